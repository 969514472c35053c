"""Implementations that are steps of aten and run on any device: what the kernels of neither CPU nor GPU serve.

``register`` names what serves which op, and ``tgl`` imports it once. ``tgl.backends.cpu`` and
``tgl.backends.composite`` may use functions of this package, and ``tgl.integrations`` the names that the
registry shows.
"""

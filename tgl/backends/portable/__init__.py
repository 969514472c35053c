"""Implementations as steps of ATen that run on any device, where no kernel of the CPU or GPU serves.

``register`` states which function serves which op, and ``tgl`` imports it once. ``tgl.backends.cpu`` and
``tgl.backends.composite`` may use functions of this package, and ``tgl.integrations`` the names that the registry
shows.
"""

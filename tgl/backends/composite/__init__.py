"""Implementations of ops that are made of other ops, each step by whatever serves its op on the device.

``register`` names what serves which op, and ``tgl`` imports it once. Nothing else imports this package. Its modules
reach other ops through ``tgl.backends``, and for a CPU they may use functions of ``tgl.backends.cpu`` and
``tgl.backends.portable``.
"""

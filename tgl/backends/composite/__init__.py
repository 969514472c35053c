"""Implementations of ops as compositions of other ops, each step served by its own op's implementation.

``register`` states which composition serves which op, and ``tgl`` imports it once. Nothing else imports this package.
Its modules reach other ops through ``tgl.backends``; for CPUs they may also use functions of ``tgl.backends.cpu`` and
``tgl.backends.portable``.
"""

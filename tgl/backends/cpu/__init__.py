"""Exact implementations of the ops for a CPU, as steps of ATen.

``register`` states which function serves which op, and ``tgl`` imports it once. ``tgl.backends.composite`` may use
functions of this package; all other code calls ops.
"""

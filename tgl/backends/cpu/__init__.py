"""Exact implementations of the ops for a CPU, as steps of aten.

``register`` names what serves which op, and ``tgl`` imports it once. ``tgl.backends.composite`` may use functions of
this package; everybody else calls ops.
"""

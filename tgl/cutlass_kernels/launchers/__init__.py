"""Launchers, from the tensors of an op to a launch: one module per family of kernels.

``cutlass_kernels.register`` imports them all when ``tgl`` is imported, so no module here imports the kernel compiler,
or a module that does, outside of a function.
"""

"""Kernels that move tokens to rows of experts and back.

``cutlass_kernels.ops.permutation`` launches them, and ``wire`` takes the loops over rows from here. Modules other than
``cut`` import the kernel compiler.
"""

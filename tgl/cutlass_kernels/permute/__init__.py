"""Kernels that move tokens to rows of experts and back.

``launchers.permutation`` launches them, and ``expert_parallel`` takes the loops over rows from here. Modules other than
``cut`` import the kernel compiler.
"""

"""Kernels that permute tokens to rows of experts and back.

``launchers.permutation`` launches them, and ``expert_parallel`` uses their loops over rows. All modules but ``tiling``
import the kernel compiler.
"""

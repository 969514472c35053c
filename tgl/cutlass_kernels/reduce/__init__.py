"""Kernels that reduce over rows or groups: segment sums and the scan of group sizes.

``cutlass_kernels.ops.reduce`` launches them; GEMMs that sum rows of their results use ``parts``.
"""

"""Kernels that reduce over rows or groups: segment sums and the scan of group sizes."""

"""Kernels that reduce over rows or groups: segment sums and the scan of group sizes.

``launchers.reduce`` launches them; GEMMs that sum rows of their results use ``partial_sums``.
"""

"""GEMM kernels for sm_100 and sm_103: tcgen05 MMAs, accumulators in tensor memory.

``registry`` names what ``archs`` finds here. ``tilings`` is plain Python, and ``archs`` imports it; no other
architecture's folder imports from this one.
"""

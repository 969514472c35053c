"""GEMM kernels for sm_90: warpgroup MMAs fed by TMA.

``registry`` names what ``archs`` finds here. ``tilings`` is plain Python, and ``archs`` imports it.
"""

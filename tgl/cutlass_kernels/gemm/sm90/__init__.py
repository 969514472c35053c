"""GEMM kernels for sm_90: warpgroup MMAs fed by TMA.

``kernels`` names what ``archs`` finds here. ``tilings`` is plain Python, and ``archs`` imports it.
"""

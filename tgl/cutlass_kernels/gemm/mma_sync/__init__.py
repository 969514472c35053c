"""GEMM kernels with mma.sync, for architectures without wider MMAs.

``registry`` names what ``archs`` finds here. The folders of other architectures take the decoding of packed operands
from here. ``tilings`` and ``packed_tilings`` are plain Python.
"""

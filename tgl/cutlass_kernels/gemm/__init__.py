"""GEMM mainloops, one folder per architecture; each has ``kernel.GroupedGemm``."""

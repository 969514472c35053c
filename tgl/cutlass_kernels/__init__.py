"""CuTe DSL kernels behind the ops of ``tgl`` on NVIDIA GPUs; they know nothing of autograd.

====================  ==========================================================================
``ops``               from the tensors of an op to a launch, one module per family of kernels
``runtime``           compiling, caching and launching, and what kernels require of operands
``archs``             the architectures, and the kernels that each of them has
``config``            which tile, cluster and pipeline a kernel is built with, and why it cannot be
``tilings``           which tiling a GEMM gets
``gemm``              mainloops, one folder per architecture
``tiles``             the order of tiles, the search for a tile's group, where its rows are
``epilogue``          what happens to an accumulator on its way to memory
``reduce``            bias gradient and group offsets
``quantize``          to quantised formats and back
``activation``        the expert's nonlinearity, forward and backward
``routing``           the router, and the sort of its result by expert
``permute``           dispatch and combine
``expert_parallel``   the exchange between ranks
====================  ==========================================================================

``register`` tells the registry of all launchers, and ``tgl`` imports it once. Nothing else in ``tgl`` imports kernels;
``tgl.doctor`` and ``tgl.warmup`` ask ``archs`` and ``runtime``. Importing ``cutlass`` takes seconds, so it is imported
for the first call on a CUDA device.
"""

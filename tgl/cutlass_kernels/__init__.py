"""CuTe DSL kernels behind the ops of ``tgl`` on NVIDIA GPUs; they know nothing of autograd.

====================  ==========================================================================
``launchers``         from the tensors of an op to a launch, one module per family of kernels
``runtime``           compiling, caching and launching, and layout requirements of operands
``archs``             the architectures, and the kernels that each of them has
``config``            the tile, cluster and pipeline that a kernel is built with
``tilings``           the choice of a GEMM's tiling, and why a tiling does not exist
``gemm``              mainloops, one folder per architecture
``scheduler``         tile order, tile lookup, the rows of a tile
``epilogue``          what happens to an accumulator on its way to memory
``reduce``            bias gradient and group offsets
``quantize``          to quantised formats and back
``activation``        the expert's nonlinearity, forward and backward
``router``            the router, and the sort of its result by expert
``permute``           dispatch and combine
``expert_parallel``   the exchange between ranks
====================  ==========================================================================

``register`` registers the implementations of all launchers, and ``tgl`` imports it once. Nothing else in ``tgl``
imports kernels; ``tgl.cli`` uses ``archs`` and ``runtime``. Importing ``cutlass`` takes seconds,
so it is imported at the first call on a CUDA device.
"""

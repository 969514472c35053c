"""CuTe DSL kernels behind the ops of ``tgl`` on NVIDIA GPUs; they know nothing of autograd.

====================  ==========================================================================
``ops``               from the tensors of an op to a launch, one module per family of kernels
``runtime``           compiling, caching and launching, and what kernels ask of operands
``config``            which tile, cluster and pipeline a kernel is built with, and why it cannot be
``gemm``              mainloops, one folder per architecture
``tiles``             the order of tiles, the search for a tile's group, where its rows are
``epilogue``          what happens to an accumulator on its way to memory
``reduce``            bias gradient and group offsets
``quantize``          to quantised formats and back
``activation``        the expert's nonlinearity, forward and backward
====================  ==========================================================================

Nothing here is imported before the first call on a CUDA device: importing ``cutlass`` takes seconds.
"""

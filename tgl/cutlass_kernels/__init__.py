"""CuTe DSL kernels behind the ops of ``tgl`` on NVIDIA GPUs; they know nothing of autograd.

====================  ==========================================================================
``config``            which tile, cluster and pipeline a kernel is built with, and why it cannot be
``schedule``          persistent tile schedule: the order of tiles, the search for a tile's group
``varlen``            where a group's rows are, and tensor maps that end where a group ends
``epilogue``          what happens to an accumulator on its way to memory
``gemm``              mainloops, one folder per architecture
``reduce``            bias gradient and group offsets
``quantize``          to quantised formats and back
``activation``        the expert's nonlinearity, forward and backward
``launch`` ...        from the tensors of a call to a launch, one module per family of GEMMs
``requirements``      what those ask of operands
``plans``, ``cache``  compiled kernels: kept in memory and on disk, found again
``compiling``         how they come to be
====================  ==========================================================================

Nothing here is imported before the first call on a CUDA device: importing ``cutlass`` takes seconds.
"""

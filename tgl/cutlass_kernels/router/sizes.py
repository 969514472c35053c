"""Sizes of the kernels that sort top-k slots, which the host needs too."""

THREADS = 512
ROUNDS = 8  # of 32 pairs that a warp ranks before the block adds up its counts
TILE = ROUNDS * THREADS  # pairs that a block ranks at once
CHUNK = TILE // 2  # pairs per block, at least, where there are several
QUAD = 4  # experts whose counts one load takes
MOST_EXPERTS = 1024  # limited by shared memory

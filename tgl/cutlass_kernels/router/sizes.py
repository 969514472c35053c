"""Sizes of the kernels that sort choices, which the host asks for too."""

THREADS = 512
ROUNDS = 8  # of 32 pairs that a warp ranks before the block adds up its counts
TILE = ROUNDS * THREADS  # pairs that a block ranks at once
CHUNK = TILE // 2  # pairs of a block, at least, where there are several
QUAD = 4  # experts whose counts one load takes
MOST_EXPERTS = 1024  # what shared memory has room for

"""Sizes of the kernels that exchange rows, which the host asks for too."""

TOKENS = 256  # whose places a block finds, a thread for each

"""Sizes of the exchange kernels that the host needs too."""

TOKENS = 256  # per block of the placement kernel, one thread each

"""mma.sync kernels, for architectures without wider MMAs."""

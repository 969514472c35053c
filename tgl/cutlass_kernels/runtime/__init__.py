"""What every launch needs on the host: what kernels ask of operands, how they are compiled and found again."""

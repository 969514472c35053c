"""From the tensors of an op to a launch, one module per family of kernels."""

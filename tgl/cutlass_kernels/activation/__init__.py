"""The experts' activations: forward, backward, and the arithmetic that other kernels compute them with."""

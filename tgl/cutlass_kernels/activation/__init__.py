"""The experts' activations: forward, backward, and the arithmetic that other kernels compute them with.

``activation_spec`` is plain Python, for launchers; ``functions`` and ``kernel`` import the kernel compiler and are for
kernels: the epilogues of GEMMs, the quantisers, the router, and what moves rows.
"""

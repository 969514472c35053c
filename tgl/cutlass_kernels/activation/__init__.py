"""The experts' activations: forward, backward, and the arithmetic that other kernels share.

``activation_spec`` is plain Python, for launchers. ``functions`` and ``kernel`` import the kernel compiler and are for
kernels: GEMM epilogues, quantisers, the router, and the permutation and exchange of rows.
"""

"""Kernels that quantise rows in groups and stacks of matrices, decode them, and requantise them.

``quantize_spec`` is plain Python, for launchers. The other modules are for kernels; GEMMs that leave quantised results
or decode an operand take the arithmetic from here.
"""

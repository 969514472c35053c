"""Kernels that move tokens to rows of experts and back."""

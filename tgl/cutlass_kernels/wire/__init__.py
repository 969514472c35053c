"""Kernels that write to the memory of the other ranks of a group."""

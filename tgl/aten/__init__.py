"""Implementations that are steps of aten and run on any device: what the kernels of neither CPU nor GPU serve."""

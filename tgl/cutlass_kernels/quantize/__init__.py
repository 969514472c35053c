"""Quantisation of rows in groups and of stacks of matrices."""

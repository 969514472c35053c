"""Mutation score: bugs planted at PTX level into kernels known to be right, and how many the emulator reports."""

"""Kernels that sort the choices of a router by expert."""

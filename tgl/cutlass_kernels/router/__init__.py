"""Kernels of the router, and those that sort the top-k slots of tokens by expert.

``router_spec`` and ``sizes`` are plain Python, for ``launchers.router`` and ``launchers.routing``, which alone import
from this package.
"""

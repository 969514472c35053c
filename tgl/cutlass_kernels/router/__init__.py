"""Kernels of the router, and those that sort the top-k slots of tokens by expert.

``router_spec`` and ``sizes`` are plain Python, for ``launchers.topk_router`` and ``launchers.route``, which alone
import from this package.
"""

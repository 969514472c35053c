"""The emulated warp, in layers: control flow, memory, synchronisation, asynchronous copies, tensor cores."""

from .tensor import Warp, unsupported

__all__ = ["Warp", "unsupported"]

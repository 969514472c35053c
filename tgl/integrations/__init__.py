"""Bridges to other libraries; each is imported on first use, and importing ``tgl`` imports none of them.

Users import ``torch``, ``torchtitan``, ``transformers``, ``transformers_parallel`` and ``peft``; vLLM imports ``vllm``.
They may use every package of ``tgl`` but kernels, and nothing in ``tgl`` imports them.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["peft", "torch", "torchtitan", "transformers", "transformers_parallel", "vllm"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return __all__

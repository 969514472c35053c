"""Tools for testing grouped ops and kernels, ours and other codebases' own.

``docs/testing.md`` is about the ops, ``docs/emulator.md`` about running kernels without a GPU, for which the package
``cute-emulator`` must be installed. Tests and tools import the names of ``__all__``. Of ``tgl`` itself
``tgl.cli.doctor`` alone imports this package: its table of sample calls.

Everything is imported on first use, so that ``import tgl`` does not pay for it.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "ContractError": "opcheck",
    "GroupSizes": "samples",
    "ROUTINGS": "samples",
    "SIGNATURES": "signatures",
    "SampleInput": "samples",
    "Signature": "samples",
    "check_op": "opcheck",
    "emulate": "emulation",
    "sample_inputs": "signatures",
    "sweep": "emulation",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})

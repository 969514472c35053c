"""The architectures that kernels are compiled for: one entry each, and what else the host asks about one.

A new one is an entry here, a folder of GEMM kernels with its ``tilings``, and the formats that its tensor cores take in
``gemm.scaling``. All other kernels are compiled for every entry.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .gemm.sm90 import tilings as sm90_tilings
from .gemm.sm100 import tilings as sm100_tilings


@dataclass(frozen=True)
class Arch:
    """An architecture.

    Attributes:
        name: what a device says it is, ``"sm_90"``.
        target: what the compiler is told, ``"sm_90a"``.
        folder: of its GEMM kernels, in ``gemm``; the module ``kernels`` in it has them by name.
        tilings: the module that knows which tilings there are and chooses one; it has the limits, too.
        rounds_to_fp4: whether it has an instruction that rounds to E2M1.
        gathers: whether it has dense GEMM kernels that read rows of an operand by an index.
    """

    name: str
    target: str
    folder: str
    tilings: ModuleType
    rounds_to_fp4: bool
    gathers: bool

    @property
    def smem_bytes(self) -> int:
        """Shared memory that a CTA may have."""
        return self.tilings.SMEM_BYTES

    def kernel(self, name: str) -> Any:
        """The class ``name`` among the GEMM kernels. Imports the compiler.

        Raises:
            NotImplementedError: there is none on this architecture.
        """
        module = importlib.import_module(f"{__package__}.gemm.{self.folder}.kernels")
        if name not in module.__all__:
            raise NotImplementedError(f"{self.name} has no {name}, but {', '.join(module.__all__)}")
        return getattr(module, name)


ARCHS = {
    arch.name: arch
    for arch in (
        Arch("sm_90", "sm_90a", folder="sm90", tilings=sm90_tilings, rounds_to_fp4=False, gathers=True),
        Arch("sm_100", "sm_100a", folder="sm100", tilings=sm100_tilings, rounds_to_fp4=True, gathers=True),
    )
}


def arch_of(name: str) -> Arch:
    """The entry for ``name``.

    Raises:
        ValueError: there is none.
    """
    if name not in ARCHS:
        raise ValueError(f"there are kernels for {', '.join(ARCHS)}, not for {name}")
    return ARCHS[name]

"""The architectures that kernels are compiled for: one entry each, and what else the host asks about one.

A new one is an entry here, a folder of GEMM kernels with its ``tilings``, and the formats that its tensor cores take in
``gemm.scaling``. All other kernels are compiled for every entry.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .gemm.sm90 import tilings as sm90_tilings
from .gemm.sm100 import tilings as sm100_tilings


@dataclass(frozen=True)
class Arch:
    """An architecture.

    Attributes:
        name: what the first of its chips says it is, ``"sm_90"``.
        chips: the compute capabilities whose devices run its kernels.
        target: what the compiler is told: ``"sm_90a"`` for that chip alone, ``"sm_100f"`` for the chips of a family.
        folder: of its GEMM kernels, in ``gemm``; the module ``kernels`` in it has them by name.
        tilings: the module that knows which tilings there are and chooses one; it has the limits, too.
        rounds_to_fp4: whether it has an instruction that rounds to E2M1.
        gathers: whether it has dense GEMM kernels that read rows of an operand by an index.
    """

    name: str
    chips: tuple[str, ...]
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
        Arch(
            "sm_90",
            chips=("sm_90",),
            target="sm_90a",
            folder="sm90",
            tilings=sm90_tilings,
            rounds_to_fp4=False,
            gathers=True,
        ),
        Arch(
            "sm_100",
            chips=("sm_100", "sm_103"),
            target="sm_100f",
            folder="sm100",
            tilings=sm100_tilings,
            rounds_to_fp4=True,
            gathers=True,
        ),
    )
}


def serving(chip: str) -> Arch | None:
    """The entry whose kernels run on a chip, or None."""
    return next((arch for arch in ARCHS.values() if chip in arch.chips), None)


def arch_of(chip: str) -> Arch:
    """``serving`` where there is one.

    Raises:
        ValueError: there is none.
    """
    arch = serving(chip)
    if arch is None:
        raise ValueError(f"there are kernels for {', '.join(chips())}, not for {chip}")
    return arch


def chips(names: Iterable[str] | None = None) -> tuple[str, ...]:
    """The chips that run the kernels of the entries of these names, of all by default."""
    return tuple(chip for name in (ARCHS if names is None else names) for chip in ARCHS[name].chips)

"""The architectures that kernels are compiled for: one entry each, and what else the host asks about one.

A new one is an entry here, a folder of GEMM kernels with its ``tilings``, and the formats that its tensor cores take in
``gemm.scaling``. All other kernels are compiled for every entry that has what they load by.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .gemm.mma_sync.tilings import Tilings as WarpTilings
from .gemm.sm90 import tilings as sm90_tilings
from .gemm.sm100 import tilings as sm100_tilings

DENSE = frozenset({"GroupedGemm", "ActivatedGroupedGemm", "GradientGroupedGemm"})
DENSE |= {f"Gathered{name}" for name in DENSE}
OF_WARPS = DENSE | {"PackedGroupedGemm"}
ALL = OF_WARPS | {"ScaledGroupedGemm"}
DECODING = "DecodingGroupedGemm"  # decodes B for MMAs wider than a warp's
FEW = frozenset({"FewGroupedGemm", "FewActivatedGroupedGemm"})  # of few rows, by launches that overlap
SWAPPED = "SwappedGroupedGemm"  # decodes B of few rows a group, as the first operand of wide MMAs
PAIRED = "PairedGroupedGemm"  # adds the product of a second pair of operands
SYMMETRIC = "SymmetricGemm"  # multiplies by its own transpose
PAIRED_ACTIVATED = "PairedActivatedGroupedGemm"  # and has an activation as a second output


@dataclass(frozen=True)
class Arch:
    """An architecture.

    Attributes:
        name: what the first of its chips says it is, ``"sm_90"``.
        chips: the compute capabilities whose devices run its kernels.
        target: what the compiler is told: ``"sm_90a"`` for that chip alone, ``"sm_100f"`` for the chips of a family.
        folder: of its GEMM kernels, in ``gemm``; ``KERNELS`` of the module ``registry`` in it has them by name.
        kernels: the names of those that it has.
        tilings: what knows which tilings there are and chooses one; it has the limits, too.
        bulk_copies: whether it has bulk copies, TMA among them, and barriers that count their bytes: many rows that are
            added up are loaded so, and operands of GEMM kernels.
        maps_operands: whether its GEMM kernels read operands through tensor maps, which skip no elements.
        rounds_to_fp4: whether it has an instruction that rounds to E2M1.
        draws_to_fp4: those of its chips that have one which rounds to E2M1 stochastically. No target of a family has
            it: kernels with it are compiled for a chip alone, see ``own_target``.
        spares_registers: whether the compiler leaves some where a kernel takes nearly all that as many blocks on a
            multiprocessor leave it; otherwise such a kernel has room for a block less.
    """

    name: str
    chips: tuple[str, ...]
    target: str
    folder: str
    kernels: frozenset[str]
    tilings: Any
    bulk_copies: bool = True
    maps_operands: bool = True
    rounds_to_fp4: bool = False
    draws_to_fp4: tuple[str, ...] = ()
    spares_registers: bool = True

    @property
    def gathers(self) -> bool:
        """Whether it has dense GEMM kernels that read rows of an operand by an index."""
        return "GatheredGroupedGemm" in self.kernels

    @property
    def wider_mmas(self) -> bool:
        """Whether it has MMAs wider than those of a warp."""
        return self.folder != "mma_sync"

    @property
    def smem_bytes(self) -> int:
        """Shared memory that a CTA may have."""
        return self.tilings.SMEM_BYTES

    def own_target(self, chip: str) -> str:
        """What the compiler is told of a kernel with instructions of one of its chips.

        Raises:
            ValueError: it is none of its chips.
        """
        if chip not in self.chips:
            raise ValueError(f"{self.name} is {', '.join(self.chips)}, not {chip}")
        return chip + "a"

    def kernel(self, name: str) -> Any:
        """The class ``name`` among the GEMM kernels. Imports the compiler.

        Raises:
            NotImplementedError: there is none on this architecture.
        """
        if name not in self.kernels:
            raise NotImplementedError(f"{self.name} has no {name}, but {', '.join(sorted(self.kernels))}")
        return importlib.import_module(f"{__package__}.gemm.{self.folder}.registry").KERNELS[name]


def _of_warps(name: str, smem_kb: int, widths: tuple[int, ...], target: str = "", bulk_copies: bool = False) -> Arch:
    """An architecture without wider MMAs than those of a warp.

    Args:
        smem_kb: shared memory that a CTA may have.
        widths: bits of the elements that its MMAs take.
        target: for what else than its name kernels are compiled: one that has MMAs which scale blocks.
    """
    kernels = ALL if 8 in widths else OF_WARPS
    tilings = WarpTilings(smem_kb * 1024, widths, bool(target), bulk_copies)
    return Arch(
        name,
        (name,),
        target or name,
        "mma_sync",
        kernels,
        tilings,
        bulk_copies,
        maps_operands=False,
        rounds_to_fp4=4 in widths,
        spares_registers=False,
    )


ARCHS = {
    arch.name: arch
    for arch in (
        _of_warps("sm_80", 163, (16,)),
        _of_warps("sm_86", 99, (16,)),
        _of_warps("sm_89", 99, (16, 8)),
        Arch(
            "sm_90",
            chips=("sm_90",),
            target="sm_90a",
            folder="sm90",
            kernels=ALL | FEW | {DECODING, SWAPPED, PAIRED, PAIRED_ACTIVATED, SYMMETRIC},
            tilings=sm90_tilings,
        ),
        Arch(
            "sm_100",
            chips=("sm_100", "sm_103"),
            target="sm_100f",
            folder="sm100",
            kernels=ALL | {"QuantizingGroupedGemm", PAIRED, PAIRED_ACTIVATED},
            tilings=sm100_tilings,
            rounds_to_fp4=True,
            draws_to_fp4=("sm_100", "sm_103"),
        ),
        _of_warps("sm_120", 99, (16, 8, 4), "sm_120f", bulk_copies=True),
        _of_warps("sm_121", 99, (16, 8, 4), "sm_121f", bulk_copies=True),
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


def having(kernel: str) -> frozenset[str]:
    """The names of the architectures that have a GEMM kernel of that name."""
    return frozenset(name for name, arch in ARCHS.items() if kernel in arch.kernels)

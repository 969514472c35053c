"""Table of the architectures that kernels are compiled for, with everything the host must know about each.

To add one, add an entry here, a folder of GEMM kernels with its ``tilings``, and the formats that its tensor cores
take in ``gemm.operand_formats``. All other kernels are compiled for every entry that has their load instructions.
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
DECODING = "DecodingGroupedGemm"  # decodes B for MMAs wider than mma.sync
FEW = frozenset({"FewGroupedGemm", "FewActivatedGroupedGemm"})  # decode kernels (small M) with overlapping launches
SWAPPED = "SwappedGroupedGemm"  # swap AB: decodes B as the first operand of wide MMAs, for few rows per group
PAIRED = "PairedGroupedGemm"  # adds the product of a second pair of operands
SYMMETRIC = "SymmetricGemm"  # multiplies a matrix by its own transpose
PAIRED_ACTIVATED = "PairedActivatedGroupedGemm"  # ``PAIRED`` with an activation as a second output


@dataclass(frozen=True)
class Arch:
    """An architecture that kernels are compiled for.

    Attributes:
        name: compute capability of the first of its chips, ``"sm_90"``.
        chips: the compute capabilities whose devices run its kernels.
        target: the compiler's target: ``"sm_90a"`` for that chip alone, ``"sm_100f"`` for the chips of a family.
        folder: folder of its GEMM kernels in ``gemm``; ``KERNELS`` of its module ``registry`` has them by name.
        kernels: names of the kernels that it has.
        tilings: module or object that lists the tilings, chooses one, and has the limits such as ``SMEM_BYTES``.
        bulk_copies: whether it has bulk copies (TMA among them) and mbarriers that count their bytes. Reductions over
            many rows load by them, and so do GEMM kernels.
        maps_operands: whether its GEMM kernels read operands through tensor maps, which skip no elements.
        rounds_to_fp4: whether it has an instruction that rounds to E2M1.
        draws_to_fp4: chips with an instruction that rounds to E2M1 stochastically. No family target has it, so kernels
            with it are compiled for one chip, see ``own_target``.
        spares_registers: whether the compiler leaves registers free in a kernel that takes nearly all that its blocks
            per multiprocessor allow; otherwise such a kernel runs with one block less.
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
        """Return whether it has dense GEMM kernels that gather rows of an operand by an index."""
        return "GatheredGroupedGemm" in self.kernels

    @property
    def wider_mmas(self) -> bool:
        """Return whether it has MMAs wider than mma.sync."""
        return self.folder != "mma_sync"

    @property
    def smem_bytes(self) -> int:
        """Return the shared memory that a CTA may have."""
        return self.tilings.SMEM_BYTES

    def own_target(self, chip: str) -> str:
        """Return the compiler's target for a kernel with instructions that only ``chip`` has.

        Raises:
            ValueError: the architecture does not have the chip.
        """
        if chip not in self.chips:
            raise ValueError(f"{self.name} is {', '.join(self.chips)}, not {chip}")
        return chip + "a"

    def kernel(self, name: str) -> Any:
        """Return the GEMM kernel class ``name``. Imports the compiler.

        Raises:
            NotImplementedError: this architecture does not have it.
        """
        if name not in self.kernels:
            raise NotImplementedError(f"{self.name} has no {name}, but {', '.join(sorted(self.kernels))}")
        return importlib.import_module(f"{__package__}.gemm.{self.folder}.registry").KERNELS[name]


def _of_warps(name: str, smem_kb: int, widths: tuple[int, ...], target: str = "", bulk_copies: bool = False) -> Arch:
    """Return an architecture whose MMAs are mma.sync.

    Args:
        smem_kb: shared memory that a CTA may have.
        widths: bits of the elements that its MMAs take.
        target: compiler target if it differs from ``name``: one with block-scaled MMAs.
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
    """Return the entry whose kernels run on a chip, or None."""
    for arch in ARCHS.values():
        if chip in arch.chips:
            return arch
    return None


def arch_of(chip: str) -> Arch:
    """Return the entry whose kernels run on a chip.

    Raises:
        ValueError: no entry has the chip.
    """
    arch = serving(chip)
    if arch is None:
        raise ValueError(f"there are kernels for {', '.join(chips())}, not for {chip}")
    return arch


def chips(names: Iterable[str] | None = None) -> tuple[str, ...]:
    """Return the chips that run the kernels of the named entries, of all by default."""
    return tuple(chip for name in (ARCHS if names is None else names) for chip in ARCHS[name].chips)


def having(kernel: str) -> frozenset[str]:
    """Return the names of the architectures that have the GEMM kernel ``kernel``."""
    return frozenset(name for name, arch in ARCHS.items() if kernel in arch.kernels)

"""The chips that can be emulated: the attributes that host code queries, and the kernels that a chip runs."""

from __future__ import annotations

import re
from dataclasses import dataclass

KIB = 1024
SYSTEM = KIB
FIRST_WITH_TARGETS = (9, 0)  # capability from which a chip has instructions of its own


@dataclass(frozen=True)
class Chip:
    """A GPU's chip.

    Attributes:
        name: ``"sm_90"``, which is its compute capability.
        multiprocessors: of the GPU that people mostly have.
        shared: bytes of shared memory of a multiprocessor.
    """

    name: str
    multiprocessors: int
    shared: int

    @property
    def capability(self) -> tuple[int, int]:
        """Major and minor."""
        return _capability(self.name)

    @property
    def shared_of_cta(self) -> int:
        """Bytes that one CTA may have: all but those that the system keeps of each."""
        return self.shared - SYSTEM

    @property
    def target(self) -> str:
        """Return the compile target of a kernel that may use all features of the chip."""
        return self.name + "a" if self.capability >= FIRST_WITH_TARGETS else self.name

    def runs(self, target: str) -> bool:
        """Return whether a kernel compiled for ``target`` (``.target`` in PTX) loads on this chip.

        A target that ends in ``a`` names one chip, one in ``f`` that chip and later ones of its family, and a plain one
        that chip and later ones of equal major capability, since what is loaded is machine code and not PTX.
        """
        major, minor = _capability(target)
        own_major, own_minor = self.capability
        return major == own_major and (minor == own_minor if target.endswith("a") else minor <= own_minor)


def _capability(name: str) -> tuple[int, int]:
    found = re.fullmatch(r"sm_(\d+)(\d)[af]?", name)
    if found is None:
        raise ValueError(f"arch must be like 'sm_90' or 'sm_100a', got {name!r}")
    return int(found[1]), int(found[2])


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("sm_80", 108, 164 * KIB),
        Chip("sm_86", 82, 100 * KIB),
        Chip("sm_89", 128, 100 * KIB),
        Chip("sm_90", 132, 228 * KIB),
        Chip("sm_100", 148, 228 * KIB),
        Chip("sm_103", 148, 228 * KIB),
        Chip("sm_120", 170, 100 * KIB),
        Chip("sm_121", 48, 100 * KIB),
    )
}


def chip_of(arch: str) -> Chip:
    """Return the chip of an architecture, or of a target such as ``"sm_90a"``.

    Raises:
        ValueError: none of the table.
    """
    chip = CHIPS.get(arch.rstrip("af"))
    if chip is None:
        raise ValueError(f"arch must be one of {', '.join(CHIPS)}, got {arch!r}")
    return chip

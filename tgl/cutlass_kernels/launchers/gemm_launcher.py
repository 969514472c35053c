"""The launcher of a GEMM, from a table of its operands and its epilogue's.

An op states its call, its kernel, the table, the kernel's key, which chooses the tiling, and its own reasons against a
call. Everything else follows from the table; see ``runtime.operands``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ... import backends
from ...meta.slots import scatter
from ..archs import arch_of, serving
from ..config import GemmConfig
from ..runtime import device
from ..runtime.launcher import Call, Launcher
from ..runtime.operands import Table, arguments_of, indices_of, operands_of, picker, plan_key_of
from ..runtime.reach import Reach

SIZES = {"T": 8, "U": 8, "G": 1, "S": 1, "K": 8, "M": 8, "N": 8, "R": 8, "I": 8, "1": 1}
SIDE = 128  # sizes of a warm-up call of quantised operands: a whole block of every format
SQUARE = {letter: min(size, 1) if letter in "GS1" else SIDE for letter, size in SIZES.items()}


class OperandLauncher(Launcher[Call]):
    """Launcher of a kernel whose arguments are described by a table.

    Attributes:
        kernel_name: name of the kernel in ``archs``; for a kernel that gathers rows, without the prefix ``Gathered``.
        operands: the kernel's arguments in order, except the index of gathered rows and ``device_arguments``.
    """

    kernel_name: ClassVar[str]
    operands: Table

    def __init__(self) -> None:
        stated = operands_of(self.operands, self.call)
        indexed = {o.name: o.indexed_by for o in stated if o.indexed_by is not None}
        needs = {o.name: o.need for o in stated if o.need is not None}
        self.reach = Reach(
            needs,
            tuple(o.name for o in stated if o.output and o.need is not None),
            keeps=self.keeps,
            slotted=next((o.name for o in stated if o.dims[:1] == "S"), None),
            indexed=indexed,
            gathers=lambda c: gathered(c[0].device, {name: getattr(c, index) for name, index in indexed.items()}),
            ordered={o.name: o.beside for o in stated if o.beside is not None},
        )
        written = [o for o in stated if o.output]
        self.outputs = picker(self.call, (o.name for o in written))
        counted = [o.name for o in written if o.need is not None]
        if not any("T" in o.dims for o in written):
            counted += [o.name for o in stated if "T" in o.dims and o.need is not None] + list(indexed.values())
        if "offs" in self.call._fields:
            counted.append("offs")
        self._sizes = picker(self.call, counted)
        if type(self).plan_key is Launcher.plan_key:
            self.plan_key = plan_key_of(self.call, self.operands)  # type: ignore[method-assign, assignment]
        self.operand_arguments = arguments_of(self.call, self.operands)
        if type(self).arguments is OperandLauncher.arguments:
            self.arguments = self.operand_arguments  # type: ignore[method-assign, assignment]

    def keeps(self, c: Call) -> bool:
        """Return whether a part of the outputs is read or must be preserved."""
        return False

    def batch_invariant(self, c: Call) -> bool:
        """Return whether a row of the output is one contraction: every tiling adds it up in one order."""
        return any(o is not None and o.output and o.dims[:1] == "T" for o in self.operands)

    def is_empty(self, c: Call) -> bool:
        """Return whether there are no results, or no rows or matrices to compute them from."""
        return any([t is not None and t.numel() == 0 for t in self._sizes(c)])

    def zero_outputs(self, c: Call) -> None:
        """Write zeros, sums over nothing, unless outputs are preserved."""
        if self.keeps(c):
            return
        slots = getattr(c, "slots", None)
        for t in self.outputs(c):
            if t is not None and slots is not None and self.reach.slotted in self.reach.outputs:
                scatter(t, slots, t.new_zeros(slots.shape[0], *t.shape[1:]))
            elif t is not None:
                t.zero_()

    def kernel(self, key: Any) -> Callable:
        """Return the kernel of ``key``, to be compiled."""
        from ..runtime.elements import TYPES

        return self.kernel_class(key)(key.kind, key.config, key.spec, TYPES[key.element])

    def kernel_class(self, key: Any) -> Callable:
        """Return the class of the kernel of ``key``, or of the one that gathers rows."""
        arch = arch_of(key.arch)
        if getattr(key, "gathered", None) is None:
            return arch.kernel(self.kernel_name)
        return functools.partial(arch.kernel(f"Gathered{self.kernel_name}"), gathered=key.gathered)

    def stand_ins(self, key: Any) -> tuple:
        """Return what the compiler gets instead of ``arguments``."""
        from ..runtime.compiling import strided

        index = () if getattr(key, "gathered", None) is None else (strided("int32"),)
        return (*(None if o is None else o.described(key) for o in self.operands), *index)

    def build(self, key: Any) -> Callable:
        """Compile the kernel for ``key``. Needs no GPU."""
        import cutlass

        from ..runtime import compiling

        return compiling.compiled(key.arch, self.kernel(key), *self.stand_ins(key), cutlass.Int32(1))

    def arguments(self, c: Call) -> tuple:
        """Return the arguments of the kernel."""
        return self.operand_arguments(c)

    def warmup_sizes(self, c: Call) -> dict[str, int]:
        """Return the sizes of the warm-up call: one group without rows."""
        return SIZES

    def warmup_call(self, c: Call) -> Any:
        """Return the warm-up call: zeros."""
        sizes, where = self.warmup_sizes(c), c[0].device
        small = {
            o.name: o.zeros(t, sizes, where)
            for o in self.operands
            if o is not None and o.dims and (t := getattr(c, o.name)) is not None
        }
        for index in indices_of(self.operands):
            if getattr(c, index) is not None:
                small[index] = getattr(c, index).new_zeros(sizes["T"])
        return c._replace(**small)


class PersistentGemmLauncher(OperandLauncher[Call]):
    """Launcher of a persistent GEMM: as many clusters are started as run at once, and each takes tile after tile."""

    def device_arguments(self, key: Any, where: torch.device) -> tuple:
        """Return the number of clusters."""
        return (device.clusters(where, key.config.ctas),)

    def tiling(self, c: Call, chip: str) -> GemmConfig | None:
        """Return the tiling of the kernel's key, or None if there is nothing to compute."""
        if self.is_empty(c):
            return None
        config: GemmConfig = self.key(c, arch_of(chip).name).config
        return config


def gathered(where: torch.device, indices: Mapping[str, Tensor | None]) -> str | None:
    """Return the operand whose rows the kernel gathers; None if there is none, or no such kernel on the device.

    Args:
        where: the device.
        indices: index of each operand. A kernel takes one: the first that is not None.
    """
    for operand, index in indices.items():
        if index is not None:
            arch = serving(backends.device_arch(where))
            return operand if arch is not None and arch.gathers else None
    return None

"""Symmetric products of stacked matrices with their own transposes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ... import backends
from .. import tilings
from ..archs import SYMMETRIC, having
from ..config import GemmConfig
from ..runtime.launcher import warm
from ..runtime.names import name
from ..runtime.operands import Operand, number
from ..runtime.requirements import MATRIX, ROW_MAJOR, dense_reason, unit_dimension
from .gemm_launcher import PersistentGemmLauncher


class SyrkKey(NamedTuple):
    """Key of a compiled kernel."""

    arch: str
    emulated: bool
    element: str
    unit: int  # which dimension of ``x`` is contiguous
    added: bool  # whether there is a ``c``
    config: GemmConfig


class SyrkCall(NamedTuple):
    """Arguments of ``batched_syrk``."""

    x: Tensor
    c: Tensor | None
    alpha: float
    beta: float
    out: Tensor


class BatchedSyrkLauncher(PersistentGemmLauncher[SyrkCall]):
    """``out[g] = alpha x[g] x[g]^T + beta c[g]``."""

    op = "batched_syrk"
    archs = having(SYMMETRIC)
    call = SyrkCall
    kernel_name = SYMMETRIC
    operands = (
        Operand("x", "GMK", "element", MATRIX, unit="unit"),
        Operand("c", "GMM", "element", ROW_MAJOR, when="added"),
        Operand("out", "GMM", "element", ROW_MAJOR, output=True),
        Operand("alpha", stand_in=number("Float32")),
        Operand("beta", stand_in=number("Float32")),
    )
    note = "one launch; one triangle of tiles, stored twice"

    def reject_reason(self, c: SyrkCall) -> backends.Reason:
        """Return why the kernel does not take the dtypes or K = 0, or None."""
        reason = dense_reason(c.x, c.out)
        return "does not take K = 0" if reason is None and c.x.shape[2] == 0 and c.out.numel() else reason

    def plan_key(self, c: SyrkCall) -> tuple | None:
        """Return the plan key: sizes and layouts of the stacks, not the factors."""
        x, added, _, _, out = c
        if not warm(x.shape[0], x.data_ptr() | out.data_ptr() | (0 if added is None else added.data_ptr())):
            return None
        return x.shape, x.stride(), out.stride(), x.dtype, added is None or added.stride()

    def key(self, c: SyrkCall, arch: str) -> SyrkKey:
        """Return the key of the kernel; the tiling follows from M."""
        tiling = tilings.choose_symmetric(arch, c.x.shape[1])
        unit = unit_dimension(c.x.stride())
        return SyrkKey(arch, not c.x.is_cuda, name(c.x), unit, c.c is not None, tiling)

    def kernel(self, key: SyrkKey) -> Callable:
        """Return the kernel of ``key``, to be compiled."""
        from ..runtime.elements import TYPES

        return self.kernel_class(key)(key.config, TYPES[key.element], key.element)


BATCHED_SYRK = BatchedSyrkLauncher()

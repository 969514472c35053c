"""Symmetric products of stacked matrices with their own transposes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ... import backends
from .. import tilings
from ..archs import SYMMETRIC, arch_of, having
from ..config import GemmConfig
from ..runtime.launcher import small, warm
from ..runtime.names import name
from ..runtime.reach import Reach
from ..runtime.requirements import MATRIX, ROW_MAJOR, dense_reason, unit_dimension
from .gemm import PersistentGemmLauncher


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
    reach = Reach({"x": MATRIX, "c": ROW_MAJOR, "out": ROW_MAJOR}, ("out",))
    note = "one launch; one triangle of tiles, stored twice"

    def refuses(self, c: SyrkCall) -> backends.Reason:
        """Return the reason against dtypes or K = 0, or None."""
        reason = dense_reason(c.x, c.out)
        return "does not take K = 0" if reason is None and c.x.shape[2] == 0 and c.out.numel() else reason

    def alike(self, c: SyrkCall) -> tuple | None:
        """Return the plan key: sizes and layouts of the stacks, not the factors."""
        x, added, _, _, out = c
        if not warm(x.shape[0], x.data_ptr() | out.data_ptr() | (0 if added is None else added.data_ptr())):
            return None
        return x.shape, x.stride(), out.stride(), x.dtype, added is None or added.stride()

    def nothing(self, c: SyrkCall) -> bool:
        """Return whether there are no results."""
        return c.out.numel() == 0

    def key(self, c: SyrkCall, arch: str) -> SyrkKey:
        """Return the key of the kernel; the tiling follows from M."""
        tiling = tilings.choose_symmetric(arch, c.x.shape[1])
        unit = unit_dimension(c.x.stride())
        return SyrkKey(arch, not c.x.is_cuda, name(c.x), unit, c.c is not None, tiling)

    def build(self, key: SyrkKey) -> Callable:
        """Compile the kernel for ``key``. Needs no GPU."""
        import cutlass

        from ..runtime.compiling import compiled, matrix
        from ..runtime.elements import TYPES

        kernel = arch_of(key.arch).kernel(SYMMETRIC)
        return compiled(
            key.arch,
            kernel(key.config, TYPES[key.element], key.element),
            matrix(key.element, 3, unit=key.unit),
            matrix(key.element, 3) if key.added else None,
            matrix(key.element, 3),
            cutlass.Float32(1),
            cutlass.Float32(1),
            cutlass.Int32(1),
        )

    def arguments(self, c: SyrkCall) -> tuple:
        """Return the arguments of the kernel."""
        return c.x, c.c, c.out, c.alpha, c.beta

    def scratch(self, c: SyrkCall) -> SyrkCall:
        """Return the warm-up call: one matrix of zeros."""
        zeros = c.x.new_zeros(1, 8, 8)
        return c._replace(x=small(c.x, 1, 8, 8), c=None if c.c is None else zeros, out=zeros.clone())


BATCHED_SYRK = BatchedSyrkLauncher()

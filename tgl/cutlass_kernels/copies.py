"""GEMMs on tensors that the kernels cannot reach where they lie: copied on the device, without synchronising.

A tensor map describes rows that begin on 16 bytes, and along its contiguous dimension it is read from multiples of 16
bytes on. Groups begin at any row, so column-major operands with groups along their columns are out of its reach, as are
misaligned views, odd row pitches and expanded tensors. Each such operand costs a copy, and each such output one too,
besides the one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import host
from .requirements import address_reason, dense_reason, matrix_reason


def _reachable(name: str, t: Tensor, any_major: bool = False) -> bool:
    return matrix_reason(name, t) is None and (any_major or t.stride(-1) == 1)


def _room(t: Tensor) -> Tensor:
    """An uninitialised row-major tensor like ``t``, its rows on 16 bytes."""
    step = host.ALIGNMENT // t.element_size()
    pitch = (t.shape[-1] + step - 1) // step * step
    return t.new_empty(*t.shape[:-1], pitch)[..., : t.shape[-1]]


def supports(a: Tensor, b: Tensor, *rest: Any, out: Tensor, **options: Any) -> str | None:
    """Why an op between copies cannot serve a call, or None."""
    reason = dense_reason(a, out)
    if reason is None and b.dim() == 3 and a.shape[1] == 0:
        return "does not take K = 0"
    return reason


def between_copies(run: Callable[..., None], *, keeps: bool) -> Callable[..., None]:
    """``run(a, b, ..., out=, ...)`` on copies of whatever it cannot reach.

    Args:
        run: ``launch.grouped_gemm`` or one of its siblings.
        keeps: whether it reads ``out`` or leaves a part of it alone.
    """

    def call(a: Tensor, b: Tensor, *rest: Any, out: Tensor, **options: Any) -> None:
        if not _reachable("a", a):
            a = _room(a).copy_(a)
        if not _reachable("b", b, any_major=b.dim() == 3):
            b = _room(b).copy_(b)
        if _reachable("out", out):
            run(a, b, *rest, out=out, **options)
            return
        result = _room(out)
        if keeps:
            result.copy_(out)
        run(a, b, *rest, out=result, **options)
        out.copy_(result)

    return call


def prepare_between_copies(prepare: Callable[..., None]) -> Callable[..., None]:
    """``prepare`` for the tensors that ``between_copies`` would hand on."""

    def call(a: Tensor, b: Tensor, *rest: Any, **options: Any) -> None:
        a = a if _reachable("a", a) else _room(a)
        b = b if _reachable("b", b, any_major=b.dim() == 3) else _room(b)
        prepare(a, b, *rest, **options)

    return call


# --- quantised operands -----------------------------------------------------------------------------------------------


def _within_reach(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> tuple[Tensor, ...]:
    """The operands, or copies of those that a kernel cannot read where they lie."""
    a = a if matrix_reason("a", a) is None else _room(a).copy_(a)
    b = b if matrix_reason("b", b) is None else _room(b).copy_(b)
    a_scale = a_scale if address_reason("a_scale", a_scale) is None else a_scale.clone()
    b_scale = b_scale if address_reason("b_scale", b_scale) is None else b_scale.clone()
    return a, a_scale, b, b_scale


def between_copies_scaled(run: Callable[..., None]) -> Callable[..., None]:
    """``run(a, a_scale, b, b_scale, ..., out=, ...)`` on copies of whatever it cannot reach."""

    def call(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *rest: Any, out: Tensor, **options: Any) -> None:
        operands = _within_reach(a, a_scale, b, b_scale)
        if matrix_reason("out", out) is None:
            run(*operands, *rest, out=out, **options)
            return
        result = _room(out)
        if options.get("accumulate", False) or not options.get("zero_tail", True):
            result.copy_(out)
        run(*operands, *rest, out=result, **options)
        out.copy_(result)

    return call

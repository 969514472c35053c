"""Helpers for the arguments of a layer's call: group ends, dtypes, and whether the call is differentiated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import backends
from ..meta.specs import accumulator
from ..ops._library import CASTS, autocast_enabled
from ..ops.splits_to_offsets import splits_to_offsets
from ._errors import fail

MSplits = Tensor | Sequence[int]


def offsets_on(m_splits: MSplits, num_gemms: int, device: torch.device) -> Tensor:
    """Return int32 ``[G]`` cumulative group ends on ``device``, without a host read if ``m_splits`` is on it."""
    if isinstance(m_splits, Tensor):
        if m_splits.shape != (num_gemms,):
            fail(f"`m_splits` must be of shape [num_gemms] = ({num_gemms},), but got {tuple(m_splits.shape)}")
        if m_splits.device == device:
            return splits_to_offsets(m_splits)
    elif not hasattr(m_splits, "__len__") or isinstance(m_splits, str):
        fail(f"`m_splits` must be a tensor or a sequence of num_gemms = {num_gemms} integers, but got {m_splits}")
    elif len(m_splits) != num_gemms:
        fail(f"`m_splits` must have num_gemms = {num_gemms} entries, but got {len(m_splits)}")
    if not torch.compiler.is_compiling() and backends.capturing(device):
        raise backends.GraphCaptureError(
            f"`m_splits` must be a tensor on {device} like `inp` while a CUDA graph is captured, but is "
            f"{_whereabouts(m_splits)}: copying it would block, and every replay would use the sizes of the capture"
        )
    if isinstance(m_splits, Tensor):
        here = m_splits
    else:  # keeps the dtype of the entries, which `splits_to_offsets` checks
        here = torch.tensor(m_splits, dtype=None if len(m_splits) else torch.int32, device="cpu")
    return splits_to_offsets(here.to(device))


def _whereabouts(m_splits: MSplits) -> str:
    return f"on {m_splits.device}" if isinstance(m_splits, Tensor) else f"a {type(m_splits).__name__}"


def result_dtype(inp: Tensor) -> torch.dtype:
    """Return the dtype a layer computes in: that of its input, or of autocast where active."""
    if autocast_enabled(inp.device.type) and inp.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return torch.get_autocast_dtype(inp.device.type)
    return inp.dtype


def check_input_dtype(inp: torch.dtype, weight: torch.dtype, device: torch.device, name: str = "`inp`") -> None:
    """Check that autocast casts ``inp`` and ``weight`` of different dtypes, for a layer without a recipe.

    Raises:
        TypeError: it does not.
    """
    if not (autocast_enabled(device.type) and inp in CASTS and weight in CASTS):
        fail(f"{name} must be {weight} like the layer's weight, but got {inp}", TypeError)


def check_row_factor(name: str, factor: Tensor, x: Tensor) -> None:
    """Check a factor ``[T]`` of the rows of ``x``, in a graph that multiplies by it without an op that would check.

    Raises:
        TypeError, ValueError: it does not fit.
    """
    if factor.dim() != 1 or (factor.shape[0] == x.shape[0]) is False:  # the product checks symbolic sizes
        fail(f"{name} must be of shape [T] = ({x.shape[0]},), but got shape {tuple(factor.shape)}")
    check_row_factor_dtype(name, factor, x)


def check_row_factor_dtype(name: str, factor: Tensor, x: Tensor) -> None:
    """Check that a factor has the dtype of ``x`` or of its sums; autocast casts others."""
    if factor.dtype not in (x.dtype, accumulator(x.dtype)) and not autocast_enabled(x.device.type):
        must = " or ".join(map(str, dict.fromkeys((x.dtype, accumulator(x.dtype)))))
        fail(f"{name} must be {must}, but got {factor.dtype}", TypeError)


def needs_grad(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether a call now is differentiated with respect to any of ``tensors``."""
    if torch.is_grad_enabled():
        for t in tensors:  # a generator would cost one more call per tensor
            if t is not None and t.requires_grad:
                return True
    return False

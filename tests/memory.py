"""Tensors as the memory they lie in, by rows or by columns, and new memory that holds NaN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def raw(t: torch.Tensor) -> torch.Tensor:
    """The bytes of ``t``, as a view."""
    return (t if t.dim() < 2 or t.stride(-1) == 1 else t.t()).view(torch.uint8)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape hold the same bytes, wherever they lie."""
    flat = (t.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for t in (one, other))
    return one.shape == other.shape and torch.equal(*flat)


def like(buffer: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The beginning of ``buffer``, a vector of the dtype of ``t``, as a tensor laid out as ``t`` is."""
    return buffer.as_strided(t.shape, t.stride())


@contextmanager
def new_memory_is_nan(warn_only: bool = False) -> Iterator[None]:
    """Every allocation of PyTorch's holds NaN, or the largest integer, as memory may that was in use before.

    Args:
        warn_only: ops that are not deterministic warn instead of raising.
    """
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warns)

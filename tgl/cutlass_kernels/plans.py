"""Plans: which compiled kernel serves a call of a GEMM and how many of its clusters to start.

A plan is found by dtypes, layouts, architecture, epilogue and tiling, never by token counts or offsets, so a change of
routing compiles nothing. The tiling follows from N, K and the mean number of rows per group, as a power of two, by a
coarse rule (``config.choose``); a model's shapes have few of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import host
from .config import GemmConfig
from .epilogue.spec import EpilogueSpec
from .host import ALIGNMENT, MAX_ROWS

EMULATED_CLUSTERS = 4  # few enough that clusters take turns on tiles


class PlanKey(NamedTuple):
    """What a compiled kernel depends on."""

    kind: str
    arch: str
    emulated: bool
    element: str
    b_unit: int  # which dimension of B is contiguous; that of A is the last
    spec: EpilogueSpec
    config: GemmConfig


class Plan(NamedTuple):
    """What launches a compiled kernel, and the columns of its tile."""

    run: Callable[..., None]
    tile_n: int


by_kernel: dict[tuple[str, Any, torch.device], Plan] = {}
"""All plans of GEMMs, by op, what the kernel depends on, and device."""

by_shape: dict[tuple, Any] = {}
"""What serves calls like one before, by all that is known of a call but token counts and addresses.

A key begins with the op's name and holds everything that the op's ``supports`` looks at and its plan depends on,
``backends.emulated_arch`` included. To be cleared when tilings change.
"""


def known(key: tuple, rows: int, addresses: int) -> Any:
    """What ``remember`` was told of ``key``; None unless the call has rows, not too many, and all on 16 bytes.

    Args:
        addresses: the addresses of the tensors that the kernel wants on 16 bytes, or-ed.
    """
    return by_shape.get(key) if 0 < rows <= MAX_ROWS and not addresses % ALIGNMENT else None


def remember(key: tuple, strides: tuple[tuple[int, ...], ...], plan: Any) -> None:
    """Keep ``plan`` for calls with ``key``, which ``strides`` are a part of."""
    if all(0 not in s for s in strides):  # a stride of 0 is fine for one row, and the key does not hold their number
        by_shape[key] = plan


def rows_class(rows: int, groups: int) -> int:
    """What tilings follow from, of the rows per group on average: calls of one class have one tiling."""
    return (rows // (groups or 1)).bit_length()


def fetch(op: str, key: Any, first: Tensor, build: Callable[[Any], Callable]) -> Plan:
    """The plan that starts the kernel ``build(key)`` on the device of ``first``, its first argument.

    Args:
        key: what the kernel depends on, its tiling as ``config``; hashable.
    """
    plan = by_kernel.get((op, key, first.device))
    if plan is None:
        kernel, tiling = host.compiled(op, key, first, lambda: build(key)), key.config
        plan = Plan(host.launcher(kernel, _clusters(first.device, tiling.ctas)), tiling.tile_n)
        by_kernel[op, key, first.device] = plan
    return plan


@functools.cache
def _clusters(device: torch.device, ctas: int) -> int:
    if device.type != "cuda":
        return EMULATED_CLUSTERS
    return max(torch.cuda.get_device_properties(device).multi_processor_count // ctas, 1)


def power_of_two(count: int) -> int:
    """The largest power of two up to ``count``; 0 for 0."""
    return 1 << count.bit_length() >> 1


def scratch(like: Tensor, *shape: int) -> Tensor:
    """A small tensor of the dtype, device and memory order of ``like``, for a launch that only warms up."""
    t = torch.zeros(shape, dtype=like.dtype, device=like.device)
    last_is_unit = like.stride(-1) == 1
    return t if last_is_unit else t.transpose(-1, -2).contiguous().transpose(-1, -2)

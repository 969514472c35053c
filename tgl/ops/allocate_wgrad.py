"""``tgl::allocate_wgrad``: one packed allocation for the weight gradients of all groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..meta import checks, specs
from ._library import register


def _kernel(
    num_groups: int, shape: list[int], dtype: torch.dtype, device: torch.device, alignment: int = 256
) -> Tensor:
    return aligned(specs.allocate_wgrad(num_groups, shape, dtype, device, alignment), alignment)


def aligned(spec: specs.TensorSpec, alignment: int) -> Tensor:
    """Allocate the packed tensor of ``spec``, uninitialised and aligned to ``alignment`` bytes."""
    out = spec.empty()
    if out.data_ptr() % alignment == 0:
        return out
    # The allocator's alignment (64 bytes on a CPU) was not enough: start later inside a larger allocation. The round
    # trip through DLPack makes that start the storage's own, with storage offset 0 as in the fake.
    assert spec.stride is not None
    count = spec.shape[0] * spec.stride[0]
    room = torch.empty(count + alignment // spec.dtype.itemsize, dtype=spec.dtype, device=spec.device)
    start = -room.data_ptr() % alignment // spec.dtype.itemsize
    packed = torch.from_dlpack(room[start : start + count])
    return packed.as_strided(spec.shape, spec.stride)


_op = register(
    "allocate_wgrad(SymInt num_groups, SymInt[] shape, ScalarType dtype, Device device, int alignment=256) -> Tensor",
    _kernel,
    lambda *args: specs.allocate_wgrad(*args).empty(),
    factory=True,
)


def allocate_wgrad(
    num_groups: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    alignment: int = 256,
) -> Tensor:
    """Allocate the weight gradients of all groups as one uninitialised tensor.

    Use ``unbind`` for the single gradients: views keep the allocation alive and follow its stream.

    Args:
        num_groups: G.
        shape: shape of one weight gradient, one dimension or more.
        dtype: float64, float32, bfloat16 or float16.
        device: default: the current default device.
        alignment: bytes, a power of two; every slot ``[g]`` starts on a multiple of it, with padding if necessary.

    Returns:
        ``[G, *shape]``; each slot is contiguous, the slot stride may exceed its size.

    Raises:
        TypeError, ValueError: arguments that do not fit.
    """
    target = torch.get_default_device() if device is None else _device(device)
    if not isinstance(shape, Sequence):
        checks.require(False, "allocate_wgrad", "shape", "a sequence of integers", repr(shape), TypeError)
    return _op(num_groups, list(shape), dtype, target, alignment)


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"tgl::allocate_wgrad: `device` must be a device, but got {device!r}: {error}") from error

"""``tgl::splits_to_offsets``: group sizes to cumulative group ends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends, debug
from ..meta import specs
from ._library import define

NAME = "splits_to_offsets"


def _kernel(m_splits: Tensor) -> Tensor:
    out = specs.splits_to_offsets(m_splits).empty()
    debug.check_splits(NAME, m_splits)
    backends.run(NAME, m_splits.device, m_splits, out=out)
    return out


_op = define("splits_to_offsets(Tensor m_splits) -> Tensor", _kernel, lambda m: specs.splits_to_offsets(m).empty())


def _call(m_splits: Tensor) -> tuple[torch.device, tuple, dict[str, Any]]:
    return m_splits.device, (m_splits,), {"out": specs.splits_to_offsets(m_splits).meta()}


backends.describe_op(NAME, _call)


def splits_to_offsets(m_splits: Tensor) -> Tensor:
    """Turn group sizes into cumulative group ends, on the device.

    Args:
        m_splits: ``[G]``, any integer dtype: rows of each group. The sum must fit int32.

    Returns:
        int32 ``[G]``: ``offs[g] = m_splits[0] + ... + m_splits[g]``.

    Raises:
        TypeError, ValueError: if ``m_splits`` is not a vector of integers.
    """
    if m_splits is None:  # the dispatcher takes a call without any tensor for one of an op without a kernel
        raise TypeError(f"tgl::{NAME}: `m_splits` must be a tensor, but got None")
    return _op(m_splits)

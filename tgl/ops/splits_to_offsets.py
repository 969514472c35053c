"""``tgl::splits_to_offsets``: convert group sizes to cumulative group ends."""

from __future__ import annotations

from torch import Tensor

from .. import debug
from ..meta import specs
from ._define import define

NAME = "splits_to_offsets"
_op = define(
    "splits_to_offsets(Tensor m_splits) -> Tensor",
    specs.splits_to_offsets,
    rows={},
    values=debug.check_splits,
)


def splits_to_offsets(m_splits: Tensor) -> Tensor:
    """Turn group sizes into cumulative group ends, on the device.

    Args:
        m_splits: ``[G]``, any integer dtype: rows of each group. The sum must fit int32.

    Returns:
        int32 ``[G]``, where ``offs[g] = m_splits[0] + ... + m_splits[g]``.

    Raises:
        TypeError, ValueError: if ``m_splits`` is not a vector of integers.
    """
    if m_splits is None:  # without any tensor the dispatcher reports a missing kernel
        raise TypeError(f"tgl::{NAME}: `m_splits` must be a tensor, but got None")
    return _op(m_splits)

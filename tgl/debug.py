"""Validation of the values of ``offs``, which live on the device and are otherwise never looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

active = 0  # contexts that are open


@contextmanager
def debug_checks() -> Iterator[None]:
    """Validate every ``offs`` that reaches an op: non-negative, non-decreasing, and not beyond the number of rows.

    Works around an eager call and around a call of a compiled function (the check runs inside the op). Inside a
    compiled function it is a graph break, hence an error with ``fullgraph=True``. Each checked op copies ``offs`` to
    the host: it synchronises and cannot run under CUDA graph capture. Contexts nest.

    Raises (from the op inside): ``ValueError`` naming the op and the first bad entry.
    """
    if torch.compiler.is_compiling():  # traced, the two assignments would cancel out before the graph runs
        torch._dynamo.graph_break("tgl.debug_checks() goes around the call of a compiled function, not inside it")
    global active
    active += 1
    try:
        yield
    finally:
        active -= 1


def check_offs(op: str, offs: Tensor, rows: int) -> None:
    """Raise ``ValueError`` for the first bad entry of ``offs`` if inside ``debug_checks()``; free otherwise."""
    if not active:
        return
    previous = 0
    for group, end in enumerate(offs.tolist()):
        if end < previous:
            bound = f"offs[{group - 1}] = {previous}" if group else "0"
            raise ValueError(f"tgl::{op}: `offs` must not descend, but offs[{group}] = {end} is less than {bound}")
        if end > rows:
            raise ValueError(f"tgl::{op}: `offs` must stay within {rows} rows, but offs[{group}] = {end}")
        previous = end


def check_splits(op: str, splits: Tensor) -> None:
    """Raise ``ValueError`` for the first negative split if inside ``debug_checks()``; free otherwise."""
    if not active:
        return
    for group, size in enumerate(splits.tolist()):
        if size < 0:
            raise ValueError(f"tgl::{op}: `m_splits` must not be negative, but m_splits[{group}] = {size}")

"""Oracles of the ops, written again with plain loops, for tests to compare with.

``int64`` functions work on numpy arrays of integers, so there is nothing to round. Rows outside every group are zero.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tgl.meta.activations import TABLE
from tgl.meta.table import OnePerName


def groups(offs):
    """``(g, start, end)`` for every group."""
    start = 0
    for g, end in enumerate(int(e) for e in offs):
        yield g, start, end
        start = end


def in_order(t, rows):
    """Row ``rows[i]`` of ``t`` as row i; ``t`` itself without ``rows``."""
    return t if rows is None else np.stack([t[row] for row in rows]) if len(rows) else t[:0]


def grouped_gemm(a, b, offs, bias=None, bias_scale=None, rows=None):
    a = in_order(a, rows)
    count, depth = a.shape
    out = np.zeros((count, b.shape[2]), dtype=np.int64)
    for g, start, end in groups(offs):
        for t in range(start, end):
            for n in range(b.shape[2]):
                total = 0
                for k in range(depth):
                    total += int(a[t, k]) * int(b[g, k, n])
                if bias is not None:
                    total += int(bias[g, n]) * (int(bias_scale[t]) if bias_scale is not None else 1)
                out[t, n] = total
    return out


def grouped_gemm_wgrad(a, b, offs, a_rows=None, b_rows=None):
    a, b = in_order(a, a_rows), in_order(b, b_rows)
    out = np.zeros((len(offs), a.shape[1], b.shape[1]), dtype=np.int64)
    for g, start, end in groups(offs):
        for m in range(a.shape[1]):
            for n in range(b.shape[1]):
                out[g, m, n] = sum(int(a[t, m]) * int(b[t, n]) for t in range(start, end))
    return out


def grouped_dbias(dy, offs):
    out = np.zeros((len(offs), dy.shape[1]), dtype=np.int64)
    for g, start, end in groups(offs):
        for n in range(dy.shape[1]):
            out[g, n] = sum(int(dy[t, n]) for t in range(start, end))
    return out


def grouped_dbias_dscales(dy, bias, bias_scale, offs):
    dbias = np.zeros((len(offs), dy.shape[1]), dtype=np.int64)
    dscales = np.zeros(dy.shape[0], dtype=np.int64)
    for g, start, end in groups(offs):
        for t in range(start, end):
            for n in range(dy.shape[1]):
                dbias[g, n] += int(dy[t, n]) * int(bias_scale[t])
                dscales[t] += int(dy[t, n]) * int(bias[g, n])
    return dbias, dscales


def _clamped_qgeglu(gate, linear, limit, alpha, offset):
    gate = torch.minimum(gate, torch.full_like(gate, limit))
    linear = torch.maximum(torch.minimum(linear, torch.full_like(linear, limit)), torch.full_like(linear, -limit))
    return gate / (1 + torch.exp(-alpha * gate)) * (linear + offset)


def _square(x):
    return torch.where(x > 0, x * x, torch.zeros_like(x))


ENTRIES = {
    "swiglu": lambda gate, linear, **_: gate / (1 + torch.exp(-gate)) * linear,
    "clamped_qgeglu": _clamped_qgeglu,
    "srelu": lambda x, _, **__: _square(x),
    "geglu": lambda gate, linear, **_: functional.gelu(gate) * linear,
    "geglu_tanh": lambda gate, linear, **_: functional.gelu(gate, approximate="tanh") * linear,
    "reglu": lambda gate, linear, **_: functional.relu(gate) * linear,
    "silu": lambda x, _, **__: x / (1 + torch.exp(-x)),
    "gelu": lambda x, _, **__: functional.gelu(x),
    "gelu_tanh": lambda x, _, **__: functional.gelu(x, approximate="tanh"),
    "relu": lambda x, _, **__: functional.relu(x),
}
ACTIVATIONS = OnePerName(TABLE, "formulas of activations, tests/oracle.py", ENTRIES)
"""Every activation, ``(gate, linear or None, **constants) -> y``, written again."""


def activation(x: Tensor, offs, probs=None, *, kind, interleaved=False, limit=7.0, alpha=1.702, offset=1.0) -> Tensor:
    """Row by row with differentiable torch functions, in the dtype of ``x``; its autograd is the gradient oracle."""
    function = ACTIVATIONS[kind]
    width = x.shape[1] // 2 if TABLE[kind].gated else x.shape[1]
    routed = int(offs[-1]) if len(offs) else 0
    rows = []
    for t in range(x.shape[0]):
        if t >= routed:
            rows.append(x.new_zeros(width))
            continue
        gate, linear = x[t], None
        if TABLE[kind].gated:
            gate, linear = (x[t, 0::2], x[t, 1::2]) if interleaved else (x[t, :width], x[t, width:])
        y = function(gate, linear, limit=limit, alpha=alpha, offset=offset)
        rows.append(y if probs is None else y * probs[t])
    return torch.stack(rows) if rows else x.new_zeros(0, width)


def numpy_int(t: Tensor | None):
    """``t`` as int64, which must lose nothing; NaN (the poisoned tail) becomes 0."""
    if t is None:
        return None
    values = torch.nan_to_num(t.detach().double(), nan=0.0)
    whole = values.to(torch.int64)
    assert torch.equal(whole.double(), values)
    return whole.numpy()


def rounded(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Integers to ``dtype``, rounded once."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.float64).to(dtype)

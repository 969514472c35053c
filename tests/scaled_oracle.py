"""Values of a quantised operand's components, decoded element by element in plain Python.

Bytes, scales, places and tiles are worked out here from the formats' definitions, by loops over integers: nothing but
the formats' names is shared with ``tgl``. Results are float64 numpy arrays, exact for the values of the sample inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
import torch

from tgl.meta.formats import FORMATS
from tgl.meta.table import OnePerName

BYTES = np.arange(256, dtype=np.uint8)
E4M3_TABLE = BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
E5M2_TABLE = BYTES.view(ml_dtypes.float8_e5m2).astype(np.float64)
E8M0_TABLE = BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
E2M1_TABLE = BYTES[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def elements(t: torch.Tensor) -> np.ndarray:
    raw = t.contiguous().view(torch.uint8).numpy()
    if t.dtype == torch.float8_e4m3fn:
        return E4M3_TABLE[raw]
    if t.dtype == torch.float8_e5m2:
        return E5M2_TABLE[raw]
    return np.stack([E2M1_TABLE[raw & 15], E2M1_TABLE[raw >> 4]], axis=-1).reshape(*raw.shape[:-1], 2 * raw.shape[-1])


class Operand(NamedTuple):
    """The facts of a format's components.

    Attributes:
        block: elements that share a scale, 0 of a scale per group.
        scales: values of the bytes of a scale; None of float32.
        data_unit, scale_unit: tokens that a group's columnwise data and scales begin on a multiple of; 0 of data in
            the order of the tokens.
        scale_rows: whether compact columnwise scales have a row per feature.
        square: whether scales of weights are those of squares.
        amax: whether a factor of the group follows from its amax.
    """

    block: int
    scales: np.ndarray | None
    data_unit: int
    scale_unit: int
    scale_rows: bool = False
    square: bool = False
    amax: bool = False


OPERANDS = OnePerName(
    FORMATS,
    "OPERANDS in tests/scaled_oracle.py",
    {
        "mxfp8": Operand(32, E8M0_TABLE, 0, 128),
        "nvfp4": Operand(16, E4M3_TABLE, 64, 64, scale_rows=True, amax=True),
        "mxfp4": Operand(32, E8M0_TABLE, 128, 128, scale_rows=True),
        "fp8_tensor": Operand(0, None, 32, 0),
        "fp8_block": Operand(128, None, 32, 128, square=True),
    },
)


def scale_value(scale: torch.Tensor, form: Operand) -> np.ndarray:
    raw = scale.numpy()
    return raw.astype(np.float64) if form.scales is None else form.scales[raw]


def tile_offset(y: int, x: int, columns: int) -> int:
    across = -(-columns // 4)
    return ((y // 128) * across + x // 4) * 512 + (y % 32) * 16 + ((y % 128) // 32) * 4 + x % 4


def factor(form: Operand, scale: torch.Tensor, amax: torch.Tensor | None, group: int) -> float:
    """Return the factor of all elements of a group."""
    if not form.block:
        return float(scale[group])
    if not form.amax:
        return 1.0
    assert amax is not None
    largest = float(amax[group])
    encode = 1.0 if largest == 0 else min(2688.0 / largest, float(np.finfo(np.float32).max))
    return 1.0 / encode


def groups(offs: torch.Tensor):
    start = 0
    for g, end in enumerate(offs.tolist()):
        yield g, start, end
        start = end


def place(token: int, start: int, group: int, unit: int) -> int:
    return (start // unit + group) * unit + token - start


def rowwise(form, layout, data, scale, offs, amax) -> np.ndarray:
    """``[T, K]`` of rowwise components; rows past the last group are zero."""
    form = OPERANDS[form]
    values = elements(data)
    out = np.zeros_like(values)
    depth = values.shape[1]
    table = scale_value(scale, form)
    for g, start, end in groups(offs):
        for t in range(start, end):
            for k in range(depth):
                value = values[t, k] * factor(form, scale, amax, g)
                if form.block:
                    x = k // form.block
                    if layout == "blocked":
                        value *= table[tile_offset(place(t, start, g, 128), x, -(-depth // form.block))]
                    else:
                        value *= table[t, x]
                out[t, k] = value
    return out


def matrices(form, layout, direction, data, scale, amax) -> np.ndarray:
    """``[G, contraction, width]`` of the components of a weight."""
    form = OPERANDS[form]
    across = direction == "columnwise" and not form.data_unit
    values = elements(data)
    if not across:
        values = values.transpose(0, 2, 1)
    out = np.zeros_like(values)
    count, depth, width = values.shape
    table = scale_value(scale, form)
    for g in range(count):
        for k in range(depth):
            for n in range(width):
                value = values[g, k, n] * factor(form, scale, amax, g)
                if form.block:
                    x = k // form.block
                    if form.square:
                        value *= table[g, n // 128, x]
                    elif layout == "blocked":
                        value *= table[g, tile_offset(n, x, -(-depth // form.block))]
                    elif across:
                        value *= table[g, x, n]
                    else:
                        value *= table[g, n, x]
                out[g, k, n] = value
    return out


def columnwise(form, layout, data, scale, offs, amax, features: int) -> list[np.ndarray]:
    """``[tokens, F]`` of every group, from columnwise components; NVFP4 keeps the whole last run of 16."""
    form = OPERANDS[form]
    values = elements(data)
    table = scale_value(scale, form)
    found = []
    for g, start, end in groups(offs):
        size = end - start
        if form.amax:  # a Hadamard transform may have filled it
            size = -(-size // 16) * 16
        out = np.zeros((size, features))
        for i in range(size):
            for f in range(features):
                if not form.data_unit:
                    value = values[start + i, f]
                else:
                    value = values[f, place(start + i, start, g, form.data_unit)]
                value *= factor(form, scale, amax, g)
                if form.block:
                    y = place(start + i, start, g, form.scale_unit) // form.block
                    if layout == "blocked":
                        columns = scale.shape[0] // (-(-features // 128) * 128)
                        value *= table[tile_offset(f, y, columns)]
                    elif form.scale_rows:
                        value *= table[f, y]
                    else:
                        value *= table[y, f]
                out[i, f] = value
        found.append(out)
    return found


def gemm(tensors, options) -> np.ndarray:
    """``[T, N]`` in float64."""
    form, layout = options["format"], options["scale_layout"]
    a = rowwise(form, layout, tensors["a"], tensors["a_scale"], tensors["offs"], tensors["a_amax"])
    b = matrices(form, layout, options["b_direction"], tensors["b"], tensors["b_scale"], tensors["b_amax"])
    out = np.zeros((a.shape[0], b.shape[2]))
    for g, start, end in groups(tensors["offs"]):
        out[start:end] = a[start:end] @ b[g]
        if tensors.get("bias") is not None:
            bias = tensors["bias"][g].double().numpy()
            rows = tensors["bias_scale"]
            out[start:end] += bias if rows is None else rows[start:end].double().numpy()[:, None] * bias
    return out


def wgrad(tensors, options, m: int, n: int) -> np.ndarray:
    """``[G, M, N]`` in float64."""
    form, layout, offs = options["format"], options["scale_layout"], tensors["offs"]
    left = columnwise(form, layout, tensors["a"], tensors["a_scale"], offs, tensors["a_amax"], m)
    right = columnwise(form, layout, tensors["b"], tensors["b_scale"], offs, tensors["b_amax"], n)
    out = np.zeros((len(left), m, n))
    for g, (x, y) in enumerate(zip(left, right)):
        out[g] = x.T @ y
    return out

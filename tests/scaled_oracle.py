"""What the components of a quantised operand stand for, decoded element by element in plain Python.

Bytes, scales, places and tiles are worked out here from the formats' definitions, by loops over integers: nothing is
shared with ``tgl``. Results are float64 numpy arrays, exact for the values of the sample inputs.
"""

from __future__ import annotations

import math

import numpy as np
import torch

BLOCK = {"mxfp8": 32, "nvfp4": 16, "fp8_block": 128}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def fp8(byte: int, exponent_bits: int) -> float:
    """One E4M3 (4 exponent bits) or E5M2 (5) element."""
    mantissa_bits = 7 - exponent_bits
    sign = -1.0 if byte & 0x80 else 1.0
    exponent = byte >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = byte & (1 << mantissa_bits) - 1
    bias = (1 << exponent_bits - 1) - 1
    if exponent_bits == 4 and byte & 0x7F == 0x7F:
        return math.nan
    if exponent_bits == 5 and exponent == 31:
        return sign * math.inf if mantissa == 0 else math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


E4M3_TABLE = np.array([fp8(b, 4) for b in range(256)])
E5M2_TABLE = np.array([fp8(b, 5) for b in range(256)])
E8M0_TABLE = np.array([math.ldexp(1.0, b - 127) for b in range(255)] + [math.nan])
E2M1_TABLE = np.array(E2M1 + [-v for v in E2M1])


def elements(t: torch.Tensor) -> np.ndarray:
    raw = t.contiguous().view(torch.uint8).numpy()
    if t.dtype == torch.float8_e4m3fn:
        return E4M3_TABLE[raw]
    if t.dtype == torch.float8_e5m2:
        return E5M2_TABLE[raw]
    return np.stack([E2M1_TABLE[raw & 15], E2M1_TABLE[raw >> 4]], axis=-1).reshape(*raw.shape[:-1], 2 * raw.shape[-1])


def scale_value(scale: torch.Tensor, form: str) -> np.ndarray:
    raw = scale.numpy()
    return {"mxfp8": lambda: E8M0_TABLE[raw], "nvfp4": lambda: E4M3_TABLE[raw]}.get(
        form, lambda: raw.astype(np.float64)
    )()


def tile_offset(y: int, x: int, columns: int) -> int:
    across = -(-columns // 4)
    return ((y // 128) * across + x // 4) * 512 + (y % 32) * 16 + ((y % 128) // 32) * 4 + x % 4


def factor(form: str, scale: torch.Tensor, amax: torch.Tensor | None, group: int) -> float:
    """What all elements of a group are multiplied by."""
    if form == "fp8_tensor":
        return float(scale[group])
    if form != "nvfp4":
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
    values = elements(data)
    out = np.zeros_like(values)
    depth = values.shape[1]
    table = scale_value(scale, form)
    for g, start, end in groups(offs):
        for t in range(start, end):
            for k in range(depth):
                value = values[t, k] * factor(form, scale, amax, g)
                if form in BLOCK:
                    x = k // BLOCK[form]
                    if layout == "blocked":
                        value *= table[tile_offset(place(t, start, g, 128), x, -(-depth // BLOCK[form]))]
                    else:
                        value *= table[t, x]
                out[t, k] = value
    return out


def matrices(form, layout, direction, data, scale, amax) -> np.ndarray:
    """``[G, contraction, width]`` of the components of a weight."""
    values = elements(data)
    if not (form == "mxfp8" and direction == "columnwise"):
        values = values.transpose(0, 2, 1)
    out = np.zeros_like(values)
    count, depth, width = values.shape
    table = scale_value(scale, form)
    for g in range(count):
        for k in range(depth):
            for n in range(width):
                value = values[g, k, n] * factor(form, scale, amax, g)
                if form in BLOCK:
                    x = k // BLOCK[form]
                    if form == "fp8_block":
                        value *= table[g, n // 128, x]
                    elif layout == "blocked":
                        value *= table[g, tile_offset(n, x, -(-depth // BLOCK[form]))]
                    elif form == "mxfp8" and direction == "columnwise":
                        value *= table[g, x, n]
                    else:
                        value *= table[g, n, x]
                out[g, k, n] = value
    return out


DATA_UNIT = {"nvfp4": 64, "fp8_tensor": 32, "fp8_block": 32}
SCALE_UNIT = {"mxfp8": 128, "nvfp4": 64, "fp8_block": 128}


def columnwise(form, layout, data, scale, offs, amax, features: int) -> list[np.ndarray]:
    """``[tokens, F]`` of every group, from columnwise components; NVFP4 keeps the whole last run of 16."""
    values = elements(data)
    table = scale_value(scale, form)
    found = []
    for g, start, end in groups(offs):
        size = end - start
        if form == "nvfp4":
            size = -(-size // 16) * 16
        out = np.zeros((size, features))
        for i in range(size):
            for f in range(features):
                if form == "mxfp8":
                    value = values[start + i, f]
                else:
                    value = values[f, place(start + i, start, g, DATA_UNIT[form])]
                value *= factor(form, scale, amax, g)
                if form in BLOCK:
                    y = place(start + i, start, g, SCALE_UNIT[form]) // BLOCK[form]
                    if layout == "blocked":
                        columns = scale.shape[0] // (-(-features // 128) * 128)
                        value *= table[tile_offset(f, y, columns)]
                    elif form == "nvfp4":
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

"""Calls of ``group_quantize`` beside the reference, and data to call it with."""

from __future__ import annotations

import numpy as np
import torch

import tgl
from tests.quantize import nvfp4_reference, reference
from tgl.meta.formats import FORMATS
from tgl.meta.table import OnePerName

ELEMENTS = {torch.float8_e4m3fn: reference.E4M3, torch.float8_e5m2: reference.E5M2}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def spread(*shape, dtype=torch.float32, seed=0, width=12):
    """Random values over many binades, some zeros of either sign."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    values *= 2.0 ** torch.randint(-width, width + 1, shape, generator=generator)
    zero = torch.rand(shape, generator=generator) < 0.05
    return torch.where(zero, values.sign() * 0.0, values).to(dtype)


def numpy(x):
    return x.detach().float().numpy()


def _mxfp8(x, ends, element, *, blocked, scale, **options):
    return reference.mxfp8(x, ends, element, blocked=blocked, **options)


def _nvfp4(x, ends, element, *, blocked, scale, block_2d=False, **options):
    layout, values = "blocked" if blocked else "compact", torch.from_numpy(x)
    if ends is None:
        made = nvfp4_reference.matrices(values[None], square=block_2d, layout=layout, **options)
        return [t[0].numpy() for t in made.values()]
    sizes = [end - start for start, end in zip([0, *ends], ends)]
    return [t.numpy() for t in nvfp4_reference.grouped(values, sizes, layout=layout, **options).values()]


def _mxfp4(x, ends, element, *, blocked, scale, **options):
    return reference.mxfp4(x, ends, blocked=blocked, **options)


def _fp8_tensor(x, ends, element, *, blocked, scale, **options):
    return reference.fp8_tensor(x, ends, element, scale=scale, **options)


def _fp8_block(x, ends, element, *, blocked, scale, block_2d=False, **options):
    if block_2d:
        return reference.fp8_block_2d(x, element, **options)
    return reference.fp8_block_1d(x, ends, element, **options)


REFERENCES = OnePerName(
    FORMATS,
    "REFERENCES in tests/quantize/comparing.py",
    {"mxfp8": _mxfp8, "nvfp4": _nvfp4, "mxfp4": _mxfp4, "fp8_tensor": _fp8_tensor, "fp8_block": _fp8_block},
)


def expected(x, ends, format, *, scale=None, dtype=torch.float8_e4m3fn, scale_layout="compact", **options):
    """The six components but dbias, by the reference; matrices one after the other."""
    make = REFERENCES[format]
    options |= {"blocked": scale_layout == "blocked", "scale": scale}

    def one(matrix, ends):
        return make(matrix, ends, ELEMENTS[dtype], **options)

    if ends is not None:
        return one(numpy(x), ends.tolist())
    parts = zip(*(one(matrix, None) for matrix in numpy(x)))
    stacked = []
    for name, arrays in zip(tgl.Components._fields, parts):
        per_group = format == "fp8_tensor" and "data" not in name
        stacked.append(np.concatenate(arrays) if per_group or not arrays[0].size else np.stack(arrays))
    return stacked


def assert_bytes(components, arrays, where=""):
    """Every component holds the bytes of the reference."""
    for name, t, array in zip(tgl.Components._fields, components, arrays):
        have = t.contiguous().view(torch.uint8 if t.dtype != torch.float32 else torch.int32)
        want = torch.from_numpy(np.ascontiguousarray(array))
        want = want.view(have.dtype) if want.numel() else want.to(have.dtype)
        assert have.shape == want.shape, f"{where} {name}: {tuple(have.shape)} instead of {tuple(want.shape)}"
        wrong = (have != want).nonzero()
        assert not len(wrong), (
            f"{where} {name}{wrong[0].tolist()}: {int(have[tuple(wrong[0])])} instead of {int(want[tuple(wrong[0])])}"
            f" ({len(wrong)} differ)"
        )


def check(x, ends, format, **options):
    """Components equal to the reference's."""
    components = tgl.group_quantize(x, ends, format=format, **options)
    assert_bytes(components, expected(x, ends, format, **options), f"{format} {options}")
    return components

"""Delayed scaling: the scale that follows from a history of amaxes, and the history itself."""

import math

import numpy as np
import pytest
import torch

import tgl
from tests.quantize.reference import E4M3, E5M2, FLT_MAX, NAN, from_bits, largest, to_bits

AMAXES = [0.0, 2.0**-149, 1e-40, 1e-3, 1.0, 447.9, 448.0, 1e30, FLT_MAX, math.inf, NAN]


@pytest.mark.parametrize("margin", [0, 3])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("element", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_scale_from_history(algorithm, element, power_of_two, margin):
    groups = [(a, b) for a in AMAXES for b in AMAXES]
    history = torch.tensor(groups).t().contiguous()
    before = torch.arange(1.0, len(groups) + 1)
    dtype = torch.float8_e4m3fn if element is E4M3 else torch.float8_e5m2
    found = tgl.fp8_scale_from_history(
        history, before, algorithm=algorithm, dtype=dtype, power_of_two=power_of_two, margin=margin
    )
    for (recent, older), previous, scale in zip(history.t().tolist(), before.tolist(), found.tolist()):
        amax = largest([recent, older]) if algorithm == "max" else recent
        want = previous
        if math.isfinite(amax) and amax > 0:
            with np.errstate(over="ignore"):
                want = min(float(np.float32(element.max / 2**margin) / np.float32(amax)), FLT_MAX)
            want = from_bits(to_bits(want) & 0xFF800000) if power_of_two else want
        assert scale == want, (recent, older)


def test_a_window_of_steps():
    """Three steps through a window of two: the first amax drops out."""
    x, offs = torch.ones(4, 32), torch.tensor([1, 1, 4], dtype=torch.int32)
    history, scale = torch.zeros(2, 3), torch.ones(3)
    scales = []
    for size in (7.0, 3.5, 1.75):
        parts = tgl.group_quantize(x * size, offs, scale=scale, format="fp8_tensor")
        assert tgl.fp8_update_history_(parts.amax, history) is history
        scale = tgl.fp8_scale_from_history(history, scale)
        scales.append(scale.tolist())
    assert history.tolist() == [[1.75, 0, 1.75], [3.5, 0, 3.5]]
    assert scales == [[64, 1, 64], [64, 1, 64], [128, 1, 128]]


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda h, s, a: tgl.fp8_scale_from_history(h, s[1:]), ValueError, r"`scale` must be of shape \[G\], as many"),
        (lambda h, s, a: tgl.fp8_scale_from_history(h[0], s), ValueError, r"`history` must be 2-D \[L, G\]"),
        (lambda h, s, a: tgl.fp8_scale_from_history(h[:0], s), ValueError, r"`history` must be .* L at least 1"),
        (lambda h, s, a: tgl.fp8_scale_from_history(h.double(), s), TypeError, "`history` must be torch.float32"),
        (lambda h, s, a: tgl.fp8_scale_from_history(h, s.half()), TypeError, "`scale` must be torch.float32"),
        (lambda h, s, a: tgl.fp8_scale_from_history(h, s.to("meta")), ValueError, "`scale` must be on cpu"),
        (
            lambda h, s, a: tgl.fp8_scale_from_history(h, s, algorithm="last"),
            ValueError,
            "must be one of max, most_rec",
        ),
        (lambda h, s, a: tgl.fp8_scale_from_history(h, s, dtype=torch.half), TypeError, "`dtype` must be torch.float8"),
        (lambda h, s, a: tgl.fp8_update_history_(a[1:], h), ValueError, r"`history` must be \[L, G\] with G = 2 like"),
        (lambda h, s, a: tgl.fp8_update_history_(a[None], h), ValueError, r"`amax` must be 1-D \[G\]"),
        (lambda h, s, a: tgl.fp8_update_history_(a, h.half()), TypeError, "`history` must be torch.float32"),
        (lambda h, s, a: tgl.fp8_update_history_(a, h.to("meta")), ValueError, "`history` must be on cpu"),
        (lambda h, s, a: tgl.fp8_update_history_(a, h[:0]), ValueError, "L at least 1"),
        (lambda h, s, a: tgl.fp8_update_history_(h[0], h), ValueError, "`history` must be disjoint from `amax`, but"),
        (lambda h, s, a: tgl.fp8_update_history_(h[-1], h), ValueError, "`history` must be disjoint from `amax`, but"),
        (
            lambda h, s, a: tgl.fp8_update_history_(a, h[:1].expand(4, 3)),
            ValueError,
            r"`history` must be free of elements that overlap, but got strides \(0, 1\)",
        ),
        (
            lambda h, s, a: tgl.fp8_update_history_(a, h.as_strided((4, 3), (1, 1))),
            ValueError,
            "`history` must be free of elements that overlap",
        ),
    ],
)
def test_bad_input(call, error, message):
    history, scale, amax = torch.zeros(4, 3), torch.ones(3), torch.ones(3)
    with pytest.raises(error, match=message):
        call(history, scale, amax)
    assert not history.any()

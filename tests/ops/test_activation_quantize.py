"""``grouped_activation_quantize`` is an activation and a ``group_quantize``, byte by byte."""

import pytest
import torch

import tgl
from tests.activation_cases import CASES as ACTIVATIONS
from tests.activation_cases import width as width_of
from tests.memory import same_bytes
from tgl.meta.formats import FORMATS
from tgl.meta.table import OnePerName
from tgl.testing import ROUTINGS

CASES = OnePerName(
    FORMATS,
    "CASES",
    {
        "mxfp8": [
            {},
            {"scale_layout": "blocked"},
            {"dtype": torch.float8_e5m2, "scaling": "floor"},
            {"columnwise": False},
        ],
        "nvfp4": [{}, {"rht": True, "scale_layout": "blocked"}, {"rowwise": False}],
        "mxfp4": [{}, {"scale_layout": "blocked", "scaling": "even"}, {"rowwise": False}],
        "fp8_tensor": [{}, {"power_of_two": True, "eps": 0.5}],
        "fp8_block": [{}, {"power_of_two": False}],
    },
)


def inputs(routing, kind, dtype):
    generator = torch.Generator().manual_seed(0)
    width = width_of(kind, 48)
    x = torch.randn(routing.rows, width, generator=generator).to(dtype)
    probs = torch.rand(routing.rows, generator=generator)
    x[routing.routed :] = probs[routing.routed :] = float("nan")
    return x, routing.ends(), probs


@pytest.mark.cover(1)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_the_same_bytes_as_two_ops(form, activation):
    for name, routing in ROUTINGS.items():
        for options in CASES[form] if name == "ragged_tail" else CASES[form][:1]:
            for dtype in (torch.bfloat16, torch.float32):
                x, offs, probs = inputs(routing, activation["kind"], dtype)
                probs = probs if dtype == torch.float32 or name != "even" else None
                fused = tgl.grouped_activation_quantize(x, offs, probs, format=form, **activation, **options)
                y = tgl.grouped_activation(x, offs, probs, **activation)
                apart = tgl.group_quantize(y, offs, format=form, **options)
                for part, a, b in zip(fused._fields, fused, apart, strict=True):
                    assert a.dtype == b.dtype
                    assert same_bytes(a, b), (name, part)


def test_a_given_scale():
    x, offs, probs = inputs(ROUTINGS["ragged_tail"], "swiglu", torch.bfloat16)
    scale = torch.tensor([1.0, 2.0, 4.0, 8.0])
    fused = tgl.grouped_activation_quantize(x, offs, probs, scale, format="fp8_tensor")
    apart = tgl.group_quantize(tgl.grouped_activation(x, offs, probs), offs, scale, format="fp8_tensor")
    assert all(same_bytes(a, b) for a, b in zip(fused, apart))


@pytest.mark.parametrize("form", FORMATS)
def test_opcheck(form):
    x, offs, probs = inputs(ROUTINGS["ragged_tail"], "swiglu", torch.bfloat16)
    for options in CASES[form]:
        torch.library.opcheck(
            torch.ops.tgl.grouped_activation_quantize.default,
            (x, offs, probs),
            {"format": form, **options},
            test_utils=("test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic"),
        )


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"x": torch.ones(6, 10)}, ValueError, r"`x` must be such that I is even \(two elements share a byte\)"),
        ({"x": torch.ones(6, 8, dtype=torch.float64)}, TypeError, "`x` must be float32, bfloat16 or float16, but got"),
        ({"scale": torch.ones(3)}, ValueError, "`scale` must be None for nvfp4, but got a tensor"),
        ({"offs": torch.tensor([2, 2, 5])}, TypeError, "`offs` must be int32"),
        (
            {"format": "int8"},
            ValueError,
            "`format` must be one of .*nvfp4, mxfp4, fp8_tensor, fp8_block, but got 'int8'",
        ),
        ({"kind": "no_such"}, ValueError, "`kind` must be one of .*, but got 'no_such'"),
        ({"format": "fp8_tensor", "scale": torch.ones(2)}, ValueError, r"`scale` must be of shape \[G\] = \(3,\)"),
        ({"x": torch.ones(6, 8, requires_grad=True)}, RuntimeError, r"has no derivative.* GroupedLinear\(recipe=...\)"),
    ],
)
def test_bad_arguments(change, error, message):
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    with pytest.raises(error, match=message):
        tgl.grouped_activation_quantize(**{"x": torch.ones(6, 8), "offs": offs, "format": "nvfp4", **change})

"""The quantising ops compiled: eager's bytes, one graph for all shapes, buffers of the caller written in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _compiling import Captured, ends, graph_breaks
from expecttest import assert_expected_inline
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.testing import CompileCounterWithBackend

import tgl
from tests.memory import raw, same_bytes

OFFS = ends(4, 0, 3)
CALLS: list[dict[str, Any]] = [
    {"format": "mxfp8"},
    {"format": "mxfp8", "scaling": "floor", "scale_layout": "blocked", "dbias": True},
    {"format": "mxfp8", "dtype": torch.float8_e5m2, "columnwise": False},
    {"format": "mxfp8", "rowwise": False},
    {"format": "fp8_tensor"},
    {"format": "fp8_tensor", "power_of_two": True, "eps": 0.5},
    {"format": "fp8_block"},
    {"format": "fp8_block", "dtype": torch.float8_e5m2, "power_of_two": False},
]


def assert_same(actual: Any, expected: Any) -> None:
    """Same types, shapes, strides and bytes."""
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert same_bytes(a, b)


def round_trip(x: Tensor, offs: Tensor, calls: list[dict[str, Any]] = CALLS) -> list[Tensor]:
    """Quantise, read both directions back, quantise again, with every option in turn."""
    made: list[Tensor] = []
    for options in calls:
        parts = tgl.group_quantize(x, offs, **options)
        made.extend(parts)
        same = {name: options[name] for name in ("format", "scale_layout") if name in options}
        if options.get("rowwise", True):
            made.append(tgl.group_dequantize(parts.data, parts.scale, offs, **same))
            made.extend(tgl.group_requantize(parts.data, parts.scale, offs, **same))
        if options.get("columnwise", True):
            data, scale = parts.columnwise_data, parts.columnwise_scale
            rows = None if same["format"] == "mxfp8" else x.shape[0]
            made.append(tgl.group_dequantize(data, scale, offs, columnwise=True, rows=rows, **same))
    return made


def test_every_option_as_in_eager() -> None:
    x = torch.randn(9, 40)
    x[7:] = torch.nan
    compiled = torch.compile(round_trip, fullgraph=True, dynamic=False)
    assert_same(compiled(x, OFFS), round_trip(x, OFFS))
    assert graph_breaks() == 0


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_matrices(backend: str) -> None:
    def quantize(w: Tensor) -> list[Tensor]:
        made: list[Tensor] = []
        for options in (*CALLS[2:], {"format": "fp8_block", "block_2d": True}):
            made.extend(tgl.group_quantize(w, None, **options))
        return made

    w = torch.randn(3, 33, 40)
    compiled = torch.compile(quantize, backend=backend, fullgraph=True, dynamic=True)
    assert_same(compiled(w), quantize(w))


def graphs(shapes: list[tuple[int, int, int]]) -> int:
    """Return the number of graphs for round trips of all ``(T, K, G)``, with every result compared with eager."""
    counter = CompileCounterWithBackend("aot_eager")
    calls = [options for options in CALLS if "eps" not in options]  # a float of the user's is a compilation of its own
    compiled = torch.compile(round_trip, backend=counter, fullgraph=True, dynamic=True)
    for rows, columns, groups in shapes:
        x = torch.randn(rows, columns)
        offs = torch.randint(rows, (groups,)).sort().values.int()
        assert_same(compiled(x, offs, calls), round_trip(x, offs, calls))
    assert graph_breaks() == 0
    return counter.frame_count


def test_one_graph_for_every_shape() -> None:
    """T, K and G vary, blocks along K become partial, groups empty."""
    assert graphs([(5, 160, 2), (130, 140, 3), (3, 133, 300), (128, 256, 7), (2, 129, 2)]) == 1


def test_a_component_of_size_one_is_another_graph() -> None:
    """PyTorch specialises on size 1: scales of one block along K, and of one group of up to 128 tokens."""
    assert graphs([(5, 160, 1), (128, 160, 1), (129, 160, 1), (1000, 160, 1)]) == 2


@pytest.mark.parametrize("options", CALLS, ids=str)
def test_one_graph_from_no_tokens_on_when_unbacked(options: dict[str, Any]) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, offs: tgl.group_quantize(x, offs, **options), backend=counter, fullgraph=True)
    for rows in (5, 1, 0, 2, 129):
        x, offs = torch.randn(rows, 40), torch.tensor([rows // 2, rows // 2, rows], dtype=torch.int32)
        mark_unbacked(x, 0)
        assert_same(compiled(x, offs), tgl.group_quantize(x, offs, **options))
    assert (counter.frame_count, graph_breaks()) == (1, 0)


def into(x: Tensor, offs: Tensor, noop: Tensor | None, buffers: list[Tensor], options: dict[str, Any]) -> Tensor:
    """Quantise into buffers and read them in the same graph."""
    parts = tgl.group_quantize(x, offs, noop=noop, **options, out=tgl.Components(*buffers))
    return parts.scale.float().amax() + parts.columnwise_scale.float().amax()


@pytest.mark.parametrize(
    "dynamic, options",
    [pytest.param(True, CALLS[i], marks=pytest.mark.slow if i in (0, 4) else ()) for i in (0, 1, 4, 6)]
    + [(False, CALLS[1])],
    ids=str,
)
def test_buffers_of_the_caller_are_written_in_inductor(dynamic: bool, options: dict[str, Any]) -> None:
    compiled: Callable = torch.compile(into, fullgraph=True, dynamic=dynamic)
    for rows in (9, 40):
        x = torch.randn(rows, 40)
        want = tgl.group_quantize(x, OFFS, **options)
        buffers = [torch.empty_like(t) for t in want]
        for t in buffers:
            raw(t).fill_(0x5B)
        before, addresses = [t.clone() for t in buffers], [t.data_ptr() for t in buffers]
        compiled(x, OFFS, torch.ones(1), buffers, options)
        assert_same(buffers, before)
        total = compiled(x, OFFS, torch.zeros(1), buffers, options)
        assert_same(buffers, want)
        assert [t.data_ptr() for t in buffers] == addresses
        assert total == want.scale.float().amax() + want.columnwise_scale.float().amax()
    assert graph_breaks() == 0


def test_delayed_scaling_in_one_graph() -> None:
    """Quantise, put the amax into the history in place, make the next scale: three ops, state in tensors."""

    def step(x: Tensor, offs: Tensor, history: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        parts = tgl.group_quantize(x, offs, scale=scale, format="fp8_tensor", columnwise=False)
        tgl.fp8_update_history_(parts.amax, history)
        return parts.data, tgl.fp8_scale_from_history(history, scale)

    captured = Captured()
    compiled = torch.compile(step, backend=captured, fullgraph=True)
    inductor = torch.compile(step, fullgraph=True)
    states = [(torch.zeros(4, 3), torch.ones(3)) for _ in range(3)]
    for _ in range(3):
        x = torch.randn(9, 8)
        results = []
        for i, function in enumerate((step, compiled, inductor)):
            history, scale = states[i]
            results.append(function(x, OFFS, history, scale))
            states[i] = history, results[-1][1]
        assert_same(results[1], results[0])
        assert_same(results[2], results[0])
    assert torch.equal(states[0][0], states[2][0])
    assert captured.tgl_calls() == {"group_quantize": 1, "fp8_scale_from_history": 1}
    assert_expected_inline(
        captured.text(),
        """\
forward
  group_quantize = tgl.group_quantize(arg0_1, arg1_1, arg2_1, format=fp8_tensor, columnwise=False)
  getitem: e4m3[9, 8] = getitem(group_quantize, 0)
  getitem_2: f32[3] = getitem(group_quantize, 2)
  auto_functionalized_v2 = auto_functionalized_v2(tgl.fp8_update_history_.default, amax=getitem_2,
      _history_base_index=0, _all_bases=[arg3_1])
  getitem_8: f32[4, 3] = getitem(auto_functionalized_v2, 1)
  fp8_scale_from_history: f32[3] = tgl.fp8_scale_from_history(getitem_8, arg2_1)
  return [getitem_8, getitem, fp8_scale_from_history]""",
    )

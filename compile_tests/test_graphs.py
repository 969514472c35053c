"""The captured graphs: dgrad, wgrad and dbias appear by name, and only those that are needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _compiling import Captured, ExpertLayer, ends, graph_breaks, leaf
from expecttest import assert_expected_inline

import tgl

T, G, K, N = 6, 3, 8, 4
OFFS = ends(2, 0, 3)


def capture(fn: Any, *args: Any) -> Captured:
    """Compile ``fn`` whole, run it and its backward, and return the graphs."""
    captured = Captured()
    torch.compile(fn, backend=captured, fullgraph=True)(*args).sum().backward()
    assert captured.compilations == 1
    assert graph_breaks() == 0
    return captured


def test_grouped_gemm() -> None:
    captured = capture(
        tgl.grouped_gemm, leaf(torch.randn(T, K)), leaf(torch.randn(G, K, N)), OFFS, leaf(torch.randn(G, N))
    )
    assert_expected_inline(
        captured.text(),
        """\
forward
  grouped_gemm: f32[6, 4] = tgl.grouped_gemm(primals_1, primals_2, primals_3, primals_4)
  return [grouped_gemm, primals_1, primals_2, primals_3]
backward
  grouped_gemm_wgrad: f32[3, 8, 4] = tgl.grouped_gemm_wgrad(primals_1, tangents_1, primals_3)
  transpose: f32[3, 4, 8] = aten.transpose.int(primals_2, 1, 2)
  grouped_gemm_1: f32[6, 8] = tgl.grouped_gemm(tangents_1, transpose, primals_3)
  grouped_dbias: f32[3, 4] = tgl.grouped_dbias(tangents_1, primals_3)
  return [grouped_gemm_1, grouped_gemm_wgrad, None, grouped_dbias]""",
    )


def test_grouped_gemm_with_scaled_bias() -> None:
    operands = leaf(torch.randn(T, K)), leaf(torch.randn(G, K, N)), OFFS, leaf(torch.randn(G, N)), leaf(torch.randn(T))
    assert_expected_inline(
        capture(tgl.grouped_gemm, *operands).text(),
        """\
forward
  grouped_gemm: f32[6, 4] = tgl.grouped_gemm(primals_1, primals_2, primals_3, primals_4, primals_5)
  return [grouped_gemm, primals_1, primals_2, primals_3, primals_4, primals_5]
backward
  grouped_gemm_wgrad: f32[3, 8, 4] = tgl.grouped_gemm_wgrad(primals_1, tangents_1, primals_3)
  transpose: f32[3, 4, 8] = aten.transpose.int(primals_2, 1, 2)
  grouped_gemm_1: f32[6, 8] = tgl.grouped_gemm(tangents_1, transpose, primals_3)
  grouped_dbias_dscales = tgl.grouped_dbias_dscales(tangents_1, primals_4, primals_5, primals_3)
  getitem: f32[3, 4] = getitem(grouped_dbias_dscales, 0)
  getitem_1: f32[6] = getitem(grouped_dbias_dscales, 1)
  return [grouped_gemm_1, grouped_gemm_wgrad, None, getitem, getitem_1]""",
    )


@pytest.mark.parametrize("frozen", ["a", "b", "bias"])
def test_grouped_gemm_skips_what_is_not_needed(frozen: str) -> None:
    a, b, bias = torch.randn(T, K), torch.randn(G, K, N), torch.randn(G, N)
    a, b, bias = (t if name == frozen else leaf(t) for name, t in (("a", a), ("b", b), ("bias", bias)))
    calls = capture(tgl.grouped_gemm, a, b, OFFS, bias).tgl_calls("backward")
    everything = {"grouped_gemm": 1, "grouped_gemm_wgrad": 1, "grouped_dbias": 1}
    del everything[{"a": "grouped_gemm", "b": "grouped_gemm_wgrad", "bias": "grouped_dbias"}[frozen]]
    assert calls == everything


def test_grouped_linear() -> None:
    layer = tgl.GroupedLinear(G, K, N)
    assert_expected_inline(
        capture(layer, leaf(torch.randn(T, K)), torch.tensor([2, 0, 3])).text(),
        """\
forward
  splits_to_offsets: i32[3] = tgl.splits_to_offsets(primals_2)
  transpose: f32[3, 8, 4] = aten.transpose.int(primals_3, 1, 2)
  grouped_gemm: f32[6, 4] = tgl.grouped_gemm(primals_1, transpose, splits_to_offsets, primals_4)
  return [grouped_gemm, primals_1, splits_to_offsets, transpose]
backward
  grouped_gemm_wgrad: f32[3, 4, 8] = tgl.grouped_gemm_wgrad(tangents_1, primals_1, splits_to_offsets)
  transpose_1: f32[3, 8, 4] = aten.transpose.int(grouped_gemm_wgrad, 1, 2)
  transpose_2: f32[3, 4, 8] = aten.transpose.int(transpose, 1, 2)
  grouped_gemm_1: f32[6, 8] = tgl.grouped_gemm(tangents_1, transpose_2, splits_to_offsets)
  grouped_dbias: f32[3, 4] = tgl.grouped_dbias(tangents_1, splits_to_offsets)
  transpose_3: f32[3, 4, 8] = aten.transpose.int(transpose_1, 1, 2)
  return [grouped_gemm_1, None, transpose_3, grouped_dbias]""",
    )


def test_grouped_linear_with_a_frozen_weight() -> None:
    layer = tgl.GroupedLinear(G, K, N)
    layer.weight.requires_grad_(False)
    captured = capture(layer, leaf(torch.randn(T, K)), torch.tensor([2, 0, 3]))
    assert_expected_inline(
        captured.text(),
        """\
forward
  splits_to_offsets: i32[3] = tgl.splits_to_offsets(primals_2)
  transpose: f32[3, 8, 4] = aten.transpose.int(primals_3, 1, 2)
  grouped_gemm: f32[6, 4] = tgl.grouped_gemm(primals_1, transpose, splits_to_offsets, primals_4)
  return [grouped_gemm, splits_to_offsets, transpose]
backward
  transpose_1: f32[3, 4, 8] = aten.transpose.int(transpose, 1, 2)
  grouped_gemm_1: f32[6, 8] = tgl.grouped_gemm(tangents_1, transpose_1, splits_to_offsets)
  grouped_dbias: f32[3, 4] = tgl.grouped_dbias(tangents_1, splits_to_offsets)
  return [grouped_gemm_1, None, None, grouped_dbias]""",
    )


def test_grouped_linear_whose_input_needs_no_gradient() -> None:
    captured = capture(tgl.GroupedLinear(G, K, N), torch.randn(T, K), torch.tensor([2, 0, 3]))
    assert_expected_inline(
        captured.text(),
        """\
forward
  splits_to_offsets: i32[3] = tgl.splits_to_offsets(primals_2)
  transpose: f32[3, 8, 4] = aten.transpose.int(primals_3, 1, 2)
  grouped_gemm: f32[6, 4] = tgl.grouped_gemm(primals_1, transpose, splits_to_offsets, primals_4)
  return [grouped_gemm, primals_1, splits_to_offsets]
backward
  grouped_gemm_wgrad: f32[3, 4, 8] = tgl.grouped_gemm_wgrad(tangents_1, primals_1, splits_to_offsets)
  transpose_1: f32[3, 8, 4] = aten.transpose.int(grouped_gemm_wgrad, 1, 2)
  grouped_dbias: f32[3, 4] = tgl.grouped_dbias(tangents_1, splits_to_offsets)
  transpose_2: f32[3, 4, 8] = aten.transpose.int(transpose_1, 1, 2)
  return [None, None, transpose_2, grouped_dbias]""",
    )


def test_grouped_mlp() -> None:
    layer = tgl.GroupedMLP(G, K, N, bias=True)
    captured = capture(layer, leaf(torch.randn(T, K)), torch.tensor([2, 0, 3]), leaf(torch.rand(T)))
    assert_expected_inline(
        captured.text(),
        """\
forward
  splits_to_offsets: i32[3] = tgl.splits_to_offsets(primals_2)
  transpose: f32[3, 8, 8] = aten.transpose.int(primals_4, 1, 2)
  grouped_gemm: f32[6, 8] = tgl.grouped_gemm(primals_1, transpose, splits_to_offsets, primals_6)
  slice_1: f32[6, 4] = aten.slice.Tensor(grouped_gemm, 1, 0, 4)
  slice_2: f32[6, 4] = aten.slice.Tensor(grouped_gemm, 1, 4, 9223372036854775807)
  silu: f32[6, 4] = aten.silu(slice_1)
  mul: f32[6, 4] = aten.mul.Tensor(silu, slice_2)
  unsqueeze: f32[6, 1] = aten.unsqueeze(primals_3, 1)
  mul_1: f32[6, 4] = aten.mul.Tensor(mul, unsqueeze)
  transpose_1: f32[3, 4, 8] = aten.transpose.int(primals_5, 1, 2)
  grouped_gemm_1: f32[6, 8] = tgl.grouped_gemm(mul_1, transpose_1, splits_to_offsets, primals_7, primals_3)
  return [grouped_gemm_1, primals_1, primals_3, primals_7, splits_to_offsets, transpose, grouped_gemm, mul_1,
      transpose_1]
backward
  grouped_gemm_wgrad: f32[3, 8, 4] = tgl.grouped_gemm_wgrad(tangents_1, mul_1, splits_to_offsets)
  transpose_2: f32[3, 4, 8] = aten.transpose.int(grouped_gemm_wgrad, 1, 2)
  transpose_3: f32[3, 8, 4] = aten.transpose.int(transpose_1, 1, 2)
  grouped_gemm_2: f32[6, 4] = tgl.grouped_gemm(tangents_1, transpose_3, splits_to_offsets)
  grouped_dbias_dscales = tgl.grouped_dbias_dscales(tangents_1, primals_7, primals_3, splits_to_offsets)
  getitem: f32[3, 8] = getitem(grouped_dbias_dscales, 0)
  getitem_1: f32[6] = getitem(grouped_dbias_dscales, 1)
  transpose_4: f32[3, 8, 4] = aten.transpose.int(transpose_2, 1, 2)
  slice_3: f32[6, 4] = aten.slice.Tensor(grouped_gemm, 1, 0, 4)
  slice_4: f32[6, 4] = aten.slice.Tensor(grouped_gemm, 1, 4, 9223372036854775807)
  sigmoid: f32[6, 4] = aten.sigmoid(slice_3)
  mul_2: f32[6, 4] = aten.mul.Tensor(slice_3, sigmoid)
  rsub: f32[6, 4] = aten.rsub.Scalar(sigmoid, 1)
  mul_3: f32[6, 4] = aten.mul.Tensor(mul_2, rsub)
  add: f32[6, 4] = aten.add.Tensor(sigmoid, mul_3)
  mul_4: f32[6, 4] = aten.mul.Tensor(mul_2, slice_4)
  mul_5: f32[6, 4] = aten.mul.Tensor(grouped_gemm_2, mul_4)
  sum_1: f32[6] = aten.sum.dim_IntList(mul_5, [1])
  unsqueeze_1: f32[6, 1] = aten.unsqueeze(primals_3, 1)
  mul_6: f32[6, 4] = aten.mul.Tensor(grouped_gemm_2, unsqueeze_1)
  mul_7: f32[6, 4] = aten.mul.Tensor(mul_6, add)
  mul_8: f32[6, 4] = aten.mul.Tensor(mul_7, slice_4)
  mul_9: f32[6, 4] = aten.mul.Tensor(mul_6, mul_2)
  cat: f32[6, 8] = aten.cat([mul_8, mul_9], 1)
  add_1: f32[6] = aten.add.Tensor(getitem_1, sum_1)
  grouped_gemm_wgrad_1: f32[3, 8, 8] = tgl.grouped_gemm_wgrad(cat, primals_1, splits_to_offsets)
  transpose_5: f32[3, 8, 8] = aten.transpose.int(grouped_gemm_wgrad_1, 1, 2)
  transpose_6: f32[3, 8, 8] = aten.transpose.int(transpose, 1, 2)
  grouped_gemm_3: f32[6, 8] = tgl.grouped_gemm(cat, transpose_6, splits_to_offsets)
  grouped_dbias: f32[3, 8] = tgl.grouped_dbias(cat, splits_to_offsets)
  transpose_7: f32[3, 8, 8] = aten.transpose.int(transpose_5, 1, 2)
  return [grouped_gemm_3, None, add_1, transpose_7, transpose_4, grouped_dbias, getitem]""",
    )


def test_grouped_mlp_with_frozen_weights() -> None:
    layer = tgl.GroupedMLP(G, K, N).requires_grad_(False)
    captured = capture(layer, leaf(torch.randn(T, K)), torch.tensor([2, 0, 3]), torch.rand(T))
    assert captured.tgl_calls("backward") == {"grouped_gemm": 2}


def test_grouped_mlp_whose_input_needs_no_gradient() -> None:
    captured = capture(tgl.GroupedMLP(G, K, N), torch.randn(T, K), torch.tensor([2, 0, 3]), torch.rand(T))
    assert captured.tgl_calls("backward") == {
        "grouped_gemm": 1,  # through FC2 only
        "grouped_gemm_wgrad": 2,
    }


def test_whole_layer() -> None:
    captured = capture(ExpertLayer(), leaf(torch.randn(5, 8)))
    assert_expected_inline(
        captured.text(only="tgl."),
        """\
forward
  grouped_gemm: f32[10, 8] = tgl.grouped_gemm
  grouped_gemm_1: f32[10, 8] = tgl.grouped_gemm
backward
  grouped_gemm_wgrad: f32[3, 8, 4] = tgl.grouped_gemm_wgrad
  grouped_gemm_2: f32[10, 4] = tgl.grouped_gemm
  grouped_gemm_wgrad_1: f32[3, 8, 8] = tgl.grouped_gemm_wgrad
  grouped_gemm_3: f32[10, 8] = tgl.grouped_gemm""",
    )


def test_whole_layer_with_frozen_experts() -> None:
    layer = ExpertLayer(bias=True)
    layer.experts.requires_grad_(False)
    captured = capture(layer, leaf(torch.randn(5, 8)))
    assert captured.tgl_calls("backward") == {"grouped_gemm": 2}

"""Layers with a recipe, compiled whole: one graph, the bits of eager mode, and quantised tensors saved in between."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from _compiling import Captured, graph_breaks
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import tgl
from tests.memory import same_bytes
from tgl.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

G, K, N = 4, 64, 32
RECIPES: dict[str, Recipe] = {
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(amax_history_len=4),
    "block": Float8BlockScaling(),
}
ROUTINGS = ((20, (10, 0, 5, 5)), (37, (0, 30, 1, 2)), (128, (0, 0, 0, 128)), (129, (1, 127, 0, 1)), (5, (0, 0, 0, 0)))
MODULES = {"linear": tgl.GroupedLinear, "mlp": tgl.GroupedMLP}


def pair(name: str, module: str = "linear", **options: Any) -> tuple[nn.Module, nn.Module]:
    """Two layers that are the same."""
    torch.manual_seed(0)
    layer = MODULES[module](G, K, N, recipe=RECIPES[name], params_dtype=torch.bfloat16, bias=True, **options)
    return layer, copy.deepcopy(layer)


def step(run: Any, layer: nn.Module, x: Tensor, *args: Any) -> list[Tensor]:
    """Output, gradients and buffers after one forward and backward."""
    layer.zero_grad(set_to_none=True)
    leaf = x.clone().requires_grad_()
    y = run(leaf, *args)
    y.backward(torch.ones_like(y) / 7)
    return [y.detach(), leaf.grad, *(p.grad for p in layer.parameters()), *layer.buffers()]


def same(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    return all(same_bytes(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.cover(1)
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("name", RECIPES)
def test_one_graph_for_all_routings_and_token_counts(name: str, module: str) -> None:
    layer, eager = pair(name, module)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for rows, sizes in ROUTINGS:
        x, splits = torch.randn(rows, K, dtype=torch.bfloat16), torch.tensor(sizes)
        assert same(step(compiled, layer, x, splits), step(eager, eager, x, splits)), (rows, sizes)
    assert counter.frame_count == 1
    assert graph_breaks() == 0


# Recipes with a state; tests/models compiles a model of every recipe.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("nvfp4", "delayed") else pytest.mark.slow) for name in RECIPES]
)
def test_inductor(name: str) -> None:
    """The MLP, which is both layers and the activation between them; the state moves as it does in eager mode."""
    layer, eager = pair(name, "mlp")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for rows, sizes in ROUTINGS[:2]:
        x, splits = torch.randn(rows, K, dtype=torch.bfloat16), torch.tensor(sizes)
        assert same(step(compiled, layer, x, splits), step(eager, eager, x, splits)), (rows, sizes)


def graphs(name: str) -> str:
    torch.manual_seed(0)
    layer = tgl.GroupedLinear(G, K, N, bias=False, recipe=RECIPES[name], params_dtype=torch.bfloat16)
    captured = Captured()
    x = torch.randn(20, K, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(layer, backend=captured, fullgraph=True)(x, torch.tensor([10, 0, 5, 3])).sum().backward()
    assert captured.compilations == 1
    saved = [n.meta["val"] for n in captured.forward.graph.find_nodes(op="output")[0].args[0][1:]]  # type: ignore[union-attr]
    assert not any(t.dtype == torch.bfloat16 for t in saved)
    return captured.text()


def test_joint_graph_of_mxfp8() -> None:
    """The forward returns the columnwise components of input and weight to the backward, and no bfloat16 tensor."""
    assert_expected_inline(
        graphs("mxfp8"),
        """\
forward
  splits_to_offsets: i32[4] = tgl.splits_to_offsets(primals_2)
  detach: bf16[4, 32, 64] = aten.detach(primals_3)
  group_quantize = tgl.group_quantize(detach, None, format=mxfp8, dtype=torch.float8_e4m3fn,
      scale_layout=blocked)
  getitem: e4m3[4, 32, 64] = getitem(group_quantize, 0)
  getitem_1: u8[4, 512] = getitem(group_quantize, 1)
  getitem_3: e4m3[4, 32, 64] = getitem(group_quantize, 3)
  getitem_4: u8[4, 512] = getitem(group_quantize, 4)
  group_quantize_1 = tgl.group_quantize(primals_1, splits_to_offsets, format=mxfp8, dtype=torch.float8_e4m3fn,
      scale_layout=blocked)
  getitem_7: e4m3[20, 64] = getitem(group_quantize_1, 0)
  getitem_8: u8[2048] = getitem(group_quantize_1, 1)
  getitem_10: e4m3[20, 64] = getitem(group_quantize_1, 3)
  getitem_11: u8[2048] = getitem(group_quantize_1, 4)
  grouped_gemm_scaled: bf16[20, 32] = tgl.grouped_gemm_scaled(getitem_7, getitem_8, getitem, getitem_1,
      splits_to_offsets, format=mxfp8, scale_layout=blocked, out_dtype=torch.bfloat16)
  return [grouped_gemm_scaled, splits_to_offsets, getitem_3, getitem_4, getitem_10, getitem_11]
backward
  group_quantize_2 = tgl.group_quantize(tangents_1, splits_to_offsets, format=mxfp8,
      dtype=torch.float8_e4m3fn, scale_layout=blocked)
  getitem_14: e4m3[20, 32] = getitem(group_quantize_2, 0)
  getitem_15: u8[2048] = getitem(group_quantize_2, 1)
  getitem_17: e4m3[20, 32] = getitem(group_quantize_2, 3)
  getitem_18: u8[2048] = getitem(group_quantize_2, 4)
  grouped_gemm_scaled_1: bf16[20, 64] = tgl.grouped_gemm_scaled(getitem_14, getitem_15, getitem_3, getitem_4,
      splits_to_offsets, format=mxfp8, b_direction=columnwise, scale_layout=blocked, out_dtype=torch.bfloat16)
  grouped_gemm_scaled_wgrad: bf16[4, 32, 64] = tgl.grouped_gemm_scaled_wgrad(getitem_17, getitem_18,
      getitem_10, getitem_11, splits_to_offsets, format=mxfp8, scale_layout=blocked, out_dtype=torch.bfloat16)
  return [grouped_gemm_scaled_1, None, grouped_gemm_scaled_wgrad]""",
    )


def test_joint_graph_of_nvfp4() -> None:
    """Likewise; the state of stochastic rounding moves on in the backward."""
    assert_expected_inline(
        graphs("nvfp4"),
        """\
forward
  splits_to_offsets: i32[4] = tgl.splits_to_offsets(primals_2)
  detach: bf16[4, 32, 64] = aten.detach(primals_3)
  group_quantize = tgl.group_quantize(detach, None, format=nvfp4, scale_layout=blocked, block_2d=True)
  getitem: u8[4, 32, 32] = getitem(group_quantize, 0)
  getitem_1: u8[4, 512] = getitem(group_quantize, 1)
  getitem_2: f32[4] = getitem(group_quantize, 2)
  getitem_3: u8[4, 64, 16] = getitem(group_quantize, 3)
  getitem_4: u8[4, 512] = getitem(group_quantize, 4)
  getitem_5: f32[4] = getitem(group_quantize, 5)
  group_quantize_1 = tgl.group_quantize(primals_1, splits_to_offsets, format=nvfp4, scale_layout=blocked,
      rht=True)
  getitem_7: u8[20, 32] = getitem(group_quantize_1, 0)
  getitem_8: u8[2048] = getitem(group_quantize_1, 1)
  getitem_9: f32[4] = getitem(group_quantize_1, 2)
  getitem_10: u8[64, 128] = getitem(group_quantize_1, 3)
  getitem_11: u8[2048] = getitem(group_quantize_1, 4)
  getitem_12: f32[4] = getitem(group_quantize_1, 5)
  grouped_gemm_scaled: bf16[20, 32] = tgl.grouped_gemm_scaled(getitem_7, getitem_8, getitem, getitem_1,
      splits_to_offsets, getitem_9, getitem_2, format=nvfp4, scale_layout=blocked, out_dtype=torch.bfloat16)
  return [grouped_gemm_scaled, splits_to_offsets, getitem_3, getitem_4, getitem_5, getitem_10, getitem_11,
      getitem_12, primals_4]
backward
  arange: i64[2] = aten.arange(2, device=cpu, pin_memory=False)
  add: i64[2] = aten.add.Tensor(primals_4, arange)
  copy: i64[2] = aten.copy(primals_4, add)
  group_quantize_2 = tgl.group_quantize(tangents_1, splits_to_offsets, None, None, add, format=nvfp4,
      scale_layout=blocked, rht=True)
  getitem_14: u8[20, 16] = getitem(group_quantize_2, 0)
  getitem_15: u8[2048] = getitem(group_quantize_2, 1)
  getitem_16: f32[4] = getitem(group_quantize_2, 2)
  getitem_17: u8[32, 128] = getitem(group_quantize_2, 3)
  getitem_18: u8[2048] = getitem(group_quantize_2, 4)
  getitem_19: f32[4] = getitem(group_quantize_2, 5)
  grouped_gemm_scaled_1: bf16[20, 64] = tgl.grouped_gemm_scaled(getitem_14, getitem_15, getitem_3, getitem_4,
      splits_to_offsets, getitem_16, getitem_5, format=nvfp4, b_direction=columnwise, scale_layout=blocked,
      out_dtype=torch.bfloat16)
  grouped_gemm_scaled_wgrad: bf16[4, 32, 64] = tgl.grouped_gemm_scaled_wgrad(getitem_17, getitem_18,
      getitem_10, getitem_11, splits_to_offsets, getitem_19, getitem_12, format=nvfp4, scale_layout=blocked,
      out_dtype=torch.bfloat16)
  copy_: i64[2] = aten.copy_(primals_4, copy)
  return [grouped_gemm_scaled_1, None, grouped_gemm_scaled_wgrad, None]""",
    )


def test_activation_is_quantised_by_the_gemm_before_it() -> None:
    layer, _ = pair("mxfp8", "mlp")
    captured = Captured()
    x = torch.randn(20, K, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(layer, backend=captured, fullgraph=True)(x, torch.tensor([10, 0, 5, 3])).sum().backward()
    assert captured.tgl_calls("forward") == {
        "splits_to_offsets": 1,
        "group_quantize": 3,  # the input and two weights
        "grouped_gemm_scaled": 1,
        "grouped_gemm_scaled_activation_quantize": 1,
    }
    forward, _, _ = captured.text().partition("\nbackward\n")
    assert not any(word in forward for word in ("copy", "clone", "empty", "zeros"))
    assert captured.tgl_calls("backward") == {
        "group_quantize": 2,
        "grouped_gemm_scaled": 2,
        "grouped_gemm_scaled_wgrad": 2,
        "grouped_activation_backward": 1,
    }


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "delayed"])
def test_microbatches(name: str) -> None:
    """A Python flag is a graph per value, and one for the first call, which makes the buffers."""
    layer, eager = pair(name)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for call in range(6):
        x, splits = torch.randn(20, K, dtype=torch.bfloat16), torch.tensor([10, 0, 5, 5])
        first = call % 3 == 0
        assert same(step(compiled, layer, x, splits, first), step(eager, eager, x, splits, first)), call
        with torch.no_grad():
            for network in (layer, eager):
                network.weight.mul_(1.25)  # must not show before the next first microbatch
    assert counter.frame_count == 3


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_microbatches_by_a_flag_on_the_device(backend: str) -> None:
    """One graph for both values, after that of the first call."""
    layer, eager = pair("mxfp8")
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for call in range(6):
        x, splits = torch.randn(20, K, dtype=torch.bfloat16), torch.tensor([10, 0, 5, 5])
        first = torch.tensor(call % 3 == 0)
        assert same(step(compiled, layer, x, splits, first), step(eager, eager, x, splits, first)), call
        with torch.no_grad():
            for network in (layer, eager):
                network.weight.mul_(1.25)
    assert counter.frame_count == 2


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_quantised_inputs_and_weights(name: str) -> None:
    """Operands quantised inside the graph need one graph; those passed to it need two."""
    recipe = RECIPES[name]
    layer, eager = pair(name)
    eager.gemms.load_state_dict(layer.gemms.state_dict())
    offs = torch.tensor([10, 10, 15, 20], dtype=torch.int32)
    options = recipe.operands.input.options()

    def inside(x: Tensor) -> Tensor:
        return layer.forward_offsets(tgl.quantize(x, offs, **options), offs)

    def outside(t: Tensor) -> Tensor:
        return layer.forward_offsets(t, offs)

    made, given = CompileCounterWithBackend("aot_eager"), CompileCounterWithBackend("aot_eager")
    compiled_inside = torch.compile(inside, backend=made, fullgraph=True, dynamic=True)
    compiled_outside = torch.compile(outside, backend=given, fullgraph=True, dynamic=True)
    for rows in (20, 33, 70):
        x = torch.randn(rows, K, dtype=torch.bfloat16)
        want = step(lambda t: eager.forward_offsets(t, offs), eager, x)[:2]
        assert same(step(compiled_inside, layer, x)[:1], want[:1])
        assert same(step(lambda t: compiled_outside(tgl.quantize(t, offs, **options)), layer, x)[:1], want[:1])
    assert made.frame_count == 1
    assert given.frame_count <= 2

    eager.quantize_weight()
    held = copy.deepcopy(eager)
    x, splits = torch.randn(20, K, dtype=torch.bfloat16), torch.tensor([10, 0, 5, 5])
    compiled = torch.compile(held, backend="aot_eager", fullgraph=True)
    assert same(step(compiled, held, x, splits)[:3], step(eager, eager, x, splits)[:3])


def test_a_wrong_quantised_input_is_named_in_the_trace() -> None:
    layer, _ = pair("mxfp8")
    offs = torch.tensor([10, 10, 15, 20], dtype=torch.int32)
    made = tgl.quantize(torch.randn(20, K, dtype=torch.bfloat16), offs, "mxfp8")
    with pytest.raises(Exception, match="`inp` must be quantised with scale_layout='blocked'"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(made, torch.tensor([10, 0, 5, 5]))


@pytest.mark.parametrize("name", ["mxfp8", "current", "block"])
def test_activation_checkpointing(name: str) -> None:
    layer, eager = pair(name, "mlp")
    compiled = torch.compile(
        lambda x, splits: checkpoint(layer, x, splits, use_reentrant=False), backend="aot_eager", fullgraph=True
    )
    x, splits = torch.randn(20, K, dtype=torch.bfloat16), torch.tensor([10, 0, 5, 5])
    assert same(step(compiled, layer, x, splits), step(eager, eager, x, splits))


@pytest.mark.parametrize("name", ["nvfp4", "delayed"])
def test_two_forwards_before_their_backwards(name: str) -> None:
    """The state that a backward moves is that of the moment, not of its forward."""
    layer, eager = pair(name)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    splits = torch.tensor([10, 0, 5, 5])
    found = []
    for run, network in ((compiled, layer), (eager, eager)):
        torch.manual_seed(1)
        leaves = [torch.randn(20, K, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
        outputs = [run(leaf, splits) for leaf in leaves]
        for y in outputs:
            y.backward(torch.ones_like(y) / 7)
        found.append([*(leaf.grad for leaf in leaves), *(p.grad for p in network.parameters()), *network.buffers()])
    assert same(*found)

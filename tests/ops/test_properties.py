"""FLOP counts, the save-list for checkpointing, and the schemas, whose every change must be deliberate."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tgl
from tgl.testing.signatures import overload

SNAPSHOT = Path(__file__).with_name("schemas.txt")
T, K, N, G = 10, 4, 6, 3
OFFS = torch.tensor([2, 2, 7], dtype=torch.int32)


def schemas() -> str:
    """Every op overload: its schema and its tags."""
    lines = []
    for name in sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("tgl::")):
        op = overload(name)
        lines.append(f"{op._schema}  # {', '.join(sorted(str(t).removeprefix('Tag.') for t in op.tags))}")
    return "\n".join(lines) + "\n"


def test_schemas():
    """To change a signature on purpose: ``python -m tests.ops.test_properties``."""
    assert schemas() == SNAPSHOT.read_text()


def count(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def test_flops_of_the_gemms():
    a, b, dy = torch.randn(T, K), torch.randn(G, K, N), torch.randn(T, N)
    assert count(lambda: tgl.grouped_gemm(a, b, OFFS)) == 2 * T * K * N
    assert count(lambda: tgl.grouped_gemm(a, b, OFFS, out=torch.empty(T, N))) == 2 * T * K * N
    assert count(lambda: tgl.grouped_gemm_activation(a, b, OFFS)) == 2 * T * K * N
    low, up = torch.randn(T, 3), torch.randn(G, 3, N)
    assert count(lambda: tgl.grouped_gemm_low_rank(a, b, low, up, OFFS)) == 2 * T * (K + 3) * N
    assert count(lambda: tgl.grouped_gemm_low_rank_activation(a, b, low, up, OFFS)) == 2 * T * (K + 3) * N
    assert count(lambda: tgl.grouped_gemm_wgrad(a, dy, OFFS)) == 2 * T * K * N
    assert count(lambda: tgl.grouped_gemm_wgrad(a, dy, OFFS, out=torch.empty(G, K, N))) == 2 * T * K * N
    h = torch.randn(T, 2 * N)
    assert count(lambda: tgl.grouped_gemm_dactivation(a, b, h, OFFS)) == 2 * T * K * N
    assert count(lambda: tgl.grouped_gemm_wgrad_accumulate_(a, dy, OFFS, torch.zeros(G, K, N))) == 2 * T * K * N


def test_flops_of_a_symmetric_product_are_those_of_all_its_elements():
    x = torch.randn(G, N, K)
    assert count(lambda: tgl.batched_syrk(x)) == 2 * G * N * N * K
    assert count(lambda: tgl.batched_syrk(x, torch.zeros(G, N, N), alpha=2.0)) == 2 * G * N * N * K


def test_flops_of_rows_by_an_index_are_those_of_the_rows():
    a, b, dy, rows = torch.randn(5, K), torch.randn(G, K, N), torch.randn(T, N), torch.zeros(T, dtype=torch.int32)
    every = 2 * T * K * N
    assert count(lambda: tgl.grouped_gemm(a, b, OFFS, rows=rows)) == every
    assert count(lambda: tgl.grouped_gemm(a, b, OFFS, rows=rows, out=torch.empty(T, N))) == every
    assert count(lambda: tgl.grouped_gemm_activation(a, b, OFFS, rows=rows)) == every
    assert count(lambda: tgl.grouped_gemm_dactivation(a, b, dy.repeat(1, 2), OFFS, rows=rows)) == every
    assert count(lambda: tgl.grouped_gemm_wgrad(a, dy, OFFS, a_rows=rows)) == every
    assert count(lambda: tgl.grouped_gemm_wgrad(dy, a, OFFS, b_rows=rows)) == every
    assert count(lambda: tgl.grouped_gemm_wgrad(a, dy, OFFS, a_rows=rows, out=torch.empty(G, K, N))) == every
    main_grad = torch.zeros(G, K, N)
    assert count(lambda: tgl.grouped_gemm_wgrad_accumulate_(a, dy, OFFS, main_grad, a_rows=rows)) == every


@pytest.mark.parametrize("make", [tgl.recipes.MXFP8BlockScaling, tgl.recipes.NVFP4BlockScaling])
def test_flops_of_a_layer_with_a_recipe(make):
    """They are the FLOPs of any other layer; NVFP4's weight gradient is stored by place, which exceed the rows."""
    recipe = make()
    layer, x = tgl.GroupedLinear(G, K, N, recipe=recipe), torch.randn(T, K, requires_grad=True)
    rows = T if recipe.format == "mxfp8" else 64 * G
    assert count(lambda: layer(x, torch.tensor([2, 0, 5]))) == 2 * T * K * N
    assert count(lambda: layer(x, torch.tensor([2, 0, 5])).sum().backward()) == 2 * (2 * T + rows) * K * N


def test_flops_of_a_backward_are_twice_those_of_the_forward():
    a, b = torch.randn(T, K, requires_grad=True), torch.randn(G, K, N, requires_grad=True)
    assert count(lambda: tgl.grouped_gemm(a, b, OFFS).sum().backward()) == 3 * 2 * T * K * N
    b.requires_grad_(False)
    assert count(lambda: tgl.grouped_gemm(a, b, OFFS).sum().backward()) == 2 * 2 * T * K * N


def test_flops_of_the_expert_layer():
    mlp, x = tgl.GroupedMLP(G, K, N), torch.randn(T, K)
    assert count(lambda: mlp(x, torch.tensor([2, 0, 5]))) == 2 * T * K * 2 * N + 2 * T * N * K


def test_flops_of_an_mlp_with_a_recipe():
    mlp, x = tgl.GroupedMLP(G, K, N, recipe=tgl.recipes.MXFP8BlockScaling()), torch.randn(T, K)
    assert count(lambda: mlp(x, torch.tensor([2, 0, 5]))) == 2 * T * K * 2 * N + 2 * T * N * K


def test_flops_of_an_mlp_are_those_of_the_gemms_it_needs():
    x, offs = torch.randn(T, K, requires_grad=True), OFFS
    w1, w2 = torch.randn(G, K, 2 * N, requires_grad=True), torch.randn(G, N, K, requires_grad=True)
    first, second = 2 * T * K * 2 * N, 2 * T * N * K
    assert count(lambda: tgl.grouped_mlp(x, w1, w2, offs)) == first + second
    assert count(lambda: tgl.grouped_mlp(x, w1, w2, offs).sum().backward()) == 3 * (first + second)
    w1.requires_grad_(False)
    assert count(lambda: tgl.grouped_mlp(x, w1, w2, offs).sum().backward()) == 2 * first + 3 * second
    x.requires_grad_(False)
    assert count(lambda: tgl.grouped_mlp(x, w1, w2, offs).sum().backward()) == first + 2 * second


def test_flops_of_a_block_are_those_of_its_rows():
    x, chosen = torch.randn(T, K, requires_grad=True), torch.arange(2 * T).view(T, 2) % G
    w1, w2 = torch.randn(G, K, 2 * N, requires_grad=True), torch.randn(G, N, K, requires_grad=True)
    first, second = 2 * 2 * T * K * 2 * N, 2 * 2 * T * N * K
    assert count(lambda: tgl.moe(x, chosen, None, w1, w2)) == first + second
    assert count(lambda: tgl.moe(x, chosen, None, w1, w2).sum().backward()) == 3 * (first + second)
    w1.requires_grad_(False)
    assert count(lambda: tgl.moe(x, chosen, None, w1, w2).sum().backward()) == 2 * first + 3 * second


def test_save_list_holds_overloads():
    """Packets would silently match nothing."""
    ops = torch.ops.tgl
    saved = [
        ops.grouped_gemm,
        ops.grouped_gemm_activation,
        ops.grouped_gemm_low_rank,
        ops.grouped_gemm_low_rank_activation,
        ops.grouped_gemm_packed,
        ops.grouped_gemm_row_scaled,
        ops.grouped_gemm_scaled,
        ops.grouped_gemm_scaled_activation_quantize,
        ops.grouped_mlp,
        ops.moe,
        ops.ep_route,
        ops.ep_dispatch,
        ops.ep_combine,
        ops.offload,
    ]
    assert [packet.default for packet in saved] == tgl.SAC_SAVE_LIST
    assert all(isinstance(op, torch._ops.OpOverload) for op in tgl.SAC_SAVE_LIST)


if __name__ == "__main__":
    SNAPSHOT.write_text(schemas())

"""Sharding rules on two ranks: the result and gradients of one rank, for every placement of the operands."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import tgl
import tgl.distributed

T, G, K, N, I = 9, 3, 4, 6, 8
OFFS = torch.tensor([4, 4, 7], dtype=torch.int32)
R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)


def mesh():
    return init_device_mesh("cpu", (2,))


def place(t: Tensor, placement, grad: bool = False) -> DTensor:
    return distribute_tensor(t.detach().clone(), mesh(), [placement]).requires_grad_(grad)


def integers(*shape: int) -> Tensor:
    return torch.randint(-4, 5, shape).double()


def compare(function, tensors, placements, expected_placement=None, communications=None) -> None:
    """``function`` on DTensors of the given placements against the same on whole tensors, and their gradients.

    The values are small integers in float64: sums of products are exact in any order, so equal means equal.
    """
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    expected = function(*leaves, OFFS)
    grads = torch.autograd.grad(expected, leaves, torch.ones_like(expected))
    shards, offs = [place(t, p, grad=True) for t, p in zip(tensors, placements)], place(OFFS, R)
    with CommDebugMode() as counter:
        actual = function(*shards, offs)
    if expected_placement is not None:
        assert actual.placements == (expected_placement,), actual.placements
        assert counter.get_total_counts() == communications
    assert torch.equal(actual.full_tensor(), expected)
    assert (actual.shape, actual.stride(), actual.dtype) == (expected.shape, expected.stride(), expected.dtype)
    ones = distribute_tensor(torch.ones_like(expected), mesh(), [R])
    for mine, theirs in zip(torch.autograd.grad(actual, shards, ones), grads):
        assert torch.equal(mine.full_tensor(), theirs)


def gemm(a, b, offs):
    return tgl.grouped_gemm(a, b, offs)


def gemm_with_bias(a, b, bias, offs):
    return tgl.grouped_gemm(a, b, offs, bias)


def gemm_with_scaled_bias(a, b, bias, scale, offs):
    return tgl.grouped_gemm(a, b, offs, bias, scale)


def low_rank(a, b, low, up, bias, offs):
    return tgl.grouped_gemm_low_rank(a, b, low, up, offs, bias)


def narrowed(a, b, down, up, offs):
    """LoRA: where K is sharded, the narrow product is a partial sum."""
    return tgl.grouped_gemm_low_rank(a, b, tgl.grouped_gemm(a, down, offs), up, offs)


def layer(a, weight, bias, offs):
    """The call of ``GroupedLinear``: the weight ``[G, N, K]``, transposed."""
    return tgl.grouped_gemm(a, weight.transpose(1, 2), offs, bias)


def check_gemm_placements():
    a, b, bias, scale = integers(T, K), integers(G, K, N), integers(G, N), integers(T)
    cases = [
        (gemm, (a, b), (R, R), R),
        (gemm, (a, b), (R, S2), S1),
        (gemm, (a, b), (S1, S1), Partial()),
        (gemm_with_bias, (a, b, bias), (R, S2, S1), S1),
        (gemm_with_bias, (a, b, bias), (S1, S1, R), Partial()),
        (gemm_with_scaled_bias, (a, b, bias, scale), (R, S2, S1, R), S1),
        (gemm_with_scaled_bias, (a, b, bias, scale), (S1, S1, R, R), Partial()),
        (layer, (a, integers(G, N, K), bias), (R, S1, S1), S1),
        (layer, (a, integers(G, N, K), bias), (S1, S2, R), Partial()),
    ]
    for function, tensors, placements, result in cases:
        compare(function, tensors, placements, result, communications=0)


def check_low_rank_placements():
    a, b, low, up, bias = integers(T, K), integers(G, K, N), integers(T, K), integers(G, K, N), integers(G, N)
    cases = [
        ((R, R, R, R, R), R),
        ((R, S2, R, S2, S1), S1),
        ((S1, S1, S1, S1, R), Partial()),
    ]
    for placements, result in cases:
        compare(low_rank, (a, b, low, up, bias), placements, result, communications=0)
    compare(narrowed, (a, b, integers(G, K, 8), integers(G, 8, N)), (S1, S1, S1, R), Partial(), communications=0)


def check_symmetric_products():
    """Products sharded by matrices, or over K to a partial sum."""
    x, c = integers(4, 3, K), integers(4, 3, 3)
    expected = tgl.batched_syrk(x, c, alpha=2.0, beta=3.0)
    for placements, result in (((R, R), R), ((S0, S0), S0), ((S2, R), Partial())):
        operands = [place(t, p) for t, p in zip((x, c), placements)]
        with CommDebugMode() as counter:
            found = tgl.batched_syrk(*operands, alpha=2.0, beta=3.0)
        assert (found.placements, counter.get_total_counts()) == ((result,), 0)
        assert torch.equal(found.full_tensor(), expected)


def check_gemm_from_anywhere():
    """DTensor redistributes what no rule takes as it is: right, if not free."""
    a, b, bias, scale = integers(T, K), integers(G, K, N), integers(G, N), integers(T)
    for placements in itertools.product((R, S0, S1), (R, S0, S1, S2), (R, S0, S1), (R, S0)):
        compare(gemm_with_scaled_bias, (a, b, bias, scale), placements)


def check_slots():
    """A table is on every rank; the matrices are sharded as without one."""
    a, b, bias, slots = integers(T, K), integers(G, K, N), integers(G, N), torch.tensor([2, 0, 1], dtype=torch.int32)
    expected = tgl.grouped_gemm(a, b, OFFS, bias, slots=slots)
    for a_placement, b_placement, bias_placement, result in ((R, R, R, R), (R, S2, S1, S1), (S1, S1, R, Partial())):
        x, w, row = place(a, a_placement), place(b, b_placement), place(bias, bias_placement)
        y = tgl.grouped_gemm(x, w, place(OFFS, R), row, slots=place(slots, R))
        assert y.placements == (result,)
        assert torch.equal(y.full_tensor(), expected)
    dy, main_grad = integers(T, N), integers(G, K, N)
    expected = main_grad.clone()
    tgl.grouped_gemm_wgrad_accumulate_(a, dy, OFFS, expected, slots)
    for a_placement, placement in ((R, R), (S1, S1), (R, S2)):
        x, y, buffer = place(a, a_placement), place(dy, R), place(main_grad, placement)
        tgl.grouped_gemm_wgrad_accumulate_(x, y, place(OFFS, R), buffer, place(slots, R))
        assert buffer.placements == (placement,)
        assert torch.equal(buffer.full_tensor(), expected)


def check_rows():
    """An index is on every rank; the columns of what it reads are sharded as without one."""
    a, b, rows = integers(5, K), integers(G, K, N), torch.tensor([4, 0, 0, 2, 1, 3, 4, -1, -1], dtype=torch.int32)
    expected = tgl.grouped_gemm(a, b, OFFS, rows=rows)
    for a_placement, b_placement, result in ((R, R, R), (R, S2, S1), (S1, S1, Partial())):
        y = tgl.grouped_gemm(place(a, a_placement), place(b, b_placement), place(OFFS, R), rows=place(rows, R))
        assert y.placements == (result,)
        assert torch.equal(y.full_tensor(), expected)
    dy, main_grad = integers(T, N), integers(G, K, N)
    expected, summed = tgl.grouped_gemm_wgrad(a, dy, OFFS, a_rows=rows), main_grad.clone()
    tgl.grouped_gemm_wgrad_accumulate_(a, dy, OFFS, summed, a_rows=rows)
    for a_placement, b_placement, result in ((R, R, R), (S1, R, S1), (R, S1, S2)):
        operands, index = (place(a, a_placement), place(dy, b_placement), place(OFFS, R)), place(rows, R)
        dw, buffer = tgl.grouped_gemm_wgrad(*operands, a_rows=index), place(main_grad, result)
        tgl.grouped_gemm_wgrad_accumulate_(*operands, buffer, a_rows=index)
        assert dw.placements == buffer.placements == (result,)
        assert torch.equal(dw.full_tensor(), expected)
        assert torch.equal(buffer.full_tensor(), summed)


def check_rows_around_an_activation():
    a, b, rows = integers(5, K), integers(G, K, 2 * I), torch.tensor([4, 0, 0, 2, 1, 3, 4, -1, -1], dtype=torch.int32)
    expected = tgl.grouped_gemm_activation(a, b, OFFS, rows=rows, interleaved=True)
    back, h = integers(G, K, I), integers(T, 2 * I)
    gradients = tgl.grouped_gemm_dactivation(a, back, h, OFFS, torch.ones(T).double(), rows, interleaved=True)
    for b_placement, h_placement, result, sums in ((R, R, R, R), (S2, S1, S1, Partial())):
        x, offs, index = place(a, R), place(OFFS, R), place(rows, R)
        found = tgl.grouped_gemm_activation(x, place(b, b_placement), offs, rows=index, interleaved=True)
        assert all(t.placements == (result,) for t in found)
        operands = x, place(back, b_placement), place(h, h_placement), offs, place(torch.ones(T).double(), R), index
        dh, dprobs = tgl.grouped_gemm_dactivation(*operands, interleaved=True)
        assert (dh.placements, dprobs.placements) == ((result,), (sums,))
        for mine, theirs in zip((*found, dh, dprobs), (*expected, *gradients)):
            torch.testing.assert_close(mine.full_tensor(), theirs)


def check_out_dtype_is_part_of_the_key():
    """The same shapes with another ``out_dtype``: DTensor must not answer from its cache."""
    a, b = integers(T, K).float(), integers(G, K, N).float()
    for dtype in (None, torch.bfloat16, torch.float16, torch.float32):
        y = tgl.grouped_gemm(place(a, R), place(b, S2), place(OFFS, R), out_dtype=dtype)
        assert y.dtype == y.to_local().dtype == (dtype or torch.float32)
        w = tgl.grouped_gemm_wgrad(place(a, R), place(a, S1), place(OFFS, R), out_dtype=dtype)
        assert w.dtype == w.to_local().dtype == (dtype or torch.float32)


def check_activation_options_are_part_of_the_key():
    x = integers(T, 2 * I)
    for kind, interleaved in (("swiglu", False), ("srelu", False), ("swiglu", True), ("clamped_qgeglu", True)):
        expected = tgl.grouped_activation(x, OFFS, kind=kind, interleaved=interleaved)
        actual = tgl.grouped_activation(place(x, S1), place(OFFS, R), kind=kind, interleaved=interleaved)
        assert actual.shape == expected.shape
        assert actual.placements == (S1 if kind == "srelu" or interleaved else R,)
        torch.testing.assert_close(actual.full_tensor(), expected)


def check_wgrad():
    a, b = integers(T, K), integers(T, N)
    for placements, result in (((R, R), R), ((S1, R), S1), ((R, S1), S2)):
        compare(lambda a, b, offs: tgl.grouped_gemm_wgrad(a, b, offs), (a, b), placements, result, communications=0)


def check_wgrad_accumulate():
    """Main_grad is written where it is: ``a`` must fit, ``b`` is brought there."""
    a, b, main_grad = integers(T, K), integers(T, N), integers(G, K, N)
    expected = main_grad.clone()
    tgl.grouped_gemm_wgrad_accumulate_(a, b, OFFS, expected)
    for (a_placement, placement), b_placement in itertools.product(((R, R), (S1, S1), (R, S2)), (R, S0, S1)):
        x, y, buffer = place(a, a_placement), place(b, b_placement), place(main_grad, placement)
        memory = buffer.to_local().data_ptr()
        tgl.grouped_gemm_wgrad_accumulate_(x, y, place(OFFS, R), buffer)
        assert buffer.placements == (placement,)
        assert buffer.to_local().data_ptr() == memory
        assert torch.equal(buffer.full_tensor(), expected)


def check_main_grad_that_does_not_fit():
    """An error on every rank, and nothing written."""
    a, b, main_grad = integers(T, K), integers(T, N), integers(4, K, N)
    offs = place(torch.tensor([4, 4, 7, 9], dtype=torch.int32), R)
    for a_placement, placement in ((R, S0), (R, S1), (S1, R), (S1, S2)):
        x, buffer = place(a, a_placement), place(main_grad, placement)
        with pytest.raises(RuntimeError, match="grouped_gemm_wgrad_accumulate_"):
            tgl.grouped_gemm_wgrad_accumulate_(x, place(b, R), offs, buffer)
        assert torch.equal(buffer.full_tensor(), main_grad)


def check_dbias():
    dy, bias, scale = integers(T, N), integers(G, N), integers(T)
    for placement in (R, S1):
        compare(lambda dy, offs: tgl.grouped_dbias(dy, offs), (dy,), (placement,), placement, communications=0)
    expected = tgl.grouped_dbias_dscales(dy, bias, scale, OFFS)
    operands = place(dy, S1), place(bias, S1), place(scale, R), place(OFFS, R)
    with CommDebugMode() as counter:
        dbias, dscales = tgl.grouped_dbias_dscales(*operands)
    assert counter.get_total_counts() == 0
    assert (dbias.placements, dscales.placements) == ((S1,), (Partial(),))
    assert torch.equal(dbias.full_tensor(), expected[0])
    assert torch.equal(dscales.full_tensor(), expected[1])


def check_permutation():
    position = torch.tensor([4, 0, 1, -1, 3, 2], dtype=torch.int32)
    token = torch.tensor([0, 1, 2, 2, 0], dtype=torch.int32)
    x, y, weights = integers(3, N), integers(5, N), integers(3, 2)
    ops, where = torch.ops.tgl, [place(t, R) for t in (token, position)]
    for op, rows in ((ops.dispatch, x), (ops.combine, y)):
        expected = op(rows, token, position, 2, weights)
        for placement in (R, S1, Partial()):
            shards, factors = place(rows, placement), place(weights, R)
            with CommDebugMode() as counter:
                actual = op(shards, *where, 2, factors)
            assert counter.get_total_counts() == 0
            assert actual.placements == (placement,)
            assert torch.equal(actual.full_tensor(), expected)
    expected = ops.combine_backward(x, y, token, position, 2, weights)
    actual = ops.combine_backward(place(x, S1), place(y, S1), *where, 2, place(weights, R))
    assert [t.placements for t in actual] == [(S1,), (Partial(),)]
    assert all(torch.equal(mine.full_tensor(), theirs) for mine, theirs in zip(actual, expected))


def check_gemm_activation():
    a, b, bias = integers(T, K), integers(G, K, 2 * I), integers(G, 2 * I)
    probs = torch.rand(T, dtype=torch.float64)
    for kind, interleaved in (("srelu", False), ("swiglu", True), ("swiglu", False)):
        options = {"kind": kind, "interleaved": interleaved}
        placement = S1 if kind == "srelu" or interleaved else R
        expected = tgl.grouped_gemm_activation(a, b, OFFS, bias, probs, **options)
        operands = place(a, R), place(b, S2), place(OFFS, R), place(bias, S1), place(probs, R)
        for mine, theirs in zip(tgl.grouped_gemm_activation(*operands, **options), expected):
            assert mine.placements == (placement,)
            torch.testing.assert_close(mine.full_tensor(), theirs)


def check_gemm_low_rank_activation():
    a, b, bias = integers(T, K), integers(G, K, 2 * I), integers(G, 2 * I)
    low, up = integers(T, 4), integers(G, 4, 2 * I)
    probs = torch.rand(T, dtype=torch.float64)
    for kind, interleaved in (("srelu", False), ("swiglu", True), ("swiglu", False)):
        options = {"kind": kind, "interleaved": interleaved}
        placement = S1 if kind == "srelu" or interleaved else R
        expected = tgl.grouped_gemm_low_rank_activation(a, b, low, up, OFFS, bias, probs, **options)
        operands = (a, R), (b, S2), (low, R), (up, S2), (OFFS, R), (bias, S1), (probs, R)
        found = tgl.grouped_gemm_low_rank_activation(*(place(t, p) for t, p in operands), **options)
        for mine, theirs in zip(found, expected):
            assert mine.placements == (placement,)
            torch.testing.assert_close(mine.full_tensor(), theirs)


def check_activation():
    probs = torch.rand(T, dtype=torch.float64)
    for kind, interleaved, width in (("srelu", False, I), ("swiglu", True, 2 * I), ("clamped_qgeglu", True, 2 * I)):
        x = torch.randn(T, width, dtype=torch.float64)
        for given in (None, probs):
            leaves = [t.clone().requires_grad_() for t in (x, given) if t is not None]
            shards = [place(t, p, grad=True) for t, p in zip((x, given), (S1, R)) if t is not None]
            options = {"kind": kind, "interleaved": interleaved}
            expected = tgl.grouped_activation(leaves[0], OFFS, *leaves[1:], **options)
            offs, dy = place(OFFS, R), place(torch.ones_like(expected), S1)
            with CommDebugMode() as counter:
                actual = tgl.grouped_activation(shards[0], offs, *shards[1:], **options)
                grads = torch.autograd.grad(actual, shards, dy)
            assert counter.get_total_counts() == 0
            assert actual.placements == (S1,)
            torch.testing.assert_close(actual.full_tensor(), expected)
            for mine, theirs in zip(grads, torch.autograd.grad(expected, leaves, torch.ones_like(expected))):
                torch.testing.assert_close(mine.full_tensor(), theirs)


def check_dactivation():
    dy, b, probs = integers(T, K), integers(G, K, I), torch.rand(T, dtype=torch.float64)
    for kind, interleaved, width in (("srelu", False, I), ("swiglu", True, 2 * I), ("swiglu", False, 2 * I)):
        h, options = torch.randn(T, width, dtype=torch.float64), {"kind": kind, "interleaved": interleaved}
        sharded = kind == "srelu" or interleaved
        expected = tgl.grouped_gemm_dactivation(dy, b, h, OFFS, probs, **options)
        operands = place(dy, R), place(b, S2), place(h, S1), place(OFFS, R), place(probs, R)
        with CommDebugMode() as counter:
            actual = tgl.grouped_gemm_dactivation(*operands, **options)
        assert (counter.get_total_counts() == 0) == sharded
        assert actual[0].placements == (S1 if sharded else R,)
        assert actual[1].placements == (Partial() if sharded else R,)
        for mine, theirs in zip(actual, expected):
            torch.testing.assert_close(mine.full_tensor(), theirs)


def check_uneven_columns():
    """Seven columns over two ranks, and gate and linear halves whose pairs would be torn apart."""
    a, b = integers(T, 7), integers(G, 7, 5)
    compare(gemm, (a, b), (S1, S1))
    compare(gemm, (a, b), (R, S2))
    x = torch.randn(T, 6)  # two ranks of three columns: a pair and a half
    actual = tgl.grouped_activation(place(x, S1), place(OFFS, R), interleaved=True)
    torch.testing.assert_close(actual.full_tensor(), tgl.grouped_activation(x, OFFS, interleaved=True))


def check_offload():
    x = torch.randn(4, 6)
    for placement in (R, S0, S1):
        moved = torch.ops.tgl.offload(place(x, placement))
        back = torch.ops.tgl.reload(moved, torch.device("cpu"))
        dependencies = [place(x, other) for other in (R, S0, S1)]
        with CommDebugMode() as counter:
            later = torch.ops.tgl.after(back, moved)
            again = [torch.ops.tgl.reload(moved, torch.device("cpu"), dependency) for dependency in dependencies]
        assert counter.get_total_counts() == 0
        for t in again:
            assert t.placements == (placement,)
            assert torch.equal(t.full_tensor(), x)
        assert moved.placements == back.placements == later.placements == (placement,)
        assert torch.equal(back.full_tensor(), x)
    weight, shard = place(torch.randn(6), R, grad=True), place(x, S0)
    with tgl.cpu_offload(min_bytes=0) as context:
        y = weight * shard
    assert context.tensors_offloaded == 1
    assert context.bytes_offloaded == 4 * 12  # this rank's half
    (grad,) = torch.autograd.grad(y.full_tensor().sum(), weight)
    torch.testing.assert_close(grad.full_tensor(), x.sum(0))


def check_splits():
    splits = torch.tensor([4, 0, 3])
    for placement in (R, S0):
        assert torch.equal(tgl.splits_to_offsets(place(splits, placement)).full_tensor(), OFFS)


def check_route():
    """Every rank needs the choices of all, since the row of a pair depends on those before it."""
    index = torch.tensor([[2, 0], [0, -1], [1, 2], [2, 2]])
    wanted = torch.ops.tgl.route(index, 3)
    for placement in (R, S0):
        for ours, theirs in zip(torch.ops.tgl.route(place(index, placement), 3), wanted, strict=True):
            assert torch.equal(ours.full_tensor(), theirs)


def check_topk_router():
    """Tokens are independent of each other; sums over them are partial."""
    logits, grad, bias = torch.randn(6, 8).double(), torch.randn(6, 2).double(), torch.randn(8).double()
    options = {"score_function": "sigmoid", "num_groups": 4, "topk_groups": 2, "sums": True}
    op, some = torch.ops.tgl.topk_router, torch.tensor([True, True, False, True, False, True])

    def results(x, g, b, mask):
        made = op(x, 2, b, mask, **options)
        return *made, torch.autograd.grad((made[0] * g).sum() + made[3].sin().sum() + made[4].sum(), x)[0]

    for (placement, of_sums), mask in itertools.product(((R, R), (S0, Partial())), (None, some)):
        wanted = results(logits.clone().requires_grad_(), grad, bias, mask)
        shards, ranks_bias = place(logits, placement, grad=True), place(bias, R)
        mask = None if mask is None else place(mask, placement)
        with CommDebugMode() as counter:
            made = op(shards, 2, ranks_bias, mask, **options)
        assert counter.get_total_counts() == 0
        assert [t.placements for t in made] == [(placement,)] * 2 + [(of_sums,)] * 3
        for ours, theirs in zip(results(shards, place(grad, placement), place(bias, R), mask), wanted, strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs)


def check_tensor_parallel_mlp():
    """Column-parallel FC1, row-parallel FC2, as Megatron does it: one all-reduce each way."""
    mlp = tgl.GroupedMLP(G, K, I, bias=True, interleaved=True, params_dtype=torch.float64)
    x, probs = torch.randn(T, K, dtype=torch.float64), torch.rand(T, dtype=torch.float64)
    leaves = [x.clone().requires_grad_(), probs.clone().requires_grad_()]
    expected = mlp.forward_offsets(leaves[0], OFFS, leaves[1])
    grads = torch.autograd.grad(expected.sin().sum(), [*leaves, *mlp.parameters()])
    plan = {"fc1.weight": S1, "fc1.bias": S1, "fc2.weight": S2, "fc2.bias": R}
    for name, parameter in list(mlp.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        shard = torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh(), [plan[name]]))
        setattr(mlp.get_submodule(owner), leaf, shard)
    leaves, offs = [place(x, R, grad=True), place(probs, R, grad=True)], place(OFFS, R)
    with CommDebugMode() as counter:
        y = mlp.forward_offsets(leaves[0], offs, leaves[1])
        assert counter.get_total_counts() == 0
        assert y.placements == (Partial(),)
        y = y.redistribute(placements=[R])
        assert counter.get_total_counts() == 1
    torch.testing.assert_close(y.to_local(), expected)
    loss = y.sin().sum()
    with CommDebugMode() as counter:
        loss.backward()  # autograd.grad cannot stop at a leaf that the mode's hooks on fc1 watch
    assert counter.get_total_counts() == 0
    actual = [t.grad for t in (*leaves, *mlp.parameters())]
    assert actual[0].placements == actual[1].placements == (Partial(),)  # to be added up by whoever takes them
    for mine, theirs in zip(actual, grads, strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs)


def check_main_grad_of_a_compiled_layer():
    """``main_grad`` is written in place, once, and not for a gradient of the input alone."""
    layer = tgl.GroupedLinear(G, K, N, bias=False, params_dtype=torch.float64, fuse_wgrad_accumulation=True)
    whole, x = layer.weight.detach().clone(), torch.randn(T, K).double()
    counts = torch.tensor([4, 0, 3])
    layer.weight.main_grad = torch.zeros_like(whole)
    layer(x, counts).sin().sum().backward()
    expected = layer.weight.main_grad.clone()
    for placement in (R, S1):
        torch._dynamo.reset()
        layer.weight = torch.nn.Parameter(distribute_tensor(whole, mesh(), [placement]))
        main_grad = layer.weight.main_grad = distribute_tensor(torch.zeros_like(whole), mesh(), [placement])
        memory, forward = main_grad.to_local().data_ptr(), torch.compile(layer, backend="aot_eager")
        rows, m_splits = place(x, R, grad=True), place(counts, R)
        torch.autograd.grad(forward(rows, m_splits).sin().sum(), rows)
        assert not main_grad.to_local().any()
        forward(rows, m_splits).sin().sum().backward()
        assert main_grad.to_local().data_ptr() == memory
        torch.testing.assert_close(main_grad.full_tensor(), expected)


@pytest.mark.parametrize("check", [f for name, f in list(globals().items()) if name.startswith("check_")])
def test_two_ranks(ranks, check):
    ranks(check)


def test_every_dense_op_has_a_rule():
    """Factories have no operands, and DTensor takes no rule for an ``out``."""
    defined = {n.removeprefix("tgl::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("tgl::")}
    rules = {op.name().removeprefix("tgl::") for op in tgl.distributed.sharding._RULES}
    dense = {n for n in defined if n.startswith(("grouped_", "moe")) and "scaled" not in n and "quantize" not in n}
    assert dense - rules == {"grouped_gemm.out", "grouped_gemm_low_rank.out", "grouped_gemm_wgrad.out"}

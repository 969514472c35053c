"""Ops that write into an argument, compiled: out buffers, accumulation into main_grad, the packed allocation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _compiling import Captured, ends, graph_breaks, leaf
from expecttest import assert_expected_inline
from torch import Tensor

import tgl

ops = torch.ops.tgl

T, G, K, N = 9, 3, 8, 16
OFFS = ends(4, 0, 3)  # an empty group, and a tail of two rows
BACKENDS = ["aot_eager", "inductor"]


# --- out= -------------------------------------------------------------------------------------------------------------


def test_out_overloads_keep_buffer_and_tail_in_inductor() -> None:
    """All combinations of optional arguments and dtypes, one compilation."""
    a, b = torch.randn(T, K), torch.randn(G, K, N)
    bias, scale = torch.randn(G, N), torch.randn(T)
    calls: list[tuple[tuple, Tensor]] = []
    for dtype, out_dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        x, w, row, p = (t.to(dtype) for t in (a, b, bias, scale))
        for optional in ((), (row,), (bias,), (row, p), (row, scale), (bias, p), (bias, scale), (None, None)):
            calls += [((x, w, OFFS, *optional), torch.full((T, N), 7.0, dtype=d)) for d in (dtype, out_dtype)]

    def gemms(calls: list[tuple[tuple, Tensor]]) -> list[Tensor]:
        return [tgl.grouped_gemm(*args, out=out) for args, out in calls]

    addresses = [out.data_ptr() for _, out in calls]
    returned = torch.compile(gemms, fullgraph=True)(calls)
    assert [out.data_ptr() for _, out in calls] == addresses
    for (args, out), result in zip(calls, returned):
        assert result is out
        assert torch.equal(out[:7], tgl.grouped_gemm(*args, out_dtype=out.dtype)[:7])
        assert (out[7:] == 7).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_of_wgrad(backend: str) -> None:
    def wgrad(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
        return tgl.grouped_gemm_wgrad(x, y, OFFS, out=out) * 2

    x, y, out = torch.randn(T, 3), torch.randn(T, 5), torch.ones(G, 3, 5)
    address = out.data_ptr()
    doubled = torch.compile(wgrad, backend=backend, fullgraph=True)(x, y, out)
    assert out.data_ptr() == address
    assert torch.equal(out, tgl.grouped_gemm_wgrad(x, y, OFFS))
    assert torch.equal(doubled, out * 2)


def test_dynamo_takes_no_padded_out_buffer() -> None:
    """A limit of Dynamo, for a keyword called ``out``; in eager, and for main_grad, padded slots are fine."""
    x, y, out = torch.randn(T, 3), torch.randn(T, 5), tgl.allocate_wgrad(G, (3, 5), torch.float32)
    tgl.grouped_gemm_wgrad(x, y, OFFS, out=out)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="non-contiguous `out=` tensor"):
        torch.compile(lambda: tgl.grouped_gemm_wgrad(x, y, OFFS, out=out), backend="eager", fullgraph=True)()


def test_out_is_functionalised_and_inductor_writes_in_place() -> None:
    """The graph holds one functional wrapper of the mutation; the generated code calls the overload on the buffer."""
    captured = Captured()
    a, b, out = torch.randn(T, K), torch.randn(G, K, N), torch.zeros(T, N)

    def double_then_gemm(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        out.add_(1)
        tgl.grouped_gemm(a, b, OFFS, out=out)
        return out.sum()

    torch.compile(double_then_gemm, backend=captured, fullgraph=True)(a, b, out)
    assert_expected_inline(
        captured.text(),
        """\
forward
  add: f32[9, 16] = aten.add.Tensor(arg0_1, 1)
  auto_functionalized_v2 = auto_functionalized_v2(tgl.grouped_gemm.out, a=arg1_1, b=arg2_1, offs=arg3_1,
      bias=None, bias_scale=None, slots=None, rows=None, _out_base_index=0, _all_bases=[add])
  getitem_1: f32[9, 16] = getitem(auto_functionalized_v2, 1)
  sum_1: f32[] = aten.sum(getitem_1)
  return [getitem_1, sum_1]""",
    )
    assert torch.equal(out[:7], tgl.grouped_gemm(a, b, OFFS)[:7])
    assert (out[7:] == 1).all()


class BufferedGemm(torch.autograd.Function):
    """A layer that writes its result and its input gradient into the caller's buffers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, offs: Tensor, out: Tensor, dgrad_out: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, offs)
        ctx.dgrad_out = dgrad_out
        ops.grouped_gemm.out(x, w, offs, out=out)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w, offs = ctx.saved_tensors
        ops.grouped_gemm.out(grad, w.transpose(1, 2), offs, out=ctx.dgrad_out)
        return ctx.dgrad_out.detach(), ops.grouped_gemm_wgrad(x, grad, offs), None, None, None


@pytest.mark.parametrize("backend", BACKENDS)
def test_caller_buffers_in_forward_and_backward(backend: str) -> None:
    x, w = leaf(torch.randn(T, K)), leaf(torch.randn(G, K, N))
    out, dgrad_out = torch.full((T, N), 7.0), torch.full((T, K), 7.0)
    y = torch.compile(BufferedGemm.apply, backend=backend, fullgraph=True)(x, w, OFFS, out, dgrad_out)
    cotangent = torch.randn(T, N)
    (y * cotangent)[:7].sum().backward()
    if backend == "inductor":
        assert y.data_ptr() == out.data_ptr()
    cotangent[7:] = 0
    plain_x, plain_w = leaf(x), leaf(w)
    plain = tgl.grouped_gemm(plain_x, plain_w, OFFS)
    plain.backward(cotangent)
    assert torch.equal(out[:7], plain[:7])
    assert torch.equal(dgrad_out[:7], plain_x.grad[:7])
    assert torch.equal(w.grad, plain_w.grad)
    assert (out[7:] == 7).all()
    assert (dgrad_out[7:] == 7).all()
    assert graph_breaks() == 0


# --- main_grad --------------------------------------------------------------------------------------------------------


class FusedAccumulation(torch.autograd.Function):
    """A layer whose weight gradient is added to ``main_grad`` during the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, offs: Tensor, main_grad: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, offs)
        ctx.main_grad = main_grad
        return ops.grouped_gemm(x, w, offs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w, offs = ctx.saved_tensors
        dx = ops.grouped_gemm(grad, w.transpose(1, 2), offs)
        ops.grouped_gemm_wgrad_accumulate_(x, grad, offs, ctx.main_grad)
        return dx, None, None, None


@pytest.mark.cover(1)
@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_main_grad_in_forward_forward_backward_backward_order(backend: str, dtype: torch.dtype) -> None:
    w = leaf(torch.randn(G, K, N, dtype=dtype))
    main_grad = torch.randn(G, K, N)
    address, expected = main_grad.data_ptr(), main_grad.clone()
    step = torch.compile(FusedAccumulation.apply, backend=backend, fullgraph=True)
    inputs = [leaf(torch.randn(T, K, dtype=dtype)) for _ in range(2)]
    cotangents = [torch.randn(T, N, dtype=dtype) for _ in range(2)]
    outputs = [step(x, w, OFFS, main_grad) for x in inputs]
    for y, cotangent in zip(outputs, cotangents):
        y.backward(cotangent)
    for x, cotangent in zip(inputs, cotangents):
        tgl.grouped_gemm_wgrad_accumulate_(x.detach(), cotangent, OFFS, expected)
        assert torch.equal(x.grad, tgl.grouped_gemm(cotangent, w.detach().transpose(1, 2), OFFS))
    assert main_grad.data_ptr() == address
    assert torch.equal(main_grad, expected)
    assert w.grad is None
    assert graph_breaks() == 0


def test_main_grad_graph() -> None:
    captured = Captured()
    x, w, main_grad = leaf(torch.randn(T, K)), leaf(torch.randn(G, K, N)), torch.zeros(G, K, N)
    torch.compile(FusedAccumulation.apply, backend=captured, fullgraph=True)(x, w, OFFS, main_grad).sum().backward()
    assert_expected_inline(
        captured.text(),
        """\
forward
  grouped_gemm: f32[9, 16] = tgl.grouped_gemm(primals_1, primals_2, primals_3)
  return [grouped_gemm, primals_1, primals_2, primals_3, primals_4]
backward
  transpose: f32[3, 16, 8] = aten.transpose.int(primals_2, 1, 2)
  grouped_gemm_1: f32[9, 8] = tgl.grouped_gemm(tangents_1, transpose, primals_3)
  auto_functionalized_v2 = auto_functionalized_v2(tgl.grouped_gemm_wgrad_accumulate_.default, a=primals_1,
      b=tangents_1, offs=primals_3, slots=None, a_rows=None, b_rows=None, overwrite=False,
      _main_grad_base_index=0, _all_bases=[primals_4])
  getitem_1: f32[3, 8, 16] = getitem(auto_functionalized_v2, 1)
  copy_: f32[3, 8, 16] = aten.copy_(primals_4, getitem_1)
  return [grouped_gemm_1, None, None, None]""",
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_accumulations_and_reads_in_one_graph_keep_their_order(backend: str) -> None:
    """Into padded slots as well, whose padding is left alone."""

    def accumulate(x: Tensor, y: Tensor, main_grad: Tensor) -> Tensor:
        ops.grouped_gemm_wgrad_accumulate_(x, y, OFFS, main_grad)
        between = main_grad * 2  # not clone(): Inductor drops a clone between two mutations of a graph input
        ops.grouped_gemm_wgrad_accumulate_(x, y, OFFS, main_grad)
        return between

    x, y = torch.randn(T, K), torch.randn(T, N)
    compiled = torch.compile(accumulate, backend=backend, fullgraph=True)
    for make in (lambda: torch.ones(G, K, N), lambda: torch.ones(G, K * N + 4)[:, : K * N].unflatten(1, (K, N))):
        eager, mine = make(), make()
        expected = accumulate(x, y, eager)
        assert torch.equal(compiled(x, y, mine), expected)
        assert torch.equal(mine, eager)
        storage = torch.empty(0).set_(mine.untyped_storage())
        assert storage.numel() == mine.numel() or (storage.view(G, -1)[:, K * N :] == 1).all()


# --- the packed allocation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_allocate_wgrad(backend: str) -> None:
    """Every alignment and dtype, a symbolic number of groups, and slots that start where they should.

    (An in-place aten op on the result inside the graph makes a functional copy of it, which is packed without padding.)
    """

    def allocate(x: Tensor) -> list[Tensor]:
        return [
            tgl.allocate_wgrad(x.shape[0], (3, 5), dtype, x.device, **alignment)
            for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
            for alignment in ({}, {"alignment": 16}, {"alignment": 1024})
        ]

    compiled = torch.compile(allocate, backend=backend, fullgraph=True, dynamic=True)
    for groups in (2, 7):
        x = torch.zeros(groups)
        for actual, expected, alignment in zip(compiled(x), allocate(x), [256, 16, 1024] * 4):
            assert (actual.dtype, actual.shape, actual.stride()) == (expected.dtype, expected.shape, expected.stride())
            assert all(slot.data_ptr() % alignment == 0 for slot in actual)

"""Modes around a compiled call: autocast, debug_checks, bad arguments, no_grad, foreign implementations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from _compiling import Captured, ExpertLayer, ends, graph_breaks, leaf
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import tgl

T, G, K, N = 9, 3, 8, 16
OFFS = ends(4, 0, 3)


# --- autocast ---------------------------------------------------------------------------------------------------------


@pytest.mark.cover(1)
@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@torch._inductor.config.patch(emulate_precision_casts=True)  # else Inductor skips the bias gradient's trip to bfloat16
def test_autocast(backend: str, where: str) -> None:
    """Operands in bfloat16, probabilities in float32, gradients in the parameters' dtype; the bits of eager."""
    mlp = tgl.GroupedMLP(G, K, N, bias=True)
    x, probs = torch.randn(T, K), torch.rand(T)

    def inside(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mlp.forward_offsets(x, OFFS, probs)

    def step(f: Callable[[Tensor], Tensor]) -> list[Tensor]:
        mlp.zero_grad()
        mine = leaf(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "around"):
            y = f(mine)
        y.backward(torch.ones(T, K, dtype=y.dtype))
        return [y, mine.grad, *(p.grad for p in mlp.parameters())]

    f = inside if where == "inside" else lambda x: mlp.forward_offsets(x, OFFS, probs)
    expected, actual = step(f), step(torch.compile(f, backend=backend, fullgraph=True))
    assert expected[0].dtype == torch.bfloat16
    assert {t.dtype for t in expected[1:]} == {torch.float32}
    for y, z in zip(actual, expected):
        assert y.dtype == z.dtype
        assert torch.equal(y, z)
    assert graph_breaks() == 0


def test_autocast_shows_in_the_graph_once_per_operand() -> None:
    captured = Captured()
    a, b, bias, scale = leaf(torch.randn(T, K)), leaf(torch.randn(G, K, N)), torch.randn(G, N), torch.rand(T)
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(tgl.grouped_gemm, backend=captured, fullgraph=True)(a, b, OFFS, bias, scale)
    assert captured.forward is not None
    targets = [str(n.target) for n in captured.forward.graph.nodes if n.op == "call_function"]
    assert targets == ["aten._to_copy.default"] * 3 + ["tgl.grouped_gemm.default"]  # a, b, bias; not the scale


# --- debug_checks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_debug_checks_around_a_compiled_call(backend: str) -> None:
    """The same compiled code checks inside the context and does not outside; entering it compiles nothing anew."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(tgl.grouped_gemm, backend=counter, fullgraph=True)
    a, b = torch.randn(T, K), torch.randn(G, K, N)
    bad = torch.tensor([4, 2, 7], dtype=torch.int32)
    compiled(a, b, bad)
    with tgl.debug_checks():
        compiled(a, b, OFFS)
        with pytest.raises(ValueError, match=r"tgl::grouped_gemm: `offs` must not descend, but offs\[1\] = 2"):
            compiled(a, b, bad)
    compiled(a, b, bad)
    assert counter.frame_count == 1


def test_debug_checks_in_a_compiled_backward() -> None:
    a, b = leaf(torch.randn(T, K)), leaf(torch.randn(G, K, N))
    y = torch.compile(tgl.grouped_gemm, backend="aot_eager", fullgraph=True)(a, b, ends(4, 0, 30))
    with tgl.debug_checks(), pytest.raises(ValueError, match="`offs` must stay within 9 rows"):
        y.sum().backward()


def test_debug_checks_inside_a_compiled_function_are_never_silently_left_out() -> None:
    def checked(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        with tgl.debug_checks():
            return tgl.grouped_gemm(a, b, offs)

    args = torch.randn(T, K), torch.randn(G, K, N), torch.tensor([4, 2, 7], dtype=torch.int32)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="goes around the call of a compiled function"):
        torch.compile(checked, backend="aot_eager", fullgraph=True)(*args)
    with pytest.raises(ValueError, match="`offs` must not descend"):
        torch.compile(checked, backend="aot_eager")(*args)


# --- bad arguments ----------------------------------------------------------------------------------------------------

BAD = {
    "rank": (lambda a, b, o: (a[0], b, o), "`a` must be 2-D"),
    "dtype mix": (lambda a, b, o: (a, b.double(), o), "`b` must be torch.float32 like `a`"),
    "offs dtype": (lambda a, b, o: (a, b, o.long()), "`offs` must be int32"),
    "offs length": (lambda a, b, o: (a, b, o[:-1]), r"`offs` must be of length (3|s\d+) "),
    "K mismatch": (lambda a, b, o: (a[:, 1:], b, o), "`b` must be .G, K, N. with K = "),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_have_the_message_of_eager(what: str, dynamic: bool) -> None:
    spoil, message = BAD[what]
    args = spoil(torch.randn(T, K), torch.randn(G, K, N), OFFS)
    with pytest.raises((TypeError, ValueError), match=f"tgl::grouped_gemm: {message}"):
        tgl.grouped_gemm(*args)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=f"tgl::grouped_gemm: {message}"):
        torch.compile(tgl.grouped_gemm, backend="aot_eager", fullgraph=True, dynamic=dynamic)(*args)


SPLITS = {
    "wrong length": (torch.tensor([4, 2]), r"`m_splits` must be of shape \[num_gemms\] = \(3,\), but got \(2,\)"),
    "wrong length of a list": ([4, 2], "`m_splits` must have num_gemms = 3 entries, but got 2"),
    "nothing": (None, "`m_splits` must be a tensor or a sequence of num_gemms = 3 integers, but got None"),
}


@pytest.mark.parametrize("what", SPLITS)
def test_bad_splits_keep_their_message(what: str) -> None:
    splits, message = SPLITS[what]
    layer, x = tgl.GroupedLinear(G, K, N), torch.randn(T, K)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x, splits)
    with pytest.raises(ValueError, match=message):
        torch.compile(layer, backend="aot_eager")(x, splits)


@pytest.mark.filterwarnings("error:.*m_splits")
def test_splits_as_a_list_compile_whole() -> None:
    layer, x = tgl.GroupedLinear(G, K, N), torch.randn(T, K)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for splits in ([4, 2, 3], [0, 9, 0], (1, 1, 1)):
        assert torch.equal(compiled(x, splits), layer(x, torch.tensor(splits)))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_misaligned_out_is_refused_at_run_time_and_not_written(backend: str) -> None:
    compiled = torch.compile(lambda a, b, out: tgl.grouped_gemm(a, b, OFFS, out=out), backend=backend, fullgraph=True)
    a, b = torch.randn(T, K), torch.randn(G, K, N)
    room = torch.full((T * N + 1,), 7.0)
    with pytest.raises(ValueError, match="`out` must be aligned to 16 bytes"):
        compiled(a, b, room[1:].view(T, N))
    assert (room == 7).all()


# --- grad modes and implementations -----------------------------------------------------------------------------------


def test_no_grad_and_grad_are_two_graphs_and_both_whole() -> None:
    layer, x = ExpertLayer(), torch.randn(5, 8)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        without = compiled(x)
    with torch.inference_mode():
        inference = compiled(x)
    y = compiled(x)
    y.sum().backward()
    assert torch.equal(without, y)
    assert torch.equal(inference, y)
    assert all(p.grad is not None for p in layer.parameters())
    assert graph_breaks() == 0


def test_an_implementation_registered_later_serves_compiled_code() -> None:
    """The implementation is looked up at run time, so registering another needs no recompilation."""
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(tgl.grouped_dbias, backend=counter, fullgraph=True)
    dy = torch.randn(T, N)
    built_in = compiled(dy, OFFS)

    @tgl.register_implementation("grouped_dbias", "constant", device="cpu")
    def constant(dy: Tensor, offs: Tensor, *, out: Tensor) -> None:
        out.fill_(3)

    try:
        assert (compiled(dy, OFFS) == 3).all()
    finally:
        tgl.backends.remove(constant)
    assert torch.equal(compiled(dy, OFFS), built_in)
    assert counter.frame_count == 1

"""Options of ``GroupedLinear`` for training loops, in eager mode and inside one graph, in every combination."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _compiling import Captured, graph_breaks
from _layers import (
    ORDERS,
    ROUTED,
    TAIL,
    G,
    K,
    N,
    T,
    expected,
    give_main_grad,
    integers,
    make_layer,
    make_microbatches,
    packed_gradient,
    run,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.variables import functions
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

import tgl

BACKENDS = ["eager", "aot_eager", "inductor"]
# Where quick tests see Inductor write the same buffers: the first test, those of caller buffers, and ``test_mutation``.
FEW_BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
FORMS = {"packed": True, "discrete": False}


def compiled(layer: torch.nn.Module, backend: str) -> Callable:
    """``"eager"`` here is the layer itself."""
    return layer if backend == "eager" else torch.compile(layer, backend=backend, fullgraph=True)


def copies(call: Callable[[], Any]) -> list[tuple[str, list]]:
    """The copies made of anything as large as a group's rows, and the kernels that Inductor wrote."""
    with profile(record_shapes=True) as profiler:
        call()
    events = [(e.name, e.input_shapes) for e in profiler.events()]
    assert any("mm" in name for name, _ in events), "the profiler saw nothing"
    copied = [e for e in events if e[0] in ("aten::copy_", "aten::clone") and math.prod(e[1][0]) >= T * K]
    return copied + [e for e in events if "cpp_fused" in e[0]]


# --- all combinations -------------------------------------------------------------------------------------------------


@pytest.mark.cover(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("delay", [False, True], ids=["now", "delayed"])
@pytest.mark.parametrize("buffers", [False, True], ids=["allocated", "buffers"])
def test_two_microbatches_in_any_order(backend: str, form: str, fuse: bool, delay: bool, buffers: bool) -> None:
    """The same integers as plain linears give, whatever is switched on."""
    layer = make_layer(single_grouped_weight=FORMS[form], fuse_wgrad_accumulation=fuse, delay_wgrad_compute=delay)
    main_grad = give_main_grad(layer) if fuse else None
    if delay and backend != "eager":
        layer.reserve_delayed_wgrad(T, 2)
    forward = compiled(layer, backend)
    for order in ORDERS.values():
        layer.zero_grad()
        batches = make_microbatches(2)
        want = expected(layer, batches)
        outputs, upstream = run(layer, batches, forward, order=order, buffers=buffers)

        tail = TAIL if buffers else 0
        for batch, y, dx, want_y, want_dx in zip(batches, outputs, upstream, want.outputs, want.input_gradients):
            for have, exact, buffer in ((y, want_y, batch.out), (dx, want_dx, batch.dgrad_out)):
                assert torch.equal(have[:ROUTED].double(), exact)
                assert (have[ROUTED:] == tail).all()
                if buffers:
                    assert torch.equal(buffer, have)
                    assert (have.data_ptr() == buffer.data_ptr()) == (backend != "aot_eager")
        if main_grad is not None:
            assert torch.equal(main_grad.double(), want.weight_gradient + 1)
            assert all(w.grad is None for w in layer.group_parameters("weight"))
            main_grad.fill_(1)
        else:
            assert torch.equal(packed_gradient(layer, "weight").double(), want.weight_gradient)
        assert torch.equal(packed_gradient(layer, "bias").double(), want.bias_gradient)
    assert graph_breaks() == 0


# --- caller buffers ---------------------------------------------------------------------------------------------------


@pytest.mark.cover(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("given", ["out", "dgrad_out"])
def test_either_buffer_alone(backend: str, given: str) -> None:
    layer, (batch,) = make_layer(), make_microbatches(1)
    want = expected(layer, [batch])
    y = compiled(layer, backend)(batch.x, batch.splits, **{given: getattr(batch, given)})
    y.backward(batch.dy)
    assert torch.equal(y[:ROUTED].double(), want.outputs[0])
    assert torch.equal(batch.x.grad[:ROUTED].double(), want.input_gradients[0])
    for name, have in (("out", y), ("dgrad_out", batch.x.grad)):
        assert (have[ROUTED:] == (TAIL if name == given else 0)).all()
    assert (batch.dgrad_out == TAIL).all() == (given == "out")
    assert (batch.out == TAIL).all() == (given == "dgrad_out")


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_nothing_is_copied_into_caller_buffers(backend: str) -> None:
    """Forward and backward write to their buffers: the profiler sees no copy. (Of a bias, addmm would make one.)"""
    layer, (batch,) = make_layer(bias=False, fuse_wgrad_accumulation=True), make_microbatches(1)
    give_main_grad(layer)
    forward, cotangent = compiled(layer, backend), torch.ones(T, N)

    def step() -> None:
        x = batch.x * 1  # a leaf would take its gradient by copy
        forward(x, batch.splits, out=batch.out, dgrad_out=batch.dgrad_out).backward(cotangent)

    step()
    batch.x.grad = None
    assert copies(step) == []
    assert copies(lambda: forward(batch.x, batch.splits).clone()) != [], "the profiler must see copies"


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_out_without_grad(backend: str) -> None:
    layer, (batch,) = make_layer(), make_microbatches(1)
    with torch.no_grad():
        y = compiled(layer, backend)(batch.x, batch.splits, out=batch.out)
    assert not y.requires_grad
    assert torch.equal(batch.out[:ROUTED].double(), expected(layer, [batch]).outputs[0])
    assert (batch.out[ROUTED:] == TAIL).all()


# --- parameters of single groups --------------------------------------------------------------------------------------


def test_what_a_trace_decides_is_decided_for_one_layer() -> None:
    """A layer whose parameters somebody has moved must not get the graph of one whose parameters lie where they did."""
    layers = [make_layer(single_grouped_weight=False) for _ in range(2)]
    layers[1].weight0.data = layers[1].weight0.data * 2
    (batch,) = make_microbatches(1)
    call = torch.compile(lambda layer: layer(batch.x, batch.splits), backend="aot_eager", fullgraph=True)
    for layer in layers:
        assert torch.equal(call(layer), layer(batch.x, batch.splits))


def test_what_a_trace_decides_is_not_given_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11 takes only tensors and constants as arguments of a function whose result is a constant."""
    evaluate, evaluated = functions.invoke_and_store_as_constant, []

    def strictly(tx: Any, fn: Callable, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        evaluated.append(name)
        for argument in (*args, *kwargs.values()):
            argument.as_python_constant()
        return evaluate(tx, fn, name, args, kwargs)

    monkeypatch.setattr(functions, "invoke_and_store_as_constant", strictly)
    layer, (batch,) = make_layer(single_grouped_weight=False, fuse_wgrad_accumulation=True), make_microbatches(1)
    main_grad = give_main_grad(layer)
    compiled(layer, "aot_eager")(batch.x, batch.splits).backward(batch.dy)
    assert torch.equal(main_grad.double(), expected(layer, [batch]).weight_gradient + 1)
    assert set(evaluated) == {
        "_still_packed",
        "_has_tensor_hooks",
        "_find_main_grad",
        "_make_edge",
        "_mark_while_tracing",
    }


# --- main_grad --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", FEW_BACKENDS)
@pytest.mark.parametrize("form, main_dtype", [("packed", torch.float32), ("discrete", torch.bfloat16)])
def test_overwrite_main_grad_is_one_more_graph(backend: str, form: str, main_dtype: torch.dtype) -> None:
    """The first microbatch replaces what the buffer holds, the second adds; an empty group's slot becomes zero."""
    layer = make_layer(dtype=torch.bfloat16, single_grouped_weight=FORMS[form], fuse_wgrad_accumulation=True)
    main_grad = give_main_grad(layer, main_dtype)
    counter = CompileCounterWithBackend("aot_eager" if backend == "eager" else backend)
    forward = layer if backend == "eager" else torch.compile(layer, backend=counter, fullgraph=True)
    first = layer.group_parameters("weight")[0]
    batches = make_microbatches(4, torch.bfloat16)
    want = expected(layer, batches[:2]).weight_gradient
    for pair in (batches[:2], batches[2:]):
        first.overwrite_main_grad = True
        forward(pair[0].x, pair[0].splits).backward(pair[0].dy)
        first.overwrite_main_grad = False
        forward(pair[1].x, pair[1].splits).backward(pair[1].dy)
        if pair[0] is batches[0]:
            assert torch.equal(main_grad.double(), want)
            assert not main_grad[1].any()
    assert counter.frame_count == (0 if backend == "eager" else 2)


def test_no_weight_gradient_is_materialised() -> None:
    """The graph that makes one holds one call more; the accumulation is in the next test."""
    calls = {}
    for fuse in (False, True):
        captured = Captured()
        torch._dynamo.reset()
        layer, (batch,) = make_layer(fuse_wgrad_accumulation=fuse), make_microbatches(1)
        give_main_grad(layer)
        torch.compile(layer, backend=captured, fullgraph=True)(batch.x, batch.splits).backward(batch.dy)
        calls[fuse] = captured.tgl_calls("backward")
    assert calls[False] == {"grouped_gemm": 1, "grouped_gemm_wgrad": 1, "grouped_dbias": 1}
    assert calls[True] == {"grouped_gemm": 1, "grouped_dbias": 1}


def test_graphs_of_main_grad_and_delayed() -> None:
    """Each is one functionalised op, whose written tensor is an input of the graph."""
    wrapped = {}
    for option in ("fuse_wgrad_accumulation", "delay_wgrad_compute"):
        captured = Captured()
        torch._dynamo.reset()
        layer, (batch,) = make_layer(**{option: True}), make_microbatches(1)
        give_main_grad(layer)
        if option == "delay_wgrad_compute":
            layer.reserve_delayed_wgrad(T)
        torch.compile(layer, backend=captured, fullgraph=True)(batch.x, batch.splits).backward(batch.dy)
        assert captured.backward is not None
        nodes = [n for n in captured.backward.graph.nodes if "auto_functionalized" in str(n.target)]
        wrapped[option] = [str(n.args[0]) for n in nodes]
        names = [str(n.target) for n in captured.backward.graph.nodes]
        assert not any("grouped_gemm_wgrad.default" in name for name in names)
    assert wrapped == {
        "fuse_wgrad_accumulation": ["tgl.grouped_gemm_wgrad_accumulate_.requested"],
        "delay_wgrad_compute": ["tgl.wgrad_stash_.requested"],
    }


@pytest.mark.cover(1)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("form", FORMS)
def test_another_main_grad_is_used_at_once(backend: str, form: str) -> None:
    """Optimizers reallocate: a compiled layer writes into what ``main_grad`` is now."""
    layer, batches = make_layer(single_grouped_weight=FORMS[form], fuse_wgrad_accumulation=True), make_microbatches(2)
    forward = compiled(layer, backend)
    buffers = []
    for batch in batches:
        buffers.append(give_main_grad(layer))
        forward(batch.x, batch.splits).backward(batch.dy)
    for buffer, batch in zip(buffers, batches):
        assert torch.equal(buffer.double(), expected(layer, [batch]).weight_gradient + 1)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_main_grad_inside_checkpoint(backend: str) -> None:
    """Accumulated once, not again by the recomputation; and the flag is set."""
    layer, (batch,) = make_layer(fuse_wgrad_accumulation=True), make_microbatches(1)
    main_grad = give_main_grad(layer)
    layer.weight.grad_added_to_main_grad = False

    def checkpointed(x: Tensor, splits: Tensor) -> Tensor:
        return checkpoint(layer, x, splits, use_reentrant=False)

    forward = checkpointed if backend == "eager" else torch.compile(checkpointed, backend=backend, fullgraph=True)
    forward(batch.x, batch.splits).backward(batch.dy)
    want = expected(layer, [batch])
    assert torch.equal(main_grad.double(), want.weight_gradient + 1)
    assert torch.equal(batch.x.grad[:ROUTED].double(), want.input_gradients[0])
    assert layer.weight.grad_added_to_main_grad
    assert not layer.weight.grad.any()


@pytest.mark.parametrize("backend", FEW_BACKENDS)
@pytest.mark.parametrize("reserve", [False, True], ids=["references", "copies"])
def test_overwriting_with_delayed_gradients(backend: str, reserve: bool) -> None:
    """The sum of what is pending replaces the buffer; a call that finds nothing leaves it alone."""
    if backend != "eager" and not reserve:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="reserve_delayed_wgrad"):
            layer, (batch,) = make_layer(delay_wgrad_compute=True), make_microbatches(1)
            compiled(layer, backend)(batch.x, batch.splits)
        return
    layer = make_layer(fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    main_grad = give_main_grad(layer).fill_(float("nan"))
    layer.weight.overwrite_main_grad = True
    layer.weight.grad_added_to_main_grad = False
    if reserve:
        layer.reserve_delayed_wgrad(T, 2)
    forward, batches = compiled(layer, backend), make_microbatches(4)
    for pair in (batches[:2], batches[2:]):
        for batch in pair:
            forward(batch.x, batch.splits).backward(batch.dy)
        for _ in range(2):
            layer.backward_dw()
            assert torch.equal(main_grad.double(), expected(layer, pair).weight_gradient)
    assert layer.weight.grad_added_to_main_grad


# --- delayed weight gradients -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", FEW_BACKENDS)
@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
def test_backward_dw_late_twice_and_never(backend: str, fuse: bool) -> None:
    layer = make_layer(delay_wgrad_compute=True, fuse_wgrad_accumulation=fuse)
    main_grad = give_main_grad(layer) if fuse else None
    layer.reserve_delayed_wgrad(T, microbatches=3)
    forward = compiled(layer, backend)
    batches = make_microbatches(3)

    def weight_gradient() -> Tensor | None:
        return main_grad.double() - 1 if main_grad is not None else layer.weight.grad

    for batch in batches[:2]:
        forward(batch.x, batch.splits).backward(batch.dy)
    assert layer.weight.grad is None
    assert layer.bias.grad is None
    assert main_grad is None or (main_grad == 1).all(), "never: nothing has happened"
    y = forward(batches[2].x, batches[2].splits)
    layer.backward_dw()  # late: after another forward, before its backward
    want = expected(layer, batches[:2])
    assert torch.equal(weight_gradient().double(), want.weight_gradient)
    assert torch.equal(layer.bias.grad.double(), want.bias_gradient)
    layer.backward_dw()  # twice
    assert torch.equal(weight_gradient().double(), want.weight_gradient)
    y.backward(batches[2].dy)
    layer.backward_dw()
    want = expected(layer, batches)
    assert torch.equal(weight_gradient().double(), want.weight_gradient)
    assert torch.equal(layer.bias.grad.double(), want.bias_gradient)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_copied_bytes_and_what_does_not_fit(backend: str) -> None:
    layer = make_layer(delay_wgrad_compute=True)
    layer.reserve_delayed_wgrad(T, microbatches=2)
    forward = compiled(layer, backend)
    batches = make_microbatches(3)
    each = 4 * (T * K + T * N + G + G * N)  # x, dy, offs and the bias gradient, float32 and int32
    for count, batch in enumerate(batches[:2], 1):
        forward(batch.x, batch.splits).backward(batch.dy)
        assert layer.delayed_bytes_copied_host() == count * each
    y = forward(batches[2].x, batches[2].splits)
    with pytest.raises(RuntimeError, match="tgl::wgrad_stash_: `buffers` hold 2 microbatches already"):
        y.backward(batches[2].dy)
    layer.backward_dw()
    assert torch.equal(layer.weight.grad.double(), expected(layer, batches[:2]).weight_gradient)


def test_more_rows_than_reserved() -> None:
    layer, (batch,) = make_layer(delay_wgrad_compute=True), make_microbatches(1)
    layer.reserve_delayed_wgrad(T - 1)
    message = r"`buffers\[0\]` must be at least \(9, 5\) in each place, but got shape \(1, 8, 5\)"
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=message):
        compiled(layer, "aot_eager")(batch.x, batch.splits)


def test_the_error_without_reserved_buffers_gives_a_remedy() -> None:
    layer, (batch,) = make_layer(delay_wgrad_compute=True), make_microbatches(1)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"needs reserve_delayed_wgrad\(max_rows\)"):
        compiled(layer, "aot_eager")(batch.x, batch.splits)


# --- gradients as views -----------------------------------------------------------------------------------------------


@pytest.mark.cover(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("delay", [False, True], ids=["now", "delayed"])
def test_gradients_of_single_groups_are_views_of_one_allocation(backend: str, delay: bool) -> None:
    """Each on 256 bytes though 12 x 5 floats are 240, and each keeping all of the memory alive by itself."""
    layer = make_layer(single_grouped_weight=False, delay_wgrad_compute=delay)
    (batch,) = make_microbatches(1)
    if delay:
        layer.reserve_delayed_wgrad(T)
    compiled(layer, backend)(batch.x, batch.splits).backward(batch.dy)
    layer.backward_dw()
    gradients = [w.grad for w in layer.group_parameters("weight")]
    want = expected(layer, [batch]).weight_gradient
    storages = {g.untyped_storage()._cdata for g in gradients}
    assert len(storages) == 1, "a view made from an address would have a storage of its own"
    assert gradients[0].untyped_storage().nbytes() >= (G - 1) * 256 + 4 * N * K
    for g, gradient in enumerate(gradients):
        assert gradient.data_ptr() % 256 == 0
        assert gradient.is_contiguous()
        assert torch.equal(gradient.double(), want[g])
    last = gradients.pop()
    for w in layer.group_parameters("weight"):
        w.grad = None
    del gradients, gradient
    refill = [torch.full((G, 64), float("nan")) for _ in range(50)]
    assert torch.equal(last.double(), want[-1]), "freed under it"
    del refill


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_parameters_that_were_moved_apart_are_still_what_is_read(backend: str) -> None:
    layer, (batch,) = make_layer(single_grouped_weight=False), make_microbatches(1)
    layer.weight1.data = layer.weight1.data.clone() + 1
    layer.bias2.data = layer.bias2.data.clone() + 1
    want = expected(layer, [batch])
    y = compiled(layer, backend)(batch.x, batch.splits)
    y.backward(batch.dy)
    assert torch.equal(y[:ROUTED].double(), want.outputs[0])
    assert torch.equal(batch.x.grad[:ROUTED].double(), want.input_gradients[0])


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_parameters_that_are_replaced(backend: str) -> None:
    """A compiled layer looks again: it holds no memory of parameters that are gone."""
    layer, (batch,) = make_layer(single_grouped_weight=False), make_microbatches(1)
    forward = compiled(layer, backend)
    forward(batch.x, batch.splits)
    layer.weight2 = torch.nn.Parameter(layer.weight2.detach() + 1)
    assert torch.equal(forward(batch.x, batch.splits)[:ROUTED].double(), expected(layer, [batch]).outputs[0])


# --- one graph --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_for_every_number_of_rows(backend: str) -> None:
    layer = make_layer(fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    main_grad = give_main_grad(layer)
    layer.reserve_delayed_wgrad(40)
    counter = CompileCounterWithBackend(backend)
    forward = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for rows in (8, 40, 13):
        main_grad.zero_()
        x, dy, sizes = integers(rows, K).requires_grad_(), integers(rows, N), torch.tensor([3, 0, rows - 3])
        out, dgrad_out = torch.empty(rows, N), torch.empty(rows, K)
        forward(x, sizes, out=out, dgrad_out=dgrad_out).backward(dy)
        layer.backward_dw()
        plain = make_layer()
        y = plain(x, sizes)
        (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        y.backward(dy)
        assert torch.equal(out, y)
        assert torch.equal(dgrad_out, dx)
        assert torch.equal(main_grad, plain.weight.grad)
    assert counter.frame_count == 1


@pytest.mark.parametrize("recipe", [None, tgl.recipes.MXFP8BlockScaling()], ids=["dense", "mxfp8"])
@pytest.mark.parametrize("form", FORMS)
def test_one_graph_for_every_routing(form: str, recipe: Any) -> None:
    """All features on, routings that change at every step; the values of the plain layer."""
    plain = make_layer(recipe=recipe)
    layer = make_layer(
        single_grouped_weight=FORMS[form], fuse_wgrad_accumulation=True, delay_wgrad_compute=True, recipe=recipe
    )
    main_grad = give_main_grad(layer).zero_()
    layer.reserve_delayed_wgrad(T)
    counter = CompileCounterWithBackend("aot_eager")
    forward = torch.compile(layer, backend=counter, fullgraph=True)
    for sizes in ([4, 0, 3], [0, 0, 7], [7, 0, 0], [2, 3, 2]):
        (batch,) = make_microbatches(1, splits=torch.tensor(sizes))
        y = forward(batch.x, batch.splits, out=batch.out, dgrad_out=batch.dgrad_out)
        y.backward(batch.dy)
        layer.backward_dw()
        want = plain(batch.x, batch.splits)
        want.backward(batch.dy)
        assert torch.equal(y[:ROUTED], want[:ROUTED])
        assert torch.equal(main_grad, plain.weight.grad)
        plain.zero_grad()
        main_grad.zero_()
    assert counter.frame_count == 1
    assert graph_breaks() == 0


# --- autocast ---------------------------------------------------------------------------------------------------------


@pytest.mark.cover(2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
def test_autocast(backend: str, form: str, fuse: bool) -> None:
    """Operands in bfloat16, gradients in float32, which keep what the plain layer would round to bfloat16."""
    layer = make_layer(single_grouped_weight=FORMS[form], fuse_wgrad_accumulation=fuse)
    main_grad = give_main_grad(layer).zero_() if fuse else None
    (batch,) = make_microbatches(1)
    out = batch.out.bfloat16()
    want = expected(layer, [batch])
    with torch.autocast("cpu", torch.bfloat16):
        y = compiled(layer, backend)(batch.x, batch.splits, out=out)
    assert y.dtype == torch.bfloat16
    y.backward(batch.dy.bfloat16())
    have = main_grad if main_grad is not None else packed_gradient(layer, "weight")
    assert have.dtype == torch.float32
    assert torch.equal(have.double(), want.weight_gradient)
    assert torch.equal(y[:ROUTED], want.outputs[0].bfloat16()[:ROUTED])
    assert torch.equal(batch.x.grad[:ROUTED].double(), want.input_gradients[0].bfloat16().double())

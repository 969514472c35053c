"""``cpu_offload`` around eager code: what moves, what stays, that it comes back right, and the two ops."""

import gc
import threading

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import tgl
from tests.memory import same_bytes
from tgl import offload
from tgl.meta.formats import FORMATS

G, K, N, T = 3, 8, 16, 12
SPLITS = torch.tensor([5, 0, 4])
ROW = 4 * T  # bytes of one column of activations


def counts(context):
    return context.tensors_offloaded, context.bytes_offloaded


def gradients(function, leaves, **context):
    """Gradients of ``function() . sin`` in ``leaves`` with the forward under a context, which is returned too."""
    with tgl.cpu_offload(**context) as offloaded:
        y = function()
    return torch.autograd.grad(y.sin().sum(), leaves), offloaded


class Block(nn.Module):
    """A layer of torch, one of tgl, and another op that saves tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(K, K)
        self.experts = tgl.GroupedMLP(G, K, N, bias=True)

    def forward(self, x):
        return self.experts(self.linear(x), SPLITS).tanh()


def test_gradients_are_the_same_bits():
    block, x = Block(), torch.randn(T, K)
    leaves = list(block.parameters())
    with_it, context = gradients(lambda: block(x), leaves, min_bytes=0)
    without, nothing = gradients(lambda: block(x), leaves, enabled=False)
    for mine, theirs in zip(with_it, without):
        assert torch.equal(mine, theirs)
    assert counts(nothing) == (0, 0)
    # x, fc1's input and output, fc2's input, the result of tanh, and offs, which every op of the experts saves.
    assert counts(context) == (6, ROW * (K + K + 2 * N + N + K) + 4 * G)


@pytest.mark.parametrize("min_bytes, tensors", [(0, 2), (4 * G, 2), (4 * G + 1, 1), (ROW * K, 1), (ROW * K + 1, 0)])
def test_minimum_size(min_bytes, tensors):
    layer, x = tgl.GroupedLinear(G, K, N, bias=False), torch.randn(T, K)
    _, context = gradients(lambda: layer(x, SPLITS), [layer.weight], min_bytes=min_bytes)
    assert context.tensors_offloaded == tensors  # x and offs; never the weight, which is larger than either


def test_default_minimum_is_a_mebibyte():
    layer = nn.Linear(512, 1)
    for rows, tensors in ((511, 0), (512, 1)):
        with tgl.cpu_offload() as context:
            layer(torch.randn(rows, 512))
        assert context.tensors_offloaded == tensors


def test_an_inner_context_opts_out():
    first, second, third = (nn.Linear(K, K) for _ in range(3))
    x = torch.randn(T, K)
    with tgl.cpu_offload(min_bytes=0) as outer:
        y = first(x)
        with tgl.cpu_offload(enabled=False) as inner:
            y = second(y)
            with tgl.cpu_offload(min_bytes=0) as innermost:
                y = third(y)
    assert [c.tensors_offloaded for c in (outer, inner, innermost)] == [1, 0, 1]
    y.sum().backward()
    with tgl.cpu_offload(enabled=False), tgl.cpu_offload(min_bytes=1 << 30) as large:
        first(x)
    assert counts(large) == (0, 0)


def test_one_context_entered_twice_and_left_by_an_error():
    context, layer, x = tgl.cpu_offload(min_bytes=0), nn.Linear(K, K), torch.randn(T, K)
    with pytest.raises(ZeroDivisionError), context, context:
        layer(x)
        1 / 0  # noqa: B018
    layer(torch.randn(T, K))
    assert context.tensors_offloaded == 1
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert offload._state.threshold is None
    assert offload.ops.meters.stack == []


def test_the_source_is_freed_and_the_copy_with_the_graph():
    layer = nn.Linear(K, K)
    x = torch.randn(T, K)
    source = torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage())
    with tgl.cpu_offload(min_bytes=0):
        y = layer(x)
    del x
    assert source.expired()
    assert len(offload._moved) == 1
    y.sum().backward()
    del y
    gc.collect()
    assert len(offload._moved) == 0


# --- once -------------------------------------------------------------------------------------------------------------


def test_a_tensor_saved_by_many_moves_once():
    layers, x = [nn.Linear(K, K) for _ in range(3)], torch.randn(T, K)
    leaves = [layer.weight for layer in layers]
    grads, context = gradients(lambda: sum(layer(x) for layer in layers), leaves, min_bytes=0)
    assert counts(context) == (1, ROW * K)
    for mine, theirs in zip(grads, gradients(lambda: sum(layer(x) for layer in layers), leaves, enabled=False)[0]):
        assert torch.equal(mine, theirs)


def test_once_means_the_same_version_of_the_same_view():
    """A tensor written in place between two saves, and another view of the same memory, are other tensors."""
    weight, x = torch.randn(K, requires_grad=True), torch.randn(T, 2 * K)
    left, right = x[:, :K], x[:, K:]
    before = x.clone()
    with tgl.cpu_offload(min_bytes=0) as context:
        terms = [weight * half for half in (left, right, left, right)]
        assert context.tensors_offloaded == 2
        x.add_(1)
        terms.append(weight * left)
        assert context.tensors_offloaded == 3
    expected = (2 * before[:, :K] + 2 * before[:, K:] + left).sum(0)
    torch.testing.assert_close(torch.autograd.grad(sum(terms).sum(), weight)[0], expected)


def test_memory_that_is_used_again_is_another_tensor():
    """The next tensor at the same address, of the same shape and version, does not get the copy of the last one."""
    weight = torch.randn(1000, requires_grad=True)
    expected, terms = torch.zeros(1000), []
    with tgl.cpu_offload(min_bytes=0) as context:
        for i in range(20):
            terms.append((weight * torch.full((1000,), float(i))).sum())
            expected += i
    assert context.tensors_offloaded == 20
    assert torch.equal(torch.autograd.grad(sum(terms), weight)[0], expected)


def test_backward_twice_and_double_backward():
    x = torch.randn(T, K, dtype=torch.float64, requires_grad=True)
    layer = tgl.GroupedLinear(G, K, N, params_dtype=torch.float64)
    with tgl.cpu_offload(min_bytes=0):
        y = layer(x, SPLITS).sin().sum()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        twice = torch.autograd.grad(dx.sum(), layer.weight)
    again = torch.autograd.grad(layer(x, SPLITS).sin().sum(), x, create_graph=True)[0]
    torch.testing.assert_close(twice, torch.autograd.grad(again.sum(), layer.weight))


# --- what stays -------------------------------------------------------------------------------------------------------


def test_parameters_buffers_and_their_views_stay():
    weight, buffer = nn.Parameter(torch.randn(K, K)), nn.Buffer(torch.randn(K, K))
    x = torch.randn(T, K, requires_grad=True)
    with tgl.cpu_offload(min_bytes=0) as context:
        rights = weight, weight.t(), weight[:, :4], weight.view(2, -1, K)[1].t(), buffer, buffer.t()
        products = [x @ right for right in rights]
    assert counts(context) == (1, ROW * K)
    sum(product.sum() for product in products).backward()


def test_frozen_parameters_stay():
    layer = tgl.GroupedLinear(G, K, N, bias=False).requires_grad_(False)
    with tgl.cpu_offload(min_bytes=4 * G + 1) as context:
        layer(torch.randn(T, K, requires_grad=True), SPLITS)
    assert counts(context) == (0, 0)


def test_expanded_tensors_stay():
    weight = torch.randn(T, K, requires_grad=True)
    with tgl.cpu_offload(min_bytes=0) as context:
        y = weight * torch.randn(K).expand(T, K)
    assert counts(context) == (0, 0)
    y.sum().backward()


def test_writing_into_what_stayed_is_still_an_error():
    weight, x = torch.randn(K, requires_grad=True), torch.randn(K)
    with tgl.cpu_offload(min_bytes=1000):
        y = weight * x
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: tensor of shape \(8,\) is at version 1"):
        y.sum().backward()


def test_writing_into_what_moved_is_not():
    weight, x = torch.randn(K, requires_grad=True), torch.randn(K)
    before = x.clone()
    with tgl.cpu_offload(min_bytes=0):
        y = weight * x
    x.add_(1)
    assert torch.equal(torch.autograd.grad(y.sum(), weight)[0], before)


# --- operands of several tensors, and subclasses ----------------------------------------------------------------------


class SavesTwo(torch.autograd.Function):
    """Saves an operand of two components and a weight, and announces them."""

    @staticmethod
    def forward(ctx, x, scale, weight):
        offload.announce((x, scale), (weight, None))
        ctx.save_for_backward(x, scale, weight)
        return x * scale * weight

    @staticmethod
    def backward(ctx, dy):
        x, scale, weight = ctx.saved_tensors
        return dy * scale * weight, None, dy * x * scale


@pytest.mark.parametrize("min_bytes, tensors", [(0, 2), (4 * K + 4, 2), (4 * K + 5, 0)])
def test_every_component_of_an_operand_moves_or_none(min_bytes, tensors):
    x, scale, weight = torch.randn(K, requires_grad=True), torch.randn(1), torch.randn(K)
    grads, context = gradients(lambda: SavesTwo.apply(x, scale, weight), [x], min_bytes=min_bytes)
    assert context.tensors_offloaded == tensors
    assert torch.equal(grads[0], gradients(lambda: SavesTwo.apply(x, scale, weight), [x], enabled=False)[0][0])


class Pair(torch.Tensor):
    """A wrapper of two tensors, the value being their sum."""

    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, device=a.device)

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(parts, context, shape, stride):
        return Pair(parts["a"], parts["b"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return torch.utils._python_dispatch.return_and_correct_aliasing(
                func, args, kwargs or {}, Pair(args[0].a, args[0].b)
            )
        plain = tree_map(lambda t: t.a + t.b if isinstance(t, Pair) else t, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


@pytest.mark.parametrize("min_bytes, tensors", [(2 * ROW * K, 2), (2 * ROW * K + 1, 0)])
def test_every_component_of_a_subclass_moves_or_none(min_bytes, tensors):
    pair, weight = Pair(torch.randn(T, K), torch.randn(T, K)), torch.randn(K, requires_grad=True)
    with tgl.cpu_offload(min_bytes=min_bytes) as context:
        y = weight * pair
    assert context.tensors_offloaded == tensors
    assert torch.equal(torch.autograd.grad(y.sum(), weight)[0], (pair.a + pair.b).sum(0))


class Keeps(torch.autograd.Function):
    """Saves a tensor as it is, and hands over what it gets back."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.save_for_backward(kept)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        (Keeps.seen,) = ctx.saved_tensors
        return dy, None


@pytest.mark.parametrize("format", FORMATS)
def test_every_component_of_a_grouped_tensor_moves_or_none(format):
    offs = torch.tensor([100, 200, 300], dtype=torch.int32)
    saved = tgl.quantize(torch.randn(300, 128, dtype=torch.bfloat16), offs, format)
    parts = {name: getattr(saved, name) for name in saved.__tensor_flatten__()[0]}
    nbytes = sum(t.numel() * t.element_size() for t in parts.values())
    for min_bytes, moves in ((nbytes, True), (nbytes + 1, False)):
        with tgl.cpu_offload(min_bytes=min_bytes) as context:
            y = Keeps.apply(torch.ones(1, requires_grad=True), saved)
        y.backward()
        assert counts(context) == ((len(parts), nbytes) if moves else (0, 0))
        assert type(Keeps.seen) is type(saved)
        for name, part in parts.items():
            mine = getattr(Keeps.seen, name)
            assert same_bytes(mine, part)
            assert (mine.data_ptr() != part.data_ptr()) == moves


# --- quantised layers -------------------------------------------------------------------------------------------------

# What the weight gradient reads of an input [384, 128] in three groups: tensors, and their bytes. Every group starts on
# a multiple of u rows, which takes u (ceil(384 / u) + 2) places: 448 for u = 32, 512 for 64, 640 for 128.
QUANTISED = {
    "MXFP8BlockScaling": (2, 384 * 128 + 640 // 32 * 128),
    "NVFP4BlockScaling": (3, 128 * 512 // 2 + 128 * 512 // 16 + 4 * G),
    "Float8CurrentScaling": (2, 128 * 448 + 4 * G),
    "DelayedScaling": (2, 128 * 448 + 4 * G),
    "Float8BlockScaling": (2, 128 * 448 + 640 // 128 * 128 * 4),
}


@pytest.mark.parametrize("recipe", QUANTISED)
def test_every_component_of_a_quantised_input_moves_or_none(recipe):
    """Neither the quantised weight, kept from the microbatch before, nor ``offs`` moves."""
    layer = tgl.GroupedLinear(G, 128, 256, recipe=getattr(tgl.recipes, recipe)(), params_dtype=torch.bfloat16)
    x, offs = torch.randn(384, 128, dtype=torch.bfloat16), torch.tensor([128, 128, 300], dtype=torch.int32)

    def step(min_bytes):
        layer.gemms.reset_state()
        layer.forward_offsets(x, offs, is_first_microbatch=True)
        with tgl.cpu_offload(min_bytes=min_bytes) as context:
            y = layer.forward_offsets(x, offs, is_first_microbatch=False)
        return torch.autograd.grad(y.float().sin().sum(), list(layer.parameters())), context

    tensors, nbytes = QUANTISED[recipe]
    expected, nothing = step(nbytes + 1)
    assert counts(nothing) == (0, 0)
    grads, context = step(nbytes)
    assert counts(context) == (tensors, nbytes)
    for mine, theirs in zip(grads, expected):
        assert torch.equal(mine, theirs)


# --- with checkpointing -----------------------------------------------------------------------------------------------


def test_around_a_checkpoint_its_inputs_move_and_nothing_else():
    block, x = Block(), torch.randn(T, K, requires_grad=True)
    with tgl.cpu_offload(min_bytes=1) as context:  # torch 2.11 saves an empty tensor as well
        y = checkpoint(block, x, use_reentrant=False)
    y.sum().backward()
    assert counts(context) == (1, ROW * K)
    assert torch.equal(x.grad, *torch.autograd.grad(block(x).sum(), x))


def test_an_opt_out_inside_a_checkpoint_leaves_the_recomputation_alone():
    runs = []

    def region(x):
        runs.append(len(runs))
        with tgl.cpu_offload(enabled=False):
            return x.sin().cos()

    x = torch.randn(T, K, requires_grad=True)
    with tgl.cpu_offload(min_bytes=0):
        y = checkpoint(region, x, use_reentrant=False)
    y.sum().backward()
    assert len(runs) == 2
    torch.testing.assert_close(x.grad, -x.sin().sin() * x.cos())


def test_inside_a_checkpoint_it_takes_precedence():
    calls = []

    def region(x):
        with tgl.cpu_offload(min_bytes=0) as context:
            y = x.sin()
        calls.append(context.tensors_offloaded)
        return y

    x = torch.randn(T, K, requires_grad=True)
    checkpoint(region, x * 1, use_reentrant=False).sum().backward()
    assert calls == [1]
    assert torch.allclose(x.grad, x.cos())


# --- the ops ----------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "row": lambda: torch.randn(6, 4),
    "column": lambda: torch.randn(4, 6).t(),
    "permuted": lambda: torch.randn(2, 3, 4).permute(1, 2, 0),
    "padded rows": lambda: torch.randn(6, 8)[:, :4],
    "expanded": lambda: torch.randn(4).expand(6, 4),
    "empty": lambda: torch.randn(0, 4),
    "scalar": lambda: torch.randn(()),
}
CPU = torch.device("cpu")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ops_keep_values_and_dense_layouts(layout):
    x = LAYOUTS[layout]()
    host = torch.ops.tgl.offload(x)
    back = torch.ops.tgl.reload(host, CPU)
    assert torch.equal(x, back)
    assert len({t.data_ptr() for t in (x, host, back)}) == 3 or x.numel() == 0
    if layout not in ("padded rows", "expanded"):
        assert x.stride() == host.stride() == back.stride()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.int32])
def test_ops_take_every_dtype(dtype):
    x = torch.randn(6, 4).to(dtype)
    back = torch.ops.tgl.reload(torch.ops.tgl.offload(x), CPU)
    assert back.dtype == dtype
    assert same_bytes(x, back)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ops_under_opcheck(layout):
    torch.library.opcheck(torch.ops.tgl.offload.default, (LAYOUTS[layout]().requires_grad_(),))
    for after in ((), (torch.randn(3),)):
        torch.library.opcheck(torch.ops.tgl.reload.default, (LAYOUTS[layout]().requires_grad_(), CPU, *after))
    torch.library.opcheck(torch.ops.tgl.after.default, (LAYOUTS[layout]().requires_grad_(), torch.randn(3)))


def test_ops_are_differentiable():
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: torch.ops.tgl.reload(torch.ops.tgl.offload(x) ** 3, CPU), x)


def test_negative_minimum():
    with pytest.raises(ValueError, match="`min_bytes` must be at least 0, but got -1"):
        tgl.cpu_offload(min_bytes=-1)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_context_is_of_its_thread(backend, fresh_compiler):
    """Leaving one in a thread leaves that of another on, compiled as well as eagerly."""
    layer = tgl.GroupedLinear(2, 16, 16, recipe=tgl.recipes.MXFP8BlockScaling())
    run = layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True)
    inside, left, found = threading.Event(), threading.Event(), {}

    def step():
        run(torch.randn(4, 16, requires_grad=True), torch.tensor([2, 2])).sum().backward()

    def other():
        inside.wait(60)
        with tgl.cpu_offload(False):
            pass
        with tgl.cpu_offload(min_bytes=0):
            pass
        step()
        left.set()

    thread = threading.Thread(target=other)
    thread.start()
    with tgl.cpu_offload(min_bytes=0) as context:
        step()
        before = context.tensors_offloaded
        assert before
        inside.set()
        assert left.wait(200)
        step()
        found["again"] = context.tensors_offloaded
    thread.join()
    assert found["again"] == 2 * before, "the other thread offloads nothing, this one as much as before"
    step()
    assert context.tensors_offloaded == 2 * before

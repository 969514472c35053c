"""Discrete weights and ``main_grad`` that somebody else has laid into memory, in any order and at any distances."""

import copy

import pytest
import torch

import tgl

G, K, N, T = 3, 8, 4, 7
SPLITS = torch.tensor([2, 0, 4])
SIZE = N * K

# Where each expert's matrix starts, in elements: in a buffer that runs over the parameters backwards, as a bucket
# boundary or another parameter lies between two of them, and in an unlikely order.
PLACES = {
    "in order": (0, SIZE, 2 * SIZE),
    "padded": (0, SIZE + 16, 2 * SIZE + 32),
    "backwards": (2 * SIZE, SIZE, 0),
    "backwards, padded": (2 * SIZE + 64, SIZE + 32, 0),
    "boundary": (2 * SIZE + 96, SIZE + 96, 0),
    "shuffled": (SIZE + 4, 0, 3 * SIZE + 32),
    "off 16 bytes": (SIZE + 1, 0, 3 * SIZE),
}
PLACED = pytest.mark.parametrize("place", PLACES)
EVERYWHERE = pytest.mark.parametrize("place", [*PLACES, "apart"])


def lay(parts, place):
    """Copies of ``parts`` where ``place`` says, in one buffer whose other elements are NaN."""
    if place == "apart":
        return [part.clone() for part in parts]
    buffer = torch.full((8 * SIZE,), float("nan"), dtype=parts[0].dtype)
    laid = [buffer[start : start + part.numel()].view(part.shape) for start, part in zip(PLACES[place], parts)]
    for there, part in zip(laid, parts):
        there.copy_(part)
    return laid


def make(**options):
    torch.manual_seed(0)
    return tgl.GroupedLinear(G, K, N, **{"single_grouped_weight": False, "params_dtype": torch.float64, **options})


def place_weights(layer, place):
    """Move the data of the parameters, as a distributed optimizer does; the parameters stay."""
    weights = layer.group_parameters("weight")
    for weight, there in zip(weights, lay([w.detach() for w in weights], place)):
        weight.data = there
    return [w.data_ptr() for w in weights]


def run(layer, call=None):
    torch.manual_seed(1)
    x = torch.randn(T, K, dtype=layer.weight0.dtype, requires_grad=True)
    y = (layer if call is None else call)(x, SPLITS)
    y.sin().sum().backward()
    return [y.detach(), x.grad]


def copies(call):
    """Return the tensors of a matrix's size that are copied or gathered during a call."""
    with torch.profiler.profile(record_shapes=True) as profiler:
        call()
    whole = ("aten::stack", "aten::cat", "aten::index_select")
    found = [(e.name, e.input_shapes) for e in profiler.events()]
    return [e for e in found if e[0] in whole or (e[0] in ("aten::copy_", "aten::add_") and e[1][0][-2:] == [N, K])]


@pytest.mark.cover(1)
@EVERYWHERE
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_weights_are_read_where_they_lie(place, compiled, fresh_compiler):
    layer = make()
    want = run(layer)
    gradients = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    addresses = place_weights(layer, place)
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else None
    for a, b in zip(run(layer, call), want):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)
    for parameter, gradient in zip(layer.parameters(), gradients):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-14)
    with torch.no_grad():
        layer.weight2.mul_(2)
    assert not torch.equal(run(layer, call)[0], want[0])
    assert addresses == [w.data_ptr() for w in layer.group_parameters("weight")]


@PLACED
def test_nothing_is_copied(place):
    layer = make(bias=False)
    place_weights(layer, place)
    run(layer)
    layer.zero_grad()
    assert copies(lambda: run(layer)) == []
    layer.zero_grad()
    place_weights(layer, "apart")
    assert copies(lambda: run(layer)) != []


@PLACED
@pytest.mark.parametrize("how", ["load", "to", "reset", "deepcopy", "recipe"])
def test_weights_that_another_owner_placed_stay_in_place(place, how):
    layer = make(params_dtype=torch.float32, recipe=tgl.recipes.Float8CurrentScaling() if how == "recipe" else None)
    before = make(params_dtype=torch.float32)
    addresses = place_weights(layer, place)
    other = layer
    if how == "load":
        layer.load_state_dict(tgl.GroupedLinear(G, K, N).state_dict())
    elif how == "to":
        layer.to("cpu").float()
    elif how == "reset":
        torch.manual_seed(0)
        layer.reset_parameters()
    elif how == "deepcopy":
        other = copy.deepcopy(layer)
    if how in ("reset", "deepcopy"):
        for a, b in zip(other.parameters(), before.parameters()):
            assert torch.equal(a, b)
        torch.testing.assert_close(run(other), run(before), rtol=0, atol=1e-6)
    run(layer)
    assert addresses == [w.data_ptr() for w in layer.group_parameters("weight")]
    values = torch.stack([w.detach() for w in layer.group_parameters("weight")])
    assert torch.equal(layer.packed("weight"), values)
    assert torch.equal(layer.state_dict()["weight1"], values[1])


def test_weights_apart_stay_too_unless_they_move_anyway():
    layer = make()
    addresses = place_weights(layer, "apart")
    layer.load_state_dict(make().state_dict())
    layer.to("cpu")
    assert addresses == [w.data_ptr() for w in layer.group_parameters("weight")]
    layer.float()
    assert layer.placed("weight")[1] is None
    assert layer.packed("weight")[1].data_ptr() == layer.weight1.data_ptr()


@pytest.mark.parametrize("place", ["backwards", "boundary"])
def test_a_placed_weight_that_is_written_before_the_backward(place):
    layer = make()
    place_weights(layer, place)
    y = layer(torch.randn(T, K, dtype=torch.float64, requires_grad=True), SPLITS)
    with torch.no_grad():
        layer.weight1.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("place", ["backwards", "boundary"])
def test_autocast_of_placed_weights(place):
    layer, plain = make(params_dtype=torch.float32), make(params_dtype=torch.float32)
    place_weights(layer, place)
    with torch.autocast("cpu", torch.bfloat16):
        for a, b in zip(run(layer), run(plain)):
            assert torch.equal(a, b)


@pytest.mark.cover(2)
@pytest.mark.cover(2)
@EVERYWHERE
@pytest.mark.parametrize("delay", [False, True], ids=["now", "delayed"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", [False, True], ids=["dense", "recipe"])
def test_main_grad_is_written_where_it_lies(place, delay, compiled, recipe, fresh_compiler):
    options = {"params_dtype": torch.float32, "recipe": tgl.recipes.Float8CurrentScaling() if recipe else None}
    plain = make(**options)
    run(plain)
    layer = make(fuse_wgrad_accumulation=True, delay_wgrad_compute=delay, **options)
    weights = layer.group_parameters("weight")
    for weight, there in zip(weights, lay([torch.ones(N, K)] * G, place)):
        weight.main_grad = there
    if delay:
        layer.reserve_delayed_wgrad(T, 2)
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else None
    for _ in range(2):
        run(layer, call)
        layer.backward_dw()
    for i, weight in enumerate(weights):
        torch.testing.assert_close(weight.main_grad, 1 + 2 * getattr(plain, f"weight{i}").grad, rtol=0, atol=1e-5)
    if place != "apart":
        buffer = torch.as_strided(weights[0].main_grad, (8 * SIZE,), (1,), 0)
        assert buffer.isnan().sum() == (8 - G) * SIZE, "between them nothing is written"


@pytest.mark.parametrize("place", [place for place in PLACES if place != "off 16 bytes"])
@pytest.mark.parametrize("frozen", [False, True])
def test_main_grad_is_added_to_inside_the_gemm(place, frozen):
    layer = make(fuse_wgrad_accumulation=True, params_dtype=torch.float32, bias=False)
    for weight, there in zip(layer.group_parameters("weight"), lay([torch.ones(N, K)] * G, place)):
        weight.main_grad = there
    if frozen:
        layer.weight0.requires_grad_(False)
    run(layer)
    assert copies(lambda: layer(torch.randn(T, K), SPLITS).sum().backward()) == []
    assert (layer.weight0.main_grad == 1).all() == frozen

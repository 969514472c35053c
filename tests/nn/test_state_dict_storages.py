"""Entries of state dicts are tensors of their own to whatever saves them, and the memory of the parameters."""

import copy
import io
import pickle

import pytest
import torch

import tgl
from tgl.meta.formats import FORMATS
from tgl.nn import layouts

G, K, N, T = 3, 32, 16, 9
SPLITS = torch.tensor([4, 0, 3])
NAMES = [f"{name}{i}" for name in ("weight", "bias") for i in range(G)]
FORMS = {
    "discrete": {"single_grouped_weight": False},
    "packed, saved discrete": {"state_dict_format": "discrete"},
    "fp8": {"single_grouped_weight": False, "recipe": tgl.recipes.Float8CurrentScaling()},
}
FORM = pytest.mark.parametrize("form", FORMS)


def make(form, seed=0):
    torch.manual_seed(seed)
    return tgl.GroupedLinear(G, K, N, **FORMS[form])


def weight(layer, i):
    """Matrix ``i``, in either form of the parameters."""
    return (layer.weight if layer.single_grouped_weight else layer.group_parameters("weight"))[i]


def written(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.tell()


@FORM
def test_every_entry_has_a_storage_of_its_own(form):
    state = make(form).state_dict()
    assert [name for name in state if name in NAMES] == NAMES
    storages = [state[name].untyped_storage() for name in NAMES]
    assert len({s.data_ptr() for s in storages}) == len(NAMES)
    assert [s.nbytes() for s in storages] == [state[name].nbytes for name in NAMES]
    assert written(state["weight1"]) < written(torch.zeros(N, K)) + 512


@FORM
def test_entries_are_the_memory_of_the_parameters(form):
    layer = make(form)
    state = layer.state_dict()
    assert all(state[f"weight{i}"].data_ptr() == weight(layer, i).data_ptr() for i in range(G))
    state["weight1"].copy_(torch.ones(N, K))
    assert weight(layer, 1).eq(1).all()


@FORM
def test_entries_outlive_the_layer(form):
    layer = make(form)
    expected = weight(layer, 1).detach().clone()
    state = layer.state_dict()
    del layer
    assert torch.equal(state["weight1"], expected)


def test_a_write_to_an_entry_before_the_backward_is_an_error():
    layer = make("discrete")
    y = layer(torch.randn(T, K, requires_grad=True), SPLITS)
    layer.state_dict()["weight1"].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@FORM
@pytest.mark.parametrize("assign", [False, True])
def test_entries_load(form, assign):
    layer, other = make(form), make(form, seed=1)
    other.load_state_dict(layer.state_dict(), assign=assign)
    x = torch.randn(T, K)
    assert torch.equal(layer(x, SPLITS), other(x, SPLITS))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_copies_of_a_state_dict_load(copied):
    layer, other = make("discrete"), make("discrete", seed=1)
    state = copied(layer.state_dict())
    assert state["weight1"].untyped_storage().data_ptr() != weight(layer, 1).untyped_storage().data_ptr()
    other.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), other.parameters()))


def test_files_of_views_load():
    """Files from a time when the entries were views of one storage load."""
    layer, other = make("discrete"), make("discrete", seed=1)
    packed = torch.stack([p.detach() for p in layer.group_parameters("weight")])
    file = io.BytesIO()
    torch.save({f"weight{i}": part for i, part in enumerate(packed)} | {"bias": layer.packed("bias")}, file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), other.parameters()))


def test_assigned_entries_share_the_memory_of_the_layer_they_come_from():
    layer, other = make("discrete"), make("discrete", seed=1)
    other.load_state_dict(layer.state_dict(), assign=True)
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(layer.parameters(), other.parameters()))
    packed = tgl.GroupedLinear(G, K, N)
    packed.load_state_dict(layouts.from_discrete(layer.state_dict()), assign=True)
    assert packed.weight.data_ptr() == layer.weight0.data_ptr()


def test_entries_in_another_order_pack_by_a_copy():
    parts = [make("discrete").state_dict()[f"weight{i}"] for i in (1, 0, 2)]
    assert torch.equal(layouts.pack(parts), torch.stack(parts))


def test_layouts_give_entries_of_their_own():
    state = tgl.GroupedLinear(G, K, N).state_dict()
    discrete = layouts.to_discrete(state)
    assert discrete["weight1"].untyped_storage().nbytes() == discrete["weight1"].nbytes
    assert discrete["weight1"].data_ptr() == state["weight"][1].data_ptr()


def test_quantised_entries():
    recipe = tgl.recipes.MXFP8BlockScaling()
    layer = tgl.GroupedLinear(G, 64, 64, bias=False, recipe=recipe, state_dict_format="discrete")
    layer.quantize_weight()
    entry = layer.state_dict()["weight1"]
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in entry.parts().values())
    assert torch.equal(entry.dequantize(), layer.weight.dequantize()[1])
    entry.quantize_(torch.ones(64, 64))
    assert layer.weight.dequantize()[1].eq(1).all()


@pytest.mark.parametrize("keep_vars", [False, True])
def test_parameters_that_are_their_own_storage(keep_vars):
    layer = tgl.GroupedLinear(1, K, N, single_grouped_weight=False)
    assert layer.state_dict(keep_vars=keep_vars)["weight0"].data_ptr() == layer.weight0.data_ptr()


def test_variables_are_the_parameters():
    layer = make("discrete")
    state = layer.state_dict(keep_vars=True)
    assert all(state[name] is parameter for name, parameter in layer.named_parameters())


def test_in_inference_mode():
    with torch.inference_mode():
        layer = make("discrete")
        assert torch.equal(layer.state_dict()["weight1"], layer.weight1)
    state = layer.state_dict()
    assert state["weight1"].data_ptr() == layer.weight1.data_ptr()
    ordinary = make("discrete")
    with torch.inference_mode():
        state = ordinary.state_dict()
    assert not state["weight1"].is_inference()


@FORM
def test_averages_that_are_written_through_a_state_dict(form):
    layer, average = make(form), make(form, seed=1)
    expected = [a.lerp(b, 0.25) for a, b in zip(average.state_dict().values(), layer.state_dict().values())]
    layer_state = layer.state_dict()
    for name, value in average.state_dict().items():
        value.lerp_(layer_state[name], 0.25)
    assert all(torch.equal(a, b) for a, b in zip(average.state_dict().values(), expected))
    loaded = make(form, seed=2)
    loaded.load_state_dict(dict(zip(layer_state, expected)))
    x = torch.randn(T, K)
    assert torch.equal(average(x, SPLITS), loaded(x, SPLITS))


@FORM
def test_averaged_model(form):
    layer = make(form)
    averaged = torch.optim.swa_utils.AveragedModel(layer)
    with torch.no_grad():
        for step in range(2):
            averaged.update_parameters(layer)
            if step == 0:
                for p in layer.parameters():
                    p.add_(1)
    assert torch.allclose(weight(averaged.module, 1), weight(layer, 1) - 0.5)
    other = torch.optim.swa_utils.AveragedModel(make(form, seed=1))
    other.load_state_dict(averaged.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(averaged.parameters(), other.parameters()))


# --- components of quantised weights ----------------------------------------------------------------------------------


def frozen(format, seed=0):
    torch.manual_seed(seed)
    layer = tgl.GroupedPackedLinear(G, 128, 64, format=format)
    layer.state_dict_format = "components"
    return layer


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_components_load(format, assign):
    layer, other = frozen(format), frozen(format, seed=1)
    state = layer.state_dict()
    assert set(state) == {f"weight.{name}" for name in layer.weight.parts()} | {"bias"}
    assert {type(t) for t in state.values()} == {torch.Tensor}
    other.load_state_dict(state, assign=assign)
    x = torch.randn(T, 128, dtype=torch.bfloat16)
    assert torch.equal(layer(x, SPLITS), other(x, SPLITS))
    other.state_dict_format = "packed"
    other.load_state_dict(layer.state_dict(), assign=assign)  # either form loads
    layer.load_state_dict(other.state_dict(), assign=assign)
    assert torch.equal(layer(x, SPLITS), other(x, SPLITS))


def test_components_of_another_layer_are_refused_and_nothing_is_written():
    layer, other = frozen("mxfp8"), frozen("mxfp8", seed=1)
    before = layer.weight.dequantize()
    state = other.state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for weight.rowwise_scale"):
        layer.load_state_dict(state | {"weight.rowwise_scale": state["weight.rowwise_scale"][:1]})
    with pytest.raises(RuntimeError, match=r"dtype mismatch for weight.rowwise_data: torch.float8_e5m2"):
        layer.load_state_dict(state | {"weight.rowwise_data": state["weight.rowwise_data"].view(torch.float8_e5m2)})
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "weight"'):
        layer.load_state_dict({name: t for name, t in state.items() if name != "weight.rowwise_scale"})
    assert torch.equal(layer.weight.dequantize(), before)


def test_components_of_a_dense_weight_are_the_weight():
    layer = tgl.GroupedLinear(G, K, N, state_dict_format="components")
    assert list(layer.state_dict()) == ["weight", "bias"]
    with pytest.raises(ValueError, match="`single_grouped_weight` must be True for state_dict_format='components'"):
        tgl.GroupedLinear(G, K, N, state_dict_format="components", single_grouped_weight=False)

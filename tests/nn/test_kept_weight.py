"""The quantised weight that ``is_first_microbatch`` keeps, after loads."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tgl
from tgl.recipes import DelayedScaling, MXFP8BlockScaling

G, K, T = 3, 32, 9
SPLITS = torch.tensor([4, 0, 3])
OLD = "`is_first_microbatch` must be True .* in the first after load_state_dict"
LOADS = {
    "itself": lambda mlp, state: mlp.load_state_dict(state),
    "layers": lambda mlp, state: [
        layer.load_state_dict({k[4:]: v for k, v in state.items() if k.startswith(name)})
        for name, layer in (("fc1", mlp.fc1), ("fc2", mlp.fc2))
    ],
    "around": lambda mlp, state: nn.Sequential(mlp).load_state_dict({f"0.{k}": v for k, v in state.items()}),
    "assign": lambda mlp, state: mlp.load_state_dict(copy.deepcopy(state), assign=True),
}


def kept_at(module):
    return [b.data_ptr() for name, b in module.named_buffers() if "kept" in name]


@pytest.mark.cover(1)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), DelayedScaling()], ids=["mxfp8", "delayed"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_load_makes_the_kept_weight_old(recipe, load, compiled, fresh_compiler):
    """False is an error until True has quantised what was loaded, into the memory that was kept."""
    torch.manual_seed(0)
    mlp = tgl.GroupedMLP(G, K, K, recipe=recipe)
    call = torch.compile(mlp, backend="eager", fullgraph=True) if compiled else mlp
    x = torch.randn(T, K)
    call(x, SPLITS, is_first_microbatch=True)
    where = kept_at(mlp)
    for _ in range(2):
        state = tgl.GroupedMLP(G, K, K, recipe=recipe).state_dict()
        LOADS[load](mlp, state)
        fresh = copy.deepcopy(mlp)
        for network in (call, fresh):
            with pytest.raises(Exception, match=OLD):
                network(x, SPLITS, is_first_microbatch=False)
        for first in (True, False):
            want = fresh(x, SPLITS) if recipe == MXFP8BlockScaling() else fresh(x, SPLITS, is_first_microbatch=first)
            assert torch.equal(call(x, SPLITS, is_first_microbatch=first), want)
    assert kept_at(mlp) == where != []


def test_a_load_and_a_flag_on_the_device():
    layer = tgl.GroupedLinear(G, K, K, recipe=MXFP8BlockScaling())
    x, no = torch.randn(T, K), torch.tensor(False)
    layer(x, SPLITS, is_first_microbatch=no)
    layer.load_state_dict(tgl.GroupedLinear(G, K, K).state_dict(), strict=False)
    want = copy.deepcopy(layer)(x, SPLITS)
    for _ in range(2):
        assert torch.equal(layer(x, SPLITS, is_first_microbatch=no), want)
        with torch.no_grad():
            layer.weight.neg_()


def test_checkpoint_in_a_graph(fresh_compiler):
    """A graph may keep nothing new there: an error that says so, until a call elsewhere has kept the weight."""
    layer = tgl.GroupedLinear(G, K, K, recipe=MXFP8BlockScaling())
    x = torch.randn(T, K)

    def run(x, first):
        return checkpoint(lambda x: layer(x, SPLITS, is_first_microbatch=first), x, use_reentrant=False)

    for _ in range(2):
        torch.compiler.reset()
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        for first in (True, torch.tensor(False)):
            with pytest.raises(Exception, match=r"`is_first_microbatch` must be None inside of torch.utils.checkpoint"):
                compiled(x, first)
        torch.compiler.reset()
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        want = layer(x, SPLITS, is_first_microbatch=True)
        for first in (True, False, torch.tensor(True)):
            assert torch.equal(compiled(x, first), want)
        layer.load_state_dict(tgl.GroupedLinear(G, K, K).state_dict(), strict=False)

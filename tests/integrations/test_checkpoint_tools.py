"""Saving, loading, offloading and resuming by other people's tools: layers that train on to the same bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tgl

accelerate = pytest.importorskip("accelerate")
hub = pytest.importorskip("huggingface_hub")
files = pytest.importorskip("safetensors.torch")

EXPERTS, WIDTH = 3, 64
SPLITS = torch.tensor([5, 0, 3])
FP8, MXFP8 = tgl.recipes.DelayedScaling(amax_history_len=4), tgl.recipes.MXFP8BlockScaling()


class Net(nn.Module):
    """Two expert layers as a model has them, with an activation between."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.up, self.down = (tgl.GroupedLinear(EXPERTS, WIDTH, WIDTH, **options) for _ in range(2))

    def forward(self, x: Tensor, splits: Tensor) -> Tensor:
        return self.down(self.up(x, splits).relu(), splits)


OPTIONS: dict[str, dict[str, Any]] = {
    "packed": {},
    "discrete": {"single_grouped_weight": False},
    "saved as discrete": {"state_dict_format": "discrete"},
    "saved as packed": {"single_grouped_weight": False, "state_dict_format": "packed"},
    "recipe": {"recipe": FP8},
    "discrete, recipe": {"single_grouped_weight": False, "recipe": FP8},
    "quantised": {"recipe": MXFP8},
    "quantised, saved as components": {"recipe": MXFP8, "state_dict_format": "components"},
}


class HubNet(Net, hub.PyTorchModelHubMixin):
    """The same, with the methods of the Hub, whose configuration has a word of JSON."""

    def __init__(self, kind: str) -> None:
        super().__init__(**OPTIONS[kind])


PLAIN = [kind for kind in OPTIONS if kind != "quantised"]  # entries are plain tensors


def make(kind: str, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    net = Net(**OPTIONS[kind])
    if kind.startswith("quantised"):
        for layer in (net.up, net.down):
            layer.quantize_weight()
            layer.weight.requires_grad_(False)
    return net


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.1)


def train(net: Any, optimizer: Any, steps: int, seed: int = 1) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(8, WIDTH), SPLITS).square().mean().backward()
        optimizer.step()


def values(t: Any) -> list[Tensor]:
    """Return the tensors that ``t`` consists of, as bytes."""
    if isinstance(t, tgl.GroupedTensor):
        return [part for each in t.parts().values() for part in values(each)]
    return [t.detach().contiguous().reshape(-1).view(torch.uint8)] if isinstance(t, Tensor) else []


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return all(map(torch.equal, values(a), values(b))) if isinstance(a, Tensor) else a == b


Pair = tuple[Net, torch.optim.Optimizer]


def by_torch(saved: Pair, fresh: Pair, path: Path) -> Pair:
    torch.save([part.state_dict() for part in saved], path / "all.pt")
    for part, state in zip(fresh, torch.load(path / "all.pt")):
        part.load_state_dict(state)
    return fresh


def by_safetensors(saved: Pair, fresh: Pair, path: Path) -> Pair:
    files.save_model(saved[0], str(path / "model.safetensors"))
    assert files.load_model(fresh[0], path / "model.safetensors") == (set(), [])
    fresh[1].load_state_dict(copy.deepcopy(saved[1].state_dict()))
    return fresh


def by_hub(saved: Pair, fresh: Pair, path: Path) -> Pair:
    hub.save_torch_model(saved[0], path)
    found = hub.load_torch_model(fresh[0], path)
    assert (list(found.missing_keys), list(found.unexpected_keys)) == ([], [])
    fresh[1].load_state_dict(copy.deepcopy(saved[1].state_dict()))
    return fresh


def accelerated(pair: Pair) -> tuple[Any, Any]:
    accelerator = accelerate.Accelerator(cpu=True)
    return accelerator, accelerator.prepare(*pair)


def by_accelerate(saved: Pair, fresh: Pair, path: Path, *, safe: bool = True) -> Pair:
    accelerated(saved)[0].save_state(path, safe_serialization=safe)
    accelerator, pair = accelerated(fresh)
    accelerator.load_state(path)
    return pair


def by_accelerate_pickled(saved: Pair, fresh: Pair, path: Path) -> Pair:
    return by_accelerate(saved, fresh, path, safe=False)


def by_accelerate_model(saved: Pair, fresh: Pair, path: Path) -> Pair:
    accelerate.Accelerator(cpu=True).save_model(saved[0], path)
    accelerate.load_checkpoint_in_model(fresh[0], path, strict=True)
    fresh[1].load_state_dict(copy.deepcopy(saved[1].state_dict()))
    return fresh


def by_dcp(saved: Pair, fresh: Pair, path: Path) -> Pair:
    dcp.save(dict(zip("mo", get_state_dict(*saved))), checkpoint_id=path, no_dist=True)
    model, optimizer = get_state_dict(*fresh)
    state = {"m": model, "o": optimizer}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    set_state_dict(*fresh, model_state_dict=state["m"], optim_state_dict=state["o"])
    return fresh


def by_dcp_in_place(saved: Pair, fresh: Pair, path: Path) -> Pair:
    """Entries of a state dict are what the checkpoint is read into, and nothing is loaded afterwards."""
    dcp.save(saved[0].state_dict(), checkpoint_id=path, no_dist=True)
    dcp.load(fresh[0].state_dict(), checkpoint_id=path, no_dist=True)
    fresh[1].load_state_dict(copy.deepcopy(saved[1].state_dict()))
    return fresh


Tool = Callable[[Pair, Pair, Path], Pair]
SAFE: list[Tool] = [by_safetensors, by_hub, by_accelerate, by_accelerate_model]  # for plain tensors alone
ANY: list[Tool] = [by_torch, by_accelerate_pickled, by_dcp_in_place]
OWN_NAMES = [kind for kind in OPTIONS if "saved as" not in kind]  # entries have the parameters' names


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "tool, kind",
    [(tool, kind) for tool in SAFE for kind in PLAIN]
    + [(tool, kind) for tool in ANY for kind in OPTIONS]
    + [(by_dcp, kind) for kind in OWN_NAMES],
)
def test_training_goes_on_where_it_was_saved(tool: Tool, kind: str, tmp_path: Path) -> None:
    net = make(kind)
    saved = net, optimizer_of(net)
    train(*saved, 2)
    other = make(kind, seed=5)
    fresh = other, optimizer_of(other)
    net2, optimizer2 = tool(saved, fresh, tmp_path)
    for _ in range(2):
        assert same(dict(net.state_dict()), dict(other.state_dict()))
        assert same(saved[1].state_dict()["state"], optimizer2.state_dict()["state"])
        x = torch.randn(8, WIDTH)
        assert torch.equal(net.eval()(x, SPLITS), other.eval()(x, SPLITS))
        net.train()
        other.train()
        train(*saved, 1, seed=9)
        train(net2, optimizer2, 1, seed=9)


@pytest.mark.parametrize("kind", [kind for kind in PLAIN if not kind.startswith("quantised")])
def test_mixin_of_the_hub(kind: str, tmp_path: Path) -> None:
    net = HubNet(kind)
    net.save_pretrained(tmp_path)
    again = HubNet.from_pretrained(tmp_path)
    assert same(dict(net.state_dict()), dict(again.state_dict()))


def offload_to_cpu(net: Net, path: Path) -> nn.Module:
    return accelerate.cpu_offload(net, execution_device="cpu")


def offload_to_disk(net: Net, path: Path) -> nn.Module:
    return accelerate.disk_offload(net, path, execution_device="cpu")


def dispatch_to_cpu(net: Net, path: Path) -> nn.Module:
    return accelerate.dispatch_model(net, {"up": "cpu", "down": "cpu"}, main_device="meta")


def dispatch_to_disk(net: Net, path: Path) -> nn.Module:
    return accelerate.dispatch_model(net, {"up": "cpu", "down": "disk"}, offload_dir=path, force_hooks=True)


@pytest.mark.parametrize(
    "offload, kind",
    [(offload_to_cpu, kind) for kind in OWN_NAMES]
    + [(f, kind) for f in (offload_to_disk, dispatch_to_disk) for kind in OWN_NAMES if kind != "quantised"],
)
def test_offloaded(offload: Callable[[Net, Path], Any], kind: str, tmp_path: Path) -> None:
    net = make(kind).eval()
    x = torch.randn(8, WIDTH, requires_grad=True)
    expected = net(x, SPLITS)
    (dx,) = torch.autograd.grad(expected.square().sum(), x)
    offloaded = offload(net, tmp_path)
    for _ in range(2):
        y = offloaded(x, SPLITS)
        assert torch.equal(y, expected)
        assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], dx)
    assert next(net.down.parameters()).device.type == "meta"


@pytest.mark.parametrize("kind", ["saved as discrete", "saved as packed"])
def test_layers_that_are_saved_by_other_names_offload_with_their_parameters(kind: str, tmp_path: Path) -> None:
    net = make(kind)
    x = torch.randn(8, WIDTH)
    expected = net(x, SPLITS)
    accelerate.cpu_offload(net, "cpu", state_dict={name: p.detach() for name, p in net.named_parameters()})
    assert torch.equal(net(x, SPLITS), expected)


def block(**options: Any) -> nn.Module:
    made = tgl.MoE(EXPERTS, WIDTH, WIDTH, params_dtype=torch.bfloat16, **options)
    if options:
        made.quantize_weight()
    return made


def low_rank() -> nn.Module:
    return tgl.GroupedLoRALinear(tgl.GroupedPackedLinear(EXPERTS, WIDTH, WIDTH), rank=2)


@pytest.mark.parametrize("make, groups", [(block, (8, 2)), (lambda: block(recipe=MXFP8), (8, 2)), (low_rank, ())])
def test_blocks_and_adapters_offload(make: Callable[[], Any], groups: tuple[int, ...]) -> None:
    net = nn.ModuleDict({"layer": make()})
    call = torch.randint(EXPERTS, groups) if groups else SPLITS
    x = torch.randn(8, WIDTH, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = net["layer"](x, call)
        accelerate.cpu_offload(net, "cpu")
        assert next(net.parameters()).device.type == "meta"
        for _ in range(2):
            assert torch.equal(net["layer"](x, call), expected)


def test_quantised_weights_start_empty_and_are_loaded() -> None:
    def layer() -> nn.Module:
        return tgl.GroupedPackedLinear(EXPERTS, WIDTH, WIDTH, format="mxfp8")

    with accelerate.init_empty_weights():
        empty = layer()
    assert empty.weight.device.type == "meta"
    full = layer()
    empty.load_state_dict(full.state_dict(), assign=True)
    x = torch.randn(8, WIDTH, dtype=torch.bfloat16)
    assert torch.equal(empty(x, SPLITS), full(x, SPLITS))


def test_disk_has_no_room_for_quantised_weights(tmp_path: Path) -> None:
    net = make("quantised").bfloat16()
    with pytest.raises(NotImplementedError, match=r"MXFP8GroupedTensor does not support aten.view.dtype"):
        accelerate.disk_offload(net, tmp_path, execution_device="cpu")

"""A graph under autocast casts every weight once, as it lies in memory.

A weight that is cast as the layer's transposed view makes a compiler write it twice, once in either order, or copy it
from one order to the other; some compilers have got that copy wrong.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code

import tgl

pytestmark = pytest.mark.usefixtures("fresh_compiler")

EXPERTS, HIDDEN, FFN, ROWS, TOP_K = 4, 32, 48, 24, 2
CASTS = {torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default}
VIEWS = {
    torch.ops.aten.transpose.int,
    torch.ops.aten.permute.default,
    torch.ops.aten.view.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.slice.Tensor,
}


def lora_mlp() -> nn.Module:
    mlp = tgl.GroupedMLP(EXPERTS, HIDDEN, FFN)
    mlp.fc1, mlp.fc2 = (tgl.GroupedLoRALinear(layer, rank=4) for layer in (mlp.fc1, mlp.fc2))
    return mlp


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "moe": lambda: tgl.MoE(EXPERTS, HIDDEN, FFN),
    "moe, recomputed": lambda: tgl.MoE(EXPERTS, HIDDEN, FFN, recompute_activation=True),
    "mlp": lambda: tgl.GroupedMLP(EXPERTS, HIDDEN, FFN),
    "mlp, recomputed": lambda: tgl.GroupedMLP(EXPERTS, HIDDEN, FFN, recompute_activation=True),
    "mlp, discrete": lambda: tgl.GroupedMLP(EXPERTS, HIDDEN, FFN, single_grouped_weight=False),
    "linear": lambda: tgl.GroupedLinear(EXPERTS, HIDDEN, HIDDEN),
    "linear, discrete": lambda: tgl.GroupedLinear(EXPERTS, HIDDEN, HIDDEN, single_grouped_weight=False),
    "lora": lambda: tgl.GroupedLoRALinear(tgl.GroupedLinear(EXPERTS, HIDDEN, HIDDEN), rank=4),
    "lora, trained base": lambda: trained(tgl.GroupedLoRALinear(tgl.GroupedLinear(EXPERTS, HIDDEN, HIDDEN), rank=4)),
    "lora, mlp": lora_mlp,
}


def trained(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(True)


def forward(layers: nn.ModuleList, x: Tensor, routing: Tensor, splits: Tensor) -> Tensor:
    for layer in layers:
        x = x + (layer(x, routing) if isinstance(layer, tgl.MoE) else layer(x, splits))
    return x


def arguments() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(ROWS, HIDDEN), torch.randint(EXPERTS, (ROWS, TOP_K)), torch.tensor([7, 0, 11, 6])


def origin(node: fx.Node) -> fx.Node:
    while node.target in VIEWS:
        node = node.args[0]
    return node


def graphs(model: nn.Module, call: Callable[..., Tensor], *args: Tensor) -> list[fx.GraphModule]:
    """The forward's and the backward's graph of ``call(model, *args)`` under autocast, as Inductor gets them."""
    found: list[fx.GraphModule] = []

    def keep(module: fx.GraphModule, _: object) -> Callable:
        found.append(module)
        return make_boxed_func(module.forward)

    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=functools.partial(min_cut_rematerialization_partition)
    )
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.compile(functools.partial(call, model), backend=backend, fullgraph=True)(*args)
    y.float().square().mean().backward()
    return found


def assert_cast_once(modules: list[fx.GraphModule]) -> None:
    """Casts of weights and of their gradients are of tensors as they lie in memory, and no weight is cast twice."""
    counts: Counter[str] = Counter()
    for module in modules:
        for node in module.graph.nodes:
            if node.target not in CASTS or node.meta["val"].dim() != 3 or node.meta["val"].shape[0] != EXPERTS:
                continue
            source = node.args[0]
            assert source.meta["val"].is_contiguous(), f"{node.format_node()} casts a transposed view"
            if origin(source).op == "placeholder":
                counts[origin(source).name] += 1
    assert counts, "the graph holds no cast of a weight"
    assert set(counts.values()) == {1}, counts


@pytest.mark.parametrize("name", LAYERS)
def test_every_weight_is_cast_once_as_it_lies(name: str) -> None:
    layers = nn.ModuleList(LAYERS[name]() for _ in range(2))
    assert_cast_once(graphs(layers, forward, *arguments()))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_of_transformers(family: str) -> None:
    from tests.models import families

    model = families.transformers_model(family, families.Size(blocks=1))
    tokens = torch.randint(families.VOCABULARY, (2, 12))
    assert_cast_once(graphs(model, lambda m, t: m(t, use_cache=False).logits, tokens))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("op", [tgl.grouped_gemm, torch.ops.tgl.grouped_gemm.default])
def test_the_cast_keeps_strides_and_gradients(op: Callable, transposed: bool) -> None:
    """A weight of either memory order is cast to the same strides in an eager call and in a fake one."""
    weight = torch.randn(EXPERTS, HIDDEN, FFN).transpose(1, 2) if transposed else torch.randn(EXPERTS, FFN, HIDDEN)
    x = torch.randn(ROWS, FFN)
    offs = torch.tensor([7, 7, 18, ROWS], dtype=torch.int32)
    wide = weight.detach().bfloat16().requires_grad_()
    wanted = op(x.bfloat16(), wide, offs)
    wanted.float().square().sum().backward()
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = op(x, weight, offs)
    y.float().square().sum().backward()
    assert torch.equal(y, wanted)
    assert torch.equal(weight.grad, wide.grad.float())
    assert weight.grad.stride() == weight.stride()


def test_the_code_for_a_cpu_transposes_nothing() -> None:
    layers = nn.ModuleList(tgl.GroupedLinear(EXPERTS, 64, 64, bias=False) for _ in range(2))
    x, splits = torch.randn(ROWS, 64), torch.tensor([7, 0, 11, 6])

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            y = compiled(x)
        y.float().square().mean().backward()

    compiled = torch.compile(lambda x: functools.reduce(lambda h, e: h + e(h, splits), layers, x), fullgraph=True)
    _, codes = run_and_get_code(step)
    assert len(codes) == 2
    for code in codes:
        assert "transpose_mxn" not in code

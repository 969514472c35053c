"""Every reason for which an expert layer takes no faster path, with a layer that gives it."""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tgl
from tgl.distributed import ExpertParallelMLP
from tgl.recipes import MXFP8BlockScaling

G, H, I, S, K = 4, 32, 64, 9, 2
CHOSEN = torch.tensor([[0, 2], [2, 3], [3, 0], [2, 1], [0, 1], [1, 3], [3, 2], [0, 3], [0, 1]])
OFFS = torch.tensor([3, 3, 8, S], dtype=torch.int32)

ONE_OP, ONE_FUNCTION = "one op", "one autograd function"
LAYERS, MODULES = "separate layers", "layers called as modules"


class Subclass(tgl.GroupedLinear):
    """A layer whose forward is the base's."""


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.inner(*args, **kwargs)


class Named(torch.Tensor):
    """A tensor of another class."""

    def new_empty(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # for deepcopy
        return super().new_empty(*args, **kwargs).as_subclass(Named)


def block(**options: Any) -> tgl.MoE:
    return tgl.MoE(G, H, I, **options)


def rows(**options: Any) -> tgl.GroupedMLP:
    return tgl.GroupedMLP(G, H, I, **options)


def exchanged(**options: Any) -> ExpertParallelMLP:
    return ExpertParallelMLP(G, H, I, group=dist.group.WORLD, top_k=K, max_tokens=S, capacity_factor=None, **options)


def hooked(layer: tgl.GroupedMLP) -> tgl.GroupedMLP:
    layer.fc2.register_forward_hook(lambda *_: None)
    return layer


def with_fc1(make: Callable[[tgl.GroupedLinear], nn.Module]) -> Callable[[], tgl.MoE]:
    def layer() -> tgl.MoE:
        made = block()
        made.fc1 = make(made.fc1)
        return made

    return layer


def subclassed(fc1: tgl.GroupedLinear) -> Subclass:
    made = Subclass(G, H, 2 * I, bias=False)
    made.load_state_dict(fc1.state_dict())
    return made


def adapted(fc1: tgl.GroupedLinear) -> tgl.GroupedLoRALinear:
    made = tgl.GroupedLoRALinear(fc1, rank=4)
    nn.init.normal_(made.lora_B)
    return made


def packed(fc1: tgl.GroupedLinear) -> tgl.GroupedPackedLinear:
    return tgl.GroupedPackedLinear(G, H, 2 * I, bias=False, format="mxfp8", params_dtype=torch.float32)


def of_another_class() -> tgl.MoE:
    layer = block()
    layer.fc1.weight = nn.Parameter(layer.fc1.weight.detach().as_subclass(Named))
    return layer


@dataclass
class Case:
    """A layer, how it is called, and what ``tgl.explain`` says.

    Attributes:
        make: makes the layer.
        path: the path that is taken.
        lines: the reason, a line for each path that it rules out.
        also: lines of further reasons, which such a layer cannot avoid.
        permutes: whether ``dispatch`` and ``combine`` are ops of their own.
        around: context of the call.
        compiled: whether the call is compiled.
        buffers, named: whether the call has ``out``; whether tokens are of a class of their own.
        rounded: None if the paths have equal bits. Else the dtype in which they round at different places: in a graph
            for a CPU the activation, and between ranks sums of another dtype.
    """

    make: Callable[[], tgl.GroupedMLP]
    path: str
    lines: tuple[str, ...]
    also: tuple[str, ...] = ()
    permutes: bool = False
    around: Callable[[], Any] = field(default=contextlib.nullcontext)
    compiled: bool = False
    buffers: bool = False
    named: bool = False
    rounded: torch.dtype | None = None


def both(path: str, words: str) -> tuple[str, ...]:
    return tuple(f"not {path}: `{name}` {words}" for name in ("fc1", "fc2"))


OP_PER_EXPERT = both(ONE_OP, "has a weight for each expert")
CASES = {
    "hooks": Case(
        lambda: hooked(block()),
        MODULES,
        ("not separate layers: `fc2` has hooks, of its own or for all modules",),
        permutes=True,
    ),
    "replaced": Case(
        with_fc1(Wrapper),
        MODULES,
        ("not separate layers: `fc1` is a Wrapper with a forward of its own",),
        permutes=True,
    ),
    "LoRA": Case(
        with_fc1(adapted),
        LAYERS,
        tuple(f"not {path}: `fc1` is a GroupedLoRALinear" for path in (ONE_OP, ONE_FUNCTION)),
        permutes=True,
    ),
    "subclass": Case(
        with_fc1(subclassed),
        LAYERS,
        ("not one op: `fc1` is a Subclass",),
        ("not one autograd function: the layers are plain, and their ops have second derivatives",),
        permutes=True,
    ),
    "packed weight": Case(
        with_fc1(packed),
        ONE_FUNCTION,
        (
            "not one op: `fc1` is a GroupedPackedLinear",
            "not one op: `fc1` has a weight that stays quantised",
        ),
    ),
    "recipe": Case(lambda: block(recipe=MXFP8BlockScaling()), ONE_FUNCTION, both(ONE_OP, "has a recipe")),
    "weight for each expert": Case(lambda: block(single_grouped_weight=False), ONE_FUNCTION, OP_PER_EXPERT),
    "main_grad": Case(
        lambda: block(fuse_wgrad_accumulation=True), ONE_FUNCTION, both(ONE_OP, "has `fuse_wgrad_accumulation`")
    ),
    "delayed": Case(lambda: block(delay_wgrad_compute=True), ONE_FUNCTION, both(ONE_OP, "has `delay_wgrad_compute`")),
    "weight's class": Case(
        of_another_class,
        LAYERS,
        ("not one op: a weight is a Named",),
        ("not one autograd function: the layers are plain, and their ops have second derivatives",),
        permutes=True,
    ),
    "compiler": Case(
        block,
        LAYERS,
        ("not one op: the compiler fuses the activation in a graph for cpu",),
        ("not one autograd function: the layers are plain, and their ops have second derivatives",),
        permutes=True,
        compiled=True,
        rounded=torch.float32,
    ),
    "compiler, several ops": Case(
        lambda: block(single_grouped_weight=False),
        LAYERS,
        ("not one autograd function: the compiler fuses the activation in a graph for a CPU",),
        OP_PER_EXPERT,
        permutes=True,
        compiled=True,
        rounded=torch.float32,
    ),
    "offload": Case(
        block,
        ONE_FUNCTION,
        ("not one op: the graph offloads activations",),
        ("not one op: the compiler fuses the activation in a graph for cpu",),
        around=lambda: tgl.cpu_offload(min_bytes=1),
        compiled=True,
    ),
    "buffers": Case(
        rows,
        LAYERS,
        ("not one op: the caller passes `out` or `dgrad_out`",),
        ("not one autograd function: the activation is not quantised, recomputed or offloaded",),
        buffers=True,
    ),
    "nothing to fuse": Case(
        lambda: rows(single_grouped_weight=False),
        LAYERS,
        ("not one autograd function: the activation is not quantised, recomputed or offloaded",),
        OP_PER_EXPERT,
    ),
    "tokens' class": Case(
        lambda: block(recipe=MXFP8BlockScaling()),
        ONE_FUNCTION,
        ("not one autograd function from tokens to tokens: `x` is a Named, whose rows an op permutes",),
        both(ONE_OP, "has a recipe"),
        permutes=True,
        named=True,
    ),
    "codes": Case(
        lambda: exchanged(wire="quantized", recipe=MXFP8BlockScaling()),
        ONE_FUNCTION,
        ("not one op: the exchange sends codes instead of tokens",),
        both(ONE_OP, "has a recipe"),
    ),
    "autocast": Case(
        lambda: exchanged(wire_dtype=torch.float32),
        ONE_FUNCTION,
        ("not one op: autocast casts the weights",),
        both(ONE_OP, "has a weight of torch.float32 for torch.bfloat16"),
        around=lambda: torch.autocast("cpu", torch.bfloat16),
        rounded=torch.bfloat16,
    ),
}


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def results(case: Case, layer: tgl.GroupedMLP) -> tuple[str, list[torch.Tensor]]:
    """Return the report of a call, and its output and gradients."""
    torch.manual_seed(1)
    of_rows = type(layer) is tgl.GroupedMLP
    weights = torch.rand(S) if of_rows else torch.rand(S, K)
    leaves = [torch.randn(S, H).requires_grad_(), weights.requires_grad_()]
    for parameter in layer.parameters():
        if getattr(layer.fc1, "fuse_wgrad_accumulation", False):
            parameter.main_grad = torch.zeros_like(parameter)
    options = {"out": torch.empty(S, H)} if case.buffers else {}
    arguments = (OFFS.diff(prepend=OFFS.new_zeros(1)),) if of_rows else (CHOSEN,)
    report: list[str] = []

    def call(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        x = x.as_subclass(Named) if case.named else x
        report.append(str(tgl.explain(layer, x, *arguments, weights, **options)))
        return layer(x, *arguments, weights, **options)

    torch._dynamo.reset()
    run = torch.compile(call, backend="aot_eager", fullgraph=True) if case.compiled else call
    with case.around():
        y = run(*leaves)
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    if layer.need_backward_dw():
        layer.backward_dw()
    grads = [getattr(p, "main_grad", p.grad) for p in layer.parameters() if p.requires_grad]
    return report[0], [t.detach().as_subclass(torch.Tensor) for t in (y, *(leaf.grad for leaf in leaves), *grads)]


def slower(case: Case, layer: tgl.GroupedMLP) -> tuple[Case, tgl.GroupedMLP]:
    """Return the same layer on the slowest path, or the plain block if that is the path of the case."""
    if case.path == MODULES:
        plain = block()
        plain.load_state_dict({name.replace("inner.", ""): t for name, t in layer.state_dict().items()})
        return Case(block, ONE_OP, ("",)), plain
    if isinstance(layer, ExpertParallelMLP):
        plain = block(recipe=MXFP8BlockScaling()) if layer.wire == "quantized" else block()
        plain.load_state_dict(layer.state_dict())
        layer = plain
    return Case(
        case.make, MODULES, case.lines, around=contextlib.nullcontext if case.compiled else case.around
    ), hooked(layer)


@pytest.mark.parametrize("name", CASES)
def test_the_path_the_reason_and_the_results(name):
    case = CASES[name]
    torch.manual_seed(0)
    layer = case.make()
    other, twin = slower(case, copy.deepcopy(layer) if not isinstance(layer, ExpertParallelMLP) else layer)
    report, found = results(case, layer)
    steps = f"dispatch, {case.path}, combine" if case.permutes else case.path
    first, *lines = report.splitlines()
    assert first == f"runs {steps}"
    assert sorted(line.strip() for line in lines) == sorted((*case.lines, *case.also))
    report, expected = results(other, twin)
    assert other.path in report
    for a, b in zip(found, expected, strict=True):
        eps = 0.0 if case.rounded is None else 2 * torch.finfo(case.rounded).eps
        torch.testing.assert_close(a, b, rtol=0, atol=eps * b.abs().max().item())


def test_a_transform_runs_the_layers():
    torch.manual_seed(0)
    layer, x, splits = rows(recipe=MXFP8BlockScaling()), torch.randn(S, H), OFFS.diff(prepend=OFFS.new_zeros(1))
    reports = []

    def loss(x):
        reports.append(str(tgl.explain(layer, x, splits)))
        return layer(x, splits).square().sum()

    found = torch.func.grad(loss)(x)
    (expected,) = torch.autograd.grad(loss(x.requires_grad_()), x)
    assert torch.equal(found, expected)
    ours, ordinary = reports
    assert ours.startswith("runs separate layers")
    assert ours.endswith("not one autograd function: `x` is inside a transform of torch.func")
    assert ordinary.startswith("runs one autograd function")


def test_the_function_has_the_paths_of_a_plain_block():
    layer, x, weights = block(), torch.randn(S, H), torch.rand(S, K)
    w1, w2 = layer.fc1.weight.detach().transpose(1, 2), layer.fc2.weight.detach().transpose(1, 2)
    reports = []

    def call(x):
        reports.append(str(tgl.explain(tgl.moe, x, CHOSEN, weights, w1, w2)))
        return tgl.moe(x, CHOSEN, weights, w1, w2)

    torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(x), call(x))
    of_graph, eager = reports
    assert of_graph.splitlines() == [
        "runs dispatch, separate layers, combine",
        "  not one op: the compiler fuses the activation in a graph for cpu",
    ]
    assert eager == "runs one op"

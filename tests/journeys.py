"""Journeys of users through an expert layer, on any device, compared with the layer in float32 on a CPU.

A journey is run on the device under test, on a CPU (eagerly, by the reference implementations), and once more in
float32 without a recipe. The bound comes from these: quantised operands are the same bytes everywhere but where a sum
in another order falls on the other side of a rounding, so a device may differ from the CPU by a part of what the
quantisation itself costs, and by the last rounding of a result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import tgl
from tgl import recipes

GROUPS, ROWS = 5, 300
SIZES = (100, 0, 37, 1, 128)  # and a tail of 34 rows, which holds NaN
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

RECIPES: dict[str, recipes.Recipe | None] = {
    "none": None,
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(amax_history_len=4),
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
}
# Half a step between elements, relative to the value: the coarser of those for values and for gradients.
HALF_STEP = {
    "none": 2.0**-8,
    "current": 2.0**-3,
    "delayed": 2.0**-3,
    "block": 2.0**-4,
    "mxfp8": 2.0**-4,
    "nvfp4": 2.0**-2,
}
DTYPES = {"bf16": BF16, "fp16": F16, "autocast": F32}  # of the parameters; autocast is to bfloat16
WIDTHS = {"aligned": (128, 256), "72x40": (72, 40), "100x60": (100, 60)}


def transposed_loss(y: Tensor, target: Tensor) -> Tensor:
    """Its gradient of ``y`` is a transposed matrix."""
    return (y.t() * target.t().contiguous()).sum()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda y, target: y.sum(),
    "mean": lambda y, target: y.mean(),
    "transposed": transposed_loss,
    "square": lambda y, target: (y - target).square().sum(),
}


# What torch.amp.GradScaler is for: without it the gradients of a mean are below float16's normal numbers.
LOSS_SCALE = {("mean", "fp16"): 1024.0}


class Case(NamedTuple):
    """One layer and what it is trained with; keys of the tables above."""

    recipe: str = "none"
    loss: str = "square"
    dtype: str = "bf16"
    widths: str = "aligned"

    def __str__(self) -> str:
        return "-".join(self)


def every_case(names: list[str]) -> Iterator[Case]:
    """The whole product, for the recipes ``names``."""
    for recipe in names:
        for loss in LOSSES:
            for dtype in DTYPES:
                for widths in WIDTHS:
                    yield Case(recipe, loss, dtype, widths)


def covering(names: list[str]) -> list[Case]:
    """Cases in which any two choices of different tables meet."""
    dtypes, widths = list(DTYPES), list(WIDTHS)
    return [
        Case(recipe, loss, dtypes[(r + 2 * i) % 3], widths[(r + i) % 3])
        for r, recipe in enumerate(names)
        for i, loss in enumerate(LOSSES)
    ]


def covering_triples(names: list[str]) -> list[Case]:
    """Cases in which any three choices of different tables meet."""
    widths = list(WIDTHS)
    return [
        Case(recipe, loss, dtype, widths[(r + i + d) % 3])
        for r, recipe in enumerate(names)
        for i, loss in enumerate(LOSSES)
        for d, dtype in enumerate(DTYPES)
    ]


# --- layers and data --------------------------------------------------------------------------------------------------


def layer(case: Case, device: str = "cpu", **options: object) -> tgl.GroupedMLP:
    """The same weights for every device, form of the parameters and option."""
    torch.manual_seed(0)
    hidden, inner = WIDTHS[case.widths]
    made = tgl.GroupedMLP(
        GROUPS, hidden, inner, bias=True, params_dtype=DTYPES[case.dtype], recipe=RECIPES[case.recipe], **options
    )
    return made.to(device)


def exact_layer(case: Case, **options: object) -> tgl.GroupedMLP:
    """``layer`` in float32 and without a recipe."""
    return layer(case._replace(recipe="none"), **options).float()


class Batch(NamedTuple):
    """Rows ``x``, how many each expert gets, probabilities, and what the loss compares with."""

    x: Tensor
    m_splits: Tensor
    probs: Tensor
    target: Tensor

    def to(self, device: str) -> Batch:
        return Batch(*(t.to(device) for t in self))

    def float(self) -> Batch:
        return Batch(self.x.float(), self.m_splits, self.probs.float(), self.target.float())


def batch(case: Case, sizes: tuple[int, ...] = SIZES, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    hidden, dtype = WIDTHS[case.widths][0], DTYPES[case.dtype]
    x = torch.randn(ROWS, hidden, generator=generator).to(dtype)
    target = torch.randn(ROWS, hidden, generator=generator).to(dtype)
    probs = torch.rand(ROWS, generator=generator).to(dtype)
    x[sum(sizes) :] = float("nan")
    return Batch(x, torch.tensor(sizes), probs, target)


def forward_and_loss(mlp: torch.nn.Module, case: Case, autocast: torch.dtype | None = None) -> Callable:
    """``(x, m_splits, probs, target, **options) -> (y, loss)``, what a user would compile."""
    loss, scale = LOSSES[case.loss], LOSS_SCALE.get((case.loss, case.dtype), 1.0)

    def call(x: Tensor, m_splits: Tensor, probs: Tensor, target: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, autocast or BF16, enabled=autocast is not None):
            y = mlp(x, m_splits, probs, **options)
        return y, loss(y, target) * scale

    return call


def casts(case: Case) -> torch.dtype | None:
    """Return the dtype that autocast computes in; None without autocast."""
    return BF16 if case.dtype == "autocast" else None


def step(call: Callable, mlp: torch.nn.Module, data: Batch, **options: object) -> dict[str, Tensor]:
    """Forward and backward: the result, and every gradient by name."""
    x, probs = data.x.detach().requires_grad_(), data.probs.detach().requires_grad_()
    mlp.zero_grad(set_to_none=True)
    y, loss = call(x, data.m_splits, probs, data.target, **options)
    loss.backward()
    return {"y": y.detach(), "x": x.grad, "probs": probs.grad} | gradients(mlp)


def gradients(mlp: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in mlp.named_parameters() if p.grad is not None}


def batches_for(case: Case) -> tuple[list[Batch], int]:
    """Two routings, and how many of the steps are for delayed scaling to settle on scales."""
    settling = 2 if case.recipe == "delayed" else 0
    return [*[batch(case)] * (settling + 1), batch(case, (0, 0, ROWS, 0, 0), seed=2)], settling


def run(case: Case, device: str, how: str) -> list[dict[str, Tensor]]:
    """A step on each batch, without an optimizer between them; ``how`` is a key of ``WAYS``."""
    mlp = layer(case, device)
    return WAYS[how](forward_and_loss(mlp, case, casts(case)), mlp, [b.to(device) for b in batches_for(case)[0]])


@functools.lru_cache(maxsize=1)
def references(case: Case) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """The steps of ``run`` on the CPU, and in float32 without a recipe."""
    mlp = exact_layer(case)
    exact = eagerly(forward_and_loss(mlp, case), mlp, [b.float() for b in batches_for(case)[0]])
    return run(case, "cpu", "eager"), exact


def check(case: Case, device: str, how: str) -> None:
    """``run`` gives what it must."""
    data, settling = batches_for(case)
    results = run(case, device, how)
    assert len(results) == len(data)
    for i, (got, cpu, exact) in enumerate(zip(results, *references(case))):
        assert_close(case, got, cpu, exact, rows=int(data[i].m_splits.sum()), settled=i >= settling)


def pile_up(device: torch.device) -> None:
    """Keep a GPU busy, so that launches wait for each other on it and not for the host."""
    if device.type == "cuda":
        torch.cuda._sleep(20_000_000)  # cycles, some ten milliseconds


def eagerly(call: Callable, mlp: tgl.GroupedMLP, batches: list[Batch]) -> list[dict[str, Tensor]]:
    pile_up(batches[0].x.device)
    return [step(call, mlp, data) for data in batches]


def compiled(call: Callable, mlp: tgl.GroupedMLP, batches: list[Batch]) -> list[dict[str, Tensor]]:
    """One graph for every routing."""
    whole = torch.compile(call, fullgraph=True)
    found = [step(whole, mlp, batches[0])]
    with torch._dynamo.config.patch(error_on_recompile=True):
        return found + [step(whole, mlp, data) for data in batches[1:]]


def traced(call: Callable, mlp: tgl.GroupedMLP, batches: list[Batch]) -> list[dict[str, Tensor]]:
    """Compiled without Inductor, which takes a tenth of the time."""
    whole = torch.compile(call, fullgraph=True, backend="aot_eager")
    return [step(whole, mlp, data) for data in batches]


def captured(call: Callable, mlp: tgl.GroupedMLP, batches: list[Batch]) -> list[dict[str, Tensor]]:
    """One CUDA graph for every routing, made on the first batch."""
    held = Batch(*(t.clone() for t in batches[0]))
    state = {name: t.clone() for name, t in mlp.state_dict().items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(call, mlp, held)
    torch.cuda.current_stream().wait_stream(stream)
    mlp.load_state_dict(state)  # histories have moved on
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(call, mlp, held)
    found = []
    pile_up(held.x.device)
    for data in batches:
        for place, value in zip(held, data):
            place.copy_(value)
        graph.replay()
        found.append({name: t.clone() for name, t in results.items()})
    return found


WAYS = {"eager": eagerly, "compiled": compiled, "traced": traced, "captured": captured}


# --- bounds -----------------------------------------------------------------------------------------------------------


def norm(t: Tensor) -> float:
    return float(t.double().norm())


def assert_close(
    case: Case,
    got: dict[str, Tensor],
    cpu: dict[str, Tensor],
    exact: dict[str, Tensor],
    *,
    rows: int = sum(SIZES),
    settled: bool = True,
) -> None:
    """``got`` is what the CPU computes in the same recipe, and that is the exact result up to its roundings.

    The two may differ by half of what the recipe costs against float32, and by one last rounding of the result. What
    the recipe costs are the independent errors of the six operands of three GEMMs in a row, each of half a step at
    most; before delayed scaling has ``settled`` on scales it may cost anything.
    """
    assert got.keys() == cpu.keys() == exact.keys()
    eps = torch.finfo(F16 if case.dtype == "fp16" else BF16).eps
    for name in exact:
        ours, theirs, wanted = (t[name].detach().double().cpu() for t in (got, cpu, exact))
        if name in ("y", "x", "probs"):
            assert not ours[rows:].any(), name
            ours, theirs, wanted = ours[:rows], theirs[:rows], wanted[:rows]
        size, cost, gap = norm(wanted), norm(theirs - wanted), norm(ours - theirs)
        if settled:
            limit = math.sqrt(6) * HALF_STEP[case.recipe] * size
            assert cost <= limit, f"{name}: the CPU is off by {cost:.3g}, at most {limit:.3g} of {size:.3g}"
        limit = cost / 2 + eps * size
        assert gap <= limit, f"{name}: {gap:.3g} from the CPU, at most {limit:.3g} of {size:.3g}"

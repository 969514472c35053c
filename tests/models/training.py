"""Trains a small model in one way, and holds every gradient against the model in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

import tgl

from .cases import THEIRS, Case
from .families import Model, Size, make

MICROBATCHES, STEPS = 2, 20

# The most that the norm of a gradient's error may be of its norm. Of the dtypes: what two or three blocks of a few
# roundings to nearest make of their unit roundoff, 2^-24 and 2^-9. Of the formats: both operands of every product are
# rounded, to 3 bits of mantissa (E4M3; E5M2, of gradients in the FP8 recipes of one scale, has 2) or to E2M1's 1. A
# gradient that is lost, doubled, of another layer or of other rows is 1 away and more.
BOUNDS = {
    "float32": 2e-5,
    "bfloat16": 0.04,
    "autocast": 0.04,
    "mxfp8": 0.15,
    "fp8_block": 0.15,
    "fp8_current": 0.2,
    "fp8_delayed": 0.2,
    "nvfp4": 0.6,
}


def check(case: Case, size: Size, device: str = "cpu", backend: str = "inductor") -> None:
    """Every gradient of two microbatches, one by one, and a loss that falls in ``STEPS`` steps.

    Args:
        case: which model, and how it is trained.
        size: of the model.
        device: where it is trained.
        backend: what compiles it, in the mode ``"compiled"``.
    """
    model = make(case, size, device)
    run = prepared(case, model, backend)
    wanted = gradients_of_reference(model)
    clear(model)
    for _ in range(MICROBATCHES):
        loss = run()
    found = gradients(model)
    assert found.keys() == wanted.keys()
    bound = BOUNDS[case.precision if case.recipe == "none" else case.recipe]
    errors = {name: error(found[name], exact) for name, exact in wanted.items()}
    wrong = {name: e for name, e in errors.items() if not e <= bound}  # NaN is not
    if wrong and case.family in THEIRS and case.precision != "float32":
        theirs = errors_of_their_own(case, size, device, wanted)
        wrong = {name: e for name, e in wrong.items() if not e <= 2 * theirs[name]}
    assert not wrong, f"away from float64 by more than {bound}: {wrong}"
    losses = curve(model, run)
    assert all(map(math.isfinite, losses)), losses
    assert losses[-1] < 0.9 * losses[0], losses
    assert abs(losses[0] - float(loss)) <= bound * losses[0]


def error(found: Tensor, exact: Tensor) -> float:
    """Relative to the norm of ``exact``; of an expert without rows, whose gradient is zero, absolute."""
    norm = float((found.double() - exact).norm())
    return norm / (float(exact.norm()) or 1)


def errors_of_their_own(case: Case, size: Size, device: str, wanted: dict[str, Tensor]) -> dict[str, float]:
    """Errors of transformers' own experts: sums that nearly cancel have errors of any size."""
    model = make(case._replace(mode="eager", training="plain"), size, device)
    model.module.model.set_experts_implementation("eager")
    with torch.autocast(device, torch.bfloat16, enabled=case.precision == "autocast"):
        y = model.module(*model.arguments)
    (MICROBATCHES * (y.float() - model.target).square().mean()).backward()
    found = gradients(model)
    return {name: error(found[name], exact) for name, exact in wanted.items()}


def prepared(case: Case, model: Model, backend: str) -> Callable[[], Tensor]:
    """A function that adds the gradients of a microbatch and returns its loss, warmed up."""
    x, *rest = model.arguments
    for layer in layers(model.module):
        if layer.delay_wgrad_compute:
            # A token of ``MoE`` is as many rows as it has experts.
            layer.reserve_delayed_wgrad(2 * x.shape[0], MICROBATCHES, dtype=compute_dtype(case))
        if layer.fuse_wgrad_accumulation:
            give_main_grad(layer)
    call: Callable = model.module
    if case.mode == "compiled":
        call = torch.compile(call, fullgraph=True, backend=backend)

    def microbatch() -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=case.precision == "autocast"):
            y = call(x, *rest)
        loss = (y.float() - model.target).square().mean()
        loss.backward()
        for layer in layers(model.module):
            layer.backward_dw()
        return loss.detach()

    if case.mode == "captured":
        return captured(microbatch, model)
    microbatch()  # scales of a delayed recipe come from a call before
    return microbatch


def captured(microbatch: Callable[[], Tensor], model: Model) -> Callable[[], Tensor]:
    """``microbatch`` in a CUDA graph, which adds to the gradients that are there."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            microbatch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = microbatch()

    def replay() -> Tensor:
        graph.replay()
        return loss.clone()

    return replay


def compute_dtype(case: Case) -> torch.dtype:
    return torch.float32 if case.precision == "float32" else torch.bfloat16


def layers(module: nn.Module) -> list[tgl.GroupedLinear]:
    return [layer for layer in module.modules() if isinstance(layer, tgl.GroupedLinear)]


def give_main_grad(layer: tgl.GroupedLinear) -> None:
    """Float32 buffers for the weights, those of discrete ones in one allocation."""
    weights = [p for name, p in layer.named_parameters(recurse=False) if name.startswith("weight")]
    whole = torch.zeros(len(weights), *weights[0].shape, device=weights[0].device)
    for weight, main_grad in zip(weights, whole.unbind()):
        weight.main_grad = main_grad


def gradient(t: Tensor) -> Tensor | None:
    """Return ``main_grad`` if the tensor has one, else ``grad``."""
    main_grad = getattr(t, "main_grad", None)
    if main_grad is None:
        return t.grad
    assert t.grad is None
    return main_grad


def leaves(model: Model) -> dict[str, Tensor]:
    """Return the tensors that get gradients: the rows and every trained parameter."""
    named = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
    return {"rows": model.arguments[0], **named}


def gradients(model: Model) -> dict[str, Tensor]:
    return {name: g.detach().clone() for name, t in leaves(model).items() if (g := gradient(t)) is not None}


def clear(model: Model) -> None:
    """Zeros in the same memory, which a CUDA graph adds to."""
    for t in leaves(model).values():
        if (g := gradient(t)) is not None:
            g.zero_()


def gradients_of_reference(model: Model) -> dict[str, Tensor]:
    x = model.arguments[0].detach().double().requires_grad_()
    y = model.reference(x, *model.arguments[1:])
    trained = leaves(model).keys()
    named = {"rows": x, **{name: p for name, p in model.reference.named_parameters() if name in trained}}
    loss = MICROBATCHES * (y - model.target.double()).square().mean()
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: g for name, g in zip(named, found) if g is not None}


def curve(model: Model, run: Callable[[], Tensor]) -> list[float]:
    """The losses of ``STEPS`` steps on the same rows."""
    trained = [t for name, t in leaves(model).items() if name != "rows"]
    losses = []
    averages = [torch.zeros_like(t, dtype=torch.float32) for t in trained]
    for _ in range(STEPS):
        clear(model)
        losses.append(float(run()))
        with torch.no_grad():
            for t, average in zip(trained, averages):
                g = gradient(t)
                if g is None:
                    continue
                average.mul_(0.9).add_(g.float().sign(), alpha=0.1)
                t.sub_((average * 4e-3).to(t.dtype))
    return losses

"""Features of a training loop around an expert layer, in every recipe, on every device: see ``tests.journeys``.

Each is a function that trains a layer it is given, on the device, on the CPU, and in float32 without a recipe.
What must not change a bit is compared with the plain steps on the same device besides.
"""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tgl
from tests import chips
from tests.journeys import (
    F16,
    GROUPS,
    RECIPES,
    Batch,
    Case,
    assert_close,
    batch,
    casts,
    exact_layer,
    forward_and_loss,
    gradients,
    layer,
    step,
)

ARCH = chips.arch()
needs_gpu = (pytest.mark.gpu, pytest.mark.skipif(ARCH is None, reason="needs a device that the kernels are built for"))
ON_GPU = chips.EVERY
EVERYWHERE = [pytest.param(name, "cpu", id=f"cpu-{name}") for name in RECIPES]
EVERYWHERE += [pytest.param(name, "cuda", id=f"cuda-{name}", marks=needs_gpu) for name in ON_GPU]
everywhere = pytest.mark.parametrize("recipe, device", EVERYWHERE)

OTHER = (0, 100, 60, 100, 6)
Results = dict[str, torch.Tensor]


class Setting(NamedTuple):
    """A layer and its data on one device; ``whole`` compiles a function, or returns it."""

    mlp: torch.nn.Module
    call: Callable
    batches: list[Batch]
    whole: Callable[[Callable], Callable]


def setting(case: Case, device: str, how: str = "eager", **options: Any) -> Setting:
    mlp = layer(case, device, **options)
    whole = {"eager": lambda f: f, "compiled": lambda f: torch.compile(f, fullgraph=True)}[how]
    batches = [batch(case).to(device), batch(case, OTHER, seed=2).to(device)]
    return Setting(mlp, forward_and_loss(mlp, case, casts(case)), batches, whole)


def exact_setting(case: Case, **options: Any) -> Setting:
    mlp = exact_layer(case, **options)
    batches = [batch(case).float(), batch(case, OTHER, seed=2).float()]
    return Setting(mlp, forward_and_loss(mlp, case), batches, lambda f: f)


def assert_right(case: Case, device: str, how: str, journey: Callable[[Setting], Results], **options: Any) -> Results:
    """``journey`` on the device is what it is on the CPU; returns its results. They are sums over two microbatches."""
    got = journey(setting(case, device, how, **options))
    cpu, exact = journey(setting(case, "cpu", **options)), journey(exact_setting(case, **options))
    # Delayed scaling has not settled on scales in two steps.
    assert_close(case, got, cpu, exact, settled=case.recipe != "delayed")
    return got


def assert_same(got: Results, wanted: Results) -> None:
    assert got.keys() == wanted.keys()
    for name, t in wanted.items():
        assert torch.equal(got[name], t), name


def accumulated(given: Setting, around: Callable[[], Any] = nullcontext, **of_first_and_other: list) -> Results:
    """Two microbatches before the gradients are read; keyword arguments of the layer by microbatch."""
    call = given.whole(given.call)
    given.mlp.zero_grad()
    for i, data in enumerate(given.batches):
        with around():
            _, loss = call(*data, **{name: values[i] for name, values in of_first_and_other.items()})
        loss.backward()
    return gradients(given.mlp)


# --- what changes no bit ----------------------------------------------------------------------------------------------


def checkpointed(given: Setting) -> Results:
    call = given.whole(lambda *args: checkpoint(given.call, *args, use_reentrant=False))
    return accumulated(given._replace(call=call, whole=lambda f: f))


def offloaded(given: Setting) -> Results:
    with tgl.cpu_offload(min_bytes=0) as context:
        found = accumulated(given)
    assert context.bytes_offloaded
    return found


def weights_kept(given: Setting) -> Results:
    return accumulated(given, is_first_microbatch=[True, False])


def into_buffers(given: Setting) -> Results:
    """The result and the input's gradient in the caller's memory."""
    call, data = given.whole(given.call), given.batches[0]
    x = data.x.detach().requires_grad_()
    out, dgrad_out = torch.zeros_like(x), torch.zeros_like(x)
    given.mlp.zero_grad()
    y, loss = call(x, *data[1:], out=out, dgrad_out=dgrad_out)
    loss.backward()
    assert y.data_ptr() == out.data_ptr()
    return {"y": out, "x": dgrad_out} | gradients(given.mlp)


JOURNEYS = {"checkpoint": checkpointed, "offload": offloaded, "microbatches": weights_kept, "buffers": into_buffers}
COMPILED = [
    pytest.param(name, "cuda", journey, id=f"cuda-{name}-{journey}", marks=needs_gpu)
    for name in ON_GPU
    for journey in JOURNEYS
]


@everywhere
@pytest.mark.parametrize("journey", JOURNEYS)
def test_features_that_change_no_bit(recipe, device, journey):
    case = Case(recipe)
    got = assert_right(case, device, "eager", JOURNEYS[journey])
    # A second forward in the backward, and a weight quantised once instead of twice, move histories elsewhere.
    if recipe == "delayed" and journey in ("checkpoint", "microbatches"):
        return
    given = setting(case, device)
    if journey == "buffers":
        wanted = step(given.call, given.mlp, given.batches[0])
        wanted.pop("probs")
    else:
        wanted = accumulated(given)
    assert_same(got, wanted)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("recipe, device, journey", COMPILED)
def test_compiled_with_a_feature(recipe, device, journey):
    """The device counterpart of ``compile_tests``."""
    if (recipe, journey) != ("delayed", "checkpoint"):
        assert_right(Case(recipe), device, "compiled", JOURNEYS[journey])
        return
    # Which of the two scales a graph quantises again with is the partitioner's choice, and not that of every version.
    case = Case(recipe)
    got, exact = checkpointed(setting(case, device, "compiled")), checkpointed(exact_setting(case))
    either = [journey(setting(case, "cpu")) for journey in (checkpointed, accumulated)]
    nearer = min(either, key=lambda found: (found["fc1.weight"] - got["fc1.weight"].cpu()).norm())
    assert_close(case, got, nearer, exact, settled=False)


# --- optimizers -------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
}


def trained_by(make: Callable, steps: int = 3) -> Callable[[Setting], Results]:
    """Return the change of each parameter."""

    def journey(given: Setting) -> Results:
        optimizer = make(given.mlp.parameters())
        start = {name: p.detach().clone() for name, p in given.mlp.named_parameters()}
        for i in range(steps):
            optimizer.zero_grad()
            given.call(*given.batches[i % 2])[1].backward()
            optimizer.step()
        return {name: p.detach() - start[name] for name, p in given.mlp.named_parameters()}

    return journey


@everywhere
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(recipe, device, optimizer):
    """Parameters in float32, which a step does not round."""
    case, journey = Case(recipe, dtype="autocast"), trained_by(OPTIMIZERS[optimizer])
    got, cpu = journey(setting(case, device)), journey(setting(case, "cpu"))
    # Adam makes a step of the same size of every gradient, those that are all rounding error among them.
    assert_close(case, got, cpu, journey(exact_setting(case)), settled=optimizer == "sgd" and recipe != "delayed")


def scaled(given: Setting) -> Results:
    """Return the change of each parameter in the first step that the scaler lets through."""
    call = forward_and_loss(given.mlp, Case(), F16)
    optimizer = torch.optim.SGD(given.mlp.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(given.batches[0].x.device.type, init_scale=2.0**24, backoff_factor=2.0**-4)
    start = {name: p.detach().clone() for name, p in given.mlp.named_parameters()}
    skipped, found = 0, start
    while found is start:
        optimizer.zero_grad()
        scaler.scale(call(*given.batches[0])[1]).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() < before:
            skipped += 1
            assert all(torch.equal(p, start[name]) for name, p in given.mlp.named_parameters())
        else:
            found = {name: p.detach() - start[name] for name, p in given.mlp.named_parameters()}
    assert 1 <= skipped < 5
    return found


def unscaled(given: Setting) -> Results:
    """Return ``scaled`` without a scaler."""
    step(given.call, given.mlp, given.batches[0])
    return {name: -1e-3 * grad for name, grad in gradients(given.mlp).items()}


@everywhere
def test_gradient_scaler(recipe, device):
    """Steps that overflow in float16 are skipped, and the next one has the right values."""
    case = Case(recipe, dtype="autocast")
    results = scaled(setting(case, device)), scaled(setting(case, "cpu")), unscaled(exact_setting(case))
    assert_close(case, *results, settled=recipe != "delayed")


# --- gradients elsewhere ----------------------------------------------------------------------------------------------


def into_main_grad(given: Setting) -> Results:
    """Two microbatches added to what is there, in float32; delayed gradients come with ``backward_dw``."""
    layers = {"fc1": given.mlp.fc1, "fc2": given.mlp.fc2}
    for linear in layers.values():
        weights = linear.group_parameters("weight")
        shape = linear.out_features, linear.in_features
        packed = tgl.allocate_wgrad(GROUPS, shape, torch.float32, weights[0].device).fill_(1)
        slots = packed if len(weights) > 1 else [packed[:, : shape[0]].contiguous()]
        for weight, slot in zip(weights, slots):
            weight.main_grad = slot
    accumulated(given)
    if given.mlp.fc1.delay_wgrad_compute:
        given.mlp.backward_dw()
    found = {name: t for name, t in gradients(given.mlp).items() if "bias" in name}
    for name, linear in layers.items():
        for i, weight in enumerate(linear.group_parameters("weight")):
            found[f"{name}.weight{i}"] = weight.main_grad - 1
    return found


def plain_gradients(given: Setting) -> Results:
    """Return the gradients of ``into_main_grad``, by autograd."""
    found = accumulated(given)
    return {f"{name}0" if name.endswith("weight") else name: t for name, t in found.items()}


FORMS = {
    "packed": {},
    "discrete": {"single_grouped_weight": False},
    "delayed": {"delay_wgrad_compute": True},
    "discrete and delayed": {"single_grouped_weight": False, "delay_wgrad_compute": True},
}


@everywhere
@pytest.mark.parametrize("form", FORMS)
def test_main_grad(recipe, device, form):
    case, options = Case(recipe), {**FORMS[form], "fuse_wgrad_accumulation": True}
    got, cpu = (into_main_grad(setting(case, on, **options)) for on in (device, "cpu"))
    exact = plain_gradients(exact_setting(case, single_grouped_weight="single_grouped_weight" not in options))
    assert_close(case, got, cpu, exact, settled=recipe != "delayed")


# --- several at once --------------------------------------------------------------------------------------------------


def steps_of(given: Setting) -> list[Results]:
    return [step(given.call, given.mlp, data) for data in given.batches * 2]


@everywhere
def test_threads(recipe, device):
    """Each thread has a layer of its own, and on a GPU a stream; what they share, plans and memory, is ours."""
    cases = [Case(recipe, widths=widths) for widths in ("aligned", "72x40", "aligned", "100x60")]
    wanted = [steps_of(setting(case, device)) for case in cases]
    settings = [setting(case, device) for case in cases]
    found: list[Any] = [None] * len(cases)
    barrier = threading.Barrier(len(cases))

    def work(i):
        try:
            barrier.wait()
            if device == "cuda":
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.default_stream())
                with torch.cuda.stream(stream):
                    found[i] = steps_of(settings[i])
                stream.synchronize()
            else:
                found[i] = steps_of(settings[i])
        except Exception as error:
            found[i] = error

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for got, want in zip(found, wanted):
        if isinstance(got, Exception):
            raise got
        for one, other in zip(got, want, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("recipe", [pytest.param(name, marks=needs_gpu) for name in ON_GPU])
def test_streams(recipe):
    """Two layers whose steps alternate on two streams, each after a kernel that takes long."""
    cases = [Case(recipe), Case(recipe, widths="72x40")]
    wanted = [steps_of(setting(case, "cuda")) for case in cases]
    settings = [setting(case, "cuda") for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    found: list[list[Results]] = [[] for _ in cases]
    for i in range(4):
        for given, stream, results in zip(settings, streams, found):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10_000_000)
                made = step(given.call, given.mlp, given.batches[i % 2])
                results.append({name: t.clone() for name, t in made.items()})
    torch.cuda.synchronize()
    for got, want in zip(found, wanted):
        for one, other in zip(got, want, strict=True):
            assert_same(one, other)

"""Memory that runs out, an interrupt or a user's exception anywhere in a step: afterwards a layer goes on as if new.

What had ended before the fault has taken effect, as in autograd everywhere: ``recover`` is all that a user has to do
before the step is repeated, and ``docs/training.md`` says so.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tgl
from tests import chips
from tests.journeys import HALF_STEP, RECIPES
from tgl.meta.components import Components, SizedComponents
from tgl.meta.specs import TensorSpec

ARCH = chips.arch()
needs_gpu = (pytest.mark.gpu, pytest.mark.skipif(ARCH is None, reason="needs a device that the kernels are built for"))
ON_GPU = chips.RECIPES[ARCH or "sm_90"]
G, H, I, T = 3, 32, 48, 40
SPLITS = (17, 0, 20)

OPTIONS = {
    "plain": {},
    "discrete": {"single_grouped_weight": False},
    "main_grad": {"fuse_wgrad_accumulation": True},
    "delayed": {"delay_wgrad_compute": True},
    "delayed into main_grad": {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True},
    "recompute": {"recompute_activation": True},
}
ALL = [(recipe, name) for recipe in RECIPES for name in OPTIONS if (recipe, name) != ("delayed", "recompute")]
# Each recipe with two options, each option with two recipes.
SOME = [(recipe, list(OPTIONS)[(i + j) % 6]) for i, recipe in enumerate(RECIPES) for j in (0, 2)]
EVERYWHERE = [pytest.param(*case, "cpu", id=f"cpu-{'-'.join(case)}") for case in SOME if case in ALL]
EVERYWHERE += [
    pytest.param(*case, "cuda", id=f"cuda-{'-'.join(case)}", marks=needs_gpu) for case in ALL if case[0] in ON_GPU
]
everywhere = pytest.mark.parametrize("recipe, name, device", EVERYWHERE)


def make(recipe, name, device):
    torch.manual_seed(0)
    mlp = tgl.GroupedMLP(
        G, H, I, bias=True, params_dtype=torch.bfloat16, recipe=RECIPES[recipe], device=device, **OPTIONS[name]
    )
    if mlp.fc1.fuse_wgrad_accumulation:
        for linear in (mlp.fc1, mlp.fc2):
            linear.weight.main_grad = torch.zeros(linear.weight.shape, device=device)
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(T, H, generator=generator).bfloat16(), torch.tensor(SPLITS), torch.rand(T, generator=generator)]
    return mlp, [t.to(device) for t in data]


def step(mlp, data, *, hook=None, first=None):
    x, splits, probs = data
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    y = mlp(x, splits, probs, is_first_microbatch=first)
    if hook is not None:
        y.register_hook(hook)
    y.sum().backward()
    if mlp.fc1.delay_wgrad_compute:
        mlp.backward_dw()
    return {"y": y.detach(), "x": x.grad, "probs": probs.grad} | gradients(mlp)


def gradients(mlp):
    found = {}
    for name, p in mlp.named_parameters():
        value = getattr(p, "main_grad", None)
        found[name] = (p.grad if value is None else value).clone()
    return found


def recover(mlp):
    """Drop what the failed step has left, before it is repeated."""
    if mlp.fc1.delay_wgrad_compute:
        mlp.backward_dw()
    mlp.zero_grad()
    for p in mlp.parameters():
        if getattr(p, "main_grad", None) is not None:
            p.main_grad.zero_()


def assert_same(got, wanted):
    assert got.keys() == wanted.keys()
    for name, t in wanted.items():
        assert torch.equal(got[name], t), name


class Fault:
    """Raises at the ``at``-th event; counts the events otherwise."""

    def __init__(self, at, error):
        self.at, self.error, self.count = at, error, 0

    def event(self):
        self.count += 1
        if self.count == self.at:
            raise self.error


class OutOfMemory(Fault):
    """Raise an out-of-memory error for each output of an op, one after the other."""

    def __init__(self, at):
        super().__init__(at, torch.OutOfMemoryError("no memory, on purpose"))

    def __enter__(self):
        self.patch, empty = pytest.MonkeyPatch(), TensorSpec.empty

        def allocate(spec):
            self.event()
            return empty(spec)

        self.patch.setattr(TensorSpec, "empty", allocate)
        self.patch.setattr(SizedComponents, "empty", lambda sized: Components(*map(allocate, sized.specs())))
        return self

    def __exit__(self, *_):
        self.patch.undo()


class Interrupt(Fault):
    """Raise before each op of the package, and after the last."""

    def __init__(self, at):
        super().__init__(at, KeyboardInterrupt())

    def __enter__(self):
        fault = self

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, op, types, args=(), kwargs=None):
                if op.namespace == "tgl":
                    fault.event()
                return op(*args, **(kwargs or {}))

        self.mode = Watch()
        self.mode.__enter__()
        return self

    def __exit__(self, *error):
        self.mode.__exit__(*error)


FAULTS = {"memory": OutOfMemory, "interrupt": Interrupt}


@pytest.mark.cover(1)
@everywhere
@pytest.mark.parametrize("kind", FAULTS)
def test_a_step_after_a_fault_at_every_point(recipe, name, device, kind):
    mlp, data = make(recipe, name, device)
    state = {key: t.clone() for key, t in mlp.state_dict().items()}
    with FAULTS[kind](0) as fault:
        wanted = step(mlp, data)
    points = fault.count
    assert points >= 3
    for at in range(1, points + 1):
        mlp, data = make(recipe, name, device)
        mlp.load_state_dict(state)
        fault = FAULTS[kind](at)
        with pytest.raises(type(fault.error)), fault:
            step(mlp, data)
        recover(mlp)
        if recipe in ("delayed", "nvfp4"):  # histories and seeds have moved on, as by any call
            assert all(bool(t.isfinite().all()) for t in step(mlp, data).values())
            recover(mlp)
            mlp.load_state_dict(state)
        assert_same(step(mlp, data), wanted)


@everywhere
def test_an_exception_of_a_hook_between_forward_and_backward(recipe, name, device):
    mlp, data = make(recipe, name, device)
    state = {key: t.clone() for key, t in mlp.state_dict().items()}
    wanted = step(mlp, data)
    recover(mlp)
    mlp.load_state_dict(state)

    def hook(grad):
        raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError):
        step(mlp, data, hook=hook)
    mlp.load_state_dict(state)
    # Nothing has been formed, and nothing is pending: there is nothing to give up.
    assert all(p.grad is None for p in mlp.parameters())
    assert_same(step(mlp, data), wanted)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "none"])
@pytest.mark.parametrize("kind", FAULTS)
def test_a_kept_weight_is_the_new_one_or_none(recipe, kind):
    """A fault while it is quantised again must not leave the old weight, or half of the new, for later microbatches."""
    torch.manual_seed(0)
    refused = 0
    for at in range(1, 4):
        linear = tgl.GroupedLinear(G, H, I, bias=False, params_dtype=torch.bfloat16, recipe=RECIPES[recipe])
        x, offs = torch.randn(T, H).bfloat16(), torch.tensor(SPLITS).cumsum(0).int()
        with torch.no_grad():
            before = linear.forward_offsets(x, offs, is_first_microbatch=True)
            linear.weight.neg_()
        fault = FAULTS[kind](at)
        with pytest.raises(type(fault.error)), fault, torch.no_grad():
            linear.forward_offsets(x, offs, is_first_microbatch=True)
        try:
            got = linear.forward_offsets(x, offs, is_first_microbatch=False)
        except RuntimeError as error:
            refused += "must be True in the first call, in the first after load_state_dict, and after" in str(error)
            got = linear.forward_offsets(x, offs, is_first_microbatch=True)
        # To the bit, but where the scales of delayed scaling have moved on; the old weight is off by twice the result.
        off = float((got.detach() + before).float().norm() / before.float().norm())
        assert off <= (HALF_STEP[recipe] if recipe == "delayed" else 0)
    assert refused >= (kind == "interrupt")


@pytest.mark.parametrize("kind", FAULTS)
def test_offloading_ends_with_its_context(kind):
    mlp, data = make("current", "plain", "cpu")
    wanted = step(mlp, data)
    with pytest.raises(type(FAULTS[kind](1).error)), tgl.cpu_offload(min_bytes=0), FAULTS[kind](3):
        step(mlp, data)
    recover(mlp)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        assert_same(step(mlp, data), wanted)
    assert seen
    recover(mlp)
    with tgl.cpu_offload(min_bytes=0) as context:
        assert_same(step(mlp, data), wanted)
    assert context.bytes_offloaded


def test_delayed_copies_after_a_fault():
    """Places reserved for microbatches are given back by ``backward_dw``, which forms what has ended."""
    mlp, data = make("current", "delayed", "cpu")
    mlp.reserve_delayed_wgrad(T, microbatches=1)
    wanted = step(mlp, data)
    for at in range(1, 12):
        recover(mlp)
        with pytest.raises(KeyboardInterrupt), Interrupt(at):
            step(mlp, data)
        recover(mlp)
        assert_same(step(mlp, data), wanted)


def bytes_free():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("copies", [False, True], ids=["references", "copies"])
def test_no_microbatch_is_added_twice(copies, monkeypatch):
    """``backward_dw`` fails between two pending microbatches."""
    torch.manual_seed(0)
    layer = tgl.GroupedLinear(G, H, I, delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(layer.weight.shape)
    if copies:
        layer.reserve_delayed_wgrad(T, microbatches=2)
    x, splits = torch.randn(T, H), torch.tensor(SPLITS)

    def two_microbatches():
        for _ in range(2):
            layer(x, splits).sum().backward()

    two_microbatches()
    layer.backward_dw()
    wanted = layer.weight.main_grad.clone()
    layer.weight.main_grad.zero_()
    layer.zero_grad()

    two_microbatches()
    add, calls = layer.gemms.wgrad_into, []

    def second_fails(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("planted")
        add(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(layer.gemms, "wgrad_into", second_fails)
        with pytest.raises(RuntimeError, match="zero main_grad and repeat the step") as caught:
            layer.backward_dw()
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    half = layer.weight.main_grad.clone()
    assert half.any()
    layer.backward_dw()
    assert torch.equal(layer.weight.main_grad, half)

    layer.weight.main_grad.zero_()
    layer.zero_grad()
    two_microbatches()
    layer.backward_dw()
    assert torch.equal(layer.weight.main_grad, wanted)


@pytest.mark.parametrize("recipe", [pytest.param(name, marks=needs_gpu) for name in ON_GPU])
@pytest.mark.parametrize("name", ["plain", "delayed into main_grad"])
def test_a_device_without_memory(recipe, name):
    """The device filled but for ever more, until a step fits: before that it fails somewhere, and then works again."""
    torch.manual_seed(0)
    hidden, rows = 1024, 1 << 16
    mlp = tgl.GroupedMLP(
        8, hidden, hidden, params_dtype=torch.bfloat16, recipe=RECIPES[recipe], device="cuda", **OPTIONS[name]
    )
    if mlp.fc1.fuse_wgrad_accumulation:
        for linear in (mlp.fc1, mlp.fc2):
            linear.weight.main_grad = torch.zeros(linear.weight.shape, device="cuda")
    x, splits = torch.randn(rows, hidden, device="cuda").bfloat16(), torch.full((8,), rows // 8, device="cuda")
    data = [x, splits, torch.rand(rows, device="cuda")]
    state = {key: t.clone() for key, t in mlp.state_dict().items()}
    wanted = step(mlp, data)
    failed = 0
    for room in range(64, 4096, 128):  # MiB
        recover(mlp)
        mlp.load_state_dict(state)
        filling = torch.empty(max(0, bytes_free() - (room << 20)), dtype=torch.uint8, device="cuda")
        try:
            step(mlp, data)
        except torch.OutOfMemoryError:
            failed += 1
        else:
            break
        finally:
            del filling
        torch.cuda.empty_cache()
        recover(mlp)
        mlp.load_state_dict(state)
        assert_same(step(mlp, data), wanted)
    assert failed >= 3

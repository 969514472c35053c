"""The arguments of a launch are as declared to the compiler, for every op, layout, width and routing."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests import layouts
from tgl import backends
from tgl.cutlass_kernels.runtime import compiling, launcher
from tgl.testing import GroupSizes

ROUTINGS = [layouts.ROUTING, GroupSizes("no rows", (0, 0, 0), 0), GroupSizes("a tail alone", (0, 0), 4)]
CHIPS = "sm_80", "sm_90", "sm_100"


def misfit(promised, given) -> str | None:
    """Return how an argument differs from its stand-in in ``compiling``, or None; as a compiled kernel checks it."""
    if promised is None or given is None:
        return None if promised is given else f"{given} for {promised}"
    if not isinstance(given, torch.Tensor):
        return f"{given} for a tensor" if hasattr(promised, "stride") else None
    if len(promised.shape) != given.dim():
        return f"{given.dim()} dimensions for {len(promised.shape)}"
    pairs = [*zip(promised.shape, given.shape), *zip(promised.stride, given.stride())]
    for wanted, got in pairs:
        if got != wanted if isinstance(wanted, int) else got % wanted.divisibility:
            return f"{got} for {wanted} in sizes {tuple(given.shape)}, strides {given.stride()}"
    if given.numel() and given.data_ptr() % promised._assumed_align:
        return f"an address that {promised._assumed_align} does not divide"
    return None


@pytest.fixture
def launches(monkeypatch):
    """Counts launches, and looks at their arguments; nothing is compiled."""
    seen = []

    def compiled(arch, kernel, *promised, chip=None):
        def launch(*given):
            found = [f"argument {i}: {misfit(*pair)}" for i, pair in enumerate(zip(promised, given)) if misfit(*pair)]
            seen.append(f"{type(kernel).__name__}: {'; '.join(found)}" if found else None)

        return launch

    monkeypatch.setattr(compiling, "compiled", compiled)
    monkeypatch.setattr(launcher, "compiled_kernels", {})
    monkeypatch.setattr(launcher, "warm_plans", {})
    return seen


def test_a_misfit_is_seen():
    bf16 = torch.bfloat16
    promised = compiling.matrix("bfloat16")
    assert misfit(promised, torch.zeros(0, 24, dtype=bf16)) is None
    assert misfit(promised, torch.zeros(4, 40, dtype=bf16)[:, :37]) is None
    assert "37 for" in misfit(promised, torch.zeros(0, 37, dtype=bf16))
    assert "1 for" in misfit(promised, torch.zeros(8, 4, dtype=bf16).t())
    assert "address" in misfit(promised, torch.zeros(33, dtype=bf16)[1:].view(4, 8))
    assert misfit(promised, torch.zeros(8, dtype=bf16)) == "1 dimensions for 2"
    assert misfit(None, None) is None
    assert misfit(promised, None)
    assert misfit(None, torch.zeros(1))


@pytest.mark.parametrize("arch", CHIPS)
@pytest.mark.parametrize("name", layouts.OPS)
def test_every_launch_is_what_was_compiled(launches, monkeypatch, name, arch):
    wrong = []
    with backends.emulated_device(arch):
        for routing in ROUTINGS:
            monkeypatch.setattr(layouts, "ROUTING", routing)
            before = len(launches)
            for call in layouts.calls(name):
                args, named = call.arguments()
                call.op(*args, **named)
                wrong += [f"{call} {m}" for m in launches[before:] if m is not None]
                before = len(launches)
    assert not wrong, f"{len(wrong)} of {len(launches)} launches, the first: {wrong[0]}"


@pytest.mark.parametrize("inner", [36, 37, 40])
@pytest.mark.parametrize("kind, format", [("swiglu", "mxfp8"), ("srelu", "mxfp8"), ("swiglu", "fp8_block")])
def test_activations_on_their_way_to_a_quantiser(launches, kind, format, inner):
    x = torch.zeros(0, inner * 2 if kind == "swiglu" else inner, dtype=torch.bfloat16)
    offs = torch.zeros(3, dtype=torch.int32)
    with backends.emulated_device("sm_90"):
        torch.ops.tgl.grouped_activation_quantize(x, offs, kind=kind, format=format)
        tgl.group_quantize(x, offs, format=format)
    assert launches
    assert not any(launches), launches

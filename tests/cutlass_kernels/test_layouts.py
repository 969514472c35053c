"""Every op takes on CUDA what its CPU implementation takes, wherever it lies: by ``explain``, and in the emulator."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests import layouts
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS
from tgl.testing import emulate

BF16 = torch.bfloat16

LACKING = {"sm_90": {"mxfp8", "nvfp4", "mxfp4"}, "sm_100": {"mxfp4"}}
"""Formats whose GEMMs an architecture has no kernels for, and emulates. What kernels reach is one table for all."""
BY_HOST = {
    f"grouped_gemm{name}"
    for name in (
        "",
        "_activation",
        "_dactivation",
        "_low_rank",
        "_low_rank_activation",
        "_packed",
        "_wgrad",
        "_wgrad_accumulate_",
    )
} | {"moe"}
"""Ops without a kernel for float32 that read group ends on the host, themselves or in one of their parts."""


def no_address(fake):
    """torch warns, and makes one up."""
    raise AssertionError("a fake tensor was asked where it lies")


def on_cuda(value, mode):
    """A fake of ``value`` on a GPU, its strides and where it begins included."""
    if not isinstance(value, torch.Tensor):
        return value
    extent = value.storage_offset() + 1
    if value.numel():
        extent += sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
    with mode:
        room = torch.empty(extent, dtype=value.dtype, device="cuda")
        return room.as_strided(value.shape, value.stride(), value.storage_offset())


@pytest.fixture
def gpu(monkeypatch):
    """Lets fake CUDA tensors be of an architecture."""
    mode = FakeTensorMode()
    monkeypatch.setattr(torch._subclasses.fake_tensor.FakeTensor, "data_ptr", no_address)
    yield mode, lambda arch: monkeypatch.setattr(backends.target, "cuda_arch", lambda device: arch)
    backends.registry.forget_candidates()


def in_full(name):
    """Return whether only ``make test-full`` runs the case: the op without ``.out`` has its operands and layouts."""
    return name.startswith("grouped_gemm_scaled") and name.endswith((".out", "accumulate_"))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * in_full(n)) for n in layouts.OPS])
def test_a_layout_or_width_is_never_a_reason(gpu, name):
    """Every layout and width runs on the same kernel as the contiguous, aligned call, without the host."""
    mode, pretend = gpu
    served: dict[tuple, bool] = {}
    for call in layouts.calls(name):
        args, named = call.arguments()
        args = tuple(on_cuda(t, mode) for t in args)
        named = {key: on_cuda(t, mode) for key, t in named.items()}
        for arch in LACKING:
            pretend(arch)
            with mode:
                explanation = tgl.explain(call.op, *args, **named)
            fine = explanation.chosen is not None and not explanation.syncs
            if call.is_plain:
                served[(arch, *call.plain)] = fine
                format = call.sample.options.get("format")
                lacking = "gemm_scaled" in name and format in LACKING[arch]
                assert explanation.emulates == (lacking and "activation" not in name), f"{call}\n{explanation}"
                by_host = name.partition(".")[0] in BY_HOST and call.sample.dtype == torch.float32
                assert fine == (not by_host), f"{call}\n{explanation}"
            elif served.get((arch, *call.plain), False):
                assert fine, f"{call}\n{explanation}"
            if explanation.chosen is not None:
                runs = explanation.chosen.name
                copies = bool(explanation.copies)
                assert copies == ("between copies" in runs) or runs.startswith("loop of"), f"{call}\n{explanation}"
    assert served


PLACES = {
    "padded": lambda: torch.arange(24.0).view(4, 6)[:, 1:4],
    "swapped": lambda: torch.arange(24.0).view(4, 6).t(),
    "one value": lambda: torch.ones(1, 1).expand(4, 6),
    "one element on": lambda: layouts.shifted(torch.arange(24.0).view(4, 6).to(torch.float8_e4m3fn)),
    "no elements": lambda: torch.zeros(4, 6)[2:, 3:3],
    "no memory": lambda: torch.zeros(12, 0, dtype=torch.uint8),
    "a scalar": lambda: torch.arange(3)[2],
}


@pytest.mark.parametrize("place", PLACES)
def test_what_moves_to_a_device_lies_there_as_it_did(place):
    t = PLACES[place]()
    copy = layouts.placed(t, "cpu")
    assert (copy.shape, copy.dtype) == (t.shape, t.dtype)
    assert (copy.stride(), copy.storage_offset()) == (t.stride(), t.storage_offset())
    assert torch.equal(copy.float(), t.float())
    assert not t.numel() or copy.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()


def check(call) -> bool:
    """Compare an emulated chip, one that has the format if any, with the CPU, in the memory that the fake announces.

    False of a call that no kernel takes: steps of aten serve it on a GPU, as `explain` has been asked above.
    """
    format = call.sample.options.get("format")
    able = [arch for arch in LACKING if "gemm" not in call.name or format not in LACKING[arch]]
    arch = ARCHS[[*able, *LACKING][0]].target
    with emulate(arch):
        args, named = call.arguments()
        explanation = tgl.explain(call.op, *args, **named)
        assert explanation.chosen, f"{call}\n{explanation}"
    if explanation.chosen.device != "cuda":
        return False
    assert layouts.check(call, "cpu", emulate(arch, detect_races=False))
    return True


FEW = {
    "grouped_gemm": lambda c: c.width in ("none x 24", "37 x 23") and c.sample.dtype == BF16,
    "grouped_gemm_dactivation": lambda c: c.placing == "one value" and c.width == "72 x 40" and c.sample.dtype == BF16,
    "grouped_gemm_scaled": lambda c: (
        c.sample.options["scale_layout"] == "compact" and c.width in ("72 x 40", "none x 24")
    ),
    "grouped_gemm_scaled_wgrad": lambda c: c.sample.options["format"] == "fp8_block" and c.width == "37 x 23",
    "group_quantize": lambda c: c.sample.options["format"] == "fp8_tensor" and c.width == "none x 24",
    "group_quantize.out": lambda c: c.sample.options["format"] == "mxfp8" and c.width == "100 x 60" and c.sample.given,
}
"""Of an op, calls that no other module has; one layout each."""


@pytest.mark.parametrize("name", FEW)
def test_few_in_the_emulator(name):
    chosen = layouts.cover(filter(FEW[name], layouts.calls(name)), 1)
    assert chosen
    for call in chosen[:3]:
        assert check(call)


@pytest.mark.slow
@pytest.mark.parametrize("strength", [1, 2])
@pytest.mark.parametrize("name", layouts.OPS)
def test_a_cover_in_the_emulator(name, strength):
    assert sum(check(call) for call in layouts.cover(layouts.calls(name), strength))

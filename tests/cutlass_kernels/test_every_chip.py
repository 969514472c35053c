"""Kernels for every dense op on every chip: ``explain`` names one, and the emulator runs it for that chip.

Quantisers, their opposite and activations with one are tried in every format.
"""

import itertools
import re

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from tests import kernels_of_warps
from tests.chips import parameters
from tests.kernel_cases import ends
from tests.memory import same_bytes
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS, PAIRED, PAIRED_ACTIVATED, SYMMETRIC, arch_of, chips, having
from tgl.cutlass_kernels.launchers.quantize import WRITTEN
from tgl.cutlass_kernels.launchers.requantize import DECODED
from tgl.meta.formats import FORMATS
from tgl.testing import GroupSizes, emulate
from tgl.testing.signatures import sample_call

SIZES, ROWS = (5, 0, 9), 16
ROUTING, WIDTHS = GroupSizes("few", SIZES, ROWS), {"K": 16, "M": 16, "N": 32, "I": 32, "R": 8}
EXACT = {"kind": "relu"}  # integers stay integers
# What a call has besides operands in bfloat16: a bias, weights or a gradient in float32, another dtype.
AXES: dict[str, dict] = {
    "combine": {"given": ("weights",), "wide": True},
    "combine_backward": {"wide": True},
    "grouped_activation": EXACT,
    "grouped_activation_backward": EXACT,
    "grouped_gemm": {"given": ("bias",)},
    "grouped_gemm_activation": EXACT,
    "grouped_gemm_dactivation": EXACT,
    "grouped_gemm_low_rank": {"given": ("bias",)},
    "grouped_gemm_low_rank_activation": {"given": ("bias",), **EXACT},
    "grouped_gemm_wgrad_accumulate_": {"wide": True},
    "route": {"dtype": torch.int64},
    "splits_to_offsets": {"dtype": torch.int64},
    "topk_router": {"dtype": torch.float32},
    "topk_router_backward": {"dtype": torch.float32},
}
# The architectures with one kernel for an op; elsewhere two run, and an activation.
SOMEWHERE = {
    "batched_syrk": having(SYMMETRIC),
    "grouped_gemm_low_rank": having(PAIRED),
    "grouped_gemm_low_rank_activation": having(PAIRED_ACTIVATED),
}
OF_TORCH = ("batched_syrk",)  # elsewhere no kernel runs, but products of torch


def of_kernels() -> list[str]:
    """Ops that a kernel serves, but for those on quantised operands, which name their format or scales."""

    def dense(op: str) -> bool:
        return not {"format", "a_scale"} & {a.name for a in torch._C._get_schema(f"tgl::{op}", "").arguments}

    found = (
        i.op
        for table in backends.registry.implementations.values()
        for i in table
        if (i.device, i.name) == ("cuda", "tgl kernel")
    )
    return sorted(filter(dense, found))


CALLS = {op: sample_call(op, routing=ROUTING, sizes=WIDTHS, **AXES.get(op, {})) for op in of_kernels()}
"""Arguments and options of a call of each, of small integers."""


def run(op: str) -> list[torch.Tensor]:
    """The results of its call; what it writes into is one of them."""
    args, options = CALLS[op]
    args = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    made = getattr(torch.ops.tgl, op)(*args, **options)
    return args[3:4] if made is None else [made] if isinstance(made, torch.Tensor) else list(made)


def runs() -> list:
    """Ops and chips; of chips with the GEMM kernels of one before them the first op that multiplies, the rest slow."""
    usual = {chip for one in parameters() if not one.marks for chip in ARCHS[one.values[0]].chips}

    def marks(op: str, chip: str):
        return () if chip in usual or op == "grouped_gemm" else pytest.mark.slow

    pairs = [(op, chip) for chip, op in itertools.product(chips(), CALLS)]
    launched = [(op, chip) for op, chip in pairs if op not in OF_TORCH or arch_of(chip).name in SOMEWHERE[op]]
    return [pytest.param(op, chip, marks=marks(op, chip)) for op, chip in launched]


@pytest.mark.parametrize("chip", chips())
def test_a_kernel_is_named(chip):
    with backends.compile_only(chip):
        for op, (args, options) in CALLS.items():
            one = arch_of(chip).name in SOMEWHERE.get(op, ARCHS)
            assert (backends.explain(op, *args, **options).chosen.name == "tgl kernel") == one, op


@pytest.mark.parametrize(("op", "chip"), runs())
def test_it_runs_as_compiled_for_the_chip(op, chip):
    wanted = run(op)
    with emulate(chip, detect_races=False) as machine:
        made = run(op)
    assert {launch.arch for launch in machine.launches} == {arch_of(chip).target}
    assert all(re.fullmatch(r"tgl_[A-Z]\w+_\d+", launch.kernel) for launch in machine.launches)
    assert all(map(torch.equal, made, wanted))


QUANTISERS = [("group_quantize", name) for name in WRITTEN]
QUANTISERS += [("group_dequantize", name) for name in FORMATS]
QUANTISERS += [("group_requantize", name) for name in DECODED]
QUANTISERS += [("grouped_activation_quantize", name) for name in ("mxfp8", "fp8_block")]  # other scales are of groups


def quantiser_runs() -> list:
    """Ops, formats and chips; one fast, the rest slow."""

    def marks(*case: str):
        return () if case == ("group_quantize", "mxfp8", "sm_120") else pytest.mark.slow

    return [pytest.param(*both, chip, marks=marks(*both, chip)) for both in QUANTISERS for chip in chips()]


@pytest.mark.slices(2)
@pytest.mark.parametrize(("op", "format", "chip"), quantiser_runs())
def test_it_writes_the_bytes_of_the_cpu(op, format, chip):
    torch.manual_seed(0)
    x, offs, options = torch.randn(ROWS, 64).bfloat16(), ends(SIZES), {"format": format}
    args = x, offs
    if op in ("group_dequantize", "group_requantize"):
        q = torch.ops.tgl.group_quantize(x, offs, **options)
        args = q[0], q[1], offs, q[2] if FORMATS[format].decodes_with_amax else None
    call = getattr(torch.ops.tgl, op)
    wanted = call(*args, **options)
    with emulate(chip, detect_races=False) as machine:
        assert backends.explain(op, *args, **options).chosen.name == "tgl kernel"
        made = call(*args, **options)
    assert {launch.arch for launch in machine.launches} == {arch_of(chip).target}
    assert all(re.fullmatch(r"tgl_[A-Z]\w+_\d+", launch.kernel) for launch in machine.launches)
    for ours, theirs in zip(*([t] if isinstance(t, torch.Tensor) else t for t in (made, wanted)), strict=True):
        assert same_bytes(ours, theirs)


def test_a_hopper_in_place_of_which_they_run_offers_what_they_do():
    """Kernels that chips with mma.sync kernels lack are not looked up there, and exist again afterwards."""

    def offered(arch):
        with backends.emulated_device(arch):
            return {
                (i.op, i.name)
                for op in backends.ops()
                for i in backends.in_order(op, torch.device("cpu"))
                if i.device == "cuda"
            }

    own = offered(kernels_of_warps.PLACE)
    with kernels_of_warps.in_place():
        forced = offered(kernels_of_warps.PLACE)
    assert forced < own
    assert forced <= set().union(*(offered(name) for name, arch in ARCHS.items() if arch.folder == "mma_sync"))
    assert offered(kernels_of_warps.PLACE) == own

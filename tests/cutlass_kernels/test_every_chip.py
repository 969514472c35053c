"""On every chip kernels of tgl serve every dense op: ``explain`` names one, and the emulator runs it for that chip.

Quantisers, their opposite and activations with one are tried in every format.
"""

import itertools

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from tests import kernels_of_warps
from tests.chips import parameters
from tests.kernel_cases import ends, integers
from tests.memory import same_bytes
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS, PAIRED, PAIRED_ACTIVATED, SYMMETRIC, arch_of, chips, having
from tgl.cutlass_kernels.launchers.quantize import WRITTEN
from tgl.cutlass_kernels.launchers.requantize import DECODED
from tgl.meta.formats import FORMATS
from tgl.meta.table import OnePerName
from tgl.testing import emulate

SIZES, ROWS, K, N = (5, 0, 9), 16, 16, 32
GROUPS = len(SIZES)
EXACT = {"kind": "relu"}  # integers stay integers
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

    found = (i.op for table in backends._table.values() for i in table if (i.device, i.name) == ("cuda", "tgl kernel"))
    return sorted(filter(dense, found))


def routed(columns: int) -> torch.Tensor:
    return integers(ROWS, columns)


def places() -> tuple[torch.Tensor, torch.Tensor]:
    """The token of every row and the row of every choice: two of each of eight tokens, two of which are no expert's."""
    position = torch.randperm(ROWS, dtype=torch.int32)
    token = torch.empty(ROWS, dtype=torch.int32)
    token[position.long()] = torch.arange(ROWS, dtype=torch.int32) // 2
    token[sum(SIZES) :] = -1
    position[position >= sum(SIZES)] = -1
    return token, position


def calls() -> OnePerName:
    """Arguments and options of a call of each, of small integers; a router's scores are equal, and so are weights."""
    torch.manual_seed(0)
    offs, tokens = ends(SIZES), ROWS // 2
    b, wide = integers(GROUPS, K, N), integers(GROUPS, N)
    ids = torch.tensor([[1, 3]] * ROWS, dtype=torch.int32)
    return OnePerName(
        of_kernels(),
        "calls in tests/cutlass_kernels/test_every_chip.py",
        {
            "batched_syrk": ((b,), {}),
            "combine": ((routed(K), *places(), 2, integers(tokens, 2).float()), {}),
            "combine_backward": ((integers(tokens, K), routed(K), *places(), 2, integers(tokens, 2).float()), {}),
            "dispatch": ((integers(tokens, K), *places(), 2), {}),
            "grouped_activation": ((routed(N), offs), EXACT),
            "grouped_activation_backward": ((routed(N), routed(N), offs), EXACT),
            "grouped_dbias": ((routed(N), offs), {}),
            "grouped_dbias_dscales": ((routed(N), wide, integers(ROWS), offs), {}),
            "grouped_gemm": ((routed(K), b, offs, wide), {}),
            "grouped_gemm_activation": ((routed(K), b, offs), EXACT),
            "grouped_gemm_dactivation": ((routed(K), b, routed(N), offs), EXACT),
            "grouped_gemm_low_rank": ((routed(K), b, routed(8), integers(GROUPS, 8, N), offs, wide), {}),
            "grouped_gemm_low_rank_activation": (
                (routed(K), b, routed(8), integers(GROUPS, 8, N), offs, wide),
                EXACT,
            ),
            "grouped_gemm_wgrad": ((routed(K), routed(N), offs), {}),
            "grouped_gemm_wgrad_accumulate_": ((routed(K), routed(N), offs, torch.ones(GROUPS, K, N)), {}),
            "route": ((torch.randint(-1, GROUPS + 1, (ROWS, 2)), GROUPS), {}),
            "splits_to_offsets": ((torch.tensor(SIZES),), {}),
            "topk_router": ((torch.zeros(ROWS, 8), 2), {}),
            "topk_router_backward": ((integers(ROWS, 2).float(), torch.zeros(ROWS, 4), ids), {}),
        },
    )


CALLS = calls()


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
    with backends.emulated_device(chip):
        for op, (args, options) in CALLS.items():
            one = arch_of(chip).name in SOMEWHERE.get(op, ARCHS)
            assert (backends.explain(op, *args, **options).chosen.name == "tgl kernel") == one, op


@pytest.mark.parametrize(("op", "chip"), runs())
def test_it_runs_as_compiled_for_the_chip(op, chip):
    wanted = run(op)
    with emulate(chip, detect_races=False) as machine:
        made = run(op)
    assert {launch.arch for launch in machine.launches} == {arch_of(chip).target}
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
    for ours, theirs in zip(*([t] if isinstance(t, torch.Tensor) else t for t in (made, wanted)), strict=True):
        assert same_bytes(ours, theirs)


def test_a_hopper_in_place_of_which_they_run_offers_what_they_do():
    """Kernels of its own that no chip with MMAs of warps has are asked for nothing, and are there again behind it."""

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

"""Activations behind mma.sync, forward and backward: the bits of the kernels that do it in two launches."""

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.activation_cases import PARAMS, back_to_hidden
from tests.cutlass_kernels import activated_cases, sass, test_gemm_gradient
from tests.cutlass_kernels.matrix import REGISTER_FILE, pairwise
from tgl import backends
from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import LINE, VARLEN_M, GemmConfig
from tgl.cutlass_kernels.gemm.mma_sync.tilings import WARPS, gradient_reason
from tgl.meta.specs import TensorSpec
from tgl.testing import emulate

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (5, 0, 129, 128, 1, 0, 40)
SHORT = (5, 0, 70, 1)
NAMES = [name for name, arch in ARCHS.items() if arch.folder == "mma_sync"]


def forward(arch, shape, kind, sizes=SHORT, **rest):
    return arch, activated_cases.Case(ARCHS[arch].tilings.deepest(*shape), sizes, PARAMS[kind], **rest)


def backward(arch, shape, kind, sizes=SHORT, **rest):
    return test_gemm_gradient.Case(arch, ARCHS[arch].tilings.deepest(*shape), kind, sizes, **rest)


FORWARD = {
    "halves": forward("sm_80", (64, 128), "swiglu", bias=BF16, columns=136),
    "alternating, b row-major": forward(
        "sm_121", (128, 64), "swiglu interleaved", bias=F32, b_row_major=True, dtype=F16, out=F16, probs=F16, columns=44
    ),
    "nothing kept": forward("sm_80", (64, 128), "swiglu", bias=BF16, columns=136, keeps=False),
}
MORE_FORWARD = {
    "not gated, float32": forward("sm_89", (64, 64), "srelu", out=F32, columns=68, probs=None, tail=70),
    "many groups": forward("sm_86", (128, 128), "swiglu", RAGGED, bias=BF16),
    "largest, b row-major": forward(
        "sm_80", (128, 256), "clamped_qgeglu", (130, 0, 3), b_row_major=True, columns=264, depth=200, tail=150
    ),
    "high": forward("sm_120", (256, 128), "geglu", (257, 0, 3), bias=F32, columns=136, tail=300),
    "alternating, float32": forward("sm_86", (128, 128), "clamped_qgeglu interleaved", out=F32, columns=68),
    "all empty": forward("sm_89", (64, 128), "swiglu", (0, 0), tail=140, columns=40, bias=BF16),
    "nothing kept, alternating": forward("sm_86", (128, 128), "clamped_qgeglu interleaved", columns=68, keeps=False),
    "nothing kept, not gated": forward("sm_120", (64, 64), "srelu", columns=68, tail=70, keeps=False),
}
BACKWARD = {
    "halves, and act": backward("sm_80", (64, 128), "swiglu", act=True),
    "alternating": backward("sm_120", (64, 64), "clamped_qgeglu interleaved", columns=44, probs=F16, dtype=F16),
}
MORE_BACKWARD = {
    "not gated, b row-major": backward("sm_89", (128, 128), "srelu", probs=None, tail=70, b_row_major=True),
    "many groups": backward("sm_86", (128, 128), "swiglu", RAGGED, columns=264, depth=200),
    "alternating, and act": backward("sm_121", (128, 64), "swiglu interleaved", columns=300, act=True),
    "not gated, and act": backward("sm_80", (64, 64), "gelu", columns=136, act=True, dtype=F16),
    "all empty": backward("sm_89", (64, 64), "clamped_qgeglu", (0, 0, 0), tail=70, columns=40, act=True),
}


@pytest.mark.parametrize(("arch", "case"), FORWARD.values(), ids=FORWARD)
def test_forward(arch, case):
    record = activated_cases.run(arch, case, seeds=(0,))
    assert record.bank_conflicts == 0
    assert not record.warnings


@pytest.mark.parametrize("case", BACKWARD.values(), ids=BACKWARD)
def test_backward(case):
    record = test_gemm_gradient.run(case, seeds=(0,))
    assert record.bank_conflicts == 0
    assert not record.warnings


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "case"), [*FORWARD.values(), *MORE_FORWARD.values()], ids=[*FORWARD, *MORE_FORWARD])
def test_forward_under_many_schedules(arch, case):
    activated_cases.run(arch, case, seeds=range(1, 6))


@pytest.mark.slow
@pytest.mark.parametrize("case", [*BACKWARD.values(), *MORE_BACKWARD.values()], ids=[*BACKWARD, *MORE_BACKWARD])
def test_backward_under_many_schedules(case):
    test_gemm_gradient.run(case, seeds=range(1, 6))


@pytest.mark.slow
@pytest.mark.usefixtures("overlapping_groups")
def test_bad_offsets_stay_inside():
    test_gemm_gradient.check_bad_offsets(BACKWARD["halves, and act"])
    arch, case = FORWARD["halves"]
    for ends in ((5, 1 << 30), (70, -3), (-(1 << 31), 3), (1 << 30, 90)):
        activated_cases.run(arch, dataclasses.replace(case, sizes=(130, 20), offs=ends), seeds=(0,))


def operands(params, rows=70, depth=48, columns=40):
    """Tokens, an index of rows of them, matrices of both directions, offsets, the activation's input, probabilities."""
    wide = params.activation.width(columns)
    tokens, index = torch.randn(20, depth).to(BF16), torch.randint(0, 20, (rows,), dtype=torch.int32)
    b1, b2 = torch.randn(2, depth, wide).to(BF16), torch.randn(2, depth, columns).to(BF16)
    offs = torch.tensor([30, 66], dtype=torch.int32)
    return tokens, index, b1, b2, offs, torch.randn(rows, wide).to(BF16), torch.rand(rows)


@pytest.mark.slow
@pytest.mark.parametrize("arch", NAMES)
@pytest.mark.parametrize("kind", ["swiglu", "swiglu interleaved", "srelu"])
def test_rows_by_an_index_have_the_bits_of_rows_in_order(arch, kind):
    params = PARAMS[kind]
    tokens, index, b1, b2, offs, h, probs = operands(params)
    rows, options = tokens[index.long()], params._asdict()
    inner = TensorSpec((len(h), b2.shape[2]), BF16, h.device)
    with emulate(arch, detect_races=False) as machine:
        assert tgl.explain(tgl.grouped_gemm_activation, tokens, b1, offs, None, probs, index, **options).chosen
        found = tgl.grouped_gemm_activation(tokens, b1, offs, None, probs, index, **options)
        back = tgl.grouped_gemm_dactivation(tokens, b2, h, offs, probs, index, **options)
        assert len(machine.launches) == 3
        wanted = tgl.grouped_gemm_activation(rows, b1, offs, None, probs, **options)
        wanted_back = back_to_hidden([rows, b2, h, offs, probs], inner, params=params)
    assert all(map(torch.equal, found, wanted))
    assert all(map(torch.equal, back, wanted_back))


def test_halves_that_alternate_by_row_of_b_need_no_other_kernel():
    """Copies of 16 bytes take columns as they lie, which no tensor map can tell apart."""
    *_, b, _, offs, _, _ = operands(PARAMS["swiglu"])
    for arch, name in (("sm_86", "tgl kernel"), ("sm_90", "GEMM, then activation")):
        with backends.compile_only(arch):
            explained = tgl.explain(
                tgl.grouped_gemm_activation, torch.zeros(70, 48, dtype=BF16), b, offs, interleaved=True
            )
            assert explained.chosen.name == name


@pytest.mark.parametrize("arch", NAMES)
def test_tilings_hold_what_they_are_chosen_for(arch):
    for columns in (8, 64, 72, 4096):
        for rows in (1, 64, 128, 1024):
            assert tilings.choose(arch, VARLEN_M, columns, 64, rows, (128, 192, 256)).tile_n % (2 * LINE) == 0
            assert gradient_reason(tilings.choose_gradient(arch, columns, 64, rows)) is None
    assert "do not fit in registers" in gradient_reason(GemmConfig(128, 256))


# --- machine code -----------------------------------------------------------------------------------------------------

EVERY = [(arch, ARCHS[arch].tilings.deepest(*shape)) for arch in NAMES for shape in WARPS]
CHOICES = {
    "tiling": [choice for choice in EVERY if gradient_reason(choice[1]) is None],
    "kind": tuple(PARAMS),
    "dtype": (BF16, F16),
    "probs": (None, F32),
    "b_row_major": (True, False),
    "act": (True, False),
}
COVER = [test_gemm_gradient.Case(*choice.pop("tiling"), **choice) for choice in pairwise(CHOICES)]


@pytest.mark.slices(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", COVER, ids=str)
def test_the_gradient_compiles(case):
    """Any two choices occur together in some kernel; nothing is in local memory."""
    with emulate(case.arch), backends.emulated_device(case.arch):
        report = sass.inspect(test_gemm_gradient.kernel(case).artifacts.CUBIN)
    down, across = WARPS[case.config.tile_m, case.config.tile_n]
    assert report.spills == report.frame == 0
    assert report.registers * 32 * down * across <= REGISTER_FILE

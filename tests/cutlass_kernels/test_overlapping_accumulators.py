"""Tiles of 256 columns of block-scaled operands on sm_100: two accumulators that have some columns in common."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import cutlass

import cute_emulator
from tests.cutlass_kernels import quantizing_cases, scaled_cases
from tests.cutlass_kernels.quantizing_cases import Case
from tests.cutlass_kernels.scaled_cases import ScaledCase
from tgl.cutlass_kernels.archs import arch_of
from tgl.cutlass_kernels.config import VARLEN_K, VARLEN_M, GemmConfig
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.gemm.operand_formats import OPERANDS
from tgl.cutlass_kernels.gemm.sm100 import activation_epilogue, store
from tgl.ops.grouped_activation import Params

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FORMS = {name: form for name, form in OPERANDS.items() if form.vector}
COLUMNS = 512  # of tensor memory
SCALES = {"mxfp8": 12, "nvfp4": 48}  # columns of a stage's scales for 128 rows of A and 256 of B
UNEVEN = (130, 0, 257, 0, 1)  # an odd and an even number of tiles for the clusters, and groups without any
ALTERNATING = Params(interleaved=True)

ROWS = {
    "16 bits, bias": dict(bias=BF16),
    "columnwise weights": dict(direction="columnwise", out=F32),
    "scaled bias, tail left alone": dict(out=F32, bias=F32, bias_scale=F32, zero_tail=False, tail=150),
}
CONTRACTION = {
    "16 bits": dict(),
    "float32": dict(out=F32),
    "accumulate": dict(out=F32, accumulate=True),
    "accumulate in 16 bits": dict(accumulate=True),
}
QUANTIZING = {
    "halves": dict(bias=F32, columns=256),
    "alternating": dict(params=ALTERNATING, columns=144),
    "no gate": dict(params=Params("srelu"), columns=272),
}
SCALED = [(VARLEN_M, name) for name in ROWS] + [(VARLEN_K, name) for name in CONTRACTION]


@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize("pair", [False, True], ids=["one", "pair"])
@pytest.mark.parametrize("name", FORMS)
def test_two_accumulators_and_the_scales_fit(name, pair, out):
    form = FORMS[name]
    element = cutlass.Float4E2M1FN if name == "nvfp4" else cutlass.Float8E4M3FN
    kernel = arch_of("sm_100").kernel("ScaledGroupedGemm")
    for tile_n in (64, 128, 256):
        tiling = GemmConfig(256 if pair else 128, tile_n, form.tile_k, two_cta=pair)
        gemm = kernel(VARLEN_M, tiling, EpilogueSpec(out, alpha=form.alpha), element, element, form, True)
        assert gemm.accumulators == 2
        assert gemm.overlap == (SCALES[name] if tile_n == 256 else 0)
        if tile_n == 256:
            assert 2 * tile_n - gemm.overlap + SCALES[name] == COLUMNS
            assert gemm.hand_overs == 1
            assert (gemm.read_first - 1) * gemm.epi_tile[1] < gemm.overlap <= gemm.read_first * gemm.epi_tile[1]
        else:
            assert gemm.hand_overs == 2
            assert gemm.read_first * gemm.epi_tile[1] == tile_n


@pytest.mark.slow
@pytest.mark.parametrize("tile_m", [128, 256])
@pytest.mark.parametrize("format", FORMS)
@pytest.mark.parametrize("kind, name", SCALED, ids=str)
def test_exact_in_every_epilogue(kind, name, format, tile_m):
    options = ROWS[name] if kind == VARLEN_M else CONTRACTION[name]
    case = ScaledCase(format, tile_m, 256, UNEVEN, depth=288, columns=544, **options)
    scaled_cases.run(kind, case, seeds=range(4))


@pytest.mark.slow
@pytest.mark.parametrize("tile_m", [128, 256])
@pytest.mark.parametrize("name", QUANTIZING)
def test_exact_where_the_activation_is_quantised(name, tile_m):
    quantizing_cases.run(Case(tile_m, 256, UNEVEN, **QUANTIZING[name]), seeds=range(4))


def one_piece_less(kernel):
    """``kernel``, made to give accumulators back a piece early."""

    class Early(kernel):
        def __init__(self, *args):
            super().__init__(*args)
            self.read_first -= 1

    return Early


def test_an_accumulator_given_back_a_piece_early_is_reported(monkeypatch):
    """48 columns of scales are two pieces of float32."""
    monkeypatch.setattr(scaled_cases, "_compiled", {})
    arch = arch_of("sm_100")
    kernels = {"ScaledGroupedGemm": one_piece_less(arch.kernel("ScaledGroupedGemm"))}
    monkeypatch.setattr(type(arch), "kernel", lambda _, name: kernels[name])
    case = ScaledCase("nvfp4", 128, 256, (1, 2, 3), depth=128, columns=768, out=F32)
    with pytest.raises(cute_emulator.RaceError, match="tensor memory"):
        scaled_cases.run(VARLEN_K, case)


@pytest.mark.parametrize(
    ("epilogue", "wrong"),
    [
        ("store", "from the first"),
        ("store", "from the last"),
        ("activation", "from the first"),
        pytest.param("activation", "from the last", marks=pytest.mark.slow),
    ],
)
def test_pieces_in_one_order_are_reported(epilogue, wrong, monkeypatch):
    """The checker reports pieces in one order for both accumulators: one's shared columns are read too late."""
    first = wrong == "from the first"
    for module in (store, activation_epilogue):
        monkeypatch.setattr(module, "in_turn", lambda _, made, step, steps: step if first else steps - 1 - step)
    monkeypatch.setattr(scaled_cases, "_compiled", {})
    monkeypatch.setattr(quantizing_cases, "_compiled", {})
    with pytest.raises(cute_emulator.RaceError, match="tensor memory"):
        if epilogue == "store":
            scaled_cases.run(VARLEN_M, ScaledCase("mxfp8", 128, 256, (1, 2, 3), depth=128, columns=768))
        else:
            quantizing_cases.run(Case(128, 256, (1, 2, 3), depth=128, columns=384))

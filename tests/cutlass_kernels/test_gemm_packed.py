"""Kernels that decode B on its way to mma.sync, on the emulator: exact on integers, whatever the timing."""

import itertools
import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import cute_emulator
import tgl
from tests.cutlass_kernels import sass
from tests.cutlass_kernels.matrix import REGISTER_FILE, pairwise
from tests.cutlass_kernels.packed_cases import Case, components, decoded, every_value_of, kernel, run, tiling
from tests.kernel_cases import ends, integers
from tests.ops.test_packed_gemm import every_value
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS, DECODING, SWAPPED, arch_of
from tgl.cutlass_kernels.config import GemmConfig
from tgl.cutlass_kernels.gemm.mma_sync.packed_tilings import WARPS, choose, pieces, sharing, stages
from tgl.cutlass_kernels.gemm.sm90 import tilings as sm90
from tgl.cutlass_kernels.gemm.sm90.swap_ab_rows import PERMUTED_ROWS
from tgl.cutlass_kernels.gemm.sm90.swap_ab_split import NUDGES
from tgl.cutlass_kernels.launchers import gemm_packed
from tgl.cutlass_kernels.launchers.gemm_packed import MANY_ROWS, PACKED, kernel_of
from tgl.cutlass_kernels.runtime import launcher
from tgl.meta.formats import E5M2, FORMATS
from tgl.testing import emulate

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (5, 0, 130, 1, 40)
slow = pytest.mark.slow

CASES = {
    "over columns": ("sm_80", Case((64, 128), RAGGED)),
    "over rows": ("sm_90", Case((64, 128), RAGGED, over_rows=True)),
    "few rows": ("sm_80", Case((16, 128), (5, 0, 20, 1), bias=F32, width=416)),
    "few rows, over rows": ("sm_90", Case((16, 128), (5, 0, 20), over_rows=True, height=200, out=F32)),
    "float16": ("sm_90", Case((32, 128), (40, 3), dtype=F16, out=F16, bias=F16, bias_scale=F32)),
    "large": ("sm_86", Case((128, 128), (130, 0, 7), bias=BF16, bias_scale=BF16, width=544, height=264)),
    "large, over rows": ("sm_100", Case((128, 128), (130, 0, 7), over_rows=True, height=520, width=288)),
    "narrow": ("sm_89", Case((128, 64), (130, 2), width=96, height=40)),
    "narrow, over rows": ("sm_121", Case((128, 64), (130, 2), over_rows=True, height=37, width=32)),
    "all empty": ("sm_80", Case((16, 128), (0, 0, 0), tail=40)),
    "no tail": ("sm_80", Case((16, 128), (16,), tail=0)),
    "bad offsets": ("sm_80", Case((16, 128), (5, 0, 20), offs=(10**9, -5, 7))),
    "nvfp4": ("sm_120", Case((64, 128), (70, 0, 3), "nvfp4")),
    "nvfp4, over rows": ("sm_90", Case((16, 128), (20, 0, 3), "nvfp4", True)),
    "mxfp8": ("sm_89", Case((16, 128), (20, 0, 3), "mxfp8", width=144)),
    "mxfp8, over rows": ("sm_80", Case((128, 128), (130, 0, 3), "mxfp8", True, width=208)),
    "mxfp8, E5M2": ("sm_80", Case((32, 128), (40, 3), "mxfp8", data=E5M2, dtype=F16, out=F32)),
    "fp8_tensor": ("sm_90", Case((16, 128), (20, 0, 3), "fp8_tensor", width=176)),
    "fp8_tensor, over rows": ("sm_120", Case((128, 64), (20, 0, 3), "fp8_tensor", True, data=E5M2)),
    "fp8_block": ("sm_80", Case((64, 128), (70, 0, 3), "fp8_block", width=336)),
    "fp8_block, over rows": ("sm_100", Case((128, 64), (20, 0, 3), "fp8_block", True, width=336, height=200)),
}
# As high as groups are long; few rows are decoded to more columns.
CASES |= {
    f"decoding, {format}, {'rows' if over else 'columns'}": (
        "sm_90",
        Case((256, 128), (300, 0, 7, 130), format, over, kernel=DECODING, height=264, width=288 if over else 160),
    )
    for format in FORMATS
    for over in (False, True)
}
CASES |= {
    "decoding": ("sm_90", Case((128, 128), RAGGED, kernel=DECODING, bias=F32, bias_scale=F32, width=416)),
    "decoding, over rows": ("sm_90", Case((128, 128), RAGGED, over_rows=True, kernel=DECODING, dtype=F16, out=F16)),
    "decoding, few rows": ("sm_90", Case((64, 256), (5, 0, 20, 1), kernel=DECODING, height=520, width=544)),
    "decoding, E5M2": ("sm_90", Case((64, 128), (5, 40), "mxfp8", data=E5M2, kernel=DECODING, out=F32)),
    "decoding, all empty": ("sm_90", Case((64, 256), (0, 0, 0), tail=40, kernel=DECODING)),
    "decoding, bad offsets": ("sm_90", Case((128, 128), (5, 0, 20), offs=(10**9, -5, 7), kernel=DECODING)),
}
# Depths that end in a stage's parts and between their blocks, rows of scales that begin at any byte, partial tiles.
CASES |= {
    "swapped": (
        "sm_90",
        Case((8, 192), (5, 0, 12, 1), kernel=SWAPPED, bias=F32, bias_scale=F32, height=200, width=544),
    ),
    "swapped, 16 rows": ("sm_90", Case((16, 192), (5, 0, 20, 1), kernel=SWAPPED, out=F32, width=160)),
    "swapped, 32 rows": ("sm_90", Case((32, 256), (40, 0, 20, 1), kernel=SWAPPED, out=F16, bias=BF16, width=96)),
    "swapped, 64 rows": ("sm_90", Case((64, 128), (130, 0, 7, 1), kernel=SWAPPED, height=264, width=320)),
    "swapped, one block": ("sm_90", Case((8, 192), (16,), tail=0, kernel=SWAPPED, height=37, width=32)),
    "swapped, all empty": ("sm_90", Case((8, 192), (0, 0, 0), tail=40, kernel=SWAPPED)),
    "swapped, one tile per multiprocessor": (
        "sm_90",
        Case((8, 128), (5, 0, 12), kernel=SWAPPED, few=True, bias=F32, height=200, width=288),
    ),
    "swapped, 64 columns": ("sm_90", Case((8, 64), (5, 0, 2, 1), kernel=SWAPPED, few=True, height=136, width=608)),
    "swapped, 192 columns": ("sm_90", Case((8, 192), (5, 0, 2, 1), kernel=SWAPPED, few=True, height=200, width=864)),
    "swapped, bad offsets": ("sm_90", Case((8, 192), (5, 0, 20), offs=(10**9, -5, 7), kernel=SWAPPED)),
}
# Depths that end in a step of a stage and in each of its parts, and blocks of scales that several stages share.
CASES |= {
    "swapped, nvfp4": (
        "sm_90",
        Case((8, 256), (5, 0, 12, 1), "nvfp4", kernel=SWAPPED, bias=F32, bias_scale=F32, height=264, width=544),
    ),
    "swapped, nvfp4, 16 rows": ("sm_90", Case((16, 256), (5, 0, 20, 1), "nvfp4", kernel=SWAPPED, width=160)),
    "swapped, nvfp4, 32 rows": ("sm_90", Case((32, 256), (40, 0, 20, 1), "nvfp4", kernel=SWAPPED, out=F16, width=96)),
    "swapped, nvfp4, 64 rows": ("sm_90", Case((64, 128), (130, 0, 7, 1), "nvfp4", kernel=SWAPPED, width=320)),
    "swapped, mxfp8": (
        "sm_90",
        Case((8, 256), (5, 0, 12, 1), "mxfp8", kernel=SWAPPED, bias=F32, bias_scale=F32, height=264, width=416),
    ),
    "swapped, mxfp8, 16 rows": ("sm_90", Case((16, 256), (5, 0, 20, 1), "mxfp8", kernel=SWAPPED, out=F32, width=224)),
    "swapped, mxfp8, E5M2": ("sm_90", Case((32, 256), (40, 0, 1), "mxfp8", data=E5M2, kernel=SWAPPED, width=96)),
    "swapped, mxfp8, 64 rows": ("sm_90", Case((64, 128), (130, 0, 7, 1), "mxfp8", kernel=SWAPPED, height=37, width=32)),
    "swapped, fp8_block": ("sm_90", Case((8, 256), (5, 0, 12, 1), "fp8_block", kernel=SWAPPED, height=264, width=336)),
    "swapped, fp8_block, 32 rows": (
        "sm_90",
        Case((32, 256), (40, 0, 20, 1), "fp8_block", kernel=SWAPPED, bias=F32, bias_scale=F32, width=400),
    ),
    "swapped, fp8_block, 64 rows": (
        "sm_90",
        Case((64, 128), (130, 0, 7), "fp8_block", data=E5M2, kernel=SWAPPED, out=F32, height=264, width=144),
    ),
    "swapped, fp8_tensor": (
        "sm_90",
        Case((8, 256), (5, 0, 12, 1), "fp8_tensor", kernel=SWAPPED, bias=F32, bias_scale=F32, height=264, width=176),
    ),
    "swapped, fp8_tensor, 16 rows": ("sm_90", Case((16, 256), (5, 0, 20), "fp8_tensor", data=E5M2, kernel=SWAPPED)),
    "swapped, fp8_tensor, 64 rows": ("sm_90", Case((64, 128), (130, 0, 7), "fp8_tensor", kernel=SWAPPED, width=80)),
    "swapped, fp8_tensor, bad offsets": (
        "sm_90",
        Case((8, 256), (5, 0, 20), "fp8_tensor", offs=(10**9, -5, 7), kernel=SWAPPED),
    ),
}


def few(format):
    """Shapes of the kernel for few rows that are chosen, by how many a group has."""
    found = [sm90.choose_swapped(rows, Case((64, 128), (), format).packed, 128, 5760) for rows in (0, 8, 16, 32)]
    return list(dict.fromkeys((tiling.tile_m, tiling.tile_n) for tiling in found))


CHOSEN = [(shape, format) for format in FORMATS for shape in few(format)]
OTHERS = [
    pytest.param(shape, format, marks=slow)
    for shape, format in itertools.product(((8, 256), (16, 256), (32, 256), (64, 128)), FORMATS)
    if (shape, format) not in CHOSEN
]
FORMATS_OF_FEW = tuple(f"swapped, {format}" for format in FORMATS if format != "mxfp4")
USUAL = (
    *FORMATS_OF_FEW,
    "few rows",
    "narrow, over rows",
    "decoding",
    "decoding, over rows",
    "swapped",
    "swapped, 64 rows",
    "swapped, one tile per multiprocessor",
)


@pytest.mark.parametrize("name", USUAL)
def test_exact(name):
    record = run(*CASES[name], seeds=(0,))
    assert record.bank_conflicts == 0


@slow
@pytest.mark.parametrize("name", CASES)
def test_exact_under_any_timing(name):
    run(*CASES[name], seeds=(0, 1, 2))


def test_every_format_is_tried_in_both_directions():
    tried = {(case.kernel, case.format, case.over_rows) for _, case in CASES.values()}
    swapped = itertools.product((SWAPPED,), FORMATS, (False,))
    assert tried == {*itertools.product((PACKED, DECODING), FORMATS, (False, True)), *swapped}


@slow
@pytest.mark.parametrize("over_rows", [False, True], ids=["columns", "rows"])
@pytest.mark.parametrize("shape", WARPS, ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_every_tiling(arch, shape, over_rows):
    run(arch, Case(shape, (130, 0, 3), over_rows=over_rows, out=F32, bias=F32, width=416, height=200))


def forced(kernel, shape, format="mxfp4"):
    """A rule that always takes one kernel and tiling; without a shape the one for the fewest rows."""
    shape = shape or few(format)[0]

    def kernel_of(arch, packed, rows_element, rows, groups, columns):
        return kernel, tiling(arch.name, Case(shape, (), format, kernel=kernel))

    return kernel_of


EVERY_ELEMENT = {
    "sm_80": ("sm_80", PACKED, (16, 128), BF16),
    "sm_80, float16": ("sm_80", PACKED, (16, 128), F16),
    "sm_90": ("sm_90", PACKED, (16, 128), BF16),
    "decoding": ("sm_90", DECODING, (64, 256), BF16),
    "decoding, float16": ("sm_90", DECODING, (64, 256), F16),
    "swapped": ("sm_90", SWAPPED, None, BF16),
}


def kernels_of(launches, arch, roles):
    """Return whether each launch is of the kernel with that role on the architecture."""
    names = [arch_of(arch).kernel(role).__name__ for role in roles]
    return [name in launch.kernel for name, launch in zip(names, launches, strict=True)]


@slow
@pytest.mark.parametrize("name", EVERY_ELEMENT)
def test_every_element_under_every_scale(name, monkeypatch):
    """All codes of E2M1 and bytes of E8M0 are what the CPU implementation makes of them, at the range's edges too."""
    arch, kernel, shape, dtype = EVERY_ELEMENT[name]
    data, scale = every_value()
    a, offs = torch.zeros(256, 32, dtype=dtype), torch.arange(1, 257, dtype=torch.int32)
    a[:, 0] = 1.0
    wanted = tgl.grouped_gemm_packed(a, data, scale, offs, format="mxfp4", out_dtype=F32)
    monkeypatch.setattr(gemm_packed, "kernel_of", forced(kernel, shape))
    launcher.forget()
    with emulate(arch, detect_races=False) as machine:
        found = tgl.grouped_gemm_packed(a, data, scale, offs, format="mxfp4", out_dtype=F32)
        assert kernels_of(machine.launches, arch, [kernel]) == [True]
    launcher.forget()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize(
    "format, element", [(f.name, dtype) for f in FORMATS.values() if f.name != "mxfp4" for dtype in f.data_dtypes]
)
def test_every_element_of_few_rows(format, element, monkeypatch):
    """NaN, infinity and zero among them, and where the contraction ends in a part of a stage."""
    data, scale, amax = every_value_of(format, element)
    groups = data.shape[0]
    a, offs = torch.eye(16, 32, dtype=BF16).repeat(groups, 1), torch.arange(1, groups + 1, dtype=torch.int32) * 16
    wanted = tgl.grouped_gemm_packed(a, data, scale, offs, amax, format=format, out_dtype=F32)
    launcher.forget()
    with emulate("sm_90", detect_races=False) as machine:
        found = tgl.grouped_gemm_packed(a, data, scale, offs, amax, format=format, out_dtype=F32)
        assert kernels_of(machine.launches, "sm_90", [SWAPPED]) == [True]
    launcher.forget()
    assert wanted.isnan().any()
    assert wanted.count_nonzero() > 256
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if "," not in n else pytest.param(n, marks=slow) for n in EVERY_ELEMENT])
def test_every_code_of_nvfp4_under_every_scale(name, monkeypatch):
    """All kernels return the same bits; a scale may be negative too."""
    arch, kernel, shape, dtype = EVERY_ELEMENT[name]
    data, scale, amax = every_value_of("nvfp4", None)
    a, offs = torch.eye(16, 32, dtype=dtype).repeat(len(data), 1), ends((16,) * len(data))
    wanted = tgl.grouped_gemm_packed(a, data, scale, offs, amax, format="nvfp4", out_dtype=F32)
    monkeypatch.setattr(gemm_packed, "kernel_of", forced(kernel, shape, "nvfp4"))
    launcher.forget()
    with emulate(arch, detect_races=False) as machine:
        found = tgl.grouped_gemm_packed(a, data, scale, offs, amax, format="nvfp4", out_dtype=F32)
        assert kernels_of(machine.launches, arch, [kernel]) == [True]
    launcher.forget()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("shape, format", CHOSEN, ids=str)
def test_two_ctas_of_few_rows_share_a_multiprocessor(shape, format):
    """Each has a KB of shared memory that the system takes, and enough stages for bytes on their way."""
    case = Case(shape, (3,), format, kernel=SWAPPED, width=32)
    assert sm90.swapped_stages(tiling("sm_90", case), case.packed) >= 3
    record = run("sm_90", case, seeds=(0,))
    assert 2 * (record.shared_bytes + 1024) <= 228 * 1024


def test_columns_that_lanes_do_not_decode_to():
    with pytest.raises(ValueError, match="no decode tile has 192 columns of nvfp4"):
        sm90.swapped(8, 192, Case((8, 192), (), "nvfp4").packed)


def test_infinite_weights_ahead_of_parts_that_are_left_out():
    """The contraction ends in the first part of a stage, and the others keep what earlier ones left in registers."""
    data, scale, _ = components("mxfp4", (1, 192, 288))
    data.view(torch.uint8)[0, 5, 96:112], scale.view(torch.uint8)[0, 5, 6] = 0x77, 254
    scale.view(torch.uint8)[0, 9, 7] = 255
    a, offs = torch.ones(3, 288, dtype=BF16), torch.tensor([3], dtype=torch.int32)
    wanted = tgl.grouped_gemm_packed(a, data, scale, offs, format="mxfp4", out_dtype=F32)
    with emulate("sm_90", detect_races=False) as machine:
        found = tgl.grouped_gemm_packed(a, data, scale, offs, format="mxfp4", out_dtype=F32)
        assert kernels_of(machine.launches, "sm_90", [SWAPPED]) == [True]
    assert wanted[:, 5].isinf().all()
    assert wanted[:, 9].isnan().all()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize(
    "tokens, columns, width, few",
    [(4, 5760, 192, True), (8, 5760, 192, False), (16, 5760, 192, True), (32, 5760, 192, False), (4, 2880, 128, True)],
)
def test_few_tiles_do_not_share_multiprocessors(tokens, columns, width, few):
    chosen = sm90.choose_swapped(0, Case((64, 128), ()).packed, tokens, columns)
    assert (chosen.tile_m, chosen.tile_n, chosen.few) == (8, width, few)


@pytest.mark.slow
@pytest.mark.parametrize("shape, format", CHOSEN + OTHERS, ids=str)
def test_few_rows_have_the_bits_of_many(shape, format):
    """Numbers that do not add up exactly; depths that are no multiples of any stage."""
    case = Case(shape, (5, 0, 12, 1), format, kernel=SWAPPED, out=F32, bias=F32, bias_scale=F32, height=200, width=416)
    bits = [product_bits(c) for c in (case, replace(case, kernel=DECODING, shape=(256, 128)))]
    assert torch.equal(*bits)


def product_bits(case):
    """Return a kernel's products of normal numbers, as integers."""
    torch.manual_seed(0)
    groups, rows = len(case.sizes), sum(case.sizes)
    form = FORMATS[case.format]
    values = torch.randn(groups, case.height, case.width)
    made = tgl.group_quantize(values, None, format=form.name, columnwise=False, block_2d=form.square_scales)
    amax = made.amax if form.decodes_with_amax else None
    a, out = torch.randn(rows, case.depth, dtype=BF16), torch.empty(rows, case.columns)
    bias, bias_scale = torch.randn(groups, case.columns), torch.randn(rows)
    with emulate(ARCHS["sm_90"].target), backends.emulated_device("sm_90"):
        data = made.data.view(torch.uint8)
        kernel("sm_90", case)(a, data, made.scale, amax, ends(case.sizes), out, bias, bias_scale, 2)
    return out.view(torch.int32)


@pytest.mark.parametrize("arch", [a if a == "sm_90" else pytest.param(a, marks=slow) for a in ARCHS])
def test_the_op_and_its_gradient_are_served(arch):
    data, scale, _ = components("mxfp4", (2, 64, 96))
    w = decoded("mxfp4", data, scale, None).bfloat16()
    a, dy = integers(12, 96).requires_grad_(), integers(12, 64)
    offs = torch.tensor([6, 10], dtype=torch.int32)
    with emulate(ARCHS[arch].target, detect_races=False) as machine:
        assert tgl.explain(tgl.grouped_gemm_packed, a, data, scale, offs, format="mxfp4").chosen.name == "tgl kernel"
        y = tgl.grouped_gemm_packed(a, data, scale, offs, format="mxfp4")
        (da,) = torch.autograd.grad(y, a, dy)
        packed = Case((64, 128), ()).packed
        kernels = [
            kernel_of(ARCHS[arch], p, "bfloat16", 6, 2, 64)[0] for p in (packed, replace(packed, over_rows=True))
        ]
        assert kernels_of(machine.launches, arch, kernels) == [True, True]
    assert torch.equal(y[:6], a[:6] @ w[0].T)
    assert torch.equal(y[10:], torch.zeros_like(y[10:]))
    assert torch.equal(da[6:10], dy[6:10] @ w[1])


# --- what is reported -------------------------------------------------------------------------------------------------


def test_a_fence_less_is_reported():
    """Lanes decode through another proxy than the MMA reads by."""

    def edit(ptx):
        pieces = ptx.split("fence.proxy.async.shared::cta;")
        ahead = [i for i, piece in enumerate(pieces) if "mbarrier.arrive.shared" in piece[:300]]
        assert len(ahead) == 1
        pieces[ahead[0] - 1 : ahead[0] + 1] = ["".join(pieces[ahead[0] - 1 : ahead[0] + 1])]
        return "fence.proxy.async.shared::cta;".join(pieces)

    with pytest.raises(cute_emulator.MemoryAccessError, match=r"st\.shared or cp\.async without fence\.proxy\.async"):
        run("sm_90", Case((128, 128), (130,), kernel=DECODING), seeds=(0,), edit_ptx=edit)


@pytest.mark.parametrize("deleted", [r"cp\.async\.wait_group", r"bar\.sync"])
def test_a_wait_or_a_barrier_less_is_reported(deleted):
    """The one of the mainloop: the wait before it is the prologue's, the one behind it is for unused stages."""
    found = []

    def edit(ptx):
        found.extend(re.finditer(rf"\n\s*{deleted}[^\n]*", ptx))
        match = found[-2 if "wait" in deleted else -1]
        return ptx[: match.start()] + ptx[match.end() :]

    with pytest.raises(cute_emulator.RaceError):
        run("sm_80", Case((16, 128), (20, 3), width=416), seeds=(0,), edit_ptx=edit)


REFUSED = {
    "dtype": (lambda c: {"a": c["a"].float()}, "takes bfloat16 and float16, got torch.float32"),
    "depth": (lambda c: {"b": c["b"][..., :24].contiguous(), "a": c["a"][:, :48]}, "strides of `b`"),
    "rows": (lambda c: {"a": c["a"].t().contiguous().t()}, "needs `a` row-major"),
}


@pytest.mark.parametrize("change, why", REFUSED.values(), ids=REFUSED)
def test_unsupported_operands_are_reported(change, why):
    data, scale, _ = components("mxfp4", (2, 64, 64))
    call = {"a": integers(40, 64), "b": data, "b_scale": scale}
    call |= change(call)
    offs = torch.tensor([30, 36], dtype=torch.int32)
    with backends.compile_only("sm_90"):
        assert why in str(tgl.explain(tgl.grouped_gemm_packed, **call, offs=offs, format="mxfp4"))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("over_rows", [False, True], ids=["columns", "rows"])
def test_many_rows_are_left_to_decoding_once(arch, over_rows):
    """Chips with MMAs wider than a warp's decode once for many rows, and for more rows if threads decode for them."""
    many = MANY_ROWS[DECODING if DECODING in ARCHS[arch].kernels else PACKED] if ARCHS[arch].wider_mmas else None
    data, scale, _ = components("mxfp4", (2, 64, 64))
    offs = torch.tensor([1000, 1024], dtype=torch.int32)
    for rows in (64, 511, 512, 1023, 1024, 5000):
        with backends.compile_only(arch):
            found = tgl.explain(
                tgl.grouped_gemm_packed, integers(2 * rows, 64), data, scale, offs, format="mxfp4", over_rows=over_rows
            )
        left = many is not None and rows >= many
        assert (f"decodes in every tile, slower from {many} rows a group on" in str(found)) == left
        assert (found.chosen.name == "tgl kernel") == (not left)


# --- tilings and machine code -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("format", FORMATS)
def test_tilings_fit(arch, format):
    room = ARCHS[arch].smem_bytes
    for rows in (0, 1, 8, 9, 16, 100, 5000):
        spec = Case((64, 128), (), format).packed
        chosen = choose(spec, rows, room)
        assert 3 <= chosen.stages <= stages(spec, chosen, room)
        assert chosen.tile_m >= min(2 * rows, 128)


def fits(choice):
    case = Case(choice["shape"], (), choice["format"])
    return stages(case.packed, GemmConfig(*case.shape), ARCHS[choice["arch"]].smem_bytes) > 0


CHOICES = {
    "arch": tuple(ARCHS),
    "shape": tuple(WARPS),
    "format": tuple(FORMATS),
    "over_rows": (False, True),
    "dtype": (BF16, F16),
}
COMPILED = [
    dict(zip(CHOICES, ("sm_80", (128, 128), "mxfp4", False, BF16))),
    *(pytest.param(choice, marks=slow) for choice in pairwise(CHOICES, fits)),
]


DECODING_SHAPES = ((256, 128), (128, 128), (64, 128), (64, 256))
DECODING_CHOICES = {
    "shape": DECODING_SHAPES,
    "format": tuple(FORMATS),
    "over_rows": (False, True),
    "dtype": (BF16, F16),
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [0, 1, 32, 33, 64, 65, 5000])
@pytest.mark.parametrize("over_rows", [False, True], ids=["columns", "rows"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_chosen_shapes_are_among_those_tried(rows, format, over_rows, dtype):
    kernel, chosen = kernel_of(ARCHS["sm_90"], Case((64, 128), (), format, over_rows).packed, dtype, rows, 128, 5760)
    swapped = rows <= 32 and (over_rows, dtype) == (False, "bfloat16")
    assert kernel == (SWAPPED if swapped else DECODING)
    assert (chosen.tile_m, chosen.tile_n) in (few(format) if swapped else DECODING_SHAPES)
    assert not swapped or chosen.tile_m >= min(2 * rows, 64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice",
    [dict(zip(DECODING_CHOICES, ((256, 128), "mxfp4", False, BF16))), *pairwise(DECODING_CHOICES, lambda choice: True)],
    ids=str,
)
def test_machine_code_of_wide_mmas(choice):
    """Nothing in local memory, and every wide MMA once."""
    shape = choice["shape"]
    case = Case(shape, (), choice["format"], choice["over_rows"], dtype=choice["dtype"], out=F32, bias=F32)
    case = replace(case, kernel=DECODING)
    with emulate(ARCHS["sm_90"].target), backends.emulated_device("sm_90"):
        report = sass.inspect(kernel("sm_90", case).artifacts.CUBIN)
    assert (report.spills, report.frame) == (0, 0)
    assert report.count("HGMMA") == 4 * max(shape[0] // 128, 1)


@pytest.mark.slow
@pytest.mark.parametrize("shape, format", CHOSEN + OTHERS, ids=str)
def test_machine_code_of_few_rows(shape, format):
    """Nothing in local memory, registers for two CTAs, every MMA once and one wait for the MMAs of each part, one read
    from shared memory for two elements, or four of permuted steps, and for the scales of a part if each column has its
    own."""
    case = Case(shape, (), format, kernel=SWAPPED, bias=F32, bias_scale=F32)
    with emulate(ARCHS["sm_90"].target), backends.emulated_device("sm_90"):
        report = sass.inspect(kernel("sm_90", case).artifacts.CUBIN)
    tiles = tiling("sm_90", case)
    groups, _, width, part = sm90.cut_of(tiles, case.packed)
    depth = width * case.packed.per_byte
    blocks, parts = shape[1] // (groups * 64), depth // part
    assert (report.spills, report.frame) == (0, 0)
    assert report.registers * (groups + 1) * 128 * 2 <= REGISTER_FILE
    assert report.count("HGMMA") == depth // 16 * blocks
    assert report.count("WARPGROUP.DEPBAR") == parts + 1
    pairs, columns = depth // 4 * blocks, depth // 16 * blocks
    # Of bfloat16. MXFP4 has more where a scale is above 2, and NVFP4 those of the parts of factors that it tries.
    products = {"mxfp4": 2 * pairs, "nvfp4": (3 + 1) * pairs + columns + 2 * len(NUDGES)}
    # Of bytes; what NVFP4 decodes in float32 it may read once more.
    permuted = format == "mxfp4" and shape[0] <= PERMUTED_ROWS and tiles.tile_k == 256
    reads = {"mxfp4": (0 if permuted else pairs,), "nvfp4": (pairs, 2 * pairs), "mxfp8": (columns,)}
    assert report.count("LDS.U8") in reads.get(format, (0,))
    assert report.count("LDS.U16") == (pairs // 2 if permuted else 0 if case.packed.per_byte == 2 else pairs)
    assert report.count("HMUL2") + report.count("HFMA2") == products.get(format, 0)


@pytest.mark.slow
@pytest.mark.parametrize("choice", COMPILED, ids=str)
def test_machine_code(choice):
    """Nothing in local memory, registers for CTAs that share a multiprocessor, no more MMAs and reads than needed."""
    arch, shape = choice["arch"], choice["shape"]
    case = Case(shape, (), choice["format"], choice["over_rows"], dtype=choice["dtype"], out=F32, bias=F32)
    with emulate(ARCHS[arch].target), backends.emulated_device(arch):
        artifacts = kernel(arch, case).artifacts
    report, config = sass.inspect(artifacts.CUBIN), tiling(arch, case)
    down, across = WARPS[shape]
    threads, shared = 32 * down * across, sharing(case.packed, config, ARCHS[arch].smem_bytes)
    assert (report.spills, report.frame) == (0, 0)
    assert report.registers * threads * shared <= REGISTER_FILE
    high, wide = shape[0] // down // 16, shape[1] // across // 16
    assert report.count("HMMA.16816") == 4 * high * 2 * wide
    assert report.count("LDSM") == 4 * (high + wide)
    copied = 2 + case.packed.decoding.amax  # of a piece: its elements, and the words beside it
    lines = shape[0] * 8 // threads
    assert report.count("LDGSTS") == 2 * (lines + pieces(case.packed, config) // threads * copied)

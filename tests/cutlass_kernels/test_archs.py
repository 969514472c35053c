"""The table of architectures: every entry complete, and a name without one an error wherever it is passed."""

from dataclasses import replace

import pytest
import torch

import tgl
from tgl import backends

pytest.importorskip("cutlass")

from tgl.cutlass_kernels import archs, tilings
from tgl.cutlass_kernels.archs import ARCHS, arch_of, chips, having
from tgl.cutlass_kernels.config import KINDS, VARLEN_K, VARLEN_M, WIDTHS, GemmConfig
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.gemm.operand_formats import OPERANDS
from tgl.cutlass_kernels.launchers import gemm
from tgl.cutlass_kernels.runtime import launcher
from tgl.meta.placement import ceil_div
from tgl.testing import emulate

PLANTED = gemm.GemmKey(VARLEN_M, "sm_42", True, "bfloat16", 1, EpilogueSpec("bfloat16"), GemmConfig())


@pytest.mark.parametrize("arch", ARCHS)
def test_an_entry_has_its_kernels_and_its_tilings(arch):
    entry = arch_of(arch)
    assert "GroupedGemm" in entry.kernels
    for name in entry.kernels:
        assert entry.kernel(name).__name__.endswith("Kernel")
    for kind in KINDS:
        assert tilings.reason(arch, kind, tilings.choose(arch, kind, 512, 512, 256)) is None
        for form in OPERANDS.values():
            if arch in form.archs:
                chosen = tilings.choose_scaled(arch, kind, form, 512, 512, 256)
                assert tilings.reason(arch, kind, chosen, form) is None


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("widths", [WIDTHS, (128, 192, 256), (128, 256)])
@pytest.mark.parametrize("columns", [200, 1536, 4096, 28672])
def test_few_groups_of_few_rows_get_narrow_tiles(arch, columns, widths):
    """So that most multiprocessors load weights; no narrower than is needed, or than an epilogue takes."""
    usual = tilings.choose(arch, VARLEN_M, columns, 4096, 1, widths)
    assert tilings.choose(arch, VARLEN_M, columns, 4096, 128, widths, 1).tile_n == (
        tilings.choose(arch, VARLEN_M, columns, 4096, 128, widths).tile_n
    )
    for busy in (1, 2, 8, 30, 1000):
        chosen = tilings.choose(arch, VARLEN_M, columns, 4096, 1, widths, busy)
        assert tilings.reason(arch, VARLEN_M, chosen) is None
        assert chosen.tile_n in widths
        assert (chosen.tile_m, chosen.stages) == (usual.tile_m, usual.stages)
        enough = [n for n in (256, 128, 64) if widths[0] <= n <= usual.tile_n]
        enough = [n for n in enough if busy * ceil_div(columns, n) >= tilings.MULTIPROCESSORS] or enough[-1:]
        assert chosen.tile_n == enough[0]


ANY, HALVES, LINES = WIDTHS, (128, 192, 256), (128, 256)


@pytest.mark.parametrize(
    ("kind", "columns", "depth", "rows", "widths", "wanted"),
    [
        (VARLEN_M, 4096, 14336, 2048, ANY, (128, 192, True)),
        (VARLEN_M, 768, 2048, 1024, ANY, (128, 192, True)),
        (VARLEN_M, 768, 2048, 128, ANY, (128, 128, True)),  # rows are a tile of each group
        (VARLEN_M, 512, 1536, 1024, ANY, (128, 256, False)),  # 192 columns would leave an eighth empty
        (VARLEN_M, 256, 1536, 1024, ANY, (128, 256, False)),
        (VARLEN_M, 128, 1536, 1024, ANY, (128, 128, True)),
        (VARLEN_M, 64, 1536, 1024, ANY, (256, 64, False)),
        (VARLEN_M, 64, 1536, 1024, HALVES, (128, 128, True)),
        (VARLEN_M, 1536, 2048, 1024, HALVES, (128, 192, True)),
        (VARLEN_M, 1536, 2048, 1024, LINES, (128, 256, False)),
        (VARLEN_M, 1536, 2048, 64, ANY, (64, 256, False)),
        (VARLEN_K, 2048, 1024, 1536, ANY, (128, 256, False)),
        (VARLEN_K, 1536, 1024, 2048, ANY, (128, 256, False)),
        (VARLEN_K, 2880, 256, 5760, ANY, (128, 192, True)),  # a short sum, and 256 would leave a fifteenth empty
        (VARLEN_K, 2880, 256, 5760, (64, 128, 256), (256, 128, False)),
        (VARLEN_K, 2048, 512, 1536, ANY, (192, 128, True)),  # as short, and 192 rows fill it
        (VARLEN_K, 2048, 128, 1536, ANY, (128, 128, True)),
        (VARLEN_K, 64, 1024, 2048, ANY, (256, 64, False)),
        (VARLEN_K, 4096, 1024, 16, ANY, (64, 256, False)),
    ],
)
def test_tilings_of_sm_90(kind, columns, depth, rows, widths, wanted):
    """Wide ones where they are full."""
    chosen = tilings.choose("sm_90", kind, columns, depth, rows, widths)
    assert (chosen.tile_m, chosen.tile_n, chosen.pingpong) == wanted
    assert tilings.reason("sm_90", kind, chosen) is None


@pytest.mark.parametrize(
    ("columns", "depth"), [(768, 2048), (2048, 7168), (2880, 2880), (256, 4096), (320, 4096), (40, 4096)]
)
def test_a_row_is_summed_over_tiles_of_one_width(columns, depth):
    """The width is independent of the rows, so that the gradient of a probability has the same bits in any batch."""
    chosen = [tilings.choose_gradient("sm_90", columns, depth, rows) for rows in (1, 64, 128, 512, 4096)]
    assert len({tiling.tile_n for tiling in chosen}) == 1


def test_the_class_of_rows_tells_how_many_groups_are_busy():
    for groups in (1, 6, 128):
        for rows in range(1, 300):
            same = [r for r in range(1, 300) if launcher.rows_class(r, groups) == launcher.rows_class(rows, groups)]
            assert len({launcher.busy_groups(r, groups) for r in same}) == 1
            assert min(groups, rows) / 2 < launcher.busy_groups(rows, groups) <= min(groups, rows)


@pytest.mark.parametrize("rows", [32, 256, 4096])
@pytest.mark.parametrize("depth", [128, 1536, 7168])
@pytest.mark.parametrize("columns", [129, 192, 2048])
def test_bytes_by_columns_are_loaded_in_whole_lines(columns, depth, rows):
    """MXFP8's second operand, where its columns lie side by side; each CTA of a pair loads half of them."""
    for kind in KINDS:
        chosen = tilings.choose_scaled("sm_100", kind, OPERANDS["mxfp8"], columns, depth, rows)
        assert chosen.tile_n // chosen.ctas >= 128


def test_formats_name_architectures_of_the_table():
    assert {arch for form in OPERANDS.values() for arch in form.archs} == having("ScaledGroupedGemm")


def test_a_kernel_that_an_architecture_lacks_is_a_named_error():
    with pytest.raises(NotImplementedError, match="sm_90 has no QuantizingGroupedGemm, but ActivatedGroupedGemm"):
        arch_of("sm_90").kernel("QuantizingGroupedGemm")


@pytest.mark.parametrize(
    "ask",
    [
        lambda: arch_of("sm_42"),
        lambda: tilings.reason("sm_42", VARLEN_M, GemmConfig()),
        lambda: tilings.choose("sm_42", VARLEN_M, 64, 64, 64),
        lambda: tilings.candidates("sm_42", VARLEN_M),
        lambda: gemm.GROUPED_GEMM.build(
            gemm.GemmKey(VARLEN_M, "sm_42", True, "bfloat16", 1, EpilogueSpec("bfloat16"), GemmConfig())
        ),
    ],
)
def test_a_name_without_an_entry_is_refused(ask):
    with pytest.raises(ValueError, match=r"there are kernels for sm_80, sm_86, .*, not for sm_42"):
        ask()


def test_an_entry_without_a_folder_gives_no_kernel(monkeypatch):
    """A name planted in the table alone is an error at its first use, never another architecture's kernel."""
    monkeypatch.setitem(archs.ARCHS, "sm_42", replace(ARCHS["sm_90"], name="sm_42", chips=("sm_42",), folder="sm42"))
    with pytest.raises(ModuleNotFoundError, match="sm42"):
        gemm.GROUPED_GEMM.build(PLANTED)
    a, b, offs = torch.zeros(4, 64).bfloat16(), torch.zeros(1, 64, 64).bfloat16(), torch.tensor([4]).int()
    with backends.emulated_device("sm_42"):
        assert tgl.explain(tgl.grouped_gemm, a, b, offs).chosen.name == "loop of mm"


def test_every_chip_is_one_entrys():
    """A chip of two entries would run the kernels of the first in silence."""
    assert len(set(chips())) == len(chips())
    assert all(arch.name in arch.chips for arch in ARCHS.values())


@pytest.mark.parametrize("chip", [pytest.param(chip, marks=[pytest.mark.slow] * (chip != "sm_90")) for chip in chips()])
def test_a_kernel_is_compiled_for_every_chip_of_its_entry(chip):
    """The emulator rejects a kernel that the chip could not load, as hardware does."""
    a, b, offs = torch.ones(4, 64).bfloat16(), torch.ones(1, 64, 64).bfloat16(), torch.tensor([4]).int()
    with emulate(chip, detect_races=False) as machine:
        assert tgl.explain(tgl.grouped_gemm, a, b, offs).chosen.name == "tgl kernel"
        assert torch.equal(tgl.grouped_gemm(a, b, offs), a @ b[0])
        assert machine.launches[0].arch == arch_of(chip).target
        codes = tgl.quantize(a, offs, format="nvfp4")
        assert len(machine.launches) > 1
        assert codes.dequantize().allclose(a)

"""NVFP4 quantisation kernels on the emulator: the bytes of the CPU implementation, and nothing written around them."""

import contextlib
import itertools

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream

import tgl
from cute_emulator.chips import CHIPS
from tests import chips
from tests.cutlass_kernels import sass
from tests.cutlass_kernels.test_quantize import (
    BF16,
    F16,
    F32,
    MANY,
    RAGGED,
    awkward,
    check,
    cost_without_rows,
    grouped,
)
from tests.kernel_cases import framed_like
from tests.memory import same_bytes
from tests.quantize import drawn
from tgl import backends
from tgl.backends.cpu.quantize import fp4 as cpu_fp4
from tgl.cutlass_kernels import archs
from tgl.cutlass_kernels.archs import ARCHS, arch_of
from tgl.cutlass_kernels.launchers.format_quantizer import QuantizeCall
from tgl.cutlass_kernels.launchers.quantize import GROUP_QUANTIZE, QUANTIZERS
from tgl.cutlass_kernels.quantize import fp4, lane_tile
from tgl.cutlass_kernels.quantize.quantize_spec import NVFP4Spec
from tgl.cutlass_kernels.runtime import compiling
from tgl.meta.components import Components
from tgl.meta.quantized import Options
from tgl.testing import emulate

SHORT = (5, 0, 130, 1)
SEED = torch.tensor([1 << 40 | 12345, -3])
BLOCKED = dict(format="nvfp4", scale_layout="blocked")
COMPACT = dict(format="nvfp4")
FROM_9 = chips.parameters([name for name in ARCHS if int(name.removeprefix("sm_")) >= 90], "rounds_to_fp4")
CASES = {
    "both, blocked": ("sm_90a", BLOCKED, RAGGED),
    "both, compact": ("sm_100a", COMPACT, RAGGED),
    "rowwise": ("sm_100a", BLOCKED | dict(columnwise=False), SHORT),
    "columnwise": ("sm_90a", COMPACT | dict(rowwise=False), SHORT),
    "transformed": ("sm_90a", BLOCKED | dict(rht=True), SHORT),
    "seeded": ("sm_100a", BLOCKED | dict(rng=SEED), SHORT),
}


@pytest.mark.cover(1)
@pytest.mark.parametrize("arch, options, sizes", CASES.values(), ids=CASES)
def test_groups(arch, options, sizes):
    check(*grouped(sizes, 9, 136, BF16), arch=arch, **options)


@pytest.mark.parametrize(
    "dtype, arch, options",
    [(F32, "sm_90a", BLOCKED), (F16, "sm_90a", COMPACT), (F32, "sm_100a", COMPACT | dict(rht=True, rng=SEED))],
)
def test_sources(dtype, arch, options):
    check(*grouped((3, 40), 9, 72, dtype), arch=arch, **options)


@pytest.mark.parametrize("sizes, tail", [(MANY[:16], 0), ((0, 0, 0), 300), ((256, 64), 0), ((0, 1, 0), 127), ((), 40)])
@pytest.mark.parametrize("options", [BLOCKED, COMPACT])
def test_routings(sizes, tail, options):
    check(*grouped(sizes, tail, 40, BF16), **options)


@pytest.mark.parametrize("options", [BLOCKED, COMPACT, BLOCKED | dict(block_2d=True), COMPACT | dict(block_2d=True)])
@pytest.mark.parametrize("rows", [224, 32])
def test_matrices(options, rows):
    check(awkward(2, rows, 136, dtype=BF16), None, **options)


def test_partial_squares_and_seeds_of_matrices():
    w = awkward(3, 151, 40, dtype=BF16)
    check(w, None, arch="sm_90a", block_2d=True, columnwise=False, **BLOCKED)
    check(awkward(3, 160, 40, dtype=BF16), None, arch="sm_90a", block_2d=True, rng=SEED, **COMPACT)


@pytest.mark.parametrize("arch", FROM_9)
def test_ties_and_their_neighbours(arch):
    """Products by 1 that lie on, above and below what rounding turns on, of both signs, zeros and subnormals."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0])
    up, down = (ties.nextafter(torch.tensor(to)) for to in (9.0, 0.0))
    small = torch.tensor([0.0, 1e-45, 1e-30, 2.0**-126, 0.1])
    values = torch.cat([ties, up, down, small])
    x = torch.cat([values, -values]).repeat(4)[:270].view(18, 15)
    x = torch.cat([torch.full((18, 1), 6.0), x], 1).repeat(8, 4)  # 6: the scale of a block is 1
    x = torch.cat([x, x.T.repeat(1, 3)[:, : x.shape[1]]])  # and the same down the columns
    x[0, 0] = 2688.0  # the scale of the group is 1
    offs = torch.tensor([x.shape[0]], dtype=torch.int32)
    assert (tgl.group_quantize(x, offs, **COMPACT).scale.view(torch.uint8) == 0x38).float().mean() > 0.5
    check(x, offs, arch=arch, **COMPACT)


@pytest.mark.parametrize("arch", FROM_9)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_every_scale(arch, dtype):
    """Blocks of every magnitude beside one of 1: scales from 0 to the largest, products from small to infinite."""
    torch.manual_seed(0)
    magnitudes = torch.exp2(torch.linspace(-24, 0, 256))[:, None]
    x = (torch.rand(256, 64) * 2 - 1) * magnitudes
    x[:, ::16] = magnitudes
    check(x.to(dtype), torch.tensor([256], dtype=torch.int32), arch=arch, **BLOCKED)


@pytest.mark.slow
@pytest.mark.parametrize("largest", [3e38, 1e-30, 1e-40, 1e-45])
def test_extreme_groups(largest):
    x = torch.rand(48, 64) * largest
    check(x, torch.tensor([20, 48], dtype=torch.int32), arch="sm_90a", **BLOCKED)


def test_row_scale_comes_before_the_transform():
    x, offs = grouped((5, 0, 130), 9, 64, BF16)
    factors = torch.rand(x.shape[0])
    factors[offs[-1] :] = float("nan")
    check(x, offs, row_scale=factors, rht=True, **BLOCKED)


@pytest.mark.slow
@pytest.mark.parametrize("arch", FROM_9)
def test_many_schedules(arch):
    check(*grouped((3, 0, 140), 9, 72, BF16), arch=arch, seeds=range(3), **BLOCKED)


def test_seed_on_a_stride():
    x, offs = grouped((3, 40), 9, 64, BF16)
    check(x, offs, rng=torch.stack([SEED, SEED + 1], 1)[:, 0], **BLOCKED)


@pytest.mark.parametrize("format, flag", [("nvfp4", torch.tensor([1.0])), ("fp8_tensor", torch.tensor(True))])
def test_noop_writes_nothing(format, flag):
    x, offs = grouped((3, 40), 9, 64, BF16)
    expected = tgl.group_quantize(x, offs, format=format)
    frame = framed_like(expected)
    out = Components(*frame.inside)
    with emulate("sm_100a") as machine:
        tgl.group_quantize(x, offs, noop=flag, format=format, out=out)
        assert len(machine.launches) == (3 if format == "nvfp4" else 2)
        assert frame.untouched()
        tgl.group_quantize(x, offs, noop=torch.zeros_like(flag), format=format, out=out)
    for ours, theirs in zip(out, expected):
        assert same_bytes(ours, theirs)


@pytest.mark.usefixtures("overlapping_groups")
@pytest.mark.parametrize("options", [BLOCKED, COMPACT])
def test_bad_offsets_stay_inside(options):
    x = torch.randn(100, 64).bfloat16()
    offs = torch.tensor([90, -5, 2000, 40], dtype=torch.int32)
    frame = framed_like(tgl.group_quantize(x, torch.tensor([10, 20, 30, 40], dtype=torch.int32), **options))
    out = Components(*frame.inside)
    with emulate("sm_100a"):
        tgl.group_quantize(x, offs, **options, out=out)
    assert frame.intact()


@pytest.mark.parametrize("shape, groups", [((0, 40), 3), ((0, 40), 1), ((40, 0), 3)])
def test_nothing_to_quantise(shape, groups):
    offs = torch.zeros(groups, dtype=torch.int32)
    expected = tgl.group_quantize(torch.zeros(shape, dtype=BF16), offs, **COMPACT)
    frame = framed_like(expected)
    out = Components(*frame.inside)
    with emulate("sm_100a"):
        tgl.group_quantize(torch.zeros(shape, dtype=BF16), offs, **COMPACT, out=out)
    for ours, theirs in zip(out, expected):
        assert same_bytes(ours, theirs)


def test_unsupported_calls_have_reasons():
    with backends.emulated_device("sm_90"):
        w = torch.zeros(2, 48, 64, dtype=BF16)
        assert "multiple of 32" in str(tgl.explain("group_quantize", w, None, **COMPACT))
        assert "runs tgl kernel" in str(tgl.explain("group_quantize", w, None, columnwise=False, **COMPACT))
        x = torch.zeros(48, 36, dtype=BF16)
        offs = torch.tensor([48], dtype=torch.int32)
        assert "multiple of 8" in str(tgl.explain("group_quantize", x, offs, **COMPACT))


@pytest.mark.slow
@pytest.mark.parametrize("arch", FROM_9)
@pytest.mark.parametrize(
    "source, rht, stochastic, registers",
    [
        ("bfloat16", False, False, 64),
        ("bfloat16", True, True, 128),
        ("float32", False, False, 128),
    ],
)
def test_machine_code(arch, source, rht, stochastic, registers):
    """Registers for blocks to share a multiprocessor, nothing in local memory, a cast for two elements or a minimum."""
    converts = ARCHS[arch].rounds_to_fp4
    chip = next(iter(ARCHS[arch].draws_to_fp4), None) if stochastic else None
    spec = NVFP4Spec(source, True, True, False, True, True, rht, stochastic, converts, chip=chip)
    with emulate(chip or ARCHS[arch].target):  # keeps what was compiled
        kernel = QUANTIZERS["nvfp4"].build(arch, spec)
    maxima = sass.inspect(kernel.artifacts.CUBIN, "GroupAmax")
    most = 128 if ARCHS[arch].spares_registers else 255  # of those one block has them all
    assert maxima.registers <= (80 if source == "bfloat16" and not rht else most if rht else max(registers, 128))
    report = sass.inspect(kernel.artifacts.CUBIN, "QuantizeNVFP4")
    assert report.registers <= registers
    for one in (maxima, report):
        assert one.spills == 0
        assert one.frame == 0
    if chip or (not stochastic and converts):
        assert report.count("F2FP.SATFINITE") >= lane_tile.STEPS * lane_tile.VECTOR
    if stochastic:  # by integers it is 4880 on sm_100
        assert (sum(report.opcodes.values()) < 3000) == (chip is not None)
    if not stochastic and not converts:
        assert report.count("VIMNMX3") >= 4 * lane_tile.STEPS * lane_tile.VECTOR  # with clamped products and without
    assert report.count("CALL") <= 3 * (1 + rht)  # a group's two divisions, and one for a table of multipliers


WAYS = {"": {}, "rows": {"rows": True}, "elements": {"elementwise": True}, "factors": {"row_scale": "float32"}}
TRANSFORMS = list(itertools.product(ARCHS, ("bfloat16", "float16", "float32"), (False, True), WAYS))


@pytest.mark.slices(3)
@pytest.mark.slow
@pytest.mark.parametrize("made", TRANSFORMS, ids=lambda made: "-".join(map(str, made)))
def test_machine_code_of_transforms(made):
    """Nothing in local memory; but for two words or four where float32 is rounded stochastically by integers."""
    arch, source, stochastic, way = made
    chip = next(iter(ARCHS[arch].draws_to_fp4), None) if stochastic else None
    facts = dict(converts=ARCHS[arch].rounds_to_fp4, chip=chip, **WAYS[way])
    spec = NVFP4Spec(source, True, True, False, True, True, True, stochastic, **facts)
    with emulate(chip or ARCHS[arch].target):
        report = sass.inspect(QUANTIZERS["nvfp4"].build(arch, spec).artifacts.CUBIN)
    words = 4 if source == "float32" and stochastic and chip is None else 0
    assert report.spills <= words
    assert report.frame <= 4 * words


# --- stochastic rounding by an instruction ----------------------------------------------------------------------------


class Draws:
    """The smallest kernel with it."""

    @cute.jit
    def __call__(self, out: cute.Tensor, stream):
        self.kernel(out).launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, out: cute.Tensor):
        words = [out[i] for i in range(lane_tile.VECTOR)]
        eight = fp4.Eight(words, [None] * lane_tile.VECTOR, cutlass.Float32)
        out[0] = fp4.drawn(eight, cutlass.Float32(1.0), words[:2])


@pytest.mark.parametrize("target", sorted({c.target for c in CHIPS.values()} | {a.target for a in ARCHS.values()}))
def test_the_assembler_takes_the_instruction_for_some_chips_alone(target):
    taken = {arch.own_target(chip) for arch in ARCHS.values() for chip in arch.draws_to_fp4}
    refused = pytest.raises(Exception, match="PTX assembly failed")
    with contextlib.nullcontext() if target in taken else refused:
        cute.compile[cute.GPUArch(target)](Draws(), compiling.vector("int32"), make_fake_stream())


@pytest.mark.parametrize("chip", archs.chips())
def test_a_kernel_with_the_instruction_is_its_chips_own(chip):
    """Its key differs, in memory and on disk; without a seed it is that of the family."""
    entry, x, offs = arch_of(chip), torch.zeros(16, 64, dtype=BF16), torch.tensor([16], dtype=torch.int32)
    out = tgl.group_quantize(x, offs, **COMPACT)
    with backends.emulated_device(chip):
        for rng in (None, SEED):
            assert tgl.explain("group_quantize", x, offs, rng=rng, **COMPACT).chosen.name == "tgl kernel"
            call = QuantizeCall(x, offs, None, None, rng, None, Options(**COMPACT).resolved("group_quantize"), out)
            draws = rng is not None and chip in entry.draws_to_fp4
            assert GROUP_QUANTIZE.key(call, entry.name).spec.chip == (chip if draws else None)


def test_it_is_compiled_for_and_loaded_by_that_chip():
    x, offs = grouped((3, 40), 9, 64, BF16)
    with emulate("sm_103", detect_races=False) as machine:
        tgl.group_quantize(x, offs, rng=SEED, columnwise=False, **COMPACT)
        assert {launch.arch for launch in machine.launches} == {"sm_103a"}
    with pytest.raises(ValueError, match="sm_100 is sm_100, sm_103, not sm_90"):
        arch_of("sm_100").own_target("sm_90")


@pytest.mark.parametrize("stream", [0, 1])
def test_its_bits_are_fair_and_shared_by_two_neighbours_alone(stream):
    x, offs, count = torch.zeros(512, 256), torch.tensor([512], dtype=torch.int32), 512 * 256 // 16
    with drawn.by_instruction(x, offs):
        bits = cpu_fp4.random_bits(torch.arange(count), 3, 5, stream).view(-1, 2, 2)
    assert torch.equal(bits[..., 0], bits[..., 1])
    numbers = bits[..., 0].double()
    assert ((numbers.mean(0) - 32767.5).abs() < 5 * 2**16 / (12 * len(numbers)) ** 0.5).all()
    assert numbers.T.corrcoef()[0, 1].abs() < 5 / len(numbers) ** 0.5
    words = numbers[:, 0] * 2**16 + numbers[:, 1]
    assert len(words.unique()) >= len(words) - 3  # of 2^32 there are, a pair of equal ones in seven such tests


def test_tiles_without_rows_cost_little():
    assert cost_without_rows(**BLOCKED) < 0.5

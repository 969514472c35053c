"""Dequantising kernels on the emulator: the numbers of the CPU implementation to the bit, canaries intact."""

import math
import re
from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.cutlass_kernels import sass
from tests.cutlass_kernels.test_quantize import BF16, E5M2, F16, F32, MANY, RAGGED, awkward, grouped
from tests.kernel_cases import framed_like
from tests.memory import like, raw, same_bytes
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.launchers.dequantize import GROUP_DEQUANTIZE, DequantizeKey
from tgl.cutlass_kernels.quantize.quantize_spec import DequantizeSpec
from tgl.cutlass_kernels.runtime import launcher
from tgl.meta.quantized import DequantizeOptions
from tgl.testing import emulate


@dataclass(frozen=True)
class Operand:
    """Components of one direction; ``rows`` is T, or None for matrices."""

    data: torch.Tensor
    scale: torch.Tensor
    offs: torch.Tensor | None
    amax: torch.Tensor | None
    rows: int | None
    options: dict

    def values(self, out_dtype: torch.dtype = BF16) -> torch.Tensor:
        return tgl.group_dequantize(
            self.data, self.scale, self.offs, self.amax, rows=self.rows, out_dtype=out_dtype, **self.options
        )


def spoil_tail(data, scale, offs, rows):
    """NaN, whatever the dtype, past the groups of what is stored by rows."""
    for t in (data, scale):
        if t.dim() == 2 and t.shape[0] == rows:
            tail = t[offs[-1] if len(offs) else 0 :]
            tail.fill_(math.nan) if t.dtype == torch.float32 else tail.view(torch.uint8).fill_(0xFF)


def operand(x, offs, format, columnwise=False, dtype=None, **options):
    """Components of ``x``, with bad bytes in the tail where it is stored."""
    q = tgl.group_quantize(
        x, offs, format=format, rowwise=not columnwise, columnwise=columnwise, dtype=dtype, **options
    )
    data, scale, amax = q[3:6] if columnwise else q[:3]
    if offs is not None:
        spoil_tail(data, scale, offs, x.shape[0])
    options |= {"format": format, "columnwise": columnwise}
    return Operand(data, scale, offs, amax if format == "nvfp4" else None, None if offs is None else len(x), options)


def same(ours, theirs):
    """Equal to the bit, but for which NaN it is."""
    bits = {2: torch.int16, 4: torch.int32}[ours.element_size()]
    return ((ours.view(bits) == theirs.view(bits)) | (ours.isnan() & theirs.isnan())).all()


OP = "group_dequantize", torch.device("cpu")


def check(q, dtype=BF16, arch="sm_100a", seeds=(0,)):
    expected = q.values(dtype)
    frame = framed_like([torch.empty(expected.shape, dtype=dtype)])
    (out,) = frame.inside
    options = DequantizeOptions(**q.options)
    with emulate(arch) as machine:
        for seed in seeds:
            machine.seed = seed
            frame.refill()
            backends.run(*OP, q.data, q.scale, q.offs, q.amax, options=options, out=out)
            assert same(out, expected)
            assert frame.intact()
        assert len(machine.launches) == (len(seeds) if q.offs is None or len(q.offs) else 0)


BLOCKED = dict(scale_layout="blocked")
CASES = {
    "mxfp8": dict(format="mxfp8"),
    "mxfp8, blocked": dict(format="mxfp8", **BLOCKED),
    "mxfp8, columnwise": dict(format="mxfp8", columnwise=True),
    "mxfp8, columnwise, blocked, E5M2": dict(format="mxfp8", columnwise=True, dtype=E5M2, **BLOCKED),
    "nvfp4": dict(format="nvfp4"),
    "nvfp4, blocked": dict(format="nvfp4", **BLOCKED),
    "nvfp4, columnwise": dict(format="nvfp4", columnwise=True),
    "nvfp4, columnwise, blocked, transformed": dict(format="nvfp4", columnwise=True, rht=True, **BLOCKED),
    "mxfp4": dict(format="mxfp4"),
    "mxfp4, blocked": dict(format="mxfp4", **BLOCKED),
    "mxfp4, columnwise": dict(format="mxfp4", columnwise=True),
    "mxfp4, columnwise, blocked": dict(format="mxfp4", columnwise=True, **BLOCKED),
    "fp8_tensor": dict(format="fp8_tensor"),
    "fp8_tensor, columnwise": dict(format="fp8_tensor", columnwise=True),
    "fp8_block": dict(format="fp8_block"),
    "fp8_block, columnwise": dict(format="fp8_block", columnwise=True),
}
EITHER_WAY = ("mxfp8, columnwise, blocked, E5M2", "nvfp4, columnwise, blocked, transformed")


@pytest.mark.cover(1)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_groups(options):
    check(operand(*grouped(RAGGED, 9, 272, BF16), **options))


@pytest.mark.parametrize("name", ["mxfp8, columnwise", "nvfp4", *EITHER_WAY])
def test_float32(name):
    check(operand(*grouped((5, 0, 130, 33), 40, 72, F32), **CASES[name]), F32)


@pytest.mark.slow
@pytest.mark.parametrize("name", EITHER_WAY)
def test_float16_on_sm_90_under_many_schedules(name):
    check(operand(*grouped((3, 0, 140), 9, 136, F16), **CASES[name]), F16, arch="sm_90a", seeds=range(3))


@pytest.mark.parametrize("sizes, tail", [(MANY, 0), ((0, 0, 0), 300), ((256, 128), 0), ((0, 1, 0), 127), ((), 40)])
@pytest.mark.parametrize("name", ["nvfp4, blocked", *EITHER_WAY])
def test_routings(name, sizes, tail):
    check(operand(*grouped(sizes, tail, 40, BF16), **CASES[name]))


OFTEN = ("mxfp8, blocked", "mxfp8, columnwise, blocked, E5M2", "fp8_tensor, columnwise", "fp8_block", EITHER_WAY[1])


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in OFTEN else pytest.mark.slow) for n in CASES])
def test_matrices(name):
    check(operand(awkward(3, 208, 136, dtype=BF16), None, **(CASES[name] | {"rht": False})))


@pytest.mark.parametrize("columnwise", [False, True])
def test_square_blocks(columnwise):
    check(operand(awkward(2, 208, 264, dtype=BF16), None, "fp8_block", columnwise, block_2d=True))
    check(operand(awkward(2, 48, 40, dtype=BF16), None, "nvfp4", columnwise, block_2d=True))


@pytest.mark.parametrize(
    "format, columnwise, rows, columns",
    [
        ("mxfp8", False, 40, 33),
        ("mxfp8", True, 40, 34),
        ("nvfp4", False, 40, 38),
        ("fp8_block", True, 31, 20),
        ("nvfp4", True, 46, 35 * 2),
    ],
)
def test_odd_matrices(format, columnwise, rows, columns):
    check(operand(awkward(3, rows, columns, dtype=BF16), None, format, columnwise, **(BLOCKED if rows > 31 else {})))


def test_odd_columns_of_groups():
    check(operand(*grouped(RAGGED, 9, 33, BF16), "mxfp8", True, **BLOCKED))
    check(operand(*grouped(RAGGED, 9, 35, BF16), "fp8_tensor", True))


@pytest.mark.usefixtures("overlapping_groups")
@pytest.mark.parametrize("name", ["mxfp8, columnwise", *EITHER_WAY])
def test_bad_offsets_stay_inside(name):
    x, offs = torch.randn(100, 64).bfloat16(), torch.tensor([10, 20, 30, 40], dtype=torch.int32)
    q = operand(x, offs, **CASES[name])
    frame = framed_like([torch.empty(100, 64, dtype=BF16)])
    bad = torch.tensor([90, -5, 2000, 40], dtype=torch.int32)
    with emulate("sm_100a"):
        backends.run(*OP, q.data, q.scale, bad, q.amax, options=DequantizeOptions(**q.options), out=frame.inside[0])
    assert frame.intact()


def misaligned(t):
    moved = like(torch.empty(t.numel() + 1, dtype=t.dtype)[1:], t)
    raw(moved).copy_(raw(t))
    return moved


def test_scales_of_rows_are_read_as_they_lie():
    q = operand(*grouped((3, 0, 140), 9, 272, BF16), "fp8_block")
    gaps = torch.stack([q.scale, q.scale], -1)[..., 1]
    with emulate("sm_90a") as machine:
        values, *others = (replace(q, scale=scale).values() for scale in (q.scale, q.scale.contiguous(), gaps))
        assert len(machine.launches) == 3
    assert all(same(values, other) for other in others)


def test_the_op_runs_it_and_copies_misaligned_operands():
    q = operand(*grouped((3, 0, 140), 9, 40, BF16), **CASES["nvfp4, columnwise, blocked, transformed"])
    moved = Operand(misaligned(q.data), misaligned(q.scale), q.offs, q.amax, q.rows, q.options)
    expected = q.values()
    with emulate("sm_100a") as machine:
        assert "are copied" in str(
            tgl.explain("group_dequantize", q.data, q.scale, q.offs, q.amax, rows=q.rows, **q.options)
        )
        assert same(moved.values(), expected)
        assert len(machine.launches) == 1


def test_warmup_compiles_what_the_call_needs(monkeypatch):
    q = operand(*grouped((3, 0, 140), 9, 40, BF16), **CASES["mxfp8"])
    expected = q.values()
    with emulate("sm_90a"):
        tgl.warmup("group_dequantize", q.data, q.scale, q.offs, rows=q.rows, **q.options)
        monkeypatch.setattr(launcher, "compiled", None)
        assert same(q.values(), expected)


def test_requantize_of_whole_groups_is_two_kernels_in_turn(monkeypatch):
    """Formats with a scale per group requantise in two launches."""
    (x, offs), options = grouped((3, 0, 140), 9, 40, BF16), dict(format="fp8_tensor")
    q = tgl.group_quantize(x, offs, columnwise=False, **options)
    spoil_tail(q.data, q.scale, offs, x.shape[0])
    expected = tgl.group_requantize(q.data, q.scale, offs, **options)
    with emulate("sm_90a") as machine:
        assert "through float32" in str(tgl.warmup("group_requantize", q.data, q.scale, offs, **options))
        monkeypatch.setattr(launcher, "compiled", None)
        got = tgl.group_requantize(q.data, q.scale, offs, **options)
        assert len(machine.launches) == 3
    for ours, theirs in zip(got, expected):
        assert same_bytes(ours, theirs)


E4M3, FP4 = "float8_e4m3fn", "float4_e2m1"
KERNELS = {
    "rows": DequantizeSpec("mxfp8", E4M3, "bfloat16", False, True, False, False, True, 8, 0),
    "rows, scales of columns": DequantizeSpec("mxfp8", E4M3, "bfloat16", True, True, False, False, True, 8, 0),
    "rows of FP4": DequantizeSpec("nvfp4", FP4, "bfloat16", False, True, False, False, True, 8, 0),
    "float32": DequantizeSpec("mxfp8", E4M3, "float32", True, True, False, False, True, 4, 0),
    "transposed": DequantizeSpec("fp8_block", E4M3, "bfloat16", True, False, False, False, True, 8, 16),
    "transformed": DequantizeSpec("nvfp4", FP4, "bfloat16", True, True, False, True, True, 8, 8),
}


@pytest.mark.slow
@pytest.mark.parametrize("arch, left_out", [("sm_90", ("float32", "transposed")), ("sm_100", ("rows",))])
def test_machine_code(arch, left_out):
    """Nothing in local memory, registers for two to four blocks, stores of 16 bytes, no product fused with a sum."""
    fused = {}
    for name, spec in KERNELS.items():
        if name in left_out:
            continue
        with emulate(ARCHS[arch].target):  # keeps what was compiled
            artifacts = GROUP_DEQUANTIZE.build(DequantizeKey(arch, True, spec)).artifacts
        report = sass.inspect(artifacts.CUBIN)
        assert report.spills == report.frame == 0, name
        assert report.registers <= (128 if spec.rht else 80 if spec.out == "float32" else 64), name
        assert re.search(r"st\.global\.(v4\.b32|v2\.b64)", artifacts.PTX), name
        fused[name] = report.count("FFMA")
    quotients = fused.pop("rows of FP4")  # of a group's scale: their expansion fuses
    assert fused.pop("transformed") == quotients
    assert not any(fused.values())

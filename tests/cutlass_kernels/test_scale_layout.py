"""Scales laid out for tensor cores in one launch, on the emulator: the bytes of the CPU, and nothing around them."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests import chips
from tests.cutlass_kernels import sass
from tests.kernel_cases import ends, exact, framed_like
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.launchers.scale_layout import SCALE_TO_LAYOUT, LayOutKey
from tgl.cutlass_kernels.runtime import launcher
from tgl.testing import emulate

RAGGED, TOKENS = (5, 0, 129, 128, 1, 0, 40), 30
MANY = (*([0, 3, 1, 0, 9, 0, 130, 2] * 5), *([0] * 95), 7, 0)  # more groups than are looked up at a time
NEVER = TOKENS - 1  # a token of no row
LOW, HIGH = -(1 << 31), (1 << 31) - 1
WILD = (-1, LOW, HIGH, TOKENS, NEVER)
OP = "scale_to_layout"
slow = pytest.mark.slow


def index(sizes, seed=0, tail=WILD):
    """Tokens of rows, some of them often, and numbers that mean nothing for a tail."""
    numbers = torch.randint(0, NEVER, (sum(sizes),), generator=torch.Generator().manual_seed(seed))
    return torch.cat([numbers, torch.tensor(tail)]).int()


def scales(rows, columns):
    """Return random bytes except 0, the value where there is no scale."""
    return torch.randint(1, 256, (rows, columns), generator=torch.Generator().manual_seed(columns)).to(torch.uint8)


def named(scale, rows):
    """The options of a call: every format has the same layout of bytes."""
    shape = len(scale if rows is None else rows), scale.shape[1] * 32
    return {"shape": shape, "layout": "blocked", "format": "mxfp8"}


def check(scale, offs, rows=None, arch="sm_90a", seeds=(0,), launches=1):
    """Check one launch, under every seed, against the bytes of steps of ATen, between canaries."""
    options = named(scale, rows)
    wanted = tgl.to_blocked_scale(scale, offs, rows, shape=options["shape"], format="mxfp8")
    _, args, keywords = backends.registry.described[OP](scale, offs, rows, **options)
    frame = framed_like([wanted])
    keywords["out"] = frame.inside[0]
    with emulate(arch) as machine:
        report = tgl.explain(OP, scale, offs, rows, **options)
        assert report.chosen.name == "tgl kernel"
        for seed in seeds:
            machine.seed = seed
            frame.refill()
            backends.run(OP, scale.device, *args, **keywords)
            differ = frame.inside[0] != wanted
            assert not differ.any(), f"seed {seed}: {differ.nonzero()[:3].tolist()}"
            assert frame.intact()
        assert len(machine.launches) == launches * len(seeds)


@pytest.mark.parametrize("arch", chips.parameters())
def test_scales_of_rows_by_an_index(arch):
    """Numbers of no row are scales of zero."""
    rows = index(RAGGED)
    rows[[2, 60, 170]] = torch.tensor([-1, HIGH, TOKENS], dtype=torch.int32)
    check(scales(TOKENS, 80), ends(RAGGED), rows, ARCHS[arch].target)


def test_scales_of_rows_in_order():
    check(scales(sum(RAGGED) + 9, 24), ends(RAGGED))


@pytest.mark.parametrize("columns", [2, 45, 90, 96, *(pytest.param(width, marks=slow) for width in (1, 3, 4, 16, 24))])
def test_widths(columns):
    """Accesses of 1 to 16 bytes, and atoms that columns fill in part."""
    check(scales(TOKENS, columns), ends((3, 0, 140)), index((3, 0, 140)))


LAYOUTS = {
    "pitch": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    "odd pitch": lambda t: torch.cat([t, t[:, :1]], 1)[:, : t.shape[1]],
    "misaligned": lambda t: torch.cat([t.new_zeros(3), t.flatten()])[3:].view(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(layout):
    check(layout(scales(TOKENS, 32)), ends((3, 0, 140)), index((3, 0, 140)))


@pytest.mark.cover(1)
@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("sizes", [MANY, (0, 0, 0), (256, 128), (0, 1, 0)], ids=["many", "empty", "even", "one"])
def test_routings(sizes, indexed):
    """The tail has units of its own, whose numbers and scales look like others."""
    rows = index(sizes, tail=WILD * 60)
    check(scales(TOKENS if indexed else len(rows), 24), ends(sizes), rows if indexed else None)


def test_nothing_to_lay_out():
    """Calls without rows, groups, tokens or columns launch nothing."""
    nothing = torch.zeros(0, dtype=torch.int32)
    check(scales(TOKENS, 16), ends((0, 0, 0)), nothing)
    check(scales(TOKENS, 16), nothing, index(()), launches=0)
    check(scales(0, 8), ends(RAGGED), index(RAGGED), launches=0)
    check(scales(0, 8), nothing, launches=0)
    check(scales(TOKENS, 0), ends(RAGGED), index(RAGGED), launches=0)


def test_many_schedules():
    check(scales(TOKENS, 80), ends(RAGGED), index(RAGGED), seeds=range(4))


def test_bad_offsets_stay_inside():
    """Wherever groups lie, wild numbers are not followed, and nothing around the result is written."""
    scale, rows = scales(TOKENS, 16), index((170,))
    _, (_, *_), keywords = backends.registry.described[OP](scale, ends((0,) * 4), rows, **named(scale, rows))
    frame = framed_like([torch.empty(keywords["out"].shape, dtype=torch.uint8)])
    keywords["out"] = frame.inside[0]
    with emulate("sm_90a"):
        for bad in ([90, -5, 2000, 40], [-9, 300, 20, -1]):
            backends.run(OP, scale.device, scale, torch.tensor(bad, dtype=torch.int32), **keywords)
            assert frame.intact()


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_the_scales_of_a_quantiser(format):
    """MXFP8 by an index too: the codes of a token do not depend on its row."""
    x, offs, rows = torch.randn(TOKENS, 224).bfloat16(), ends(RAGGED), index(RAGGED)
    x[NEVER] = x[3, 40] = torch.nan
    ordered = x[rows.clamp(0, NEVER).long()]
    options, named = {"format": format, "columnwise": False}, {"shape": ordered.shape, "format": format}
    wanted = tgl.group_quantize(ordered, offs, scale_layout="blocked", **options).scale
    compact = tgl.group_quantize(ordered, offs, **options).scale
    tokens = tgl.group_quantize(x, ends((TOKENS,)), **options).scale
    with emulate("sm_90a"):
        assert torch.equal(tgl.to_blocked_scale(compact, offs, **named), wanted)
        if format == "mxfp8":
            assert torch.equal(tgl.to_blocked_scale(tokens, offs, rows, **named), wanted)


def test_other_numbers_of_rows_and_tokens_are_the_same_kernel(monkeypatch):
    for table in ("compiled_kernels", "warm_plans"):  # whatever other tests of the process have called
        monkeypatch.setattr(launcher, table, {})
    scale = scales(TOKENS, 16)
    with emulate("sm_90a") as machine:
        tgl.warmup(OP, scale, ends(RAGGED), index(RAGGED), **named(scale, index(RAGGED)))
        assert (len(launcher.compiled_kernels), len(machine.launches)) == (1, 0)
        for tokens, sizes in ((TOKENS, RAGGED), (NEVER, (3, 40)), (TOKENS, (0, 0, 0, 200))):
            rows = index(sizes)
            tgl.to_blocked_scale(scale[:tokens], ends(sizes), rows, shape=(len(rows), 512), format="mxfp8")
        assert (len(launcher.compiled_kernels), len(launcher.warm_plans), len(machine.launches)) == (1, 1, 3)
        tgl.to_blocked_scale(scale, ends((TOKENS,)), shape=(TOKENS, 512), format="mxfp8")  # in order
        assert len(launcher.compiled_kernels) == 2


def why(scale, offs, rows=None, **options):
    """Return the reason that ``explain`` gives against the kernel."""
    with emulate("sm_90a"):
        report = tgl.explain(OP, scale, offs, rows, **{"layout": "blocked", "format": "mxfp8", **options})
    assert report.chosen.name == "map of offsets"
    return str(report)


def test_unsupported_calls_have_reasons():
    other = 'lays out rowwise scales of rows in groups, in layout "blocked"'
    offs, rows = ends((20, 10)), torch.arange(30, dtype=torch.int32)
    assert other in why(scales(30, 2), offs, shape=(30, 64), layout="torch")
    assert other in why(scales(30, 2), offs, rows, shape=(30, 64), layout="te")
    assert other in why(scales(8, 64), offs, shape=(30, 64), columnwise=True)
    assert other in why(scales(6, 5)[None], None, shape=(1, 6, 160))
    assert "needs `scale` row-major" in why(scales(4, 30).t(), offs, shape=(30, 128))


def test_what_a_product_of_compact_scales_needs_is_warmed_up(asked):
    x, w, offs = exact(sum(RAGGED), 64), exact(len(RAGGED), 48, 64), ends(RAGGED)
    q, p = tgl.group_quantize(x, offs, format="mxfp8"), tgl.group_quantize(w, None, format="mxfp8")
    found = []
    with backends.emulated_device("sm_100"):
        for call in (tgl.warmup, lambda op, *args, **options: op(*args, **options)):
            asked.clear()
            launcher.compiled_kernels.clear()
            launcher.forget()
            call(tgl.grouped_gemm_scaled, q.data, q.scale, p.data, p.scale, offs, format="mxfp8")
            found.append(set(asked))
    assert found[0] == found[1]
    assert {op for op, _ in asked} == {OP, "grouped_gemm_scaled"}


@pytest.mark.parametrize("arch", ["sm_90", *(pytest.param(arch, marks=slow) for arch in ("sm_80", "sm_100", "sm_120"))])
def test_machine_code(arch):
    """Nothing in local memory, and registers for six blocks on a multiprocessor."""
    with emulate(ARCHS[arch].target):  # keeps what was compiled
        kernel = SCALE_TO_LAYOUT.build(LayOutKey(arch, False, 16, True))
    report = sass.inspect(kernel.artifacts.CUBIN)
    assert (report.spills, report.frame) == (0, 0)
    assert report.registers <= 40

"""Groups that begin behind row 0: rows before them are neither read nor written, wherever ``begin`` points."""

import itertools

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from tests.cutlass_kernels.gemm_cases import CLUSTERS
from tests.kernel_cases import CANARY, ends, framed, integers
from tests.ops.test_packed_gemm import decoded, matrices
from tgl import backends
from tgl.backends.composite import packed_gemm
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import VARLEN_M, GemmConfig
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.launchers import gemm
from tgl.meta import packed
from tgl.testing import emulate

BF16, F32 = torch.bfloat16, torch.float32
BEFORE, SIZES, TAIL = 37, (0, 70, 3, 65), 5
FIRST_ENDS = BEFORE + ends(SIZES)
ROWS = BEFORE + sum(SIZES) + TAIL
TILINGS = [
    ("sm_90", GemmConfig(64, 64)),
    ("sm_90", GemmConfig(128, 64, pingpong=True)),
    ("sm_90", GemmConfig(128, 128, cluster_n=2)),
    ("sm_100", GemmConfig(128, 64)),
    ("sm_100", GemmConfig(256, 64, two_cta=True)),
    ("sm_89", GemmConfig(64, 64, stages=5)),
    ("sm_120", GemmConfig(64, 64, stages=5, tma=True)),
]


def expected_rows(a, b, begin, bias, scale, tail):
    """Return rows in float64; canaries before the groups, and behind the last one unless the ``tail`` is cleared."""
    made = torch.full((len(a), b.shape[2]), CANARY, dtype=torch.float64)
    starts, last = [begin, *FIRST_ENDS.tolist()], int(FIRST_ENDS[-1])
    for g, (start, end) in enumerate(zip(starts, FIRST_ENDS.tolist())):
        rows = slice(max(start, 0), end)  # none if the group begins behind its end
        made[rows] = a[rows].double() @ b[g].double() + scale[rows, None].double() * bias[g].double()
    if tail:
        made[last:] = 0
    return made


def cases():
    """Each tiling with rows in order and gathered; the tail alternating, and each with either in ``make test-full``."""
    for i, (arch, config) in enumerate(TILINGS):
        for gathered, tail in itertools.product([False, True], [True, False]):
            name = f"{arch} {config.tile_m}x{config.tile_n}{' gathered' * gathered}{', zero tail' * tail}"
            marks = () if tail == (gathered != i % 2) else pytest.mark.slow
            yield pytest.param(arch, config, tail, gathered, id=name, marks=marks)


@pytest.mark.parametrize(("arch", "config", "tail", "gathered"), list(cases()))
def test_kernels(arch, config, tail, gathered):
    if gathered and config.cluster_n > 1:
        config = GemmConfig(128, 128)  # no cluster shares rows that lanes find
    spec = EpilogueSpec("bfloat16", "float32", "float32", tail=tail)
    tokens, b, bias = integers(ROWS, 72), integers(len(SIZES), 72, 104), integers(len(SIZES), 104, dtype=F32)
    scale, index = integers(ROWS, dtype=F32), torch.randperm(ROWS).int()
    rows = tokens[index.long()] if gathered else tokens
    with emulate(ARCHS[arch].target):
        operand = "a" if gathered else None
        call = gemm.GROUPED_GEMM.build(
            gemm.GemmKey(VARLEN_M, arch, True, "bfloat16", 2, spec, config, False, operand, True)
        )
        for begin in (BEFORE, 0, BEFORE - 9, -(1 << 31), ROWS, (1 << 31) - 1):
            frame = framed(ROWS, 104, dtype=BF16)
            a, factor, first = rows.clone(), scale.clone(), min(max(begin, 0), BEFORE)
            unread = [*range(first), *range(FIRST_ENDS[-1], ROWS)]
            a[unread], factor[unread] = float("nan"), float("nan")
            if gathered:
                a[index.long()] = a.clone()
            more = (index,) if gathered else ()
            where = torch.tensor([begin], dtype=torch.int32)
            call(a, b, FIRST_ENDS, frame.inside, bias, factor, None, where, *more, CLUSTERS)
            wanted = expected_rows(rows, b, begin, bias, scale, tail).to(BF16)
            assert torch.equal(frame.inside, wanted), begin
            assert frame.intact(), begin


USUAL_PIECES = {("sm_90", False), ("sm_100", True)}


@pytest.mark.parametrize(
    ("arch", "over_rows"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in USUAL_PIECES))
        for case in itertools.product(["sm_80", "sm_90", "sm_100", "sm_120"], [False, True])
    ],
)
def test_pieces_of_packed_matrices(arch, over_rows, monkeypatch):
    """Every piece is one GEMM over its rows alone; the results are those of all matrices decoded at once."""
    data, scale, _ = matrices("mxfp4", (4, 64, 128))
    weight = decoded("mxfp4", data, scale, None, BF16)
    right, offs = weight if over_rows else weight.transpose(1, 2), torch.tensor([20, 20, 47, 90], dtype=torch.int32)
    a, bias = integers(96, right.shape[1]), integers(4, right.shape[2], dtype=F32)
    a[90:] = float("nan")
    whole = torch.full((96, right.shape[2]), float("nan"))
    out = whole.clone()
    with emulate(ARCHS[arch].target) as machine, backends.emulated_device(arch):
        backends.run("grouped_gemm", a.device, a, right, offs, bias, None, out=whole, zero_tail=True)
        before = len(machine.launches)
        monkeypatch.setattr(packed, "BYTES", 2 * 64 * 128 * 2)
        packed_gemm.run(a, data, scale, offs, None, bias, None, format="mxfp4", over_rows=over_rows, out=out)
        assert len(machine.launches) == before + 4  # to decode and to multiply, twice
    assert torch.equal(out, whole)
    assert not out[90:].any()


def test_a_call_that_is_known_by_its_shapes_has_a_begin_or_not():
    """The kernels differ, and nothing else of the calls does."""
    a, b, offs = integers(64, 72), integers(2, 72, 104), torch.tensor([30, 64], dtype=torch.int32)
    where = torch.tensor([16], dtype=torch.int32)
    with emulate("sm_90a"), backends.emulated_device("sm_90"):
        for begin in ({}, {"begin": where}, {}, {"begin": where}):
            out = torch.full((64, 104), CANARY, dtype=BF16)
            backends.run("grouped_gemm", a.device, a, b, offs, None, None, out=out, zero_tail=True, **begin)
            assert bool((out[:16] == CANARY).all()) == bool(begin)
            assert torch.equal(out[16:30], (a[16:30].float() @ b[0].float()).to(BF16))


def test_between_copies_rows_before_are_kept():
    """Operands that no tensor map describes: rows of an odd pitch."""
    a, b, offs = integers(64, 73)[:, :72], integers(2, 72, 104), torch.tensor([30, 60], dtype=torch.int32)
    out = torch.full((64, 105), CANARY, dtype=BF16)[:, :104]
    begin = {"begin": torch.tensor([16], dtype=torch.int32)}
    with emulate("sm_90a"), backends.emulated_device("sm_90"):
        found = backends.report("grouped_gemm", a.device, a, b, offs, None, None, out=out, zero_tail=True, **begin)
        assert found.chosen.name == "tgl kernel between copies"
        backends.run("grouped_gemm", a.device, a, b, offs, None, None, out=out, zero_tail=True, **begin)
    assert (out[:16] == CANARY).all()
    for rows, matrix in ((slice(16, 30), 0), (slice(30, 60), 1)):
        assert torch.equal(out[rows], (a[rows].float() @ b[matrix].float()).to(BF16))
    assert not out[60:].any()


def test_of_no_groups_the_rows_from_begin_on_are_the_tail():
    a, b, offs = integers(8, 72), integers(0, 72, 104), torch.zeros(0, dtype=torch.int32)
    out = torch.full((8, 104), CANARY, dtype=BF16)
    with emulate("sm_90a"), backends.emulated_device("sm_90"):
        begin = torch.tensor([3], dtype=torch.int32)
        backends.run("grouped_gemm", a.device, a, b, offs, None, None, out=out, zero_tail=True, begin=begin)
    assert (out[:3] == CANARY).all()
    assert not out[3:].any()

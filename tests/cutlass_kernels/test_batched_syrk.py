"""Symmetric products on the emulator: exact on integers, a triangle of tiles, symmetric under adversarial timing."""

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import cute_emulator
import tgl
from tests.cutlass_kernels import sass
from tests.kernel_cases import column_major, framed, integers, stored
from tgl import backends, optim
from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.archs import ARCHS, SYMMETRIC, chips, having
from tgl.cutlass_kernels.gemm.sm90.tilings import HIGH, PAIR, SYMMETRIC_COSTS, TURNS, WIDE, choose_symmetric
from tgl.cutlass_kernels.launchers.batched_syrk import BATCHED_SYRK, SyrkKey
from tgl.cutlass_kernels.runtime import launcher
from tgl.cutlass_kernels.scheduler.swizzle import decode_triangle
from tgl.testing import emulate

ARCH, BF16, F16 = "sm_90", torch.bfloat16, torch.float16
CLUSTERS = 3  # so that clusters take several tiles, in turn


@dataclasses.dataclass(frozen=True)
class Case:
    """A tiling, and the sizes it is run on."""

    config: tilings.GemmConfig
    groups: int
    rows: int
    depth: int
    dtype: torch.dtype = BF16
    row_major: bool = True
    c: bool = False


CASES = {
    "ping-pong, ragged": Case(TURNS, 2, 264, 72),
    "ping-pong, c": Case(TURNS, 1, 264, 72, c=True),
    "ping-pong, c, less than a tile": Case(TURNS, 3, 8, 136, c=True),
    "pairs of CTAs, ragged": Case(PAIR, 1, 520, 64),
    "pairs of CTAs, deeper than the ring": Case(PAIR, 2, 136, 392),
    "pairs of CTAs, c, float16, along M": Case(PAIR, 1, 264, 72, F16, row_major=False, c=True),
}
LONGER = {"pairs of CTAs, ragged", "pairs of CTAs, deeper than the ring"}
"""Cases whose paths through the kernel another case takes too."""
MORE = {
    "ping-pong, c, along M": Case(TURNS, 2, 392, 200, row_major=False, c=True),
    "one CTA, wide": Case(WIDE, 2, 520, 72, c=True),
    "one CTA, high": Case(HIGH, 2, 520, 72, c=True),
    "pairs of CTAs, c, many tiles": Case(PAIR, 1, 1032, 40, c=True),
}


@pytest.fixture(scope="module")
def clusters():
    """Launch few clusters, which take all tiles; kernels compiled for that are kept for the module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BATCHED_SYRK, "device_arguments", lambda key, where: (CLUSTERS,), raising=False)
        launcher.compiled_kernels.clear()
        yield
    launcher.compiled_kernels.clear()


@pytest.fixture
def tiling(clusters, monkeypatch):
    """Gives every product a tiling."""

    def use(config):
        monkeypatch.setattr(tilings, "choose_symmetric", lambda *_: config)
        launcher.forget()

    yield use
    launcher.forget()


def symmetric(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    values = integers(*shape, dtype=dtype)
    return values.tril() + values.tril(-1).mT


def run(case: Case, seeds, x=None, edit_ptx=None):
    """Compare every byte of the output's buffer, for every seed; returns the last launch and the output."""
    torch.manual_seed(0)
    x = stored(integers(case.groups, case.rows, case.depth, dtype=case.dtype) if x is None else x, case.row_major)
    c = symmetric(case.groups, case.rows, case.rows, dtype=case.dtype) if case.c else None
    alpha, beta = (0.5, -2.0) if case.c else (1.0, 1.0)
    expected = alpha * x.double() @ x.double().mT + (beta * c.double() if case.c else 0)
    frame = framed(*expected.shape, dtype=case.dtype)
    with emulate(ARCHS[ARCH].target) as machine, backends.emulated_device(ARCH):
        machine.edit_ptx = edit_ptx
        for seed in seeds:
            frame.refill()
            machine.seed = seed
            backends.run("batched_syrk", x.device, x, c, alpha=alpha, beta=beta, out=frame.inside)
            assert torch.equal(frame.inside.double().nan_to_num(7), expected.to(case.dtype).double().nan_to_num(7))
            assert frame.intact(), f"seed {seed}: written around the output"
        return machine.launches[-1], frame.inside


@pytest.mark.parametrize("side", [1, 2, 3, 4, 7, 12, 23])
def test_the_tile_order_has_every_place_once(side):
    found = [decode_triangle(i, side) for i in range(side * (side + 1) // 2)]
    assert sorted(found) == [(m, n) for m in range(side) for n in range(m + 1)]


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=[pytest.mark.slow] * (name in LONGER)) for name, case in CASES.items()]
)
def test_exact(tiling, case):
    tiling(case.config)
    run(case, seeds=(0,))


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES.values(), *MORE.values()], ids=[*CASES, *MORE])
def test_exact_under_many_schedules(tiling, case):
    tiling(case.config)
    run(case, seeds=range(1, 7))


def test_a_triangle_is_multiplied_and_a_row_of_nan_reaches_a_row_and_a_column(tiling):
    """One tile of 128 x 128 takes two MMAs for 16 of K."""
    case = CASES["ping-pong, ragged"]
    tiling(case.config)
    x = integers(case.groups, case.rows, case.depth)
    x[1, 133] = float("nan")
    launch, found = run(case, (0,), x)
    tiles, squares = 3 * 4 // 2, 3 * 3  # of 264 rows
    assert tiles < squares
    assert launch.mma_count == case.groups * tiles * 2 * (2 * 64 // 16)
    expected = torch.zeros(found.shape, dtype=torch.bool)
    expected[1, 133] = expected[1, :, 133] = True
    assert torch.equal(found.isnan(), expected)


def test_a_buffer_is_filled_again_once_it_was_read(tiling):
    """A warp's transposed chunk comes after the chunk itself, whose buffer the next one takes."""
    tiling(TURNS)
    wait = "cp.async.bulk.wait_group.read \t1"

    def edit(ptx: str) -> str:
        assert wait in ptx
        return ptx.replace(wait, wait[:-1] + "7")

    with pytest.raises((cute_emulator.EmulatorError, AssertionError)):
        run(CASES["ping-pong, ragged"], range(4), edit_ptx=edit)


def test_tiles_are_large_where_they_cover_a_triangle_with_little_waste():
    assert [choose_symmetric(rows) for rows in (8, 128, 384)] == [TURNS] * 3
    assert [choose_symmetric(rows) for rows in (768, 1536, 2048, 2880, 4096)] == [PAIR] * 5
    assert all(max(t.cluster_tile) % min(t.cluster_tile) == 0 for t in SYMMETRIC_COSTS)


@pytest.mark.parametrize("chip", chips())
def test_who_serves_is_named(chip):
    x = torch.ones(2, 16, 24, dtype=BF16)
    with backends.compile_only(chip):
        explanation = tgl.explain(tgl.batched_syrk, x)
        kernel = chip in chips(having(SYMMETRIC))
        assert (explanation.chosen.name == "tgl kernel") == kernel
        assert kernel or f"built for sm_90, this device is {chip}" in str(explanation)


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (torch.ones(2, 12, 24, dtype=BF16), "needs strides of `out` that are multiples of 16 bytes"),
        (torch.ones(2, 16, 12, dtype=BF16), "needs strides of `x` that are multiples of 16 bytes"),
        (torch.ones(2, 16, 24), "takes bfloat16 and float16, got torch.float32"),
        (torch.ones(2, 16, 0, dtype=BF16), "does not take K = 0"),
    ],
    ids=["M", "K", "dtype", "no K"],
)
def test_unsupported_products_are_left_to_torch_and_reported(x, reason):
    with backends.emulated_device(ARCH):
        explanation = tgl.explain(tgl.batched_syrk, x)
        assert explanation.chosen.name == "aten bmm"
        assert reason in str(explanation)
        assert torch.equal(tgl.batched_syrk(x), x @ x.mT)


def test_nothing_is_launched_for_no_results():
    with emulate(ARCHS[ARCH].target) as machine, backends.emulated_device(ARCH):
        for shape in ((0, 16, 24), (2, 0, 24)):
            assert tgl.batched_syrk(torch.ones(shape, dtype=BF16)).shape == (shape[0], shape[1], shape[1])
        assert not machine.launches


def test_steps_of_muon_are_those_of_torchs_products_but_for_rounding(clusters):
    """Tall matrices, whose transposes are iterated on: along M at first, and row-major then."""
    torch.manual_seed(0)
    stack = torch.randn(2, 40, 16)
    wanted = optim.orthogonalized(stack, steps=2)
    with emulate(ARCHS[ARCH].target, detect_races=False) as machine, backends.emulated_device(ARCH):
        found = optim.orthogonalized(stack, steps=2)
    assert len(machine.launches) == 2 * 2
    assert (found.float() - wanted.float()).norm() < 0.02 * wanted.float().norm()
    assert found.stride() == wanted.stride()


@pytest.mark.slow
@pytest.mark.parametrize("config", [TURNS, PAIR], ids=["ping-pong", "pairs"])
@pytest.mark.parametrize("added", [False, True], ids=["", "c"])
@pytest.mark.parametrize("unit", [1, 2])
def test_machine_code(config, added, unit):
    with emulate(ARCHS[ARCH].target), backends.emulated_device(ARCH):
        kernel = BATCHED_SYRK.build(SyrkKey(ARCH, True, "bfloat16", unit, added, config))
    report = sass.inspect(kernel.artifacts.CUBIN)
    assert report.spills == report.frame == report.loops_over_lanes == 0
    assert report.count("WARPGROUP.DEPBAR") == 2  # one wait in the mainloop and one behind it
    assert report.count("LDG") == (16 if added else 0)  # of 16 bytes: a thread's 128 elements


def test_column_major_stacks_and_their_transposes_are_told_apart():
    x = integers(2, 16, 24)
    with backends.emulated_device(ARCH):
        calls = [BATCHED_SYRK.call(t, None, 1.0, 1.0, x.new_empty(2, 16, 16)) for t in (x, column_major(x))]
        assert [BATCHED_SYRK.key(c, ARCH).unit for c in calls] == [2, 1]
        assert len({BATCHED_SYRK.plan_key(c) for c in calls}) == 2

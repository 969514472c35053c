"""Dispatch, combine and its backward on the emulator: exactly, without an access to unused memory."""

import contextlib

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import cute_emulator
import tgl
from tests.cutlass_kernels import sass
from tests.kernel_cases import framed_like
from tests.ops.test_permutation import NAN, SOME, combined, dispatched, dots, integers, places, problem
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.launchers import permutation as calls
from tgl.cutlass_kernels.permute.tiling import LANES, cut_of
from tgl.cutlass_kernels.runtime import device, launcher
from tgl.testing import emulate

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
OPS = torch.ops.tgl


@pytest.fixture(autouse=True)
def _forget_kernels():
    yield
    launcher.compiled_kernels.clear()
    launcher.forget()


def run(op, *operands, top_k, likes):
    """The outputs of one launch, the same bits under two schedules, in the middle of canaries."""
    found = []
    for seed in (0, 1):
        cute_emulator.active().seed = seed
        launches = len(cute_emulator.active().launches)
        frame = framed_like(torch.empty(t.shape, dtype=t.dtype) for t in likes.values())
        backends.run(op, operands[0].device, *operands, top_k=top_k, **dict(zip(likes, frame.inside)))
        assert len(cute_emulator.active().launches) == launches + 1
        assert frame.intact()
        found.append(frame.rooms)
    assert all(torch.equal(a, b) for a, b in zip(*found))
    return frame.inside


def check(x, y, token, position, top_k, weights, given=("none", "wide", "narrow")):
    """All three kernels, without weights and with them in the accumulator's dtype and in that of the rows."""
    chosen = {"none": None, "wide": weights, "narrow": weights.to(x.dtype)}
    for w in (chosen[name] for name in given):
        (rows,) = run("dispatch", x, token, position, w, top_k=top_k, likes={"out": y})
        assert torch.equal(rows, dispatched(x, token, position, top_k, w).to(x.dtype))
        (sums,) = run("combine", y, position, w, top_k=top_k, likes={"out": x})
        assert torch.equal(sums, combined(y, position, top_k, w).to(x.dtype))
        if w is None:
            continue
        likes = {"dy": y, "dweights": weights.float()}
        dy, dweights = run("combine_backward", x, y, token, position, w, top_k=top_k, likes=likes)
        assert torch.equal(dy, dispatched(x, token, position, top_k, w).to(x.dtype))
        assert torch.equal(dweights, dots(x, y, position, top_k).float())


CASES = [
    ("sm_90a", 8, BF16, 264, "both"),
    pytest.param("sm_80", 2, BF16, 40, "both", marks=pytest.mark.slow),
    pytest.param("sm_120a", 3, F16, 24, "both", marks=pytest.mark.slow),
    pytest.param("sm_100a", 2, F16, 36, "both", marks=pytest.mark.slow),
    pytest.param("sm_90a", 1, BF16, 520, "both", marks=pytest.mark.slow),
    pytest.param("sm_90a", 4, F32, 36, "spare rows", marks=pytest.mark.slow),
    pytest.param("sm_100a", 6, BF16, 264, "absent", marks=pytest.mark.slow),
    pytest.param("sm_90a", 10, F16, 5, "both", marks=pytest.mark.slow),
    pytest.param("sm_100a", 16, BF16, 24, "absent", marks=pytest.mark.slow),
    pytest.param("sm_90a", 17, F32, 4, "both", marks=pytest.mark.slow),
    pytest.param("sm_90a", 2, BF16, 264, "nothing but", marks=pytest.mark.slow),
]


@pytest.mark.cover(1)
@pytest.mark.parametrize(("arch", "top_k", "dtype", "columns", "some"), CASES, ids=str)
def test_exactly(monkeypatch, arch, top_k, dtype, columns, some):
    """Machine code loads 16 bytes where rows allow it, with nothing in local memory."""
    compile, kernels = launcher.compiled, []
    monkeypatch.setattr(launcher, "compiled", lambda *args: kernels.append(compile(*args)) or kernels[-1])
    spare, absent = SOME[some]
    x, y, token, position, weights = problem(top_k, dtype, columns, spare=spare, absent=absent)
    with emulate(arch):
        check(x, y, token, position, top_k, weights, given=("none", "wide"))
    assert len(kernels) == 5
    if columns * dtype.itemsize % 16 == 0:
        for kernel in kernels:
            assert "ld.global.v4.b32" in kernel.artifacts.PTX
            assert "st.global.v4.b32" in kernel.artifacts.PTX
    for report in (sass.inspect(kernel.artifacts.CUBIN) for kernel in kernels):
        assert report.spills == report.frame == 0
        assert report.registers <= 128


WIDER_AND_NARROWER = [
    ("sm_90a", 8, BF16, F32, 264),
    ("sm_80", 2, F32, BF16, 40),
    ("sm_120a", 3, F16, F32, 20),
    pytest.param("sm_100a", 10, F16, F32, 5, marks=pytest.mark.slow),
    pytest.param("sm_90a", 11, F32, F16, 36, marks=pytest.mark.slow),
    pytest.param("sm_100a", 6, F16, BF16, 264, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("arch", "top_k", "dtype", "out_dtype", "columns"), WIDER_AND_NARROWER, ids=str)
def test_sums_of_another_dtype(monkeypatch, arch, top_k, dtype, out_dtype, columns):
    """The bits of rows that are cast to float32 first, whose loads are no narrower than without it."""
    compile, kernels = launcher.compiled, []
    monkeypatch.setattr(launcher, "compiled", lambda *args: kernels.append(compile(*args)) or kernels[-1])
    token, position = places(9, top_k, spare=3, absent=0.3)
    y, weights = torch.randn(len(token), columns).to(dtype), torch.rand(9, top_k)
    y[(token < 0) | (token >= 9)] = NAN
    like = {"out": torch.empty(9, columns, dtype=out_dtype)}
    with emulate(arch):
        for w in (None, weights):
            (sums,) = run("combine", y, position, w, top_k=top_k, likes=like)
            (expected,) = run("combine", y.float(), position, w, top_k=top_k, likes={"out": torch.empty(9, columns)})
            assert torch.equal(sums, expected.to(out_dtype))
            assert torch.equal(sums, OPS.combine(y, token, position, top_k, w, out_dtype=out_dtype))
    ours = kernels[::2] if dtype != F32 else kernels
    for kernel in ours:
        if columns % 8 == 0:
            assert "ld.global.v4.b32" in kernel.artifacts.PTX
        report = sass.inspect(kernel.artifacts.CUBIN)
        assert report.spills == report.frame == 0
        assert report.registers <= 128


IN_FLIGHT = [
    pytest.param(arch.chips[0], dtype, top_k, marks=() if (arch, top_k) == (ARCHS["sm_90"], 8) else pytest.mark.slow)
    for arch in ARCHS.values()
    for dtype in calls.DTYPES
    for top_k in range(1, calls.CombineBackwardLauncher.most + 1)
]


@pytest.mark.slices(2)
@pytest.mark.parametrize(("arch", "dtype", "top_k"), IN_FLIGHT, ids=str)
def test_all_rows_of_a_token_are_loaded_before_the_first_is_used(arch, dtype, top_k):
    """The backward loads all rows of a token before it uses the first, in registers alone."""
    element = str(dtype).removeprefix("torch.")
    cut = cut_of(
        4096, 16 // dtype.itemsize, top_k, calls.CombineBackwardLauncher.least, calls.CombineBackwardLauncher.most
    )
    assert cut.batch == top_k
    with emulate(arch):
        kernel = calls.COMBINE_BACKWARD.build(
            calls.PermutationKey(arch, True, cut, element, "int32", "int32", "float32")
        )
    loads = (top_k + 1) * cut.strips  # and the token's own row
    assert sass.loads_before_use(kernel.artifacts.CUBIN, 128) == (loads, loads)
    report = sass.inspect(kernel.artifacts.CUBIN)
    assert report.spills == report.frame == 0
    assert report.registers <= 128


def test_two_devices_give_the_same_bits(monkeypatch):
    """Values whose sums round: the grid follows from the problem, not from the number of multiprocessors."""
    token, position = places(40, 4, spare=2, absent=0.3)
    x, y, weights = torch.randn(40, 264).to(BF16), torch.randn(len(token), 264).to(BF16), torch.rand(40, 4)
    found, grids = [], []
    for count in (1, 132):
        launcher.compiled_kernels.clear()
        launcher.forget()
        monkeypatch.setattr(device, "multiprocessors", lambda _, count=count: count)
        with emulate("sm_90a") as machine:
            found.append((OPS.dispatch(x, token, position, 4, weights), OPS.combine(y, token, position, 4, weights)))
        grids.append([launch.grid for launch in machine.launches])
    assert all(map(torch.equal, *found))
    assert grids[0] == grids[1]
    assert len(grids[0]) == 2


def test_through_the_ops():
    """Places of int64, numbers instead of rows, gradients, and rows that are copied first."""
    token, position = places(7, 3, spare=2, absent=0.3, dtype=torch.int64)
    weights = integers(7, 3)
    for columns, lay in ((None, torch.Tensor.clone), (6, lambda t: t.t().contiguous().t())):
        shape = () if columns is None else (columns,)
        x, y = lay(integers(7, *shape)).requires_grad_(), lay(integers(len(token), *shape)).requires_grad_()
        w = weights.clone().requires_grad_()
        ours = []
        for arch in ("sm_90a", None):
            with emulate(arch) if arch else contextlib.nullcontext():
                rows, sums = OPS.dispatch(x, token, position, 3, w), OPS.combine(y, token, position, 3, w)
                ours.append((rows, sums, *torch.autograd.grad([rows, sums], [x, y, w], [y, x])))
        assert all(torch.equal(a, b) for a, b in zip(*ours))


def test_unsupported_calls_have_reasons():
    token, position = places(4, 2)
    with backends.emulated_device("sm_90"):
        rows = torch.zeros(4, 8)
        assert tgl.explain("dispatch", rows, token, position, 2).chosen.name == "tgl kernel"
        assert "float64" in str(tgl.explain("dispatch", rows.double(), token, position, 2))
        columns = torch.zeros(8, 4).t()
        assert "row-major" in str(tgl.explain("dispatch", columns, token, position, 2))
        assert tgl.explain("dispatch", columns, token, position, 2).chosen.name == "tgl kernel between copies"


@pytest.mark.parametrize(
    ("columns", "vector", "top_k", "expected"),
    [
        (7168, 8, 8, (8, LANES, 1, 8, 8)),
        (7168, 8, 10, (8, LANES, 1, 10, 5)),
        (7168, 8, 1, (8, LANES, 4, 1, 1)),
        (40, 8, 2, (8, 8, 1, 2, 2)),
        (1, 1, 1, (1, 1, 1, 1, 1)),
    ],
)
def test_how_rows_are_dealt(columns, vector, top_k, expected):
    assert cut_of(columns, vector, top_k) == expected


@pytest.mark.parametrize(
    ("rows", "vector"),
    [
        (torch.empty(4, 24, dtype=BF16), 8),
        (torch.empty(4, 20, dtype=BF16), 4),
        (torch.empty(4, 24, dtype=BF16)[:, 2:18], 2),
        (torch.empty(4, 5), 1),
    ],
)
def test_accesses_are_as_wide_as_rows_allow(rows, vector):
    assert calls.vector_of(rows) == vector


@pytest.mark.parametrize(
    ("rows", "sums", "vector"),
    [
        (torch.empty(4, 24, dtype=BF16), torch.empty(4, 28)[:, 4:], 8),
        (torch.empty(4, 24, dtype=BF16), torch.empty(4, 26)[:, 2:], 2),
        (torch.empty(4, 28, dtype=BF16), torch.empty(4, 28), 4),
        (torch.empty(4, 24), torch.empty(4, 28, dtype=BF16)[:, 4:], 4),
        (torch.empty(4, 24), torch.empty(4, 26, dtype=BF16)[:, 2:], 2),
    ],
)
def test_accesses_of_sums_that_are_wider_or_narrower_than_rows(rows, sums, vector):
    assert calls.vector_of(rows, sums) == vector

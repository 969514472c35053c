"""Small bfloat16 groups in one padded ``bmm``: equal to the loop, blind to rows of no group, and only where it pays."""

from itertools import pairwise

import pytest
import torch

import tgl
from tgl.backends.cpu import batched as _batched_cpu
from tgl.backends.cpu import gemm as _gemm_cpu
from tgl.backends.portable.segments import native_matmul

pytestmark = pytest.mark.skipif(not native_matmul(torch.empty(0, dtype=torch.bfloat16)), reason="no bfloat16 GEMM here")

K, N = 64, 96
BALANCED = tuple(8 + g % 5 for g in range(40))
WITH_EMPTY = tuple(0 if g % 7 == 0 else size for g, size in enumerate(BALANCED))
ONE_LARGE = (*BALANCED, 2000, *BALANCED)
ROUTINGS = {
    "balanced": BALANCED,
    "with empty": WITH_EMPTY,
    "one large": ONE_LARGE,
    "large and empty": (0, *ONE_LARGE, 0),
    "a batch of empty ones": (*(0,) * 30, *BALANCED),
    "graded": tuple(2 + g // 2 for g in range(100)),
}
TAIL = 7


@pytest.fixture
def batches(monkeypatch):
    """The choices that are made."""
    made, work = [], _gemm_cpu.work

    def recorded(*args):
        made.append(work(*args).batches)
        return work(*args)

    monkeypatch.setattr(_gemm_cpu, "work", recorded)
    return made


def loop(monkeypatch, call):
    work = _gemm_cpu.work
    with monkeypatch.context() as patch:
        patch.setattr(_gemm_cpu, "work", lambda *args: work(*args)._replace(batches=()))
        return call()


def integers(*shape):
    return torch.randint(-3, 4, shape).bfloat16()


def problem(sizes):
    """Rows with NaN in the tail, and the offsets."""
    offs = torch.tensor(sizes).cumsum(0).int()
    a, b = integers(sum(sizes) + TAIL, K), integers(sum(sizes) + TAIL, N)
    a[-TAIL:] = b[-TAIL:] = torch.nan
    return a, b, offs


def exact(a, matrices, offs, bias=None):
    """The product in float32, which is exact on these integers, rounded once."""
    out = torch.zeros(a.shape[0], matrices.shape[2])
    ends = [0, *offs.tolist()]
    for g, (start, end) in enumerate(pairwise(ends)):
        out[start:end] = a[start:end].float() @ matrices[g].float() + (bias[g].float() if bias is not None else 0)
    return out.bfloat16()


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("major", ["row", "column", "padded", "expanded"])
def test_gemm_is_exact(batches, monkeypatch, sizes, major):
    a, _, offs = problem(sizes)
    matrices = {
        "row": lambda: integers(len(sizes), K, N),
        "column": lambda: integers(len(sizes), N, K).transpose(1, 2),
        "padded": lambda: integers(len(sizes), K, N + 8)[:, :, :N],
        "expanded": lambda: integers(1, K, N).expand(len(sizes), K, N),
    }[major]()
    out = tgl.grouped_gemm(a, matrices, offs)
    assert batches[-1]
    assert torch.equal(out, exact(a, matrices, offs))
    assert torch.equal(out, loop(monkeypatch, lambda: tgl.grouped_gemm(a, matrices, offs)))


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("strided", [False, True])
def test_bias_is_rounded_with_the_product(batches, monkeypatch, sizes, strided):
    a, _, offs = problem(sizes)
    a[:-TAIL] *= 9
    matrices, bias = integers(len(sizes), K, N), torch.randint(-128, 128, (len(sizes), N)).bfloat16()
    if strided:
        bias = bias.t().contiguous().t()
    out = tgl.grouped_gemm(a, matrices, offs, bias)
    assert batches[-1]
    assert torch.equal(out, exact(a, matrices, offs, bias))
    assert torch.equal(out, loop(monkeypatch, lambda: tgl.grouped_gemm(a, matrices, offs, bias)))
    rounded_twice = exact(a, matrices, offs)[:-TAIL] + bias.repeat_interleave(torch.tensor(sizes), 0)
    assert not torch.equal(out[:-TAIL], rounded_twice)


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("strided", [False, True])
def test_wgrad_is_exact(batches, monkeypatch, sizes, strided):
    a, b, offs = problem(sizes)
    if strided:
        a, b = (torch.cat([t, t], 1)[:, : t.shape[1]] for t in (a, b))
    out = tgl.grouped_gemm_wgrad(a, b, offs)
    assert batches[-1]
    ends = [0, *offs.tolist()]
    for g, (start, end) in enumerate(pairwise(ends)):
        assert torch.equal(out[g], (a[start:end].float().t() @ b[start:end].float()).bfloat16())
    assert torch.equal(out, loop(monkeypatch, lambda: tgl.grouped_gemm_wgrad(a, b, offs)))


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
def test_strided_out(batches, sizes):
    a, b, offs = problem(sizes)
    matrices = integers(len(sizes), K, N)
    out = torch.full((a.shape[0], N + 8), 5.0).bfloat16()
    tgl.grouped_gemm(a, matrices, offs, out=out[:, :N])
    assert torch.equal(out[:-TAIL, :N], exact(a, matrices, offs)[:-TAIL])
    assert (out[-TAIL:] == 5).all()
    assert (out[:, N:] == 5).all()
    slots = torch.full((len(sizes), K + 1, N + 8), 5.0).bfloat16()
    tgl.grouped_gemm_wgrad(a, b, offs, out=slots[:, :K, :N])
    assert all(batches)
    assert torch.equal(slots[:, :K, :N], tgl.grouped_gemm_wgrad(a, b, offs))
    assert (slots[:, K] == 5).all()
    assert (slots[:, :, N:] == 5).all()


def test_a_group_keeps_its_nan_and_inf_to_itself(batches):
    """The last row of a group is what its padding repeats."""
    a, b, offs = problem(BALANCED)
    last = int(offs[3]) - 1
    clean = tgl.grouped_gemm_wgrad(a, b, offs)
    a[last, 0], b[last, 1] = torch.inf, torch.nan
    b[last, 2] = 1
    out = tgl.grouped_gemm_wgrad(a, b, offs)
    assert all(batches)
    others = [g for g in range(len(BALANCED)) if g != 3]
    assert torch.equal(out[others], clean[others])
    assert out[3, 0, 2] == torch.inf
    assert out[3, :, 1].isnan().all()
    assert torch.equal(out[3, 1:, 3:], clean[3, 1:, 3:])
    matrices = integers(len(BALANCED), K, N)
    values = tgl.grouped_gemm(a, matrices, offs)
    assert values[last].isfinite().logical_not().any()
    assert values[torch.arange(a.shape[0]) != last].isfinite().all()


def test_same_bits_every_run(batches):
    _, _, offs = problem(ONE_LARGE)
    a, b = torch.randn(int(offs[-1]), K).bfloat16(), torch.randn(int(offs[-1]), N).bfloat16()
    matrices = torch.randn(len(ONE_LARGE), K, N).bfloat16()
    for call in (lambda: tgl.grouped_gemm(a, matrices, offs), lambda: tgl.grouped_gemm_wgrad(a, b, offs)):
        first = call()
        assert all(torch.equal(call(), first) for _ in range(3))
    assert all(batches)


@pytest.mark.parametrize("offs", [[5, -3, 10**6, 2] * 10, [-1] * 40, [2**31 - 1] * 40, [40 - g for g in range(40)]])
def test_bad_offs_stay_in_bounds(offs):
    offs = torch.tensor(offs, dtype=torch.int32)
    a, b = integers(300, K), integers(300, N)
    assert tgl.grouped_gemm(a, integers(40, K, N), offs).isfinite().all()
    assert tgl.grouped_gemm_wgrad(a, b, offs).isfinite().all()


def test_only_bfloat16_in_rows_is_batched(batches):
    a, b, offs = problem(BALANCED)
    matrices = integers(len(BALANCED), K, N)
    tgl.grouped_gemm(a.float(), matrices.float(), offs)
    tgl.grouped_gemm(a.t().contiguous().t(), matrices, offs)
    tgl.grouped_gemm(a, matrices, offs, out_dtype=torch.float32)
    tgl.grouped_gemm(a, matrices, offs, integers(len(BALANCED), N).float())
    tgl.grouped_gemm(a, matrices, offs, integers(len(BALANCED), N), integers(a.shape[0]))
    tgl.grouped_gemm_wgrad(a, b.t().contiguous().t(), offs)
    assert len(batches) == 6
    assert not any(batches)


GRADED = tuple(4 + g // 2 for g in range(120))  # 4 to 63 rows


@pytest.mark.parametrize(
    "sizes, k, n, count",
    [
        (BALANCED, 128, 128, len(BALANCED)),
        (WITH_EMPTY, 128, 128, len(WITH_EMPTY)),  # the empty ones too: then no matrix is copied
        (ONE_LARGE, 128, 128, 2 * len(BALANCED)),  # the large one would pad all others
        (GRADED, 64, 128, len(GRADED)),
        (BALANCED, 0, 128, 0),
        (BALANCED, 1024, 2048, 0),  # set-up is nothing next to the products
        ((64,) * 8, 1024, 2048, 0),
        ((8,), 128, 128, 0),
        ((0,) * 50, 128, 128, 0),
        ((), 128, 128, 0),
    ],
)
def test_plan(sizes, k, n, count):
    saved, batches = _batched_cpu.plan((*sizes, TAIL), k, n)
    groups = [g for batch in batches for g in batch]
    assert len(groups) == len(set(groups)) == count
    assert (saved > 0) == (count > 0)
    assert all(list(batch) == sorted(batch) for batch in batches)
    assert all(sizes[g] <= 100 for g in groups)


def test_groups_of_about_one_size_go_together():
    """Padding all to the largest would cost more than the loop saves."""
    _, batches = _batched_cpu.plan((*GRADED, TAIL), 64, 128)
    assert len(batches) > 1
    for batch in batches:
        heights = [GRADED[g] for g in batch]
        assert sum(max(heights) - height for height in heights) * 64 * 128 < _batched_cpu._BATCH

"""Rows by an index on a device: exact, no other row read, and a graph follows its index."""

import pytest
import torch

import tgl
from tests.gpu.device import DEVICE, TAIL, ends, integers, served
from tests.kernel_cases import gradient, product
from tests.memory import same_bytes
from tgl.cutlass_kernels.launchers.quantize import WRITTEN
from tgl.meta.table import OnePerName

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SIZES = (300, 0, 3, 129, 64, 1, 517)
ROUTED, GROUPS, TOKENS = sum(SIZES), len(SIZES), 400
ROWS = ROUTED + TAIL
NEVER = TOKENS - 1  # a token of no row
LOW, HIGH = -(1 << 31), (1 << 31) - 1


def index(seed=0):
    """Tokens of the rows and, in the tail, numbers that mean nothing."""
    numbers = torch.randint(0, NEVER, (ROUTED,), generator=torch.Generator().manual_seed(seed))
    tail = torch.tensor([-1, LOW, HIGH, TOKENS, NEVER]).repeat(TAIL)[:TAIL]
    return torch.cat([numbers, tail]).int().to(DEVICE)


def tokens(columns, dtype=BF16):
    """NaN for the token of no row."""
    made = integers(TOKENS, columns, dtype=dtype)
    made[NEVER] = float("nan")
    return made


def in_order(t, rows):
    return t[rows.clamp(0, NEVER - 1).long()]


def offs():
    return ends(SIZES)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("depth", [264, 263])
def test_products(dtype, depth):
    a, b, dy, rows = tokens(depth, dtype), integers(GROUPS, depth, 328, dtype=dtype), tokens(328, dtype), index()
    got = served(tgl.grouped_gemm, a, b, offs(), rows=rows)
    assert torch.equal(got, product(in_order(a, rows), b, SIZES).to(dtype))
    other = index(1)
    wanted = gradient(in_order(a, rows), in_order(dy, other), SIZES)
    assert torch.equal(served(tgl.grouped_gemm_wgrad, a, dy, offs(), a_rows=rows, b_rows=other), wanted.to(dtype))
    main_grad = torch.ones(GROUPS, depth, 328, device=DEVICE)
    served(tgl.grouped_gemm_wgrad_accumulate_, in_order(a, rows), dy, offs(), main_grad, b_rows=other)
    assert torch.equal(main_grad, (wanted + 1).float())
    rows[5] = -1
    zeros = in_order(a, rows)
    zeros[5] = 0
    assert torch.equal(tgl.grouped_gemm(a, b, offs(), rows=rows), product(zeros, b, SIZES).to(dtype))


def test_calls_without_a_kernel_stay_in_bounds():
    a, b = tokens(40, F32), integers(GROUPS, 40, 24, dtype=F32)
    for absent in (-1, LOW, TOKENS, HIGH):
        rows = index()
        rows[7] = absent
        x = in_order(a, rows)
        x[7] = 0
        x[ROUTED:] = 0
        assert torch.equal(tgl.grouped_gemm(a, b, offs(), rows=rows), product(x, b, SIZES).float())
        assert torch.equal(tgl.grouped_gemm_wgrad(a, x, offs(), a_rows=rows), gradient(x, x, SIZES).float())


def test_the_activation_ops():
    a, b, rows, probs = tokens(264), integers(GROUPS, 264, 656), index(), torch.rand(ROWS, device=DEVICE)
    got = served(tgl.grouped_gemm_activation, a, b, offs(), None, probs, rows)
    wanted = tgl.grouped_gemm_activation(in_order(a, rows), b, offs(), None, probs)
    assert all(map(torch.equal, got, wanted))
    h, back = got[1], integers(GROUPS, 264, 328)
    got = served(tgl.grouped_gemm_dactivation, a, back, h, offs(), probs, rows)
    wanted = tgl.grouped_gemm_dactivation(in_order(a, rows), back, h, offs(), probs)
    assert all(map(torch.equal, got, wanted))


def test_a_captured_step_takes_a_new_index():
    """Nothing reads a value on the host, the gradient of the tokens included."""
    a = integers(TOKENS, 264).requires_grad_()
    b, dy, rows, offs_ = integers(GROUPS, 264, 328).requires_grad_(), integers(ROWS, 328), index(), offs()

    def step():
        y = tgl.grouped_gemm(a, b, offs_, rows=rows)
        return (y, *torch.autograd.grad(y, (a, b), dy))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, da, db = step()
    for seed in range(3):
        rows.copy_(index(seed))
        graph.replay()
        x = in_order(a.detach(), rows)
        assert torch.equal(y, product(x, b.detach(), SIZES).to(BF16))
        assert torch.equal(db, gradient(x, dy, SIZES).to(BF16))
        by_row = product(dy, b.detach().transpose(1, 2), SIZES).to(BF16).double()
        wanted = torch.zeros(TOKENS, 264, dtype=torch.float64, device=DEVICE).index_add_(
            0, rows[:ROUTED], by_row[:ROUTED]
        )
        assert torch.equal(da, wanted.to(BF16))


QUANTIZED = OnePerName(
    WRITTEN,
    "QUANTIZED",
    {
        "mxfp8": {"scale_layout": "blocked"},
        "nvfp4": {"scale_layout": "blocked", "rht": True},
        "fp8_tensor": {},
        "fp8_block": {},
    },
)


@pytest.mark.parametrize("format", WRITTEN)
@pytest.mark.parametrize("width", [264, 60])
def test_quantised(format, width):
    """The bytes of a copy in order, without one."""
    x, rows, options = tokens(width), index(), {"format": format, **QUANTIZED[format]}
    rows[5] = -1
    ordered = in_order(x, rows)
    ordered[5] = 0
    report = tgl.explain(tgl.group_quantize, x, offs(), rows=rows, **options)
    assert "tgl kernel" in report.chosen.name
    assert not report.copies
    made, wanted = tgl.group_quantize(x, offs(), rows=rows, **options), tgl.group_quantize(ordered, offs(), **options)
    assert all(map(same_bytes, made, wanted))
    sums = tgl.group_quantize(x, offs(), rows=rows, dbias=True, **options)
    wanted = tgl.group_quantize(ordered, offs(), dbias=True, **options)
    assert all(map(same_bytes, sums, wanted))


@pytest.mark.parametrize("width", [512, 264, 2880])
def test_scales_of_tokens(width):
    """Laid out in one launch: those of rows that are quantised by an index, of accesses of 16, 1 and 2 bytes."""
    x, rows, options = tokens(width), index(), {"format": "mxfp8", "columnwise": False}
    rows[5] = -1
    scale, one = tgl.group_quantize(x, ends((TOKENS,)), **options).scale, {"shape": (ROWS, width), "format": "mxfp8"}
    explained = tgl.explain("scale_to_layout", scale, offs(), rows, layout="blocked", **one)
    assert explained.chosen.name == "tgl kernel"
    made = tgl.to_blocked_scale(scale, offs(), rows, **one)
    assert torch.equal(made, tgl.group_quantize(x, offs(), rows=rows, scale_layout="blocked", **options).scale)
    ordered = in_order(scale, rows)
    ordered[5] = 0
    assert torch.equal(tgl.to_blocked_scale(ordered, offs(), **one), made)


def test_a_captured_scale_conversion_takes_new_indices_and_groups():
    scale, rows, groups = torch.randint(1, 256, (TOKENS, 80), device=DEVICE).to(torch.uint8), index(), offs()
    one = {"shape": (ROWS, 2560), "format": "mxfp8"}
    tgl.to_blocked_scale(scale, groups, rows, **one)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = tgl.to_blocked_scale(scale, groups, rows, **one)
    for seed, sizes in enumerate((SIZES, (0, 0, 0, ROUTED, 0, 0, 0), (0,) * GROUPS, SIZES[::-1])):
        rows.copy_(index(seed))
        groups.copy_(ends(sizes))
        graph.replay()
        assert torch.equal(made.cpu(), tgl.to_blocked_scale(scale.cpu(), groups.cpu(), rows.cpu(), **one))

"""Rows by an index on a device: exact, in every tiling of kernels that gather, under graphs whose routing changes."""

import pytest
import torch

import tgl
from tests.cutlass_kernels.gather_cases import random_index, scattered
from tests.gpu.device import ARCH, DEVICE, TAIL, ends, integers, served
from tests.kernel_cases import ROUTINGS, column_major, gradient, poisoned, product
from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import VARLEN_K, VARLEN_M
from tgl.cutlass_kernels.runtime import launcher

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOKENS = 300
GATHERS = ARCHS[ARCH].gathers
EVERY = [
    pytest.param(kind, operand, tiling, id=f"{kind} {operand} {tiling}")
    for kind, operand in ((VARLEN_M, "a"), (VARLEN_K, "a"), (VARLEN_K, "b"))
    for tiling in tilings.candidates(ARCH, kind, gathering=True)
]


def routed(values, sizes, absent=True):
    """Tokens, NaN where no row reads them, the index and the rows that it names."""
    index = random_index(len(values), sizes, TAIL, absent)
    tokens, rows = scattered(values.cpu(), index)
    return tokens.to(DEVICE), index.to(DEVICE), rows.to(DEVICE)


def in_place(op, *args, **kwargs):
    """The call, by a kernel that gathers where there is one."""
    assert tgl.explain(op, *args, **kwargs).chosen.name == "tgl kernel" or not GATHERS
    return served(op, *args, **kwargs)


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("depth", [200, 64, 5])
def test_grouped_gemm(sizes, dtype, depth):
    wide = torch.zeros(TOKENS, depth + -depth % 8, dtype=dtype, device=DEVICE)[:, :depth]
    tokens, index, rows = routed(integers(TOKENS, depth, dtype=dtype), sizes)
    wide.copy_(tokens)
    b, bias = integers(len(sizes), depth, 328, dtype=dtype), integers(len(sizes), 328, dtype=F32)
    for weights in (b, column_major(b)):
        if depth % 8 and weights is not b:
            continue  # rows of K do not begin on 16 bytes
        got = in_place(tgl.grouped_gemm, wide, weights, ends(sizes), bias, rows=index)
        assert torch.equal(got, product(rows, b, sizes, bias).to(dtype))


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("operand", ["a", "b"])
def test_wgrad(sizes, operand):
    widths = {"a": 136, "b": 264}
    other = "b" if operand == "a" else "a"
    tokens, index, rows = routed(integers(TOKENS, widths[operand]), sizes)
    given = {operand: tokens, other: poisoned(integers(sum(sizes) + TAIL, widths[other]), sizes)}
    wanted = {**given, operand: rows}
    dw, option = gradient(wanted["a"], wanted["b"], sizes), {f"{operand}_rows": index}
    operands = (given["a"], given["b"], ends(sizes))
    assert torch.equal(in_place(tgl.grouped_gemm_wgrad, *operands, **option), dw.to(BF16))
    main_grad = integers(*dw.shape, dtype=F32)
    total = main_grad.double() + dw
    in_place(tgl.grouped_gemm_wgrad_accumulate_, *operands, main_grad, **option)
    assert torch.equal(main_grad.double(), total)


@pytest.mark.parametrize("kind, operand, tiling", EVERY if GATHERS else [])
def test_every_tiling(kind, operand, tiling, monkeypatch):
    monkeypatch.setattr(tilings, "choose_gathering", lambda *_: tiling)
    launcher.forget()
    sizes = (700, 0, 3, 1025, 64, 512)
    if kind == VARLEN_M:
        tokens, index, rows = routed(integers(900, 1000), sizes)
        b = integers(len(sizes), 1000, 776)
        got = in_place(tgl.grouped_gemm, tokens, b, ends(sizes), rows=index)
        assert torch.equal(got, product(rows, b, sizes).to(BF16))
    else:
        tokens, index, rows = routed(integers(900, 520), sizes)
        dense = poisoned(integers(sum(sizes) + TAIL, 520), sizes)
        pairs = {"a": (tokens, dense, rows, dense), "b": (dense, tokens, dense, rows)}
        a, b, x, y = pairs[operand]
        got = in_place(tgl.grouped_gemm_wgrad, a, b, ends(sizes), out_dtype=F32, **{f"{operand}_rows": index})
        assert torch.equal(got, gradient(x, y, sizes).float())
    launcher.forget()


def test_one_graph_for_every_routing():
    """Replays see other tokens, another index and other groups."""
    groups, rows = 8, 2000
    x, dy, b = integers(TOKENS, 264), integers(rows, 328), integers(groups, 264, 328)
    offs, index = ends((0,) * groups), torch.full((rows,), -1, dtype=torch.int32, device=DEVICE)

    def step():
        return tgl.grouped_gemm(x, b, offs, rows=index), tgl.grouped_gemm_wgrad(x, dy, offs, a_rows=index)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dw = step()
    for turn in range(10):
        sizes = tuple(torch.randint(0, 240, (groups,)).tolist())
        offs.copy_(ends(sizes))
        numbers = random_index(TOKENS, sizes, rows - sum(sizes), True)
        tokens, in_order = scattered(integers(TOKENS, 264).cpu(), numbers)
        x.copy_(tokens)
        index.copy_(numbers)
        graph.replay()
        in_order = in_order.to(DEVICE)
        assert torch.equal(y, product(in_order, b, sizes).to(BF16)), turn
        assert torch.equal(dw, gradient(in_order, dy, sizes).to(BF16)), turn

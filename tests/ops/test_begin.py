"""Groups that begin after row 0, for implementations of ``grouped_gemm`` without a CuTe kernel."""

import pytest
import torch

from tgl import backends
from tgl.backends.cpu import gemm
from tgl.backends.portable import empty_contraction, grouped_mm, loops

BF16, F32 = torch.bfloat16, torch.float32
ROWS, GROUPS, DEPTH, COLUMNS = 24, 3, 8, 16
WAYS = {
    "a CPU's": (gemm.grouped_gemm, True),
    "loop of mm": (loops.grouped_gemm, True),
    "aten grouped_mm": (grouped_mm.grouped_gemm, False),
}


@pytest.mark.parametrize("zero_tail", [True, False], ids=["zero tail", "tail"])
@pytest.mark.parametrize("begin", [0, 3, 11])
@pytest.mark.parametrize("run, biased", WAYS.values(), ids=WAYS)
def test_rows_before_begin_are_neither_read_nor_written(run, biased, begin, zero_tail):
    ends = torch.tensor([11, 11, 20], dtype=torch.int32)
    a, b = torch.randint(-3, 4, (ROWS, DEPTH)).to(BF16), torch.randint(-3, 4, (GROUPS, DEPTH, COLUMNS)).to(BF16)
    bias = torch.randint(-3, 4, (GROUPS, COLUMNS)).float() if biased else None
    wanted = torch.full((ROWS, COLUMNS), 7.0)
    for g, (start, end) in enumerate(zip([begin, 11, 11], [11, 11, 20])):
        wanted[start:end] = a[start:end].float() @ b[g].float() + (0 if bias is None else bias[g])
    if zero_tail:
        wanted[20:] = 0
    a[:begin], a[20:] = float("nan"), float("nan")
    out = torch.full((ROWS, COLUMNS), 7.0, dtype=BF16)
    run(a, b, ends, bias, None, out=out, zero_tail=zero_tail, begin=torch.tensor([begin], dtype=torch.int32))
    assert torch.equal(out.float(), wanted)


@pytest.mark.parametrize("run", [gemm.grouped_gemm, loops.grouped_gemm], ids=["a CPU's", "loop of mm"])
def test_row_indices_and_bias_scales_begin_there_too(run):
    tokens, index = torch.randint(-3, 4, (5, DEPTH)).to(BF16), torch.randint(0, 5, (ROWS,)).int()
    b, ends = torch.randint(-3, 4, (GROUPS, DEPTH, COLUMNS)).to(BF16), torch.tensor([9, 15, 20], dtype=torch.int32)
    bias, factor = torch.randint(-3, 4, (GROUPS, COLUMNS)).float(), torch.randint(1, 4, (ROWS,)).float()
    wanted = torch.full((ROWS, COLUMNS), 7.0, dtype=BF16)
    run(tokens[index.long()], b, ends, bias, factor, out=wanted, zero_tail=True)
    wanted[:4] = 7.0
    out = torch.full_like(wanted, 7.0)
    begin = torch.tensor([4], dtype=torch.int32)
    run(tokens, b, ends, bias, factor, out=out, zero_tail=True, rows=index, begin=begin)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("zero_tail", [True, False], ids=["zero tail", "tail"])
def test_the_bias_alone_begins_there_too(zero_tail):
    bias, out = torch.randn(GROUPS, COLUMNS), torch.full((ROWS, COLUMNS), 7.0)
    operands = torch.empty(ROWS, 0), torch.empty(GROUPS, 0, COLUMNS), torch.tensor([9, 15, 20], dtype=torch.int32)
    wanted = torch.cat([out[:4], bias.repeat_interleave(torch.tensor([5, 6, 5]), 0), out[20:] * (not zero_tail)])
    begin = torch.tensor([4], dtype=torch.int32)
    empty_contraction.grouped_gemm(*operands, bias, None, out=out, zero_tail=zero_tail, begin=begin)
    assert torch.equal(out, wanted)


def test_implementations_without_begin_are_passed_over():
    @backends.register_implementation("grouped_gemm", "ours", device="cpu", priority=99)
    def ours(*_, out, **__):
        out.fill_(-1)

    a, b, ends = torch.ones(4, 8), torch.ones(1, 8, 8), torch.tensor([4], dtype=torch.int32)
    try:
        for begin, first in (({}, -1), ({"begin": torch.tensor([2], dtype=torch.int32)}, 7)):
            out = torch.full((4, 8), 7.0)
            backends.run("grouped_gemm", a.device, a, b, ends, None, None, out=out, zero_tail=True, **begin)
            assert out[0, 0] == first
            assert out[3, 0] == (8 if begin else -1)
    finally:
        backends.remove(ours)

"""Reductions that Inductor makes around the ops read back what they stored, whatever the memory held before."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import tgl

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_compiler")]
TOKENS, CHOICES = 2048, 4


def norm_backward(rows, position, router, x, weight, r, residual, splits):
    """The backward of a norm ahead of experts: a float32 sum that is stored, reduced and read back, beside bfloat16."""
    dy = rows.index_select(0, position).unflatten(0, (-1, CHOICES)).sum(1) + router.float()
    dw = dy * weight
    dx = residual + (dw - x * ((x * dw).sum(-1, keepdim=True) / x.shape[-1])) * r
    return dy, dx, dx.bfloat16(), tgl.splits_to_offsets(splits)


def poison():
    """Leave NaN in what the allocator will hand out."""
    for size in (1 << 20, 1 << 21, 1 << 22, 1 << 23):
        del [torch.full((size // 4,), torch.nan, device="cuda") for _ in range(8)][:]


@pytest.mark.parametrize("width", [256, 512, 2048])
def test_a_reduction_reads_back_what_it_stored(width):
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape, dtype=torch.float32):
        return torch.randint(-4, 5, shape, device="cuda", generator=generator).to(dtype)

    arguments = (
        draw(CHOICES * TOKENS, width),
        torch.randperm(CHOICES * TOKENS, device="cuda", generator=generator),
        draw(TOKENS, width, dtype=torch.bfloat16),
        draw(TOKENS, width),
        draw(width),
        draw(TOKENS, 1),
        draw(TOKENS, width),
        torch.tensor([3, 4], device="cuda"),
    )
    expected = norm_backward(*arguments)  # integers, and a sum of them over a power of two: exact in any order
    compiled = torch.compile(norm_backward, fullgraph=True)
    _, codes = run_and_get_code(compiled, *arguments)
    code = "\n".join(codes)
    assert code.count("for r0_offset") < 2 or "tl.debug_barrier()" in code
    for _ in range(20):
        poison()
        for ours, theirs in zip(compiled(*arguments), expected):
            assert torch.equal(ours, theirs)

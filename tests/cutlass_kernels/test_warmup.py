"""``tgl.warmup`` of an op that is made of others prepares what each of them needs."""

import pytest
import torch
from torch.utils._pytree import tree_map_only

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tgl import backends
from tgl.cli.step_kernels import BlockStep, recorded
from tgl.cutlass_kernels.runtime import launcher

SIZES = {"experts": 4, "hidden": 64, "ffn": 128, "tokens": 50, "top_k": 2}
BF16 = torch.bfloat16


def experts():
    """A step of experts behind their routing."""
    layer = tgl.GroupedMLP(4, 64, 128, bias=True, params_dtype=BF16, device="meta")
    x = torch.empty(100, 64, dtype=BF16, device="meta", requires_grad=True)
    layer(x, torch.empty(4, dtype=torch.int32, device="meta"), torch.empty(100, device="meta")).sum().backward()


def low_rank():
    """A frozen product and an adapter beside it."""
    shapes = (100, 64), (4, 64, 48), (100, 12), (4, 12, 48)
    operands = [torch.empty(shape, dtype=BF16, device="meta") for shape in shapes]
    tgl.grouped_gemm_low_rank(*operands, torch.empty(4, dtype=torch.int32, device="meta"))


STEPS = {
    "block": BlockStep(**SIZES),
    "block with biases": BlockStep(**SIZES, bias=True, activation="srelu"),
    "forward": BlockStep(**SIZES, backward=False),
    "experts": experts,
    "low rank": low_rank,
}


def there(t):
    """Values that any op takes: rows of no group, tokens of place 0."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).zero_()


def forget():
    launcher.compiled_kernels.clear()
    launcher.forget()


@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("step", STEPS)
def test_a_call_after_it_finds_its_kernels(step, chip, asked):
    calls, ever = recorded(STEPS[step]), set()
    with backends.emulated_device(chip):
        for op, _, args, kwargs in calls:
            given, named = tree_map_only(torch.Tensor, there, (args, kwargs))
            sets = []
            for call in (tgl.warmup, lambda op, *args, **kwargs: op(*args, **kwargs)):
                asked.clear()
                call(op, *given, **named)
                sets.append(set(asked))
                forget()
            prepared, needed = sets
            assert prepared == needed, op
            ever |= prepared
    assert ever

"""Tilings of a block's GEMMs, and what they read by an index, follow from the rows that it expects."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from benchmarks.harness.expert_parallel import SHAPES, Shape
from tests import moe_cases
from tests.memory import new_memory_is_nan
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.runtime import launcher
from tgl.distributed._exchange import Sizes
from tgl.testing import emulate

RANKS, BF16 = 4, torch.bfloat16
NAMED = tuple(SHAPES)
FACTORS = (None, 2.0, 1.1)
OPS = ("moe", "moe_backward_hidden", "moe_backward_input")


def explained(shape: Shape, sizes: Sizes, chip: str, hint: dict[str, int]) -> list[tgl.backends.Explanation]:
    """Return the reports on the ops of a rank's block, forward and backward, for rows of all ranks."""
    experts, rows, arrived = shape.experts // RANKS, sizes.expert_rows, RANKS * sizes.pair_rows
    with FakeTensorMode(), backends.emulated_device(chip):
        x, weights = (torch.empty(arrived, n, dtype=BF16) for n in (shape.hidden, shape.top_k))
        w1 = torch.empty(experts, 2 * shape.inner, shape.hidden, dtype=BF16).transpose(1, 2)
        w2 = torch.empty(experts, shape.hidden, shape.inner, dtype=BF16).transpose(1, 2)
        counts = rows, arrived * shape.top_k, rows, experts
        places = [torch.empty(n, dtype=torch.int32) for n in counts]
        h = torch.empty(rows, 2 * shape.inner, dtype=BF16)
        options = {"top_k": shape.top_k, **hint}
        mask = [True, True, True, False]
        of_block = (
            tgl.explain("moe", x, w1, w2, *places, weights, **options),
            tgl.explain("moe_backward_hidden", x, w2, *places, h, weights, output_mask=mask, **options),
            tgl.explain("moe_backward_input", h, x, w1, *places[1:], output_mask=mask[1:], **options),
        )
    return [part for op in of_block for part in op.parts]


def launches(name: str, factor: float | None, chip: str, *, hinted: bool = True) -> list[tuple]:
    """Every op and its tiling."""
    shape = SHAPES[name]
    sizes = Sizes(RANKS, shape.experts, shape.top_k, shape.tokens, factor, None, invariant=False)
    hint = {"expected_rows": sizes.expected_rows} if hinted else {}
    return [(part.op, part.tiling) for part in explained(shape, sizes, chip, hint)]


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("arch", ARCHS)
def test_the_capacity_chooses_no_tiling(arch, name):
    first, *others = (launches(name, factor, arch) for factor in FACTORS)
    assert sum(tiling is not None for _, tiling in first) == 6
    assert [op for op, tiling in first if tiling is None and "gemm" in op] == []
    assert all(other == first for other in others)


def test_without_the_hint_the_capacity_would_choose():
    """By the capacity, both weight gradients of a GPU with 64 experts would get another tiling."""
    worst, least = (launches("deepseek-v3", factor, "sm_90", hinted=False) for factor in (None, 1.1))
    differing = [op for (op, one), (_, other) in zip(worst, least, strict=True) if one != other]
    assert differing == ["grouped_gemm_wgrad", "grouped_gemm_wgrad"]
    assert least == launches("deepseek-v3", None, "sm_90")


def test_a_report_states_the_tiling():
    shape = SHAPES["deepseek-v3"]
    sizes = Sizes(RANKS, shape.experts, shape.top_k, shape.tokens, None, None, invariant=False)
    texts = [str(part) for part in explained(shape, sizes, "sm_90", {"expected_rows": sizes.expected_rows})]
    gradients = [text for text in texts if "grouped_gemm_wgrad" in text]
    assert ["192 x 128 ping-pong" in gradients[0], "128 x 192 ping-pong" in gradients[1]] == [True, True]
    texts = [str(part) for part in explained(shape, sizes, "sm_100", {})]
    assert "tiles of 256 x 256 by pairs of CTAs" in texts[-1]
    texts = [str(part) for part in explained(shape, sizes, "sm_90", {})]
    assert "tiles of 128 x 256 in clusters of 2 x 1" in texts[-1]


G, S, K, H, I = 3, 24, 2, 256, 192
ROOM = 7500
FEW = G * 16
BY_ROWS = ("grouped_gemm", "grouped_gemm_activation", "grouped_gemm_dactivation")


def block(expected):
    """Operands of ``moe`` with a capacity of many rows, and its options."""
    made = torch.Generator().manual_seed(1)
    x, w1, w2 = (torch.randn(size, generator=made).bfloat16() for size in ((S, H), (G, H, 2 * I), (G, I, H)))
    routing = tgl.route(torch.arange(S * K).view(S, K) % G, G, ROOM)
    places = routing.source, routing.position, routing.token, routing.offs
    return (x, w1, w2, *places), {"top_k": K, "expected_rows": expected}


def test_wide_experts_of_few_rows_read_tokens_in_place():
    """Kernels are chosen for the expected rows."""
    wide = 4096
    with FakeTensorMode(), backends.emulated_device("sm_90"):
        x, w1 = torch.empty(S, H, dtype=BF16), torch.empty(G, H, 2 * wide, dtype=BF16)
        w2, places = torch.empty(G, wide, H, dtype=BF16), (ROOM, S * K, ROOM, G)
        given = x, w1, w2, *(torch.empty(n, dtype=torch.int32) for n in places)
        found = [
            [part.op for part in tgl.explain("moe", *given, top_k=K, expected_rows=rows).parts]
            for rows in (None, G * 65, G * 64)
        ]
        more = torch.empty(ROOM, 2 * wide, dtype=BF16), x, w1, *given[4:]
        options = {"top_k": K, "output_mask": [False, True, False]}
        gradients = [
            [part.op for part in tgl.explain("moe_backward_input", *more, **options, expected_rows=rows).parts]
            for rows in (None, G * 257, G * 256)
        ]
    for parts in (found, gradients):
        assert ["dispatch" in ops for ops in parts] == [True, True, False]


def step(expected):
    given, options = block(expected)
    leaves = [t.requires_grad_() for t in given[:3]]
    y, _ = torch.ops.tgl.moe(*given, **options)
    torch.autograd.grad(y, leaves, torch.ones_like(y))


@pytest.mark.parametrize(
    ("chip", "ops"), [("sm_80", BY_ROWS), ("sm_90", (*BY_ROWS, "grouped_gemm_wgrad")), ("sm_100", BY_ROWS)]
)
def test_calls_that_expect_other_rows_have_other_kernels(chip, ops, asked):
    """A warm call, too, finds its own; calls of one class have one. ``ops``: whose tilings follow from rows."""
    gemms = []
    with backends.emulated_device(chip):
        for expected in (None, FEW, None, FEW + G, ROOM, 9 * ROOM):
            asked.clear()
            step(expected)
            gemms.append({(op, key.config) for op, key in asked if "gemm" in op})
    first, other, *again = gemms
    assert {op for op, _ in other} == set(ops)
    assert not first & other
    assert again == [set()] * 4


@pytest.mark.parametrize("op", OPS)
def test_warming_up_prepares_what_the_call_needs(op, asked):
    x, w1, w2, *places = block(FEW)[0]
    h, mask = torch.zeros(ROOM, 2 * I, dtype=BF16), [True, True, False, False]
    given, more = {
        "moe": ((x, w1, w2, *places), {}),
        "moe_backward_hidden": ((x, w2, *places, h), {"output_mask": mask}),
        "moe_backward_input": ((h, x, w1, *places[1:]), {"output_mask": mask[:3]}),
    }[op]
    found = []
    with backends.emulated_device("sm_90"):
        for call in (tgl.warmup, lambda name, *args, **kwargs: getattr(torch.ops.tgl, name)(*args, **kwargs)):
            for expected in (FEW, None):
                asked.clear()
                call(op, *given, **more, top_k=K, expected_rows=expected)
                found.append(set(asked))
                launcher.compiled_kernels.clear()
                launcher.forget()
    assert found[:2] == found[2:]
    assert found[0] != found[1]


@pytest.mark.slow
def test_no_bit_of_a_weight_gradient_follows_from_its_tiling():
    """Sums of random numbers, over a group that ends inside of a stage."""
    made = torch.Generator().manual_seed(2)
    spread = torch.logspace(-9, 9, 200, base=2)[:, None]
    a, b = (torch.randn(200, n, generator=made).mul(spread).bfloat16() for n in (512, 768))
    offs, found = torch.tensor([70, 187], dtype=torch.int32), []
    with emulate("sm_90a", detect_races=False):
        tilings = set()
        for expected in (2 * 100, 2 * 400, 2 * 3000):
            out = torch.empty(2, 512, 768)
            options = {"out": out, "expected_rows": expected}
            tilings.add(backends.report("grouped_gemm_wgrad", a.device, a, b, offs, **options).tiling)
            backends.run("grouped_gemm_wgrad", a.device, a, b, offs, **options)
            found.append(out)
    assert len(tilings) == 3
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_bits_are_those_of_a_cpu_whatever_is_expected(arch, monkeypatch):
    """More rows than there are, and fewer."""
    monkeypatch.setattr(moe_cases, "ROOM", 3000)
    operands = moe_cases.block(moe_cases.Sizes(G, S, K, 64, 64), "relu", False)
    wanted, call = moe_cases.expected(operands, "relu"), tgl.moe
    for rows in (8, 600):
        monkeypatch.setattr(tgl, "moe", lambda *args, rows=rows, **kw: call(*args, **kw, expected_rows=rows))
        with new_memory_is_nan(), emulate(ARCHS[arch].target):
            found = moe_cases.step(operands, "relu")
        for name, t in wanted.items():
            assert torch.equal(found[name], t), (rows, name)

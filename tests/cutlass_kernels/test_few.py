"""A block of few choices by launches that overlap: bits of the composition, and nothing read or written too early."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import cute_emulator
import tgl
from tests.cutlass_kernels import sass
from tgl import backends
from tgl.cutlass_kernels import overlap
from tgl.cutlass_kernels.activation.activation_spec import spec_of
from tgl.cutlass_kernels.config import VARLEN_M
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.gemm.sm90 import tilings
from tgl.cutlass_kernels.launchers import decode_block
from tgl.cutlass_kernels.launchers.permutation import COMBINE
from tgl.cutlass_kernels.runtime import launcher
from tgl.ops.grouped_activation import Params
from tgl.testing import emulate

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CANARY = 77


class Block(NamedTuple):
    """Sizes and kinds of a call."""

    tokens: int = 3
    choices: int = 4
    experts: int = 40
    hidden: int = 136
    inner: int = 72
    kind: str = "swiglu"
    interleaved: bool = False
    biases: bool = False
    weights: torch.dtype | None = F32
    dtype: torch.dtype = BF16
    across: bool = False  # whether w1 and w2 lie along their columns


def operands(case: Block) -> tuple[list[Tensor | None], list[Tensor]]:
    """Return the arguments of ``tgl.moe``, with one dropped slot, and y and h of the right sizes."""
    torch.manual_seed(case.hidden)
    width = case.inner * (2 if Params(kind=case.kind).gated else 1)
    chosen = torch.stack([torch.randperm(case.experts)[: case.choices] for _ in range(case.tokens)]).int()
    chosen[-1, -1] = -1

    def matrices(rows: int, columns: int) -> Tensor:
        t = (torch.randn(case.experts, columns, rows) * rows**-0.5).to(case.dtype).transpose(1, 2)
        return t.contiguous() if case.across else t

    biases: list[Tensor | None] = [None, None]
    if case.biases:
        biases = [torch.randn(case.experts, n).to(case.dtype) for n in (width, case.hidden)]
    weights = None if case.weights is None else torch.rand(case.tokens, case.choices).to(case.weights)
    x = torch.randn(case.tokens, case.hidden).to(case.dtype)
    given = [x, chosen, weights, matrices(case.hidden, width), matrices(case.inner, case.hidden), *biases]
    rows = case.tokens * case.choices
    return given, [torch.empty_like(x), torch.empty(rows, width, dtype=case.dtype)]


CASES = [
    Block(),
    Block(biases=True, dtype=F16, weights=F16, across=True),
    Block(kind="srelu", weights=None, biases=True, experts=5, tokens=9),
    Block(interleaved=True, kind="clamped_qgeglu", inner=64),
]


@pytest.mark.parametrize("case", CASES, ids=["gated", "float16, along columns", "ungated", "interleaved"])
def test_the_bits_of_the_composition(case, monkeypatch):
    given, _ = operands(case)
    found = []
    for most in (64, 0):
        monkeypatch.setattr(overlap, "FEW_CHOICES", most)
        with emulate("sm_90a") as machine:
            found.append(tgl.moe(*given, kind=case.kind, interleaved=case.interleaved))
        assert {record.overlaps for record in machine.launches} == {most > 0}
        assert ("DecodeGemm" in machine.launches[1].kernel) == (most > 0)
    assert torch.equal(*found)
    assert found[0].isfinite().all()
    assert found[0].any()


def test_the_bits_of_a_forward_that_keeps_nothing():
    given, _ = operands(Block(biases=True, experts=6))
    found, stores = [], []
    for kept in (False, True):  # for a backward of w1
        given[3].requires_grad_(kept)
        with emulate("sm_90a") as machine:
            found.append(tgl.moe(*given).detach())
        assert "DecodeGemm" in machine.launches[1].kernel
        stores.append(machine.launches[1].tma_bytes["store"])
    assert torch.equal(*found)
    assert stores[1] == 3 * stores[0] > 0  # gate and linear half beside the result


@pytest.mark.slow
@pytest.mark.parametrize("width", tilings.FEW_WIDTHS)
def test_the_bits_of_every_width(width, monkeypatch):
    given, _ = operands(Block(hidden=400, inner=208, biases=True, experts=6))
    wanted = None
    for most in (0, 64):
        monkeypatch.setattr(overlap, "FEW_CHOICES", most)
        monkeypatch.setattr(tilings, "FEW_WIDTHS", (width,))
        launcher.forget()
        with emulate("sm_90a") as machine:
            found = tgl.moe(*given)
        wanted = found if wanted is None else wanted
    launcher.forget()
    gemms, stage = machine.launches[1:3], (64 + width) * 128
    assert all("DecodeGemm" in record.kernel for record in gemms)
    assert all(0 <= tilings.SMEM_BYTES - record.shared_bytes < stage for record in gemms)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("tokens", [1, 16, 17])
def test_many_choices_wait_for_the_launch_in_front(tokens):
    case = Block(tokens=tokens, experts=4, hidden=64, inner=32)
    given, _ = operands(case)
    with emulate("sm_90a", detect_races=False) as machine:
        chosen = tgl.topk_router(torch.randn(tokens, case.experts), case.choices, renormalize=True)
        tgl.moe(given[0], chosen.top_k_index, chosen.weights, *given[3:])
    assert {record.overlaps for record in machine.launches} == {tokens <= 16}
    assert all(record.at_once is None for record in machine.launches)
    assert len(machine.launches) == (5 if tokens <= 16 else 6)


def test_explain_and_other_chips():
    case = Block()
    (x, chosen, weights, w1, w2, *_), _ = operands(case)
    routing = tgl.route(chosen, case.experts)
    places = routing.source, routing.position, routing.token, routing.offs
    for chip, served in (("sm_90", True), ("sm_80", False), ("sm_100", False)):
        with backends.compile_only(chip):
            found = tgl.explain("moe", x, w1, w2, *places, weights, top_k=case.choices)
        assert (found.chosen is decode_block.IMPLEMENTATION) == served
        assert found.batch_invariant
    with backends.compile_only("sm_90"):
        found = tgl.explain("moe", x, w1, w2, places[0].long(), *places[1:], weights, top_k=case.choices)
    assert "takes `source` of int32" in str(found)


@pytest.mark.slow
def test_sums_of_another_dtype(monkeypatch):
    """Sums in float32, as for partial sums between ranks: rows keep 16 bits."""
    case = Block(biases=True)
    given, _ = operands(case)
    routing = tgl.route(given[1], case.experts)
    places = routing.source, routing.position, routing.token, routing.offs
    found = []
    for most in (64, 0):
        monkeypatch.setattr(overlap, "FEW_CHOICES", most)
        with emulate("sm_90a") as machine:
            args = given[0], *given[3:5], *places, given[2], *given[5:]
            found.append(torch.ops.tgl.moe(*args, top_k=case.choices, out_dtype=F32)[0])
        assert ("DecodeGemm" in machine.launches[0].kernel) == (most > 0)
    assert torch.equal(*found)
    assert found[0].dtype == F32
    assert not torch.equal(found[0], found[0].to(BF16).float())


def test_large_experts_are_not_served(monkeypatch):
    """Only experts that the slots may select count, at most all of them."""
    case = Block(experts=5, tokens=9)
    given, _ = operands(case)
    routing = tgl.route(given[1], case.experts)
    places = routing.source, routing.position, routing.token, routing.offs
    size = given[3].nbytes + given[4].nbytes
    found = []
    for most in (size, size - 1):
        monkeypatch.setattr(decode_block, "DECODE_BYTES", most)
        launcher.forget()
        with emulate("sm_90a", detect_races=False) as machine:
            found.append(tgl.moe(*given))
        assert ("DecodeGemm" in machine.launches[1].kernel) == (most == size)
    assert torch.equal(*found)
    with backends.compile_only("sm_90"):
        explained = tgl.explain("moe", given[0], *given[3:5], *places, given[2], top_k=case.choices)
    assert f"takes experts of up to {size - 1} bytes, 36 top-k slots may select {size}" in str(explained)


@pytest.mark.parametrize(
    ("experts", "choices", "hidden", "inner", "served"),
    [
        (128, 8, 2048, 768, True),
        (128, 32, 2048, 768, False),
        (128, 4, 2880, 2880, True),
        (8, 2, 4096, 14336, False),
    ],
)
def test_the_sizes_where_they_are_ahead(experts, choices, hidden, inner, served):
    """One token of Qwen3-30B or of gpt-oss is served; four tokens of Qwen3-30B or one of Mixtral are not."""
    w1 = torch.empty(experts, hidden, 2 * inner, dtype=BF16, device="meta")
    w2 = torch.empty(experts, inner, hidden, dtype=BF16, device="meta")
    places = [torch.empty(choices, dtype=torch.int32, device="meta")] * 3
    assert (decode_block.too_many((None, w1, w2, *places)) is None) == served


def behind(
    machine: cute_emulator.Emulation, late: list[Tensor], written: list[Tensor], call: Callable[[], object]
) -> None:
    """``call`` while the launch in front has ``late`` still to write, and reads ``written`` to its end."""
    values, early = [t.clone() for t in late], []
    for t in late:
        t.fill_(float("nan") if t.is_floating_point() else 1 << 20)
    for t in written:
        t.fill_(CANARY)

    def front() -> None:
        early.extend(t for t in written if (t != CANARY).any())
        for t, value in zip(late, values):
            t.copy_(value)

    machine.front = front
    call()
    machine.front = None
    assert not early, "written before the launch in front has ended"


@pytest.mark.parametrize(
    ("biases", "seed"), [(True, 0), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, 1), (True, 2)))]
)
def test_the_block_waits_for_what_it_reads(biases, seed, monkeypatch):
    """Each launch alone, behind one that writes all it reads, and the second GEMM behind one that writes A alone."""
    monkeypatch.setattr(tilings, "FEW_WIDTHS", (192,))
    launcher.forget()
    case = Block(1, 3, 4, biases=biases, hidden=392, inner=392)  # more k tiles than stages of this width
    (x, chosen, weights, w1, w2, bias1, bias2), (y, h) = operands(case)
    routing = tgl.route(chosen, case.experts)
    places = routing.source, routing.position, routing.token, routing.offs
    options = {"params": Params(kind=case.kind), "top_k": case.choices, "y": y, "h": h}
    used = int(routing.offs[-1])
    with emulate("sm_90a", seed=seed) as machine:
        steps = decode_block.steps((x, w1, w2, *places, weights, bias1, bias2), **options)
        for step in steps:
            step.launcher.run(step.call)
        first, second, combined = (step.call for step in steps)
        made = first.h, first.y, second.out
        wanted = [t[:used].clone() for t in made] + [y.clone()]

        read = [t for t in (x, w1, bias1, weights, *places) if t is not None]
        behind(machine, read, [first.h, first.y], lambda: decode_block.FIRST.run(first))
        late = second._replace(settled=0)
        read = [t for t in (second.a, w2, bias2, weights, *places) if t is not None]
        behind(machine, read, [second.out], lambda: decode_block.SECOND.run(late))
        assert torch.equal(second.out[:used], wanted[2])
        behind(machine, [second.a], [second.out], lambda: decode_block.SECOND.run(second))
        assert machine.launches[-1].early is not None
        behind(machine, [second.out, routing.position], [y], lambda: COMBINE.run(combined))
    launcher.forget()
    assert all(record.overlaps and record.at_once is None for record in machine.launches)
    for found, value in zip(made, wanted):
        assert torch.equal(found[:used], value)
    assert torch.equal(y, wanted[3])


def test_the_other_launches_wait_for_what_they_read():
    case = Block()
    (x, chosen, *_), _ = operands(case)
    logits = torch.randn(case.tokens, case.experts)
    routing, router = tgl.route(chosen, case.experts), tgl.topk_router(logits, case.choices)
    rows = tgl.dispatch(x, routing)
    source, position, token, offs = (
        torch.empty_like(t) for t in (routing.source, routing.position, routing.token, routing.offs)
    )
    made = {"source": source, "position": position, "token": token, "offs": offs}
    out = torch.empty_like(rows)
    device, k = x.device, case.choices
    with emulate("sm_90a") as machine:
        behind(
            machine, [chosen], list(made.values()), lambda: backends.run("route", device, chosen, case.experts, **made)
        )
        for name, t in made.items():
            assert torch.equal(t, getattr(routing, name))
        given = x, token, position, None
        behind(machine, [x, token, position], [out], lambda: backends.run("dispatch", device, *given, top_k=k, out=out))
        assert torch.equal(out, rows)
        values, kept = logits.clone(), []
        logits.fill_(float("nan"))
        machine.front = lambda: logits.copy_(values)
        kept.append(tgl.topk_router(logits, case.choices))
        machine.front = None
    assert torch.equal(kept[0].top_k_index, router.top_k_index)
    assert all(record.overlaps and record.early is record.at_once is None for record in machine.launches)


def test_the_check_tells_when_a_kernel_does_not_wait():
    """The second GEMM finds wrong tiles if all operands but A count as ready when they are not."""
    case = Block(tokens=2)
    (x, chosen, weights, w1, w2, *biases), (y, h) = operands(case)
    routing = tgl.route(chosen, case.experts)
    places = routing.source, routing.position, routing.token, routing.offs
    options = {"params": Params(kind=case.kind), "top_k": case.choices, "y": y, "h": h}
    with pytest.raises(cute_emulator.EmulatorError), emulate("sm_90a") as machine:
        second = decode_block.steps((x, w1, w2, *places, weights, *biases), **options)[1].call
        second.a.zero_()
        behind(machine, [routing.offs], [second.out], lambda: decode_block.SECOND.run(second))


def test_tiles():
    """Columns, groups with rows, what columns are a multiple of, and the width."""
    for columns, groups, step, width in (
        (1536, 8, 32, 96),  # 128 tiles
        (2048, 8, 32, 128),
        (5760, 4, 32, 192),
        (2880, 4, 32, 96),
        (4096, 2, 32, 64),
        (1536, 32, 32, 128),  # several for each multiprocessor at any width
        (1536, 8, 64, 128),
        (1536, 4, 128, 128),
    ):
        assert tilings.choose_few(columns, groups, step) == tilings.GemmConfig(64, width, few=True)
        assert tilings.reason("varlen_m", tilings.GemmConfig(64, width, few=True), 16) is None
    assert "have one warpgroup" in str(tilings.reason("varlen_m", tilings.GemmConfig(128, 128, few=True), 16))
    assert "tile_n must be" in str(tilings.reason("varlen_m", tilings.GemmConfig(64, 96), 16))


@pytest.mark.parametrize(("width", "stages"), [(64, 13), (96, 10), (128, 8), (192, 6)])
def test_stages(width, stages):
    """Routing weights and biases take no stage from the ring, in the kernels of the test above too."""
    import cutlass

    from tgl.cutlass_kernels.gemm.sm90.decode_kernels import Sm90DecodeGemmActivationKernel

    config = tilings.GemmConfig(64, width, few=True)
    for bias, probs in itertools.product((None, "bfloat16"), (None, "float32")):
        spec = EpilogueSpec("bfloat16", bias, activation=spec_of(Params()), probs=probs)
        assert Sm90DecodeGemmActivationKernel(VARLEN_M, config, spec, cutlass.BFloat16, gathered="a").stages == stages


@pytest.mark.slow
@pytest.mark.parametrize("width", tilings.FEW_WIDTHS)
def test_machine_code(width, monkeypatch):
    """128 registers a thread, nothing is spilled, and MMAs are waited for a k tile at a time."""
    compile, compiled = launcher.compiled, []
    monkeypatch.setattr(launcher, "compiled", lambda *args: compiled.append(compile(*args)) or compiled[-1])
    monkeypatch.setattr(launcher, "compiled_kernels", {})
    monkeypatch.setattr(tilings, "FEW_WIDTHS", (width,))
    (x, chosen, weights, w1, w2, *biases), (y, h) = operands(Block(biases=True))
    routing = tgl.route(chosen, w1.shape[0])
    places = routing.source, routing.position, routing.token, routing.offs
    options = {"params": Params(kind="clamped_qgeglu"), "top_k": chosen.shape[1], "y": y, "h": h}
    with emulate("sm_90a"):
        for step in decode_block.steps((x, w1, w2, *places, weights, *biases), **options)[:2]:
            step.launcher.plan(step.call)
    assert len(compiled) == 2
    for kernel in compiled:
        report = sass.inspect(kernel.artifacts.CUBIN)
        assert report.spills == report.frame == 0
        assert report.registers == 128
        assert report.count("WARPGROUP.DEPBAR") == 1
        assert f"m64n{width}k16" in kernel.artifacts.PTX

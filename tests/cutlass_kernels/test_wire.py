"""Expert parallelism on symmetric memory, on the emulator: the ops of several ranks, at the same time.

Results are those of the collectives, to the bit, and no rank reads what another one may still write.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import cute_emulator
import tgl
from tests.cutlass_kernels import sass
from tests.cutlass_kernels.emulated_ranks import Group, barrier_call, emulated
from tests.kernel_cases import framed_like
from tests.ranks_on_one_device import Threads, World, world
from tgl.backends.composite import expert_parallel as collectives
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.launchers import expert_parallel as engine
from tgl.cutlass_kernels.launchers.exchange_kernels import (
    BARRIER,
    EXCHANGE,
    LOADS,
    PLACEMENT,
    BarrierCall,
    ExchangeKey,
    PlacementCall,
    PlacementKey,
)
from tgl.cutlass_kernels.permute.tiling import cut_of
from tgl.distributed._exchange import Sizes
from tgl.distributed._wire_format import WireFormat
from tgl.meta import expert_parallel as meta
from tgl.meta import symmetric_memory
from tgl.meta.specs import empty_all
from tgl.testing import emulate

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
EXPERTS, TOP_K = 8, 3
OPS = {op.name: op for op in engine.OPS}
SLOW = pytest.mark.slow
WAYS = [(2, False), (4, True), pytest.param(2, True, marks=SLOW), pytest.param(4, False, marks=SLOW)]
MOVING = {
    "ep_dispatch": (meta.ep_dispatch, collectives.dispatch),
    "ep_combine": (meta.ep_combine, collectives.combine),
}
ROUTED = ("position", "token", "index", "needed")


machine = pytest.fixture(scope="module")(emulated)


def draw(case: str, ranks: int) -> list[Tensor]:
    """Choices of every rank's tokens."""
    counts = {"uneven": [(3 * r + 2) % 6 for r in range(ranks)], "one rank has all": [0, 6, 0, 0][:ranks]}
    made = []
    for count in counts.get(case, [5] * ranks):
        index = torch.rand(count, EXPERTS).topk(TOP_K).indices
        if case == "sentinels":
            index[::2, 1], index[1, 0] = EXPERTS + 3, -1
        elif case == "one rank takes all":
            index = index % (EXPERTS // ranks) + EXPERTS - EXPERTS // ranks
        made.append(index.int() if case == "sentinels" else index)
    return made


def routed(found: Group, index: list[Tensor], **sizes: int) -> list[tuple[Tensor, ...]]:
    """Places of both engines, which are equal."""
    ranks = found.world.ranks
    sizes = {"group_size": ranks, "pair_rows": 6, "expert_rows": 40, "invariant": False, **sizes}
    specs = [meta.ep_route(i, EXPERTS, **sizes) for i in index]
    ours = [framed_like(empty_all(spec)) for spec in specs]
    theirs = [empty_all(spec) for spec in specs]
    found.world.poison(3)
    calls = [((i, EXPERTS), {**sizes, **dict(zip(ROUTED, frame.inside))}) for i, frame in zip(index, ours)]
    found.play("ep_route", calls)
    wanted = [((i, EXPERTS), {**sizes, **dict(zip(ROUTED, made))}) for i, made in zip(index, theirs)]
    Threads(ranks)(collectives.route, wanted)
    for frame, made in zip(ours, theirs):
        assert frame.intact()
        for name, a, b in zip(ROUTED, frame.inside, made):
            assert torch.equal(a, b), (name, a, b)
    return theirs


@pytest.mark.parametrize("ranks, invariant", WAYS)
def test_routing(machine, ranks, invariant):
    with world(ranks, [(ranks, EXPERTS + ranks, torch.int32), (18 * ranks, TOP_K, torch.int32)]) as made:
        found, rows = Group(made), 18 if invariant else 6
        for case in ("uneven", "sentinels", "one rank takes all"):
            routed(found, draw(case, ranks), invariant=invariant, pair_rows=rows)


@pytest.mark.parametrize("ranks, invariant", [(4, False), pytest.param(32, True, marks=SLOW)])
def test_places_of_many_tokens(machine, ranks, invariant):
    """More than a block has threads, some behind the last row of their pair."""
    tokens, experts, pair_rows = 1100, 64, 200 if invariant else 620
    index = torch.randint(-1, experts + 1, (tokens, TOP_K))
    owner = torch.where((index < 0) | (index >= experts), ranks, index // (experts // ranks))
    places, pairs = (collectives._by_choice if invariant else collectives._by_rank)(owner, ranks, pair_rows)
    copies = TOP_K if invariant else ranks
    source = collectives._inverse(places, ranks * pair_rows)
    frame = framed_like(torch.empty(n, dtype=torch.int32) for n in (len(places), len(source), experts + ranks))
    PLACEMENT.run(PlacementCall(index, *frame.inside, ranks, invariant))
    position, token, counts = frame.inside
    assert frame.intact()
    assert torch.equal(position, places.int())
    assert torch.equal(token, source.div(copies, rounding_mode="floor").int())
    assert torch.equal(counts[:experts], torch.bincount(index[owner < ranks], minlength=experts).int())
    assert torch.equal(counts[experts:], pairs)
    assert invariant or pairs.max() > pair_rows


def moved(
    found: Group, op: str, tensors: list[tuple[Tensor, Tensor | None]], plan: list, copies: int, **rounded: torch.dtype
) -> None:
    """Results of both engines, which are equal wherever a token has its place.

    The collectives sum in float32, which is then rounded: torch's sum of bags on a CPU rounds ties of bfloat16 up.
    """
    check, collective = MOVING[op]
    places = [(token, position) for position, token, _, _ in plan]
    made = [empty_all(check(*both, *where, copies, **rounded)) for both, where in zip(tensors, places)]

    def wider(t):
        return t if t is None or t.dtype == torch.uint8 else t.float()

    ours, theirs = [framed_like(outputs) for outputs in made], [[wider(t) for t in outputs] for outputs in made]
    found.world.poison(0xFF)

    def calls(operands, outputs):
        options = [{"top_k": copies, "out": out, "out_weights": weights} for out, weights in outputs]
        return [((*both, *where), given) for both, where, given in zip(operands, places, options)]

    found.play(op, calls(tensors, [frame.inside for frame in ours]))
    wide = [tuple(wider(t) for t in both) for both in tensors]
    Threads(found.world.ranks)(collective, calls(wide, theirs))
    for rank, (frame, wanted) in enumerate(zip(ours, theirs)):
        assert frame.intact()
        used = (plan[rank][2] >= 0).any(1) if op == "ep_dispatch" else slice(None)
        for a, b in zip(frame.inside, wanted):
            assert not b.numel() or torch.equal(a[used], b[used].to(a.dtype))


EXCHANGES = ("uneven", BF16, 72, F32), ("one rank has all", F16, 5, None)


@pytest.mark.cover(1)
@pytest.mark.parametrize("exchanges", [EXCHANGES[:1], EXCHANGES[1:], pytest.param(EXCHANGES, marks=SLOW)], ids=str)
@pytest.mark.parametrize("flags", [None, 4])
@pytest.mark.parametrize("ranks, invariant", WAYS)
def test_rows_there_and_back(machine, monkeypatch, ranks, invariant, flags, exchanges):
    """Exchanges of all sizes share one memory, one after the other; with a flag for each row, or for a few."""
    if flags is not None:
        monkeypatch.setattr(symmetric_memory, "FLAGS", flags)
    copies, rows = TOP_K if invariant else ranks, 18 if invariant else 6
    with world(ranks, [(rows * ranks, 96, F32), (rows * ranks, TOP_K, F32)]) as made:
        found = Group(made)
        for case, dtype, width, weighted in exchanges:
            plan = routed(found, draw(case, ranks), invariant=invariant, pair_rows=rows)
            x = [torch.randn(len(position) // copies, width).to(dtype) for position, *_ in plan]
            weights = [weighted and torch.rand(len(t), TOP_K).to(weighted) for t in x]
            moved(found, "ep_dispatch", list(zip(x, weights)), plan, copies)
            y = [torch.randn(rows * ranks, width).to(dtype) for _ in plan]
            weights = [weighted and torch.rand(rows * ranks, TOP_K).to(weighted) for _ in plan]
            moved(found, "ep_combine", list(zip(y, weights)), plan, copies)


def test_rows_of_bytes(machine):
    """Codes and scales with float32 partial sums back, in the memory that a layer reserves for them."""
    recipe = tgl.recipes.MXFP8BlockScaling()
    form = WireFormat.of("quantized", F32, recipe)
    sizes = Sizes(2, EXPERTS, TOP_K, 6, None, None, invariant=False)
    codec = form.codecs(72, BF16)[0]
    with world(2, [(1, sizes.memory(72, BF16, form), torch.uint8)]) as made:
        found = Group(made)
        plan = routed(found, draw("uneven", 2), pair_rows=sizes.pair_rows)
        x = [torch.randn(len(position) // 2, 72).bfloat16() for position, *_ in plan]
        sent = [(codec.pack(t), torch.rand(len(t), TOP_K)) for t in x]
        assert sent[0][0].shape[1] == codec.width == 96
        moved(found, "ep_dispatch", sent, plan, 2)
        moved(found, "ep_dispatch", [(rows[:, 16:64], None) for rows, _ in sent], plan, 2)  # of a pitch, copied
        sums = [(torch.randn(2 * sizes.pair_rows, 72), None) for _ in plan]
        moved(found, "ep_combine", sums, plan, 2)
        moved(found, "ep_combine", sums, plan, 2, out_dtype=BF16)


@pytest.mark.parametrize("sizes", [{"pair_rows": 4}, {"expert_rows": 12}], ids=str)
def test_more_rows_than_there_are(machine, sizes):
    """If a pair of ranks or an expert gets too many rows, tokens read an answer of rank 0 where none has gone."""
    with world(2, [(12, 64, F32)]) as made:
        found = Group(made)
        plan = routed(found, draw("one rank takes all", 2), **sizes)
        assert all(not position.any() and needed.tolist() == [5, 30] for position, _, _, needed in plan)
        moved(found, "ep_combine", [(torch.randn(len(token), 72).bfloat16(), None) for _, token, _, _ in plan], plan, 2)


# --- barrier ----------------------------------------------------------------------------------------------------------


def alone(made: World, rank: int, token: Tensor | None) -> BarrierCall:
    """Return the barrier call of one rank, which waits only briefly for the others."""
    symmetric_memory.memory_of(made.names[rank]).watch[:, 0] = 10_000
    return barrier_call(made, rank, token)


def numbers(used: list[int], rows: int) -> Tensor:
    """``token`` of a rank that sends so many rows to every one."""
    return torch.cat([torch.arange(rows, dtype=torch.int32).masked_fill_(torch.arange(rows) >= n, -1) for n in used])


def test_barriers_tell_numbers_of_rows(machine):
    """Barriers signal numbers of rows in arithmetic that wraps around, from the first row of a pair to the last."""
    with world(3, []) as made:
        found = Group(made)
        before = 2**31 - 4
        made.epochs.fill_(before)
        for memory in made.memories:
            memory[:12].view(torch.int32).fill_(before)
        for counts in ([[0, 1, 70], [69, 32, 33], [64, 31, 2]], [[70, 70, 70], [0, 0, 0], [5, 66, 34]]):
            found.barrier([numbers(used, 70) for used in counts])
            for tells in (True, False):
                if not tells:
                    found.barrier([None] * 3)
                assert made.arrived.t().tolist() == counts
                assert made.leaving.tolist() == counts
        assert made.epochs.tolist() == [[-(2**31), 0]] * 3


def test_a_rank_that_is_ahead_changes_no_number_of_the_others(machine):
    with world(2, []) as made:
        found = Group(made)
        found.barrier([numbers([3, 2], 4), numbers([1, 4], 4)])
        found.barrier([None, None])
        first = symmetric_memory.memory_of(made.names[0]).control.clone()
        with pytest.raises(cute_emulator.EmulatorError, match="trap"):
            BARRIER.run(alone(made, 1, numbers([2, 2], 4)))
        changed = (symmetric_memory.memory_of(made.names[0]).control != first).nonzero().flatten().tolist()
        assert changed == [1, 5]  # the epoch of rank 1, and what it tells for the exchange to come


@pytest.mark.parametrize("barrier", ["before", "behind"])
@pytest.mark.parametrize("op", OPS)
def test_a_rank_that_stays_away_is_named(machine, op, barrier):
    """The device of the other one stops after a time, and the host says who, in which op and where."""
    with world(2, [(12, 64, F32)], seconds=1e-5) as made:
        Group(made)
        known = symmetric_memory.memory_of(made.names[0])
        assert symmetric_memory.failure_of(made.names[0]) is None
        if barrier == "behind":
            known.control[[1, 5]] = 1  # the other one has come to the first barrier, and tells of a row
        tokens = torch.zeros(12, dtype=torch.int32), torch.full((6,), 6, dtype=torch.int32), 2
        args, sizes = {
            "ep_route": (
                (torch.zeros(3, 2, dtype=torch.int32), 4),
                {"group_size": 2, "pair_rows": 6, "expert_rows": 8},
            ),
            "ep_dispatch": ((torch.zeros(3, 8), None, *tokens), {}),
            "ep_combine": ((torch.zeros(12, 8), None, *tokens), {}),
        }[op]
        said = f"rank 0 of 2 waited 1e-05 s for rank 1 in {op}, in the barrier {barrier} its writes"
        with pytest.raises(RuntimeError, match=f"{op}: {said}"):
            getattr(torch.ops.tgl, op)(*args, **sizes, group_name=made.names[0], engine="symmetric_memory")
        assert said in symmetric_memory.failure_of(made.names[0])
        assert symmetric_memory.failure_of(made.names[1]) is None


def test_all_ranks_that_stay_away_are_named(machine):
    with world(4, [(12, 64, F32)]) as made:
        Group(made)
        known = symmetric_memory.memory_of(made.names[1])
        known.control[2] = 1
        with pytest.raises(cute_emulator.EmulatorError, match="trap"):
            BARRIER.run(alone(made, 1, None))
        assert known.missed[0].tolist() == [[0, 0, 0, 0], [1, 0, 0, 1]]
        said = "rank 1 of 4 waited 60 s for ranks 0, 3 in ep_route, in the barrier behind its writes. "
        assert known.failure().startswith(said)


# --- calls of the ops -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_by_itself(machine):
    """A group of one rank waits for no rank: the ops in eager mode, their gradients, and what ``explain`` says.

    All places are used, as the others hold anything, which ``opcheck`` would compare.
    """
    with world(1, [(6, 64, F32), (6, 2, F32)]) as made:
        machine.register(made.room)
        group = {"group_name": made.names[0], "engine": "symmetric_memory"}
        index, sizes = torch.rand(6, 4).topk(2).indices, {"group_size": 1, "pair_rows": 6, "expert_rows": 12}
        position, token, choices, needed = torch.ops.tgl.ep_route(index, 4, **sizes, **group)
        assert torch.equal(choices, index.int())
        assert needed.tolist() == [6, 12]
        x, weights = torch.randn(6, 64, requires_grad=True), torch.rand(6, 2, requires_grad=True)
        rows, row_weights = torch.ops.tgl.ep_dispatch(x, weights, token, position, 1, **group)
        assert torch.equal(rows, x)
        y, _ = torch.ops.tgl.ep_combine(rows * row_weights.sum(1, keepdim=True), None, token, position, 1, **group)
        assert torch.equal(y, x * weights.sum(1, keepdim=True))
        dx, dweights = torch.autograd.grad(y.sum(), (x, weights))  # of a gradient with strides of 0
        assert torch.equal(dx, weights.sum(1, keepdim=True).expand_as(x))
        torch.testing.assert_close(dweights, x.sum(1, keepdim=True).expand(-1, 2))
        places = token, position, 1
        for op, args, options in (
            ("ep_route", (index, 4), sizes),
            ("ep_dispatch", (x, weights, *places), {}),
            ("ep_dispatch", (torch.randint(256, (6, 64), dtype=torch.uint8), weights.detach(), *places), {}),
            ("ep_combine", (torch.randn(6, 64, requires_grad=True), None, *places), {}),
            ("ep_combine", (torch.randn(6, 64, requires_grad=True), None, *places), {"out_dtype": BF16}),
        ):
            torch.library.opcheck(getattr(torch.ops.tgl, op).default, args, {**options, **group})
        report = str(tgl.explain("ep_route", index, 4, **sizes, **group))
        assert "runs tgl kernels over symmetric memory" in report
        assert "not  all_to_all_single: the call requests engine='symmetric_memory'" in report


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_machine_code(arch):
    """Rows move 16 bytes at a time, two blocks fit, and nothing is in local memory up to 8 ranks."""
    cut, few = (cut_of(columns, vector, 1, loads=LOADS) for columns, vector in ((7168, 8), (8, 4)))
    sums = cut_of(7168, 8, 8, loads=LOADS)
    with emulate(ARCHS[arch].target):  # keeps what was compiled
        places = PLACEMENT.build(PlacementKey(arch, True, "int64", 8, 8, 9, invariant=True, alone=False))
        sent = EXCHANGE.build(ExchangeKey(arch, True, (cut, few), (), ("bfloat16", "float32"), ("bfloat16", "float32")))
        answered = EXCHANGE.build(ExchangeKey(arch, True, (cut,), (sums,), ("bfloat16",), ("bfloat16",)))
    places, *flows = (sass.inspect(made.artifacts.CUBIN) for made in (places, sent, answered))
    assert places.spills == places.frame == 0
    assert places.registers <= 64  # of 256 threads: four blocks fit
    for rows in flows:
        assert rows.spills == rows.frame == 0
        assert rows.registers <= 128  # of 256 threads
        assert rows.count("LDG") >= cut.strips == LOADS
        assert rows.count("STG") >= cut.strips
        assert rows.count("MEMBAR") >= 1


REFUSED = [
    ({"group_name": "none"}, "the group 'none' has no symmetric memory"),
    ({"pair_rows": 1 << 20}, "bytes of symmetric memory, and the group has"),
    ({"num_experts": 8192, "pair_rows": 1000, "expert_rows": 8192}, "takes up to 4096 experts, got 8192"),
    ({"group_size": 1, "pair_rows": 12}, "the group has 2 ranks, got group_size=1"),
]


@pytest.mark.parametrize("changes, reason", REFUSED)
def test_refused(machine, changes, reason):
    with world(2, [(12, 4 * EXPERTS**4, F32)]) as made:
        given = {"num_experts": EXPERTS, "group_size": 2, "pair_rows": 6, "expert_rows": 40}
        given |= {"group_name": made.names[0], "engine": "symmetric_memory", **changes}
        index = torch.zeros(3, TOP_K, dtype=torch.int32)
        assert reason in str(tgl.explain("ep_route", index, given.pop("num_experts"), **given))

"""The ops of expert parallelism on two ranks: places and values against loops, contracts, failures."""

from __future__ import annotations

import itertools
import re
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _symmetric_memory

import tgl
from tgl.distributed import ExpertParallelMLP
from tgl.meta.expert_parallel import ENGINES, NEED_OF_PEERS

OPS = torch.ops.tgl
EXPERTS, TOP_K, PAIR_ROWS, EXPERT_ROWS = 6, 2, 8, 24
INDEX = (  # of each rank
    torch.tensor([[0, 5], [1, 2], [-1, 3], [4, 4], [6, 9]]),
    torch.tensor([[5, 4], [0, 3]]),
)


def options(**changes: Any) -> dict[str, Any]:
    sizes = {"group_size": 2, "pair_rows": PAIR_ROWS, "expert_rows": EXPERT_ROWS}
    return {**sizes, "group_name": dist.group.WORLD.group_name, **changes}


def rows_sent(invariant: bool) -> list[list[tuple[int, int, list[int]]]]:
    """Return for each destination the source rank, token and local top-k slots of every row, in order."""
    made: list[list[tuple[int, int, list[int]]]] = [[], []]
    for to, source in itertools.product(range(2), range(2)):
        for token, choices in enumerate(INDEX[source].tolist()):
            local = [e - 3 * to if 0 <= e - 3 * to < 3 else -1 for e in choices]
            if invariant:
                for j in range(TOP_K):
                    if local[j] >= 0:
                        made[to].append((source, token, [local[j] if i == j else -1 for i in range(TOP_K)]))
            elif max(local) >= 0:
                made[to].append((source, token, local))
    return made


def check_places(invariant: bool) -> None:
    me = dist.get_rank()
    position, token, index, needed = OPS.ep_route(INDEX[me], EXPERTS, **options(invariant=invariant))
    arriving, sent = rows_sent(invariant), 2 * PAIR_ROWS
    expected = torch.full((sent, TOP_K), -1, dtype=torch.int32)
    tokens = torch.full((sent,), -1, dtype=torch.int32)
    for source in range(2):
        here = [local for rank, _, local in arriving[me] if rank == source]
        expected[source * PAIR_ROWS : source * PAIR_ROWS + len(here)] = torch.tensor(here)
    for to in range(2):
        mine = [t for rank, t, _ in arriving[to] if rank == me]
        tokens[to * PAIR_ROWS : to * PAIR_ROWS + len(mine)] = torch.tensor(mine)
    assert torch.equal(index, expected)
    assert torch.equal(token, tokens)
    for place, row in enumerate(position.tolist()):
        assert row < 0 or token[row] == place // 2  # two copies of a token in either way
    assert sorted(row for row in position.tolist() if row >= 0) == (token >= 0).nonzero().view(-1).tolist()
    pairs = max(sum(rank == source for rank, _, _ in rows) for rows in arriving for source in range(2))
    choices = max(sum(e >= 0 for _, _, local in rows for e in local) for rows in arriving)
    assert needed.tolist() == [pairs, choices]


@pytest.mark.parametrize("invariant", [False, True])
def test_places(ranks, invariant):
    ranks(check_places, invariant)


def problem(dtype: torch.dtype = torch.float64, columns: int = 3) -> tuple[Any, ...]:
    """Tokens, weights and places of this rank, and what arrives according to loops."""
    me = dist.get_rank()
    position, token, _, _ = OPS.ep_route(INDEX[me], EXPERTS, **options())
    x = [torch.randn(len(index), columns, dtype=dtype) for index in INDEX]
    rows = torch.zeros(2 * PAIR_ROWS, columns, dtype=dtype)
    arriving = rows_sent(invariant=False)[me]
    for source in range(2):
        of_source = [x[source][t] for rank, t, _ in arriving if rank == source]
        rows[source * PAIR_ROWS : source * PAIR_ROWS + len(of_source)] = torch.stack(of_source)
    weights = [torch.rand(len(index), TOP_K, dtype=dtype) for index in INDEX]
    return x[me], weights[me], (token, position, 2), rows


def check_values() -> None:
    name = options()["group_name"]
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x, weights, places, rows = problem(dtype)
        arrived, arrived_weights = OPS.ep_dispatch(x, weights, *places, group_name=name)
        assert torch.equal(arrived, rows)
        assert arrived_weights.shape == (2 * PAIR_ROWS, TOP_K)
        assert arrived_weights.dtype == dtype
        unused = (rows == 0).all(1)
        for value in (0.0, float("nan")):  # in unused places
            rows[unused] = value
            y, none = OPS.ep_combine(rows, None, *places, group_name=name)
            visits = (places[1].view(-1, 2) >= 0).sum(1)[:, None]
            assert torch.equal(y, x * visits)
            assert none.shape == (0,)
            if dtype != torch.float64:
                for out_dtype in (torch.float32, torch.bfloat16):
                    sums, _ = OPS.ep_combine(rows, None, *places, group_name=name, out_dtype=out_dtype)
                    assert sums.dtype == out_dtype
                    assert torch.equal(sums, (x.float() * visits).to(out_dtype))


def test_values_and_unused_places(ranks):
    ranks(check_values)


def check_bytes() -> None:
    """Any bits arrive as they are, and the gradient of the weights comes back alone."""
    name = options()["group_name"]
    x, weights, places, _ = problem()
    sent = torch.randint(256, (len(x), 48), dtype=torch.uint8)
    sent[:, ::4] = torch.tensor([0x01, 0x7F, 0xFF, 0x80, 0x7F, 0xFF])[torch.arange(12) % 6].byte()
    wide = sent.double()
    arrived, _ = OPS.ep_dispatch(sent, weights, *places, group_name=name)
    assert arrived.dtype == torch.uint8
    assert torch.equal(arrived.double(), OPS.ep_dispatch(wide, None, *places, group_name=name)[0])
    for odd in (sent.t().contiguous().t()[:, :32], torch.zeros(len(x) * 48 + 1).byte()[1:].view(-1, 48)):
        assert torch.equal(
            OPS.ep_dispatch(odd, None, *places, group_name=name)[0].double(),
            OPS.ep_dispatch(odd.double(), None, *places, group_name=name)[0],
        )
    weights.requires_grad_()
    grads = []
    for rows in (sent, wide):
        _, back = OPS.ep_dispatch(rows, weights, *places, group_name=name)
        grads += torch.autograd.grad(back.sin().sum(), weights)
    assert torch.equal(*grads)


def check_contracts() -> None:
    name = options()["group_name"]
    x, weights, places, rows = problem()
    x.requires_grad_(), weights.requires_grad_(), rows.requires_grad_()
    for invariant in (False, True):
        torch.library.opcheck(OPS.ep_route.default, (INDEX[dist.get_rank()], EXPERTS), options(invariant=invariant))
    nothing = torch.empty(0, TOP_K, dtype=torch.int32)
    torch.library.opcheck(OPS.ep_route.default, (nothing, EXPERTS), options())
    sent = torch.randint(256, (len(x), 32), dtype=torch.uint8)
    narrow = torch.randn_like(rows, dtype=torch.bfloat16).requires_grad_()
    for op, t, w, rounded in (
        (OPS.ep_dispatch, x, weights, {}),
        # opcheck does not add sums of bytes and of floats that require grad
        (OPS.ep_dispatch, sent, weights.detach(), {}),
        (OPS.ep_combine, rows, torch.rand(2 * PAIR_ROWS, 1), {}),
        (OPS.ep_combine, narrow, torch.rand(2 * PAIR_ROWS, 1), {"out_dtype": torch.float32}),
    ):
        for given in (w, None):
            torch.library.opcheck(op.default, (t, given, *places), {"group_name": name, **rounded})
            report = tgl.explain(op, t, given, *places, group_name=name, **rounded)
            assert report.chosen.name == "all_to_all_single"
            assert not report.syncs


def test_contracts(ranks):
    ranks(check_bytes)
    ranks(check_contracts)


def check_transposed() -> None:
    """<dispatch(x), y> = <x, combine(y)>, summed over ranks; and so are the gradients, twice."""
    name = options()["group_name"]
    x, weights, places, rows = problem()
    x.requires_grad_()
    y = torch.randn_like(rows, requires_grad=True)
    dispatched, _ = OPS.ep_dispatch(x, weights, *places, group_name=name)
    combined, _ = OPS.ep_combine(y, None, *places, group_name=name)
    products = torch.stack([(dispatched * y).sum(), (x * combined).sum()]).detach()
    dist.all_reduce(products)
    torch.testing.assert_close(products[0], products[1], rtol=0, atol=1e-12)
    (dx,) = torch.autograd.grad(dispatched, x, y, create_graph=True)
    torch.testing.assert_close(dx, combined, rtol=0, atol=0)
    g = torch.randn_like(x)
    (second,) = torch.autograd.grad(dx, y, g)
    assert torch.equal(second, OPS.ep_dispatch(g, None, *places, group_name=name)[0])


def test_dispatch_and_combine_are_transposed(ranks):
    ranks(check_transposed)


BAD_ROUTES = [
    ({"top_k_index": torch.zeros(3, dtype=torch.int32)}, ValueError, r"`top_k_index` must be 2-D \[S, k\]"),
    ({"top_k_index": torch.zeros(3, 2)}, TypeError, "`top_k_index` must be an integer tensor"),
    ({"top_k_index": torch.zeros(3, 0, dtype=torch.int32)}, ValueError, r"`top_k_index` must be \[S, k\] with k of at"),
    ({"num_experts": 5}, ValueError, "`num_experts` must be a multiple of the 2 ranks, but got 5"),
    ({"num_experts": 0}, ValueError, "`num_experts` must be at least 1"),
    ({"group_size": 0}, ValueError, "`group_size` must be at least 1"),
    ({"pair_rows": 0}, ValueError, "`pair_rows` must be at least 1"),
    ({"expert_rows": 4}, ValueError, "`expert_rows` must be at least 5"),
    ({"expert_rows": 2**31}, ValueError, "`expert_rows` must be for fewer than 2\\^31 places"),
]


def check_bad_routes() -> None:
    for changes, error, message in BAD_ROUTES:
        given = {"top_k_index": INDEX[0], "num_experts": EXPERTS, **options(), **changes}
        index, experts = given.pop("top_k_index"), given.pop("num_experts")
        with pytest.raises(error, match=f"tgl::ep_route: {message}"):
            OPS.ep_route(index, experts, **given)
        with FakeTensorMode() as mode, pytest.raises(error, match=f"tgl::ep_route: {message}"):
            OPS.ep_route(mode.from_tensor(index), experts, **given)
    with pytest.raises(ValueError, match="`group_size` must be 2 like the group, but got 3"):
        OPS.ep_route(INDEX[0], EXPERTS, **options(group_size=3))
    with pytest.raises(ValueError, match="`group_name` must be the name of a group of this process, but got 'none'"):
        OPS.ep_route(INDEX[0], EXPERTS, **options(group_name="none"))


def check_bad_rows() -> None:
    x, weights, (token, position, copies), rows = problem()
    name = options()["group_name"]
    wide, narrow, odd = x.int(), weights[:1], position[:-1]
    cases: list[tuple[Any, tuple, type[Exception], str]] = [
        (OPS.ep_dispatch, (wide, weights, token, position, copies), TypeError, "ep_dispatch: `x` must be float64"),
        (OPS.ep_dispatch, (x.byte(), None, token, position, copies), ValueError, "`x` must be of rows of a multiple"),
        (OPS.ep_combine, (rows.byte(), None, token, position, copies), TypeError, "ep_combine: `y` must be float64"),
        (OPS.ep_dispatch, (x[0], weights, token, position, copies), ValueError, "`x` must be 2-D [S, H]"),
        (OPS.ep_dispatch, (x[1:], None, token, position, copies), ValueError, f"`x` must be of {len(x)} rows"),
        (OPS.ep_dispatch, (x, narrow, token, position, copies), ValueError, f"`weights` must be of {len(x)} rows"),
        (OPS.ep_dispatch, (x, weights, token, odd, copies), ValueError, "`position` must be [S c] with c = 2"),
        (OPS.ep_dispatch, (x, weights, token[1:], position, copies), ValueError, "`token` must be [W P] with W = 2"),
        (OPS.ep_combine, (rows[1:], None, token, position, copies), ValueError, "ep_combine: `y` must be of 16 rows"),
        (OPS.ep_combine, (rows, None, token.short(), position, copies), TypeError, "`token` must be int32 or int64"),
    ]
    for op, arguments, error, message in cases:
        with pytest.raises(error, match=re.escape(message)):
            op(*arguments, group_name=name)
    with pytest.raises(TypeError, match=r"tgl::ep_combine: `out_dtype` must be float64, but got torch.float32"):
        OPS.ep_combine(rows, None, token, position, copies, group_name=name, out_dtype=torch.float32)


def test_bad_arguments(ranks):
    ranks(check_bad_routes)
    ranks(check_bad_rows)


def check_time_out() -> None:
    group = dist.new_group(timeout=timedelta(seconds=2), backend="gloo")
    given = options(group_name=group.group_name)
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="`num_experts` must be a multiple"):
            OPS.ep_route(INDEX[1], EXPERTS + 1, **given)
    else:
        message = r"tgl::ep_route: the exchange among ranks \[0, 1\] failed on rank 0. Each of them must make the call"
        with pytest.raises(RuntimeError, match=message):
            OPS.ep_route(INDEX[0], EXPERTS, **given)
    dist.barrier()


def test_a_rank_that_raises_does_not_hang_the_others(ranks):
    ranks(check_time_out)


def check_engines() -> None:
    me, name = dist.get_rank(), options()["group_name"]
    with pytest.raises(
        ValueError, match="tgl::ep_route: `engine` must be one of 'all_to_all', 'symmetric_memory', but"
    ):
        OPS.ep_route(INDEX[me], EXPERTS, **options(engine="nccl"))
    x, _, places, _ = problem()
    with pytest.raises(ValueError, match=r"tgl::ep_dispatch: `engine` must be one of .* but got 'nccl'"):
        OPS.ep_dispatch(x, None, *places, group_name=name, engine="nccl")
    with pytest.raises(tgl.NoImplementationError, match="the call requests engine='symmetric_memory'"):
        OPS.ep_dispatch(x, None, *places, group_name=name, engine="symmetric_memory")
    with pytest.raises(ValueError, match="`engine` must be one of 'all_to_all', 'symmetric_memory', but got 'nccl'"):
        layer(engine="nccl")
    with pytest.raises(ValueError, match="`engine` must be equal on all ranks of `group`, but got"):
        layer(engine=["all_to_all", "symmetric_memory"][me])
    why = f"{NEED_OF_PEERS}, and there is none"
    message = f"layer 7: `engine='symmetric_memory'` is not available: rank 0: {why}; rank 1: {why}"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        layer(engine="symmetric_memory")


@pytest.mark.parametrize("found", [False, True])
def test_explain_names_all_engines(monkeypatch, found):
    """``explain`` names all engines and why the others do not run, with and without NVSHMEM."""
    monkeypatch.setattr(_symmetric_memory, "is_nvshmem_available", lambda: found)
    places = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64), 1
    for op in ("ep_dispatch", "ep_combine"):
        asked = {e: tgl.explain(op, torch.randn(4, 8), None, *places, group_name="0", engine=e) for e in ENGINES}
        assert asked["all_to_all"].chosen.name == "all_to_all_single"
        assert asked["symmetric_memory"].chosen is None
        for engine, explanation in asked.items():
            refused = {i.name: reason for i, reason in explanation.refused}
            assert refused["symmetric memory"].endswith(f"{NEED_OF_PEERS}, but the tensors are on a CPU")
            assert ("the call requests engine=" in refused["symmetric memory"]) == (engine == "all_to_all")
            assert refused["all_to_all_vdev_2d"].endswith(f"torch finds {'' if found else 'no '}NVSHMEM")
            assert ("all_to_all_single" in refused) == (engine == "symmetric_memory")


def layer(**changes: Any) -> ExpertParallelMLP:
    return ExpertParallelMLP(EXPERTS, 8, 8, group=dist.group.WORLD, top_k=2, max_tokens=4, name="layer 7", **changes)


def test_engines(ranks):
    """The requested engine alone is used, and all ranks report why there is none."""
    ranks(check_engines)

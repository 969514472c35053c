"""A block like ones before makes its launches without asking again: with the same arguments, or by the long way."""

import pytest
import torch

import tgl
from tgl import backends
from tgl.composed import moe as composed
from tgl.cutlass_kernels.runtime import device, launcher

G, H, I, S, K = 4, 32, 48, 40, 2
BF16 = torch.bfloat16


@pytest.fixture
def launches(monkeypatch):
    """What kernels are called with: op, and of every tensor its shape, strides and dtype."""
    seen = []

    def about(given):
        if isinstance(given, tuple):
            return tuple(map(about, given))
        return (given.shape, given.stride(), given.dtype) if isinstance(given, torch.Tensor) else given

    def compiled(op, key, *_):
        return lambda *given: seen.append((op, key, *map(about, given)))

    monkeypatch.setattr(launcher, "compiled", compiled)
    monkeypatch.setattr(device, "packages_reason", lambda: None)
    for table in ("plans", "known"):
        monkeypatch.setattr(launcher, table, {})
    with backends.emulated_device("sm_90"):
        yield seen


@pytest.fixture
def long_ways():
    """Counts calls of the composition."""
    taken = []
    (composition,) = [i for i in backends._table["moe", "cuda"] if i.produce is composed.forward]

    def produce(*args, **kwargs):
        taken.append(1)
        return composed.forward(*args, **kwargs)

    object.__setattr__(composition, "produce", produce)  # it is frozen
    yield taken
    object.__setattr__(composition, "produce", composed.forward)


def tensors(tokens=S, weights=True, biases=False, width=I):
    x, chosen = torch.zeros(tokens, H, dtype=BF16), torch.arange(tokens * K).view(tokens, K) % G
    made = [torch.zeros(G, 2 * width, H, dtype=BF16), torch.zeros(G, H, width, dtype=BF16)]
    made = [w.transpose(1, 2) for w in made]
    vectors = [torch.zeros(G, 2 * width), torch.zeros(G, H)] if biases else [None, None]
    return [x, chosen, torch.zeros(tokens, K) if weights else None, *made, *vectors]


def launched(launches, given, **options):
    launches.clear()
    tgl.moe(*given, **options)
    return list(launches)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_the_launches_are_those_of_the_composition(launches, long_ways, weights, biases):
    given = tensors(weights=weights, biases=biases)
    first = launched(launches, given)
    assert [op for op, *_ in first] == [
        "route",
        *["dispatch"] * weights,
        "grouped_gemm_activation",
        "grouped_gemm",
        "combine",
    ]
    assert all(launched(launches, given) == first for _ in range(3))
    assert len(long_ways) == 2
    other = tensors(weights=weights, biases=biases)  # other memory
    assert launched(launches, other) == first
    assert len(long_ways) == 2


@pytest.mark.parametrize("case", ["tokens", "options", "address", "pitch"])
def test_of_other_calls_the_long_way_is_taken(launches, long_ways, case):
    given, options = tensors(), {"kind": "clamped_qgeglu", "limit": 3.0}
    for _ in range(3):
        launched(launches, given, **options)
    before = len(long_ways)
    other, changed = tensors(S + 8 if case == "tokens" else S), dict(options)
    if case == "options":
        changed["limit"] = 2.0
    elif case == "address":
        other[0] = torch.zeros(S * H + 8, dtype=BF16)[4 : 4 + S * H].view(S, H)
    elif case == "pitch":
        other[0] = torch.zeros(S, 2 * H, dtype=BF16)[:, :H]
    found = launched(launches, other, **changed)
    assert len(long_ways) == before + 1
    launcher.known.clear()  # from scratch
    assert launched(launches, other, **changed) == found
    assert launched(launches, given, **options) == launched(launches, given, **options)


def test_what_is_registered_is_asked(launches, long_ways):
    given, called = tensors(), []
    for _ in range(3):
        launched(launches, given)

    def combine(*args, out, top_k):
        called.append(top_k)

    mine = backends.add(backends.Implementation("combine", "mine", "cuda", combine, priority=20, emulable=True))
    try:
        for _ in range(4):
            assert "combine" not in [op for op, *_ in launched(launches, given)]
        assert called == [K] * 4
    finally:
        backends.remove(mine)
    before = len(long_ways)
    launcher.forget()  # as another tiling may be chosen
    assert "combine" in [op for op, *_ in launched(launches, given)]
    assert len(long_ways) == before + 1


def test_wide_experts_read_copies_in_order(launches, long_ways):
    wide = composed.FIRST + 64
    given = tensors(tokens=G * composed.FEW_ROWS, width=wide)
    found = [launched(launches, given) for _ in range(4)]
    assert [op for op, *_ in found[0]].count("dispatch") == 2
    assert found[1:] == found[:1] * 3
    assert len(long_ways) == 4

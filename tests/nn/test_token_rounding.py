"""Token rounding against a loop over experts and tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tgl
from tgl.nn.token_rounding import _ROUNDINGS

ROUNDED = {
    "nearest": lambda n, multiple: int(n / multiple + 0.5) * multiple,
    "up": lambda n, multiple: -(-n // multiple) * multiple,
    "down": lambda n, multiple: n // multiple * multiple,
}


def by_loop(index, scores, multiple, rounding, choices):
    """The experts of every token, in a list that -1 fills up."""
    (tokens, experts), chosen = scores.shape, index.tolist()
    kept = [[] for _ in range(tokens)]
    for expert in range(experts):
        order = sorted(range(tokens), key=lambda s: (expert not in chosen[s], -scores[s, expert], s))
        count = ROUNDED[rounding](sum(expert in row for row in chosen), multiple)
        for token in order[: min(count, tokens // multiple * multiple)]:
            kept[token].append(expert)
    rows = [sorted(row, key=lambda e: (-scores[s, e], e))[:choices] for s, row in enumerate(kept)]
    return [row + [-1] * (choices - len(row)) for row in rows]


@given(
    tokens=st.integers(0, 30),
    experts=st.integers(1, 7),
    top_k=st.integers(1, 3),
    multiple=st.integers(1, 8),
    rounding=st.sampled_from(sorted(_ROUNDINGS)),
    seed=st.integers(0, 1000),
)
def test_against_a_loop(tokens, experts, top_k, multiple, rounding, seed):
    """Equal scores, tokens with two slots for one expert, and dropped slots."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 6, (tokens, experts), generator=generator) / 8
    index = torch.randint(-1, experts + 1, (tokens, top_k), generator=generator, dtype=torch.int32)
    options = {"multiple": multiple, "rounding": rounding}
    ours = tgl.round_tokens(index, scores, **options)
    assert ours.tolist() == by_loop(index, scores, multiple, rounding, min(2 * top_k, experts))
    every = tgl.round_tokens(index, scores, **options, max_choices=experts)
    counts = tgl.route(every, experts).offs.diff(prepend=torch.zeros(1, dtype=torch.int32))
    assert not (counts % multiple).any()


def test_the_roundings_are_those_of_the_table():
    assert ROUNDED.keys() == _ROUNDINGS.keys()


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph_from_scores_to_gradients(dynamic):
    """A block with rounded groups, and the gradient of the router through the weights."""
    torch.manual_seed(0)
    w1, w2 = (torch.randn(5, *shape, dtype=torch.float64) for shape in ((8, 12), (6, 8)))
    router = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)

    def block(x):
        scores = (x @ router).softmax(-1)
        chosen = tgl.round_tokens(scores.topk(2).indices, scores, multiple=4)
        weights = scores.gather(1, chosen.clamp(min=0))
        return tgl.moe(x, tgl.route(chosen, 5, 2 * x.shape[0] + 5 * 2, sentinels=True), weights, w1, w2)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (32, 40):
        x = torch.randn(tokens, 8, dtype=torch.float64)
        with tgl.debug_checks():  # the bound on rows holds
            expected = block(x)
        torch.testing.assert_close(compiled(x), expected)
        grads = [torch.autograd.grad(y.square().sum(), router)[0] for y in (compiled(x), expected)]
        torch.testing.assert_close(*grads)
        assert grads[1].abs().sum() > 0


BAD = [
    ({"scores": torch.rand(4)}, ValueError, r"`scores` must be 2-D \[S, G\], but got shape \(4,\)"),
    ({"top_k_index": torch.zeros(4)}, ValueError, r"`top_k_index` must be 2-D \[S, k\], but got shape \(4,\)"),
    ({"top_k_index": torch.zeros(4, 2)}, TypeError, "`top_k_index` must be an integer tensor, but got torch.float32"),
    ({"scores": torch.zeros(4, 3).int()}, TypeError, "`scores` must be a floating tensor, but got torch.int32"),
    (
        {"scores": torch.rand(4, 3, device="meta")},
        ValueError,
        "`scores` must be on cpu like `top_k_index`, but got meta",
    ),
    ({"scores": torch.rand(5, 3)}, ValueError, "`scores` must have the 4 tokens of `top_k_index`, but got shape"),
    ({"multiple": 0}, ValueError, "`multiple` must be at least 1, but got 0"),
    ({"rounding": "floor"}, ValueError, "`rounding` must be one of nearest, up, down, but got 'floor'"),
    ({"max_choices": 4}, ValueError, "`max_choices` must be from 1 to the 3 experts, but got 4"),
]


@pytest.mark.parametrize("change, error, message", BAD)
def test_bad_input(change, error, message):
    arguments = {"top_k_index": torch.zeros(4, 2, dtype=torch.int64), "scores": torch.rand(4, 3)}
    with pytest.raises(error, match=f"tgl::round_tokens: {message}"):
        tgl.round_tokens(**{**arguments, **change})

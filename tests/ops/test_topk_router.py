"""``tgl::topk_router`` on a CPU: against a loop over tokens, numerical derivatives, ties, NaN, and bad input."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tgl
from tests.router_cases import CASES, SCALARS, Case, by_loop, cotangents, operands, weighing
from tgl.meta.router import GROUP_RULES, SCORES

OP, BACKWARD = torch.ops.tgl.topk_router, torch.ops.tgl.topk_router_backward
NAMES = ("weights", "top_k_index", "tokens_per_expert", "prob_sum", "z_sum")
SMALL = [name for name, case in CASES.items() if case.experts <= 64]
FEW = ("mixtral", "deepseek-v3, sums", "one expert")  # with and without sums, a bias and groups


def test_the_cases_have_every_name():
    options = [case.options for case in CASES.values()]
    assert {o.get("score_function", "softmax") for o in options} == set(SCORES) == set(SCALARS)
    assert {o.get("group_score", "max") for o in options} == set(GROUP_RULES)


@pytest.mark.parametrize("name", CASES)
def test_against_a_loop(name):
    case = CASES[name]
    logits, bias = operands(case, 7)
    weights, index, *_ = OP(logits, case.top_k, bias, **case.options)
    for row, ours, chosen in zip(logits.tolist(), weights, index.tolist()):
        wanted, by = by_loop(case, row, None if bias is None else bias.tolist())
        assert chosen == wanted
        torch.testing.assert_close(ours, torch.tensor(by, dtype=torch.float64))


@pytest.mark.parametrize("name", CASES)
def test_sums(name):
    case = CASES[name]
    logits, bias = operands(case, 9)
    _, index, counts, shares, z = OP(logits, case.top_k, bias, **{**case.options, "sums": True})
    assert counts.dtype == torch.int32
    assert torch.equal(counts, index.flatten().bincount(minlength=case.experts).int())
    score = case.options.get("score_function", "softmax")
    each = torch.tensor([SCALARS[score](row) for row in logits.tolist()], dtype=torch.float64)
    torch.testing.assert_close(shares, (each / each.sum(1, keepdim=True)).sum(0))
    torch.testing.assert_close(z, logits.exp().sum(1).log().square().sum()[None])
    for t in OP(logits, case.top_k, bias, **{**case.options, "sums": False})[2:]:
        assert t.shape == (0,)


WITH_SUMS = [name for name in SMALL if CASES[name].options.get("sums")]


@pytest.mark.parametrize("name", WITH_SUMS)
def test_sums_of_some_tokens(name):
    """Sums are over the masked tokens alone, though the others are NaN; weights are of all tokens."""
    case, counts = CASES[name], torch.tensor([True, False, True, True, False, True])
    logits, bias = operands(case, 6)
    few = logits[counts].requires_grad_()
    logits[1, 0], logits[4] = float("nan"), float("nan")
    logits.requires_grad_()
    made, some = OP(logits, case.top_k, bias, counts, **case.options), OP(few, case.top_k, bias, **case.options)
    assert torch.equal(made[1][counts], some[1])
    assert torch.equal(made[2], some[2])
    for ours, wanted in zip((made[0][counts], *made[3:]), (some[0], *some[3:]), strict=True):
        torch.testing.assert_close(ours, wanted)
    grad, *sums = cotangents(case, 6)
    (ours,) = torch.autograd.grad((made[0], *made[3:]), logits, (grad.where(counts[:, None], 0), *sums))
    (wanted,) = torch.autograd.grad((some[0], *some[3:]), few, (grad[counts], *sums))
    torch.testing.assert_close(ours[counts], wanted)
    alone = BACKWARD(grad, logits, made[1], *sums, counts, **weighing(case))
    without = BACKWARD(grad, logits, made[1], **weighing(case))
    assert torch.equal(alone[~counts].nan_to_num(), without[~counts].nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_scored_in_float32(dtype):
    case = CASES["deepseek-v3, sums"]
    logits, bias = operands(case, 5, dtype)
    made = OP(logits, case.top_k, bias, **case.options)
    wanted = OP(logits.double(), case.top_k, bias.double(), **case.options)
    assert torch.equal(made[1], wanted[1])
    for i in (0, 3, 4):
        assert made[i].dtype == torch.float32
        torch.testing.assert_close(made[i].double(), wanted[i], rtol=1e-6, atol=0)


def test_ties_are_in_ascending_order():
    logits = torch.tensor([[1.0, 3.0, -0.0, 3.0, 0.0, 1.0]])
    for bias in (None, torch.zeros(6)):
        assert OP(logits, 6, bias)[1].tolist() == [[1, 3, 0, 5, 2, 4]]
    groups = torch.tensor([[0.0, 2.0, 2.0, 1.0, 0.5, 2.0]])
    assert OP(groups, 2, num_groups=3, topk_groups=2)[1].tolist() == [[1, 2]]


def test_infinities_and_nan():
    inf, nan = float("inf"), float("nan")
    weights, index, *_ = OP(torch.tensor([[-inf, 1.0, -inf, 2.0], [-inf] * 4]), 3, renormalize=True)
    assert index.tolist() == [[3, 1, 0], [0, 1, 2]]
    assert weights[0, 2] == 0
    assert weights[1].isnan().all()
    # What is left out stays out, however low the rest is.
    assert OP(torch.tensor([[-inf, -inf, 5.0, 1.0]]), 2, num_groups=2, topk_groups=1)[1].tolist() == [[2, 3]]
    low = torch.tensor([[1.0, -inf, 0.0, -inf, -inf, 0.5]])
    assert OP(low, 3, num_groups=3, topk_groups=2)[1].tolist() == [[0, 5, 1]]
    for options in ({}, {"renormalize": True}, {"score_function": "sigmoid", "renormalize": True}):
        weights, index, *_ = OP(torch.tensor([[0.0, nan, 1.0, nan]]), 3, **options)
        assert index.tolist() == [[1, 3, 2]]
        assert weights[0, 0].isnan()
    # Whatever the bits of a NaN are.
    assert OP(torch.tensor([[0.0, nan, inf, 1.0]]).copysign(torch.tensor([1.0, -1.0, 1.0, 1.0])), 2)[1].tolist() == [
        [1, 2]
    ]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", SMALL)
def test_replay_against_a_loop(name, dtype):
    """Experts in another order than by rank, some slots dropped: weights, loads, and gradients of all outputs."""
    case = CASES[name]
    logits, bias = operands(case, 6)
    index = torch.stack([torch.randperm(case.experts)[: case.top_k] for _ in range(6)]).to(dtype)
    index[torch.arange(6 * case.top_k).view(6, -1) % 4 == 1] = -1
    index[5] = -1
    weights, kept, counts, *sums = OP(logits, case.top_k, bias, None, index, **case.options)
    assert torch.equal(kept, index.int())
    score = SCALARS[case.options.get("score_function", "softmax")]
    for row, ours, experts in zip(logits.tolist(), weights.tolist(), index.tolist()):
        scores = score(row)
        total = sum(scores[e] for e in experts if e >= 0) if case.options.get("renormalize") else 1.0
        wanted = [scores[e] / total * case.options.get("scale", 1.0) if e >= 0 else 0.0 for e in experts]
        torch.testing.assert_close(ours, wanted)
    if case.options.get("sums"):
        assert torch.equal(counts, index[index >= 0].bincount(minlength=case.experts).int())
        chosen = OP(logits, case.top_k, bias, **case.options)
        assert all(torch.equal(a, b) for a, b in zip(sums, chosen[3:]))


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3, sums", "deepseek-v4", "one expert"])
def test_replay_derivatives(name):
    """First and second order with dropped slots; sums are of two tokens of three."""
    case = CASES[name]
    logits, bias = operands(case, 3)
    logits.requires_grad_()
    mask = torch.tensor([True, False, True]) if case.options.get("sums") else None
    index = torch.stack([torch.randperm(case.experts)[: case.top_k] for _ in range(3)])
    index[1, 0] = -1
    index[2] = -1

    def results(logits):
        weights, _, _, *sums = OP(logits, case.top_k, bias, mask, index, **case.options)
        return (weights, *sums) if case.options.get("sums") else weights

    torch.autograd.gradcheck(results, logits)
    torch.autograd.gradgradcheck(results, logits)


def test_replay_of_the_chosen_experts():
    """A replay of what the router chose has its bits, forward and backward."""
    for name in SMALL:
        case = CASES[name]
        logits, bias = operands(case, 6, torch.float32)
        made = OP(logits, case.top_k, bias, **case.options)
        again = OP(logits, case.top_k, None, None, made[1], **case.options)
        assert all(torch.equal(a, b) for a, b in zip(made, again, strict=True))


def test_scores_of_zero_have_weights_of_zero():
    logits = torch.full((1, 4), -1000.0, requires_grad=True)
    weights = OP(logits, 2, score_function="sigmoid", renormalize=True)[0]
    (grad,) = torch.autograd.grad(weights.sum(), logits)
    assert torch.equal(weights, torch.zeros(1, 2))
    assert torch.equal(grad, torch.zeros(1, 4))


@pytest.mark.parametrize("name", SMALL)
def test_derivatives(name):
    """First and second order, of all outputs; sums are of two tokens of three."""
    case = CASES[name]
    logits, bias = operands(case, 3)
    logits.requires_grad_()
    mask = torch.tensor([True, False, True]) if case.options.get("sums") else None

    def results(logits):
        weights, _, _, *sums = OP(logits, case.top_k, bias, mask, **case.options)
        return (weights, *sums) if case.options.get("sums") else weights

    torch.autograd.gradcheck(results, logits)
    torch.autograd.gradgradcheck(results, logits)


def test_derivatives_of_transforms():
    case = CASES["olmoe"]
    logits, _ = operands(case, 4)

    def objective(logits):
        weights, _, _, shares, z = OP(logits, case.top_k, **case.options)
        return weights.sin().sum() + shares.square().sum() + z.sum()

    leaf = logits.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(objective(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(objective)(logits), wanted)
    with pytest.raises(RuntimeError, match="has no forward-mode derivative"):
        torch.func.jvp(objective, (logits,), (logits,))


def test_indices_and_counts_have_no_gradient():
    logits, bias = torch.randn(3, 4, requires_grad=True), torch.randn(4)
    weights, index, counts, *_ = OP(logits, 2, bias, sums=True)
    assert weights.requires_grad
    assert not index.requires_grad
    assert not counts.requires_grad


@pytest.mark.cover(1)
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FEW else pytest.mark.slow) for n in SMALL])
def test_opcheck(name, tokens):
    case = CASES[name]
    logits, bias = operands(case, tokens, torch.float32)
    logits.requires_grad_()
    torch.library.opcheck(OP.default, (logits, case.top_k, bias), case.options)
    index = OP(logits, case.top_k, bias, **case.options)[1]
    grads = [None if t is None else t.requires_grad_() for t in cotangents(case, tokens, torch.float32)]
    torch.library.opcheck(BACKWARD.default, (grads[0], logits, index, *grads[1:]), weighing(case))
    if case.options.get("sums"):
        mask = torch.arange(tokens) % 2 == 0
        torch.library.opcheck(OP.default, (logits, case.top_k, bias, mask), case.options)
        torch.library.opcheck(BACKWARD.default, (grads[0], logits, index, *grads[1:], mask), weighing(case))
        torch.library.opcheck(OP.default, (logits, case.top_k, bias, mask, index.long()), case.options)


@pytest.mark.parametrize("layout", ["column-major", "sliced", "expanded"])
def test_any_layout(layout):
    case = Case(8, 3, {"renormalize": True, "sums": True})
    logits = torch.randn(8, 8)
    logits = {"column-major": logits.t(), "sliced": torch.randn(5, 20)[:, 4:12], "expanded": logits[:1].expand(8, 8)}[
        layout
    ]
    made = OP(logits, case.top_k, **case.options)
    for ours, wanted in zip(made, OP(logits.contiguous(), case.top_k, **case.options), strict=True):
        assert torch.equal(ours, wanted)
    grad = torch.randn(1, 3).expand(len(logits), 3)
    ours = BACKWARD(grad, logits, made[1], renormalize=True)
    assert torch.equal(ours, BACKWARD(grad.contiguous(), logits.contiguous(), made[1], renormalize=True))


def test_autocast_changes_nothing():
    logits, bias = operands(CASES["deepseek-v3"], 3, torch.float32)
    wanted = OP(logits, 8, bias, **CASES["deepseek-v3"].options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = OP(logits, 8, bias, **CASES["deepseek-v3"].options)
    assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))


X, B, M = torch.zeros(3, 8), torch.zeros(8), torch.ones(3, dtype=torch.bool)
I = torch.zeros(3, 2, dtype=torch.int64)
BAD = [
    ((X[0], 2), {}, ValueError, r"`logits` must be 2-D \[S, E\], but got shape \(8,\)"),
    ((X.int(), 2), {}, TypeError, "`logits` must be float64, float32, bfloat16 or float16, but got torch.int32"),
    ((X, 0), {}, ValueError, "`top_k` must be at least 1, but got 0"),
    ((X, 9), {}, ValueError, "`top_k` must be at most the 8 experts to choose from, but got 9"),
    ((X, 5), {"num_groups": 4, "topk_groups": 2}, ValueError, "`top_k` must be at most the 4 experts to choose from"),
    ((X, 2), {"num_groups": 0}, ValueError, "`num_groups` must be at least 1, but got 0"),
    ((X, 2), {"num_groups": 3}, ValueError, "`num_groups` must be a divisor of the 8 experts, but got 3"),
    ((X, 2), {"num_groups": 2, "topk_groups": 3}, ValueError, "`topk_groups` must be from 1 to num_groups = 2, but"),
    (
        (X, 2),
        {"num_groups": 8, "topk_groups": 4, "group_score": "top2_sum"},
        ValueError,
        "`num_groups` must be a number of groups of 2 experts or more for 'top2_sum', but got 8",
    ),
    ((X, 2), {"score_function": "tanh"}, ValueError, "`score_function` must be one of softmax, sigmoid, sqrtsoftplus"),
    ((X, 2), {"group_score": "mean"}, ValueError, "`group_score` must be one of max, top2_sum, but got 'mean'"),
    ((X, 2, B[1:]), {}, ValueError, r"`bias` must be of shape \[E\] = \(8,\), but got shape \(7,\)"),
    ((X, 2, B.double()), {}, TypeError, "`bias` must be torch.float32, but got torch.float64"),
    ((X, 2, B, M[1:]), {"sums": True}, ValueError, r"`mask` must be of shape \[S\] = \(3,\), but got shape \(2,\)"),
    ((X, 2, B, M.long()), {"sums": True}, TypeError, "`mask` must be torch.bool, but got torch.int64"),
    ((X, 2, None, M), {}, ValueError, "`mask` must be None where there are no sums \\(losses\\)"),
    (
        (X, 2, B, None, I[:, :1]),
        {},
        ValueError,
        r"`index` must be of shape \[S, k\] = \(3, 2\), but got shape \(3, 1\)",
    ),
    ((X, 2, B, None, I.short()), {}, TypeError, "`index` must be torch.int32 or torch.int64, but got torch.int16"),
]
INDEX, GRAD = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2)
BAD_BACKWARD = [
    ((GRAD, X, INDEX.long()), TypeError, "`top_k_index` must be torch.int32, but got torch.int64"),
    ((GRAD, X, INDEX[1:]), ValueError, r"`top_k_index` must be \[S, k\] with S = 3 like `logits`"),
    ((GRAD[:, 1:], X, INDEX), ValueError, r"`grad_weights` must be of shape \[S, k\] = \(3, 2\)"),
    ((GRAD.double(), X, INDEX), TypeError, "`grad_weights` must be torch.float32, but got torch.float64"),
    ((GRAD, X, INDEX, B[1:], B[:1]), ValueError, r"`grad_prob_sum` must be of shape \[E\] = \(8,\)"),
    ((GRAD, X, INDEX, B, B), ValueError, r"`grad_z_sum` must be of shape \[1\] = \(1,\)"),
    ((GRAD, X, INDEX, B), ValueError, "`grad_z_sum` must be given where `grad_prob_sum` is"),
    ((GRAD, X, INDEX, None, None, M), ValueError, "`mask` must be None where there are no sums"),
    ((GRAD, X, INDEX, B, B[:1], M[:2]), ValueError, r"`mask` must be of shape \[S\] = \(3,\)"),
]


def refused(op, args, options, error, message):
    with pytest.raises(error, match=message):
        op(*args, **options)
    with FakeTensorMode() as mode, pytest.raises(error, match=message):
        op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args), **options)


@pytest.mark.parametrize("args, options, error, message", BAD)
def test_bad_input(args, options, error, message):
    refused(OP, args, options, error, f"tgl::topk_router: {message}")


@pytest.mark.parametrize("args, error, message", BAD_BACKWARD)
def test_bad_input_of_the_backward(args, error, message):
    refused(BACKWARD, args, {}, error, f"tgl::topk_router_backward: {message}")


def test_top_k_must_be_an_integer():
    with pytest.raises(TypeError, match=r"tgl::topk_router: `top_k` must be an integer, but got 2\.0"):
        tgl.topk_router(X, 2.0)

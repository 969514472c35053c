"""``tgl.topk_router``: its losses, and a block of router, routing and experts as one graph."""

import pytest
import torch

import tgl

TOKENS, WIDTH, INNER, EXPERTS, TOP_K = 12, 16, 8, 6, 2
FORMS = {
    "softmax": {},
    "renormalised": {"renormalize": True},
    "groups": {"score_function": "sigmoid", "renormalize": True, "num_groups": 3, "topk_groups": 2},
}


def test_losses():
    logits = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    made = tgl.topk_router(logits, 2, losses=True)
    p = logits.softmax(1)
    f = torch.nn.functional.one_hot(made.top_k_index.long(), 5).sum((0, 1)) / 7
    assert torch.equal(made.tokens_per_expert, (7 * f).round().int())
    torch.testing.assert_close(made.load_balancing_loss, 5 * (f * p.mean(0)).sum())
    torch.testing.assert_close(made.z_loss, logits.logsumexp(1).square().mean())
    (ours,) = torch.autograd.grad(made.load_balancing_loss + 3 * made.z_loss, logits)
    wanted = torch.autograd.grad(5 * (f * p.mean(0)).sum() + 3 * logits.logsumexp(1).square().mean(), logits)
    torch.testing.assert_close(ours, wanted[0])


def test_losses_of_some_tokens():
    """Means over those; of none they are zero. In float64 and narrower, and with the mask as attention has it."""
    logits, mask = torch.randn(9, 5, dtype=torch.float64), torch.arange(9) % 3 != 0
    for x in (logits, logits.bfloat16()):
        made, some = tgl.topk_router(x, 2, mask=mask, losses=True), tgl.topk_router(x[mask], 2, losses=True)
        assert torch.equal(made.tokens_per_expert, some.tokens_per_expert)
        torch.testing.assert_close(made.load_balancing_loss, some.load_balancing_loss)
        torch.testing.assert_close(made.z_loss, some.z_loss)
    made = tgl.topk_router(logits, 2, mask=torch.zeros_like(mask), losses=True)
    assert made.load_balancing_loss == made.z_loss == 0
    with pytest.raises(ValueError, match="tgl::topk_router: `mask` must be None where there are no sums"):
        tgl.topk_router(logits, 2, mask=mask)


def test_no_losses():
    made = tgl.topk_router(torch.randn(4, 3), 2)
    assert made.tokens_per_expert is made.load_balancing_loss is made.z_loss is None


def test_losses_of_no_tokens_are_zero():
    made = tgl.topk_router(torch.zeros(0, 4), 2, losses=True)
    assert made.load_balancing_loss == made.z_loss == 0


def test_all_groups_are_kept_unless_told():
    logits, bias = torch.randn(9, 8), torch.randn(8)
    for ours, wanted in zip(tgl.topk_router(logits, 3, bias, num_groups=4)[:2], tgl.topk_router(logits, 3, bias)[:2]):
        assert torch.equal(ours, wanted)


def block(x, router, bias, w1, w2, options):
    made = tgl.topk_router(x @ router, TOP_K, bias, losses=True, **options)
    y = tgl.moe(x, tgl.route(made.top_k_index, EXPERTS), made.weights, w1, w2)
    return y, made.load_balancing_loss + made.z_loss


@pytest.mark.parametrize("form", FORMS)
def test_a_block_as_one_graph(form, fresh_compiler):
    """Values and gradients of a compiled step are those of the eager one, and of a loop over choices."""
    options = FORMS[form]
    bias = torch.rand(EXPERTS).double() if form == "groups" else None
    sizes = ((TOKENS, WIDTH), (WIDTH, EXPERTS), (EXPERTS, WIDTH, 2 * INNER), (EXPERTS, INNER, WIDTH))
    x, router, w1, w2 = leaves = [torch.randn(size, dtype=torch.float64).requires_grad_() for size in sizes]

    def step(call):
        y, loss = call(x, router, bias, w1, w2, options)
        return y, loss, *torch.autograd.grad(y.sin().sum() + loss, leaves)

    eager = step(block)
    for ours, wanted in zip(step(torch.compile(block, fullgraph=True)), eager, strict=True):
        torch.testing.assert_close(ours, wanted)

    def loop(x, router, bias, w1, w2, options):
        made = tgl.topk_router(x @ router, TOP_K, bias, losses=True, **options)
        rows = []
        for token in range(TOKENS):
            parts = []
            for weight, expert in zip(made.weights[token], made.top_k_index[token].tolist()):
                gate, linear = (x[token] @ w1[expert]).chunk(2)
                parts.append(weight * (torch.nn.functional.silu(gate) * linear) @ w2[expert])
            rows.append(sum(parts))
        return torch.stack(rows), made.load_balancing_loss + made.z_loss

    for ours, wanted in zip(eager, step(loop), strict=True):
        torch.testing.assert_close(ours, wanted)

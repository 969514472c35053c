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


def test_all_groups_are_kept_by_default():
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
    backend = "inductor" if form == "groups" else "aot_eager"
    for ours, wanted in zip(step(torch.compile(block, fullgraph=True, backend=backend)), eager, strict=True):
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


# --- routing replay, and leading dimensions ---------------------------------------------------------------------------


def replayed_block(x, router, index, w1, w2, options):
    made = tgl.topk_router(x @ router, TOP_K, index=index, losses=True, **options)
    return tgl.moe(x, made, None, w1, w2), made.load_balancing_loss + made.z_loss, made.top_k_index


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_replay_as_one_graph(dtype, fresh_compiler):
    """Experts of a rollout, with dropped slots, in a batch of sequences: eager, compiled, and the formula."""
    options = FORMS["renormalised"]
    sizes = ((2, 6, WIDTH), (WIDTH, EXPERTS), (EXPERTS, WIDTH, 2 * INNER), (EXPERTS, INNER, WIDTH))
    x, router, w1, w2 = leaves = [torch.randn(size, dtype=torch.float64).requires_grad_() for size in sizes]
    index = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(12)]).view(2, 6, TOP_K).to(dtype)
    index[0, 1, 0] = index[1, 2, 0] = index[1, 2, 1] = -1

    def step(call):
        y, loss, kept = call(x, router, index, w1, w2, options)
        assert y.shape == x.shape
        assert torch.equal(kept, index)
        assert kept.dtype == dtype
        return y, loss, *torch.autograd.grad(y.sin().sum() + loss, leaves)

    def formula(x, router, index, w1, w2, options):
        logits, chosen = x @ router, index >= 0
        named = index.clamp_min(0).long()
        weights = logits.softmax(-1).gather(-1, named) * chosen
        weights = weights / weights.sum(-1, keepdim=True).masked_fill(~chosen.any(-1, keepdim=True), 1)
        gate, linear = torch.einsum("bsh,ehn->bsen", x, w1).chunk(2, -1)
        rows = torch.einsum("bsei,eih->bseh", torch.nn.functional.silu(gate) * linear, w2)
        rows = rows.gather(2, named[..., None].expand(*named.shape, WIDTH))
        loads = torch.nn.functional.one_hot(named, EXPERTS)[chosen].sum(0) / 12
        loss = EXPERTS * (loads * logits.softmax(-1).mean((0, 1))).sum() + logits.logsumexp(-1).square().mean()
        return (rows * weights[..., None]).sum(2), loss, index

    wanted = step(formula)
    for call in (replayed_block, torch.compile(replayed_block, fullgraph=True, backend="aot_eager")):
        for ours, theirs in zip(step(call), wanted, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_errors_of_replayed_experts():
    logits = torch.randn(2, 3, 5)
    with pytest.raises(
        ValueError, match=r"`index` must be of the leading dimensions of `logits` and `top_k`, \(2, 3, 2\)"
    ):
        tgl.topk_router(logits, 2, index=torch.zeros(6, 2, dtype=torch.int32))
    with pytest.raises(TypeError, match="`index` must be a tensor or None, but got a list"):
        tgl.topk_router(logits, 2, index=[[0, 1]])
    index = torch.tensor([[0, -1], [5, 2]])
    made = tgl.topk_router(logits[0, :2], 2, index=index)
    assert made.top_k_index is index
    assert made.weights[0, 1] == made.weights[1, 0] == 0
    with tgl.debug_checks():
        tgl.topk_router(logits[0, :2], 2, index=index.clamp_max(4))
        with pytest.raises(ValueError, match=r"`index` must be experts from 0 to 4, or -1 .*, but index\[1, 0\] = 5"):
            tgl.topk_router(logits[0, :2], 2, index=index)


def test_leading_dimensions():
    """Every function takes them, and gives the bits that it gives for flat tokens."""
    logits, x = torch.randn(2, 3, 5), torch.randn(2, 3, 8)
    mask = torch.arange(6).view(2, 3) != 4
    made = tgl.topk_router(logits, 2, losses=True, mask=mask)
    flat = tgl.topk_router(logits.view(6, 5), 2, losses=True, mask=mask.view(6))
    assert made.weights.shape == made.top_k_index.shape == (2, 3, 2)
    assert all(torch.equal(a.flatten(), b.flatten()) for a, b in zip(made, flat))
    routing, of_flat = tgl.route(made.top_k_index, 5), tgl.route(flat.top_k_index, 5)
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(routing, of_flat))
    rows = tgl.dispatch(x, routing)
    assert torch.equal(rows, tgl.dispatch(x.view(6, 8), routing))
    assert torch.equal(tgl.dispatch_weights(made.weights, routing), tgl.dispatch_weights(flat.weights, routing))
    y = tgl.combine(rows, routing, made.weights)
    assert torch.equal(y, tgl.combine(rows, routing, flat.weights).view(2, 3, 8))
    layer = tgl.MoE(5, 8, 4)
    wanted = layer(x.view(6, 8), flat.top_k_index, flat.weights).view(2, 3, 8)
    for arguments in ((made,), (flat,), (made.top_k_index, made.weights), (routing, made.weights)):
        assert torch.equal(layer(x, *arguments), wanted)
    weights = [w.transpose(1, 2) for w in (layer.fc1.weight, layer.fc2.weight)]
    for arguments in ((made, None), (routing, made.weights)):
        assert torch.equal(tgl.moe(x, *arguments, *weights), wanted)
    for call in (layer, lambda x, *args: tgl.moe(x, *args, *weights)):
        with pytest.raises(TypeError, match="`weights` must be None beside a RouterOutput"):
            call(x, made, made.weights)


def test_text_is_one_line():
    made = tgl.topk_router(torch.randn(3, 4), 2)
    assert repr(made) == "RouterOutput(weights=float32[3, 2], top_k_index=int32[3, 2])"
    text = "Routing(source=int32[6], position=int32[6], offs=int32[4], top_k=2, token=int32[6])"
    assert repr(tgl.route(made.top_k_index, 4)) == text

"""``tgl.MoELayer``: router, experts and shared expert against a loop over experts, balancing, replay, and graphs."""

import copy

import pytest
import torch
import torch.distributed as dist

import tgl

H, I, E, K = 16, 8, 6, 2
FORMS = {
    "mixtral": {},
    "shared expert with a gate": {"shared_intermediate_size": 12, "shared_gate": True, "router": "sigmoid"},
    "deepseek": {
        "router": {"score_function": "sigmoid", "renormalize": True, "scale": 2.5, "num_groups": 3, "topk_groups": 2},
        "balance": "bias",
        "shared_intermediate_size": 8,
    },
    "gpt-oss": {"activation": "clamped_qgeglu", "interleaved": True, "bias": True, "router_bias": True},
}


def made(form, **options):
    layer = tgl.MoELayer(H, I, E, K, dtype=torch.float64, **FORMS[form], **options)
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.copy_(torch.rand(E))
    return layer


def by_experts(layer, x, router):
    """Return the layer's result for the router's choice, one expert at a time."""
    tokens, y = x.reshape(-1, H), 0

    def expert(mlp, g):
        hidden = torch.nn.functional.linear(
            tokens, mlp.fc1.weight[g], None if mlp.fc1.bias is None else mlp.fc1.bias[g]
        )
        offs = torch.tensor([len(tokens)], dtype=torch.int32)
        hidden = tgl.grouped_activation(hidden, offs, kind=mlp.activation, interleaved=mlp.interleaved)
        return torch.nn.functional.linear(hidden, mlp.fc2.weight[g], None if mlp.fc2.bias is None else mlp.fc2.bias[g])

    index, weights = router.top_k_index.reshape(-1, K), router.weights.reshape(-1, K)
    for g in range(E):
        y = y + expert(layer.experts, g) * (weights * (index == g)).sum(1, keepdim=True)
    if layer.shared is not None:
        gate = 1.0 if layer.shared_gate is None else layer.shared_gate(tokens).sigmoid()
        y = y + gate * expert(layer.shared, 0)
    return y.view(x.shape)


@pytest.mark.parametrize("form", FORMS)
def test_results_gradients_and_replay(form, fresh_compiler):
    """Eager and as one graph; a replay of the layer's own choice gives the same."""
    layer, x = made(form), torch.randn(2, 5, H, dtype=torch.float64)
    parameters = dict(layer.named_parameters())

    def step(call, **options):
        leaf = x.clone().requires_grad_()
        y, router = call(leaf, return_router=True, **options)
        loss = y.sin().sum() + layer.router_loss(router)
        return (y, *torch.autograd.grad(loss, [leaf, *parameters.values()])), router

    def formula(leaf, return_router, **options):
        router = layer.router(leaf, losses=True)
        return by_experts(layer, leaf, router), router

    (wanted, router), compiled = step(formula), torch.compile(layer, fullgraph=True, backend="aot_eager")
    index = router.top_k_index.long()
    for call, options in ((layer, {}), (layer, {"index": index}), (compiled, {}), (compiled, {"index": index})):
        results, of_call = step(call, **options)
        assert torch.equal(of_call.tokens_per_expert, router.tokens_per_expert)
        for ours, theirs in zip(results, wanted, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert torch.equal(layer(x), step(layer)[0][0])


def test_dropped_slots_and_padding():
    layer, x = made("mixtral"), torch.randn(5, H, dtype=torch.float64)
    index = torch.tensor([[0, 1], [-1, 2], [3, -1], [-1, -1], [4, 5]])
    mask = torch.tensor([True, True, False, True, True])
    y, router = layer(x, index=index, mask=mask, return_router=True)
    assert torch.equal(y[3], torch.zeros_like(y[3]))
    assert router.tokens_per_expert.tolist() == [1, 1, 1, 0, 1, 1]
    torch.testing.assert_close(y, by_experts(layer, x, router))
    with tgl.debug_checks():
        layer(x, index=index)


def test_bias_moves_to_the_mean_load(fresh_compiler):
    layer, x = made("deepseek", bias_update_rate=0.25), torch.randn(9, H, dtype=torch.float64)
    layer.router.expert_bias.zero_()
    router = layer(x, return_router=True)[1]
    with torch.no_grad():
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    loads = layer.router.loads
    assert torch.equal(loads, 2 * router.tokens_per_expert)
    layer.eval()(x)
    assert int(loads.sum()) == 2 * 9 * K
    wanted = 0.25 * torch.sign(loads.float().mean() - loads)
    layer.update_expert_bias()
    assert torch.equal(layer.router.expert_bias, wanted)
    assert not layer.router.loads.any()
    with pytest.raises(RuntimeError, match="`balance` must be 'bias' for update_expert_bias, but is 'loss'"):
        made("mixtral").update_expert_bias()


def test_losses():
    layer = made("mixtral", load_balancing_coefficient=0.5, z_loss_coefficient=2.0)
    router = layer(torch.randn(4, H, dtype=torch.float64), return_router=True)[1]
    wanted = 0.5 * router.load_balancing_loss + 2 * router.z_loss
    torch.testing.assert_close(layer.router_loss(router), wanted)
    with pytest.raises(ValueError, match="`router` must have losses, from a call with return_router=True"):
        layer.router_loss(layer.router(torch.randn(4, H, dtype=torch.float64)))


def test_narrow_layers_route_in_float32():
    """So does autocast; casts of the layer leave the bias of the choice as it is."""
    layer = tgl.MoELayer(H, I, E, K, balance="bias", router="sigmoid").bfloat16()
    assert layer.router.expert_bias.dtype == torch.float32
    assert layer.router.weight.dtype == torch.bfloat16
    x = torch.randn(5, H, dtype=torch.bfloat16)
    logits = layer.router.logits(x)
    assert torch.equal(logits, x.float() @ layer.router.weight.float().t())
    y, router = layer(x, return_router=True)
    assert y.dtype == torch.bfloat16
    assert router.weights.dtype == torch.float32
    wide = tgl.MoELayer(H, I, E, K)
    chosen = wide(x.float(), return_router=True)[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, router = wide(x.float(), return_router=True)
    assert torch.equal(router.weights, chosen.weights)


def test_copies_recipes_and_the_meta_device():
    layer = tgl.MoELayer(64, 32, E, K, recipe="mxfp8", shared_intermediate_size=32, balance="bias")
    x = torch.randn(7, 64)
    again = copy.deepcopy(layer)
    assert torch.equal(again(x), layer(x))
    empty = tgl.MoELayer(64, 32, E, K, recipe="mxfp8", shared_intermediate_size=32, balance="bias", device="meta")
    empty.to_empty(device="cpu").reset_parameters()
    assert not empty.router.expert_bias.any()
    empty.load_state_dict(layer.state_dict())
    assert torch.equal(empty(x), layer(x))


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_expert_parallel(group):
    """A group of one rank gives the values of the layer without a group, replay and shared expert included."""
    options = {"shared_intermediate_size": 12, "balance": "bias", "router": "sigmoid"}
    layer = tgl.MoELayer(H, I, E, K, **options)
    ranks = tgl.MoELayer(H, I, E, K, process_group=group, max_tokens=10, capacity_factor=None, **options)
    ranks.load_state_dict(layer.state_dict())
    x = torch.randn(2, 5, H)
    index = torch.stack([torch.randperm(E)[:K] for _ in range(10)]).view(2, 5, K)
    index[1, 3, 0] = -1
    for arguments in ({}, {"index": index}):
        torch.testing.assert_close(ranks(x, **arguments), layer(x, **arguments))
    ranks.update_expert_bias(group)
    layer.update_expert_bias()
    assert torch.equal(ranks.router.expert_bias, layer.router.expert_bias)
    with pytest.raises(TypeError, match="`max_tokens` must be given with `process_group`"):
        tgl.MoELayer(H, I, E, K, process_group=group)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"balance": "biass"}, ValueError, r"`balance` must be one of loss, bias, none, .* \(did you mean 'bias'\?\)"),
        ({"router": "softmx"}, ValueError, r"`router` must be one of .* \(did you mean 'softmax'\?\)"),
        (
            {"router": {"scales": 2.0}},
            ValueError,
            r"`router` must hold only .* but has 'scales' \(did you mean 'scale'",
        ),
        ({"router": 3}, TypeError, "`router` must be the name of a score function or a dict of options, but got 3"),
        ({"shared_gate": True}, ValueError, "`shared_gate` must be False without `shared_intermediate_size`"),
        ({"bias": 1}, TypeError, "`bias` must be True or False, but got 1"),
        ({"z_loss_coefficient": "1"}, TypeError, "`z_loss_coefficient` must be a number, but got '1'"),
        ({"num_experts": 1}, ValueError, "`top_k` must be at most the 1 experts to choose from, but got 2"),
        ({"recipe": "mxfp9"}, ValueError, r"`recipe` must be one of .* \(did you mean 'mxfp8'"),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        tgl.MoELayer(**{"hidden_size": H, "intermediate_size": I, "num_experts": E, "top_k": K, **options})


def test_bad_input():
    layer = made("mixtral")
    with pytest.raises(ValueError, match=r"MoELayer: `x` must be \[..., H\] with H = 16, but got shape \(3, 5\)"):
        layer(torch.randn(3, 5))
    with pytest.raises(TypeError, match="MoELayer: `x` must be a tensor, but got a list"):
        layer([1.0])

"""``GroupedMLP`` against one expert at a time in plain PyTorch."""

import pytest
import torch

import tgl
from tests import oracle
from tgl.meta.activations import TABLE

G, H, I = 3, 4, 6
SPLITS = torch.tensor([2, 0, 3])
OFFS = torch.tensor([2, 2, 5], dtype=torch.int32)


def expert_by_expert(mlp, x, probs):
    rows, start = [], 0
    for g, size in enumerate(SPLITS.tolist()):
        part, p = x[start : start + size], None if probs is None else probs[start : start + size]
        hidden = part @ mlp.fc1.weight[g].t() + (mlp.fc1.bias[g] if mlp.fc1.bias is not None else 0)
        all_rows = torch.tensor([size], dtype=torch.int32)
        hidden = oracle.activation(hidden, all_rows, kind=mlp.activation, interleaved=mlp.interleaved)
        y = hidden @ mlp.fc2.weight[g].t() + (mlp.fc2.bias[g] if mlp.fc2.bias is not None else 0)
        rows.append(y if p is None else y * p[:, None])
        start += size
    return torch.cat([*rows, x.new_zeros(x.shape[0] - start, H)])


@pytest.mark.cover(2)
@pytest.mark.parametrize("activation", TABLE)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("with_probs", [False, True])
def test_values_and_gradients(activation, interleaved, bias, with_probs):
    """The probability multiplies the expert's whole answer, FC2's bias included."""
    options = {"activation": activation, "interleaved": interleaved, "bias": bias, "params_dtype": torch.float64}
    mlp = tgl.GroupedMLP(G, H, I, **options)
    x = torch.randn(6, H, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(6, dtype=torch.float64, requires_grad=True) if with_probs else None
    leaves = [x, *mlp.parameters()] + [probs] * with_probs
    y, expected = mlp(x, SPLITS, probs), expert_by_expert(mlp, x, probs)
    dy = torch.randn_like(y)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, leaves, dy))


def test_nothing_reads_the_tail():
    mlp = tgl.GroupedMLP(G, H, I, bias=True)
    x, probs = torch.randn(6, H), torch.rand(6)
    results = []
    for poison in (float("nan"), 3.0):
        x[5], probs[5] = poison, poison
        leaf, p = x.clone().requires_grad_(), probs.clone().requires_grad_()
        y = mlp(leaf, SPLITS, p)
        dy = torch.ones_like(y)
        dy[5] = poison
        results.append((y, *torch.autograd.grad(y, [leaf, p, *mlp.parameters()], dy)))
    for first, second in zip(*results):
        assert torch.equal(first, second)


def test_an_expert_without_rows_gets_no_gradient():
    mlp = tgl.GroupedMLP(G, H, I, bias=True)
    mlp(torch.randn(6, H), SPLITS).pow(2).sum().backward()
    for parameter in mlp.parameters():
        assert not parameter.grad[1].any()
        assert parameter.grad[0].any()


def test_state_dicts_of_both_layers():
    source = tgl.GroupedMLP(2, H, I, bias=True, state_dict_format="discrete")
    state = source.state_dict()
    assert set(state) == {f"fc{n}.{p}{g}" for n in (1, 2) for p in ("weight", "bias") for g in range(2)}
    target = tgl.GroupedMLP(2, H, I, bias=True)
    target.load_state_dict(state)
    for mine, theirs in zip(target.parameters(), source.parameters()):
        assert torch.equal(mine, theirs)


def test_meta_device_then_reset():
    mlp = tgl.GroupedMLP(G, H, I, device="meta")
    mlp.to_empty(device="cpu")
    mlp.reset_parameters()
    assert all(p.isfinite().all() and p.any() for p in mlp.parameters())


def test_offsets_instead_of_splits():
    mlp, x = tgl.GroupedMLP(G, H, I), torch.randn(6, H)
    assert torch.equal(mlp.forward_offsets(x, OFFS), mlp(x, SPLITS))


def test_unknown_activation():
    with pytest.raises(ValueError, match=r"`activation` must be one of .*, but got 'no_such'"):
        tgl.GroupedMLP(G, H, I, activation="no_such")


def test_arguments_by_either_name():
    for module in (tgl.GroupedMLP, tgl.MoE):
        ours = module(num_experts=G, hidden_size=H, intermediate_size=I, dtype=torch.bfloat16)
        theirs = module(G, H, I, params_dtype=torch.bfloat16)
        assert {n: (p.shape, p.dtype) for n, p in ours.named_parameters()} == {
            n: (p.shape, p.dtype) for n, p in theirs.named_parameters()
        }
    assert tgl.GroupedLinear(num_experts=G, in_features=H, out_features=I, dtype=torch.float64).weight.shape == (
        G,
        I,
        H,
    )
    for arguments, message in (
        ({"hidden_size": H, "ffn_hidden_size": I}, "`num_gemms` or `num_experts` must be given, but got neither"),
        ({"num_gemms": G, "num_experts": G}, "`num_gemms` or `num_experts` .* got num_gemms=3 and num_experts=3"),
        ({"num_experts": G, "intermediate_size": I}, "`hidden_size` must be given, but got None"),
        ({"num_experts": G, "hidden_size": H}, "`ffn_hidden_size` or `intermediate_size` must be given"),
    ):
        with pytest.raises(TypeError, match=message):
            tgl.MoE(**arguments)
    with pytest.raises(TypeError, match="`params_dtype` or `dtype` must be given, but got params_dtype="):
        tgl.MoE(G, H, I, params_dtype=torch.float32, dtype=torch.float32)

"""Mistakes that a user makes, and the message of each, as one table: eager, and the same sentence compiled."""

import textwrap

import pytest
import torch
from expecttest import assert_expected_inline

import tgl

G, H, I, S, K, T = 4, 32, 48, 9, 2, 12
x, index, weights, logits = torch.randn(S, H), torch.randint(G, (S, K)), torch.rand(S, K), torch.randn(S, G)
rows, splits, w = torch.randn(T, H), torch.full((G,), T // G), torch.randn(G, H, I)
offs = tgl.splits_to_offsets(splits)
layer, block, mlp = tgl.MoELayer(H, I, G, K), tgl.MoE(G, H, I), tgl.GroupedMLP(G, H, I)

CONSTRUCTORS = {
    "more experts per token than experts": lambda: tgl.MoELayer(H, I, G, 5),
    "unknown activation": lambda: tgl.MoELayer(H, I, G, K, activation="swigul"),
    "unknown router": lambda: tgl.MoELayer(H, I, G, K, router="softmaxx"),
    "unknown balance": lambda: tgl.MoELayer(H, I, G, K, balance="biass"),
    "misspelt recipe": lambda: tgl.MoELayer(H, I, G, K, recipe="mxpf8"),
    "a limit without ranks": lambda: tgl.MoELayer(H, I, G, K, max_tokens=4),
    "a width that is no integer": lambda: tgl.GroupedLinear(G, H, 1.5),
    "two words for one size": lambda: tgl.MoE(num_experts=G, num_gemms=G, hidden_size=H, ffn_hidden_size=I),
}
CALLS = {
    "a recipe in the call": lambda: mlp(rows, splits, "mxfp8"),
    "tokens of another width": lambda: layer(torch.randn(S, H + 1)),
    "tokens of another dtype": lambda: layer(x.bfloat16()),
    "an array": lambda: layer([1.0]),
    "indices as a list": lambda: block(x, [[0, 1]] * S, weights),
    "weights as indices": lambda: block(x, weights),
    "indices of other tokens": lambda: block(x, index[:-1], weights[:-1]),
    "weights of another k": lambda: block(x, index, weights[:, :1]),
    "integer weights": lambda: block(x, index, weights.long()),
    "weights beside a router's": lambda: block(x, tgl.topk_router(logits, K), weights),
    "splits of other groups": lambda: mlp(rows, splits[:-1]),
    "splits of floats": lambda: mlp(rows, splits.float()),
    "probabilities of other rows": lambda: mlp(rows, splits, torch.rand(T - 1)),
    "one probability": lambda: mlp(rows, splits, torch.rand(1)),
    "integer probabilities": lambda: mlp(rows, splits, torch.ones(T, dtype=torch.int64)),
    "more experts than logits": lambda: tgl.topk_router(logits, G + 1),
    "offsets of int64": lambda: tgl.grouped_gemm(rows, w, offs.long()),
    "a matrix too few": lambda: tgl.grouped_gemm(rows, w[:-1], offs),
    "transposed matrices": lambda: tgl.grouped_gemm(rows, w.transpose(1, 2), offs),
    "a bias of another width": lambda: tgl.grouped_gemm(rows, w, offs, torch.randn(G, I + 1)),
    "unknown kind": lambda: tgl.grouped_activation(rows, offs, kind="swigloo"),
    "an odd width": lambda: tgl.grouped_activation(rows[:, :31], offs),
    "unknown format": lambda: tgl.group_quantize(rows, offs, format="mxfp9"),
}


def message(call) -> str:
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    return f"{raised.type.__name__}: {raised.value}".partition("\n")[0]


def wrapped(text: str) -> str:
    return textwrap.fill(text, 110, initial_indent="    ", subsequent_indent="        ")


def test_messages():
    table = "\n".join(f"{name}\n{wrapped(message(call))}" for name, call in (CONSTRUCTORS | CALLS).items())
    assert_expected_inline(
        table,
        """\
more experts per token than experts
    ValueError: tgl::topk_router: `top_k` must be at most the 4 experts to choose from, but got 5
unknown activation
    ValueError: `activation` must be one of swiglu, clamped_qgeglu, geglu, geglu_tanh, reglu, silu, gelu,
        gelu_tanh, relu, srelu, but got 'swigul' (did you mean 'swiglu'?)
unknown router
    ValueError: `router` must be one of softmax, sigmoid, sqrtsoftplus, but got 'softmaxx' (did you mean
        'softmax'?)
unknown balance
    ValueError: `balance` must be one of loss, bias, none, but got 'biass' (did you mean 'bias'?)
misspelt recipe
    ValueError: `recipe` must be one of mxfp8, nvfp4, fp8_block, fp8_current, fp8_delayed, but got 'mxpf8'
        (did you mean 'mxfp8'?)
a limit without ranks
    TypeError: `max_tokens` must be left out without `process_group`, which it is for
a width that is no integer
    TypeError: `out_features` must be an integer, but got 1.5
two words for one size
    TypeError: `num_gemms` or `num_experts` must be given, but got num_gemms=4 and num_experts=4
a recipe in the call
    TypeError: `probs` must be a tensor or None, but got 'mxfp8'
tokens of another width
    ValueError: MoELayer: `x` must be [..., H] with H = 32, but got shape (9, 33)
tokens of another dtype
    TypeError: `x` must be torch.float32 like the layer's weight, but got torch.bfloat16
an array
    TypeError: MoELayer: `x` must be a tensor, but got a list
indices as a list
    TypeError: tgl::MoE: `routing` must be a tgl.Routing, but got list
weights as indices
    TypeError: tgl::route: `top_k_index` must be an integer tensor, but got torch.float32
indices of other tokens
    ValueError: tgl::MoE: `x` must be [S, H] with S = 8 like `routing`, but got shape (9, 32)
weights of another k
    ValueError: tgl::MoE: `weights` must be [S, k] with k = 2 like `routing`, but got shape (9, 1)
integer weights
    TypeError: tgl::moe: `weights` must be torch.float32, but got torch.int64
weights beside a router's
    TypeError: `weights` must be None beside a RouterOutput, which has them, but got a Tensor
splits of other groups
    ValueError: `m_splits` must be of shape [num_gemms] = (4,), but got (3,)
splits of floats
    TypeError: tgl::splits_to_offsets: `m_splits` must be an integer tensor, but got torch.float32
probabilities of other rows
    ValueError: tgl::grouped_mlp: `probs` must be of shape [T] = (12,), but got shape (11,)
one probability
    ValueError: tgl::grouped_mlp: `probs` must be of shape [T] = (12,), but got shape (1,)
integer probabilities
    TypeError: tgl::grouped_mlp: `probs` must be torch.float32, but got torch.int64
more experts than logits
    ValueError: tgl::topk_router: `top_k` must be at most the 4 experts to choose from, but got 5
offsets of int64
    TypeError: tgl::grouped_gemm: `offs` must be int32 (cumulative group ends), but got torch.int64
a matrix too few
    ValueError: tgl::grouped_gemm: `offs` must be of length 3 (one end per group), but got shape (4,)
transposed matrices
    ValueError: tgl::grouped_gemm: `b` must be [G, K, N] with K = 32 like `a`, but got shape (4, 48, 32)
a bias of another width
    ValueError: tgl::grouped_gemm: `bias` must be of shape [G, N] = (4, 48), but got shape (4, 49)
unknown kind
    ValueError: tgl::grouped_activation: `kind` must be one of swiglu, clamped_qgeglu, geglu, geglu_tanh,
        reglu, silu, gelu, gelu_tanh, relu, srelu, but got 'swigloo' (did you mean 'swiglu'?)
an odd width
    ValueError: tgl::grouped_activation: `x` must be [T, 2 I] with an even number of columns, but got shape
        (12, 31)
unknown format
    ValueError: tgl::group_quantize: `format` must be one of mxfp8, nvfp4, mxfp4, fp8_tensor, fp8_block, but
        got 'mxfp9' (did you mean 'mxfp8'?)""",
    )


def sentence(text: str) -> str:
    """Return a message from its first argument on, without the name of the op or the layer that found the mistake."""
    return "`" + text.partition("`")[2]


@pytest.mark.parametrize("name", CALLS)
def test_compiled_messages(name, fresh_compiler):
    expected = sentence(message(CALLS[name]))
    with pytest.raises(torch._dynamo.exc.TorchDynamoException) as raised:
        torch.compile(CALLS[name], backend="eager", fullgraph=True)()
    assert expected in str(raised.value)

"""Signatures of the ops of ``torch.ops.tgl``, and their sample inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..meta.activations import TABLE
from .quantized import QUANTIZED_SIGNATURES
from .samples import DIMENSIONS, SampleInput, Signature, choices, named_rows, places
from .scaled_samples import ROW_SCALED, QuantizedSignature, packed_signatures

_ACTIVATION: dict[str, Any] = {"wide": ("probs",), "exact": False}
_BACKWARD = "dy[T,{y}], x[T,{x}], offs[G]:ends, probs[T]? -> dx[T,{x}], dprobs[T]"
_FUSED = "a[T,K], b[G,K,{0}], offs[G]:ends, bias[G,{0}]?, probs[T]? -> y[T,I], h[T,{0}]"
_DACTIVATION = "dy[T,K], b[G,K,I], h[T,{h}], offs[G]:ends, probs[T]? -> dh[T,{h}], dprobs[T]"
# With the default activation: an index belongs to the product.
_FUSED_INDEXED = "a[S,K], b[G,K,2I], offs[G]:ends, bias[G,2I]?, probs[T]?, rows[T]:derived -> y[T,I], h[T,2I]"
_DACTIVATION_INDEXED = "dy[S,K], b[G,K,I], h[T,2I], offs[G]:ends, probs[T]?, rows[T]:derived -> dh[T,2I], dprobs[T]"
_GATED: dict[str, Sequence[Any]] = {
    "kind": tuple(a.name for a in TABLE.values() if a.gated),
    "interleaved": (False, True),
}
_PLAIN: dict[str, Sequence[Any]] = {"kind": tuple(a.name for a in TABLE.values() if not a.gated)}
# Integers stay integers, through both products.
_EXACT: dict[str, Sequence[Any]] = {"kind": tuple(a.name for a in TABLE.values() if a.exact and not a.gated)}
_MLP_WIDE = ("probs", "bias1", "bias2")
_MLP_FORWARD = (
    "x[T,K], w1[G,K,I], w2[G,I,N], offs[G]:ends, probs[T]?, bias1[G,I]?, bias2[G,N]? -> y[T,N], h[T,I], act[T,I]"
)
_MLP_BACKWARD = (
    "dy[T,N], x[T,K], w1[G,K,I], w2[G,I,N], offs[G]:ends, h[T,I], act[T,I]?, probs[T], bias2[G,N]? -> "
    "dx[T,K], dw1[G,K,I], dw2[G,I,N], dprobs[T], dbias1[G,I], dbias2[G,N]"
)
_ALL: dict[str, Sequence[Any]] = {"output_mask": ((True,) * 6,)}
_MOE_WIDE = ("weights", "bias1", "bias2")
_MOE_PLACES = "source[T]:derived, position[2T]:derived, token[T]:derived, offs[G]:ends"
_MOE_FORWARD = f"x[T,K], w1[G,K,I], w2[G,I,N], {_MOE_PLACES}, weights[T,2], bias1[G,I]?, bias2[G,N]? -> y[T,N], h[T,I]"
_MOE_HIDDEN = (
    f"dy[T,N], w2[G,I,N], {_MOE_PLACES}, h[T,I], weights[T,2], bias2[G,N]? -> "
    "dh[T,I], dw2[G,I,N], dweights[T,2], dbias2[G,N]"
)
_MOE_INPUT = (
    "dh[T,I], x[T,K], w1[G,K,I], position[2T]:derived, token[T]:derived, offs[G]:ends -> "
    "dx[T,K], dw1[G,K,I], dbias1[G,I]"
)
_TWO: dict[str, Sequence[Any]] = {"kind": ("srelu",), "top_k": (2,)}
_EXPECTED: dict[str, Sequence[Any]] = {"expected_rows": (None, 3)}
_SCALED = "a[T,K], a_scale[S], b[G,K,N], b_scale[S], offs[G]:ends, a_amax[G], b_amax[G], bias[G,N]?, bias_scale[T]?"
_PACKED = "a[T,{0}], b[]:derived, b_scale[]:derived, offs[G]:ends, b_amax[G]{2}{3} -> y[T,{1}]"
_ROW_SCALED = "a[]:derived, a_scale[]:derived, b[]:derived, b_scale[]:derived, offs[G]:ends -> {0}"
_SCALED_WGRAD = "a[T,M], a_scale[S], b[T,N], b_scale[S], offs[G]:ends, a_amax[G], b_amax[G]"
_LOW_RANK = "a[T,K], b[G,K,N], low[T,R], up[G,R,N], offs[G]:ends, bias[G,N]?, bias_scale[T]?"
_FUSED_LOW_RANK = "a[T,K], b[G,K,{0}], low[T,R], up[G,R,{0}], offs[G]:ends, bias[G,{0}]?, probs[T]? -> y[T,I], h[T,{0}]"
_RANK: dict[str, Any] = {"dimensions": {**DIMENSIONS, "R": 4}}
_INDEXED: dict[str, Any] = {"derive": named_rows, "dimensions": {**DIMENSIONS, "S": 6}}

SIGNATURES: dict[str, tuple[Signature, ...]] = {
    "splits_to_offsets": (Signature("m_splits[G]:sizes -> offs[G]", differentiable=False),),
    "route": (
        Signature(
            "top_k_index[S,2]:derived -> source[R], position[R], token[R], offs[E]",
            options={"num_experts": (4, 0, 300)},
            derive=choices,
            differentiable=False,
            dtypes=(torch.int64,),
        ),
    ),
    "grouped_gemm": (
        Signature(
            "a[T,K], b[G,K,N], offs[G]:ends, bias[G,N]?, bias_scale[T]? -> y[T,N]",
            requires={"bias_scale": "bias"},
            wide=("bias", "bias_scale"),
        ),
        Signature(
            "a[S,K], b[G,K,N], offs[G]:ends, bias[G,N]?, bias_scale[T]?, rows[T]:derived -> y[T,N]",
            requires={"bias_scale": "bias"},
            wide=("bias", "bias_scale"),
            **_INDEXED,
        ),
    ),
    "grouped_gemm.out": (
        Signature(
            "a[T,K], b[G,K,N], offs[G]:ends, bias[G,N]?, bias_scale[T]?, out[T,N]! ->",
            requires={"bias_scale": "bias"},
            wide=("bias", "bias_scale", "out"),
        ),
        Signature("a[S,K], b[G,K,N], offs[G]:ends, rows[T]:derived, out[T,N]! ->", wide=("out",), **_INDEXED),
    ),
    "grouped_gemm_low_rank": (
        Signature(f"{_LOW_RANK} -> y[T,N]", requires={"bias_scale": "bias"}, wide=("bias", "bias_scale"), **_RANK),
    ),
    "grouped_gemm_low_rank.out": (
        Signature(
            f"{_LOW_RANK}, out[T,N]! ->",
            requires={"bias_scale": "bias"},
            wide=("bias", "bias_scale", "out"),
            **_RANK,
        ),
    ),
    "grouped_gemm_activation": (
        Signature(_FUSED.format("2I"), options=_GATED, exact=False, wide=("bias", "probs")),
        Signature(_FUSED.format("I"), options=_PLAIN, exact=False, wide=("bias", "probs")),
        Signature(_FUSED_INDEXED, exact=False, wide=("bias", "probs"), **_INDEXED),
    ),
    "grouped_gemm_low_rank_activation": (
        Signature(_FUSED_LOW_RANK.format("2I"), options=_GATED, exact=False, wide=("bias", "probs"), **_RANK),
        Signature(_FUSED_LOW_RANK.format("I"), options=_PLAIN, exact=False, wide=("bias", "probs"), **_RANK),
    ),
    "grouped_gemm_wgrad": (
        Signature("a[T,M], b[T,N], offs[G]:ends -> dw[G,M,N]"),
        Signature("a[S,M], b[T,N], offs[G]:ends, a_rows[T]:derived -> dw[G,M,N]", **_INDEXED),
        Signature("a[T,M], b[S,N], offs[G]:ends, b_rows[T]:derived -> dw[G,M,N]", **_INDEXED),
        Signature("a[S,M], b[S,N], offs[G]:ends, a_rows[T]:derived, b_rows[T]:derived -> dw[G,M,N]", **_INDEXED),
    ),
    "grouped_gemm_wgrad.out": (
        Signature("a[T,M], b[T,N], offs[G]:ends, out[G,M,N]! ->", wide=("out",)),
        Signature("a[S,M], b[T,N], offs[G]:ends, a_rows[T]:derived, out[G,M,N]! ->", wide=("out",), **_INDEXED),
    ),
    "grouped_gemm_wgrad_accumulate_": (
        Signature("a[T,M], b[T,N], offs[G]:ends, main_grad[G,M,N]! ->", wide=("main_grad",), accumulates=True),
        Signature(
            "a[T,M], b[S,N], offs[G]:ends, main_grad[G,M,N]!, b_rows[T]:derived ->",
            wide=("main_grad",),
            accumulates=True,
            **_INDEXED,
        ),
    ),
    "grouped_dbias": (Signature("dy[T,N], offs[G]:ends -> dbias[G,N]"),),
    "grouped_dbias_dscales": (
        Signature(
            "dy[T,N], bias[G,N], bias_scale[T], offs[G]:ends -> dbias[G,N], dscales[T]", wide=("bias", "bias_scale")
        ),
    ),
    "grouped_activation": (
        Signature("x[T,2I], offs[G]:ends, probs[T]? -> y[T,I]", options=_GATED, **_ACTIVATION),
        Signature("x[T,I], offs[G]:ends, probs[T]? -> y[T,I]", options=_PLAIN, **_ACTIVATION),
    ),
    "grouped_activation_backward": (
        Signature(_BACKWARD.format(x="2I", y="I"), options=_GATED, **_ACTIVATION),
        Signature(_BACKWARD.format(x="I", y="I"), options=_PLAIN, **_ACTIVATION),
    ),
    "grouped_gemm_dactivation": (
        Signature(_DACTIVATION.format(h="2I"), options=_GATED, **_ACTIVATION),
        Signature(_DACTIVATION.format(h="I"), options=_PLAIN, **_ACTIVATION),
        Signature(_DACTIVATION_INDEXED, **_ACTIVATION, **_INDEXED),
    ),
    "batched_syrk": (
        Signature(
            "x[S,M,K], c[S,M,M]? -> s[S,M,M]",
            options={"alpha": (1.0, 2.0)},
            dimensions={**DIMENSIONS, "S": 3},
            differentiable=False,
        ),
    ),
    "grouped_mlp": (Signature(_MLP_FORWARD, options=_EXACT, wide=_MLP_WIDE),),
    "grouped_mlp_backward": (
        Signature(_MLP_BACKWARD, options={**_EXACT, **_ALL}, differentiable=False, wide=_MLP_WIDE),
    ),
    "moe": (Signature(_MOE_FORWARD, options={**_TWO, **_EXPECTED}, wide=_MOE_WIDE, derive=places),),
    "moe_backward_hidden": (
        Signature(
            _MOE_HIDDEN,
            options={**_TWO, **_EXPECTED, "output_mask": ((True,) * 4,)},
            differentiable=False,
            wide=_MOE_WIDE,
            derive=places,
        ),
    ),
    "moe_backward_input": (
        Signature(
            _MOE_INPUT,
            options={"top_k": (2,), **_EXPECTED, "output_mask": ((True,) * 3,)},
            differentiable=False,
            derive=places,
        ),
    ),
    "grouped_gemm_row_scaled": (Signature(_ROW_SCALED.format("y[T,N]"), **ROW_SCALED),),
    "grouped_gemm_row_scaled_wgrad": (Signature(_ROW_SCALED.format("dw[G,M,N]"), **ROW_SCALED),),
    "grouped_gemm_packed": packed_signatures(_PACKED, ", bias[G,{0}]?, bias_scale[T]?"),
    "grouped_gemm_scaled": (QuantizedSignature(f"{_SCALED} -> y[T,N]", requires={"bias_scale": "bias"}),),
    "grouped_gemm_scaled.out": (QuantizedSignature(f"{_SCALED}, out[T,N]! ->", requires={"bias_scale": "bias"}),),
    "grouped_gemm_scaled_wgrad": (QuantizedSignature(f"{_SCALED_WGRAD} -> dw[G,M,N]"),),
    "grouped_gemm_scaled_wgrad.out": (QuantizedSignature(f"{_SCALED_WGRAD}, out[G,M,N]! ->"),),
    "grouped_gemm_scaled_wgrad_accumulate_": (
        QuantizedSignature(f"{_SCALED_WGRAD.replace('ends', 'ends, main_grad[G,M,N]!')} ->", accumulates=True),
    ),
    **QUANTIZED_SIGNATURES,
}
"""Signatures by op name (without namespace, with the overload unless it is the default one)."""


def sample_inputs(op: Any, **axes: Any) -> Iterator[SampleInput]:
    """Sample inputs of one of our ops; ``axes`` as for ``Signature.samples``.

    Args:
        op: an ``OpOverload`` of ``torch.ops.tgl``, or its name in ``SIGNATURES``.

    Raises:
        ValueError: an op without a signature; make a ``Signature`` for it and call its ``samples``.
    """
    name = op if isinstance(op, str) else op.name()
    name = name.removeprefix("tgl::")
    if name not in SIGNATURES:
        raise ValueError(f"`op` must be one of {', '.join(SIGNATURES)}, but got {name!r}")
    for signature in SIGNATURES[name]:
        yield from signature.samples(**axes)

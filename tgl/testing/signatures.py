"""The table of sample calls, which states for every op how its arguments are made.

``OPS`` has an entry for each op of ``torch.ops.tgl`` and of the registry, overloads included. ``check_op`` and tests
sample its signatures along every axis (``sample_inputs``). Reports, tables of implementations and tests of kernels take
one call of an op from it, in the sizes, dtype and format that they need (``sample_call``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..meta.activations import TABLE
from ..meta.formats import FORMATS
from .derived_arguments import aten_lists, aten_operands, converted_scale, equal_scores, stash
from .quantized import QUANTIZED_SIGNATURES
from .samples import DIMENSIONS, GroupSizes, SampleInput, Signature, choices, named_rows, places
from .scaled_samples import ROW_SCALED, QuantizedSignature, packed_signatures

ROW_WISE = "FP8 by rows"
"""The variant of ops on FP8 operands with a scale per row."""

USUAL = GroupSizes("usual", (128, 128), 256)
WIDTHS = {"K": 256, "M": 256, "N": 256, "I": 256, "R": 16, "E": 8}
"""Sizes that every kernel takes."""


class OpSamples:
    """The signatures of an op, from which its arguments are made.

    Attributes:
        signatures: a way to call the op each; the first is the usual one.
        contracts: whether ``check_op`` holds the op to the contracts of grouped ops; ``SIGNATURES`` has those.
        needs: what a call needs besides a process of its own; such an op has no signatures.
        variants: names of the formats that its operands can be in, or what they are without one: a dtype, ``ROW_WISE``.
    """

    def __init__(
        self, *signatures: Signature, contracts: bool = True, needs: str = "", variant: str = "bfloat16"
    ) -> None:
        self.signatures = signatures
        self.contracts = contracts
        self.needs = needs
        formats = {name for s in signatures for name in s.options.get("format", ())}
        if any(isinstance(s, QuantizedSignature) for s in signatures):
            formats = set(FORMATS)
        self.variants = tuple(filter(formats.__contains__, FORMATS)) or (variant,)


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
_ELSEWHERE: dict[str, Any] = {"contracts": False}
_ROUTER: dict[str, Any] = {"derive": equal_scores, "dimensions": {"E": 8}, "differentiable": False}
_PAIRS = "token[T]:derived, position[2T]:derived"
_PERMUTATION: dict[str, Any] = {"options": {"top_k": (2,)}, "wide": ("weights",), "derive": places}
_FORMATS: dict[str, Sequence[Any]] = {"format": tuple(FORMATS), "scale_layout": ("compact", "blocked")}
_SCALED_FUSED = "a[T,K], a_scale[S], b[G,K,N], b_scale[S], offs[G]:ends, a_amax[G], b_amax[G], bias[G,N]?, probs[T]?"
_CONVERSION: dict[str, Any] = {
    "options": {"format": tuple(f.name for f in FORMATS.values() if "blocked" in f.layouts), "layout": ("blocked",)},
    "differentiable": False,
    "derive": converted_scale,
}
_LISTS = ", ".join(f"{kind}_{operand}[]:derived" for operand in "ab" for kind in ("scale", "recipe", "swizzle"))
_ATENS: dict[str, Any] = {**ROW_SCALED, "options": {"out_dtype": (torch.bfloat16,)}}
_ALLOCATION: dict[str, Sequence[Any]] = {
    "num_groups": (3,),
    "shape": ([5, 7],),
    "dtype": (torch.bfloat16,),
    "device": (torch.device("cpu"),),
}


OPS: dict[str, OpSamples] = {
    "topk_router": OpSamples(
        Signature("logits[T,E]:derived -> weights[T,2]", options={"top_k": (2,)}, **_ROUTER), **_ELSEWHERE
    ),
    "topk_router_backward": OpSamples(
        Signature(
            "grad_weights[T,2]:derived, logits[T,E]:derived, top_k_index[T,2]:derived -> dlogits[T,E]", **_ROUTER
        ),
        **_ELSEWHERE,
    ),
    "route": OpSamples(
        Signature(
            "top_k_index[S,2]:derived -> source[R], position[R], token[R], offs[E]",
            options={"num_experts": (4, 0, 300)},
            derive=choices,
            differentiable=False,
            dtypes=(torch.int64,),
        ),
        variant="int32",
    ),
    "splits_to_offsets": OpSamples(Signature("m_splits[G]:sizes -> offs[G]", differentiable=False), variant="int32"),
    "dispatch": OpSamples(Signature(f"x[T,K], {_PAIRS}, weights[T,2]? -> y[T,K]", **_PERMUTATION), **_ELSEWHERE),
    "combine": OpSamples(Signature(f"y[T,K], {_PAIRS}, weights[T,2]? -> x[T,K]", **_PERMUTATION), **_ELSEWHERE),
    "combine_backward": OpSamples(
        Signature(f"grad[T,K], y[T,K], {_PAIRS}, weights[T,2] -> dy[T,K], dweights[T,2]", **_PERMUTATION), **_ELSEWHERE
    ),
    "grouped_gemm": OpSamples(
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
    "grouped_gemm.out": OpSamples(
        Signature(
            "a[T,K], b[G,K,N], offs[G]:ends, bias[G,N]?, bias_scale[T]?, out[T,N]! ->",
            requires={"bias_scale": "bias"},
            wide=("bias", "bias_scale", "out"),
        ),
        Signature("a[S,K], b[G,K,N], offs[G]:ends, rows[T]:derived, out[T,N]! ->", wide=("out",), **_INDEXED),
    ),
    "grouped_gemm_low_rank": OpSamples(
        Signature(f"{_LOW_RANK} -> y[T,N]", requires={"bias_scale": "bias"}, wide=("bias", "bias_scale"), **_RANK),
    ),
    "grouped_gemm_low_rank.out": OpSamples(
        Signature(
            f"{_LOW_RANK}, out[T,N]! ->",
            requires={"bias_scale": "bias"},
            wide=("bias", "bias_scale", "out"),
            **_RANK,
        ),
    ),
    "grouped_gemm_low_rank_activation": OpSamples(
        Signature(_FUSED_LOW_RANK.format("2I"), options=_GATED, exact=False, wide=("bias", "probs"), **_RANK),
        Signature(_FUSED_LOW_RANK.format("I"), options=_PLAIN, exact=False, wide=("bias", "probs"), **_RANK),
    ),
    "grouped_gemm_activation": OpSamples(
        Signature(_FUSED.format("2I"), options=_GATED, exact=False, wide=("bias", "probs")),
        Signature(_FUSED.format("I"), options=_PLAIN, exact=False, wide=("bias", "probs")),
        Signature(_FUSED_INDEXED, exact=False, wide=("bias", "probs"), **_INDEXED),
    ),
    "grouped_gemm_dactivation": OpSamples(
        Signature(_DACTIVATION.format(h="2I"), options=_GATED, **_ACTIVATION),
        Signature(_DACTIVATION.format(h="I"), options=_PLAIN, **_ACTIVATION),
        Signature(_DACTIVATION_INDEXED, **_ACTIVATION, **_INDEXED),
    ),
    "grouped_gemm_wgrad": OpSamples(
        Signature("a[T,M], b[T,N], offs[G]:ends -> dw[G,M,N]"),
        Signature("a[S,M], b[T,N], offs[G]:ends, a_rows[T]:derived -> dw[G,M,N]", **_INDEXED),
        Signature("a[T,M], b[S,N], offs[G]:ends, b_rows[T]:derived -> dw[G,M,N]", **_INDEXED),
        Signature("a[S,M], b[S,N], offs[G]:ends, a_rows[T]:derived, b_rows[T]:derived -> dw[G,M,N]", **_INDEXED),
    ),
    "grouped_gemm_wgrad.out": OpSamples(
        Signature("a[T,M], b[T,N], offs[G]:ends, out[G,M,N]! ->", wide=("out",)),
        Signature("a[S,M], b[T,N], offs[G]:ends, a_rows[T]:derived, out[G,M,N]! ->", wide=("out",), **_INDEXED),
    ),
    "grouped_gemm_wgrad_accumulate_": OpSamples(
        Signature("a[T,M], b[T,N], offs[G]:ends, main_grad[G,M,N]! ->", wide=("main_grad",), accumulates=True),
        Signature(
            "a[T,M], b[S,N], offs[G]:ends, main_grad[G,M,N]!, b_rows[T]:derived ->",
            wide=("main_grad",),
            accumulates=True,
            **_INDEXED,
        ),
    ),
    "grouped_gemm_wgrad_accumulate_.requested": OpSamples(needs="a compiled backward", **_ELSEWHERE),
    "grouped_activation": OpSamples(
        Signature("x[T,2I], offs[G]:ends, probs[T]? -> y[T,I]", options=_GATED, **_ACTIVATION),
        Signature("x[T,I], offs[G]:ends, probs[T]? -> y[T,I]", options=_PLAIN, **_ACTIVATION),
    ),
    "grouped_activation_backward": OpSamples(
        Signature(_BACKWARD.format(x="2I", y="I"), options=_GATED, **_ACTIVATION),
        Signature(_BACKWARD.format(x="I", y="I"), options=_PLAIN, **_ACTIVATION),
    ),
    "grouped_dbias": OpSamples(
        Signature("dy[T,N], offs[G]:ends -> dbias[G,N]"),
    ),
    "grouped_dbias_dscales": OpSamples(
        Signature(
            "dy[T,N], bias[G,N], bias_scale[T], offs[G]:ends -> dbias[G,N], dscales[T]", wide=("bias", "bias_scale")
        ),
    ),
    "batched_syrk": OpSamples(
        Signature(
            "x[S,M,K], c[S,M,M]? -> s[S,M,M]",
            options={"alpha": (1.0, 2.0)},
            dimensions={**DIMENSIONS, "S": 3},
            differentiable=False,
        ),
    ),
    "grouped_mlp": OpSamples(
        Signature(_MLP_FORWARD, options=_EXACT, wide=_MLP_WIDE),
    ),
    "grouped_mlp_backward": OpSamples(
        Signature(_MLP_BACKWARD, options={**_EXACT, **_ALL}, differentiable=False, wide=_MLP_WIDE),
    ),
    "moe": OpSamples(
        Signature(_MOE_FORWARD, options={**_TWO, **_EXPECTED}, wide=_MOE_WIDE, derive=places),
    ),
    "moe_backward_hidden": OpSamples(
        Signature(
            _MOE_HIDDEN,
            options={**_TWO, **_EXPECTED, "output_mask": ((True,) * 4,)},
            differentiable=False,
            wide=_MOE_WIDE,
            derive=places,
        ),
    ),
    "moe_backward_input": OpSamples(
        Signature(
            _MOE_INPUT,
            options={"top_k": (2,), **_EXPECTED, "output_mask": ((True,) * 3,)},
            differentiable=False,
            derive=places,
        ),
    ),
    "grouped_gemm_row_scaled": OpSamples(Signature(_ROW_SCALED.format("y[T,N]"), **ROW_SCALED), variant=ROW_WISE),
    "grouped_gemm_row_scaled_wgrad": OpSamples(
        Signature(_ROW_SCALED.format("dw[G,M,N]"), **ROW_SCALED), variant=ROW_WISE
    ),
    "group_quantize": OpSamples(*QUANTIZED_SIGNATURES["group_quantize"]),
    "group_quantize.out": OpSamples(*QUANTIZED_SIGNATURES["group_quantize.out"]),
    "group_dequantize": OpSamples(*QUANTIZED_SIGNATURES["group_dequantize"]),
    "group_requantize": OpSamples(*QUANTIZED_SIGNATURES["group_requantize"]),
    "grouped_activation_quantize": OpSamples(
        Signature(
            "x[T,2I], offs[G]:ends, probs[T]? -> data[T,I]", options=_FORMATS, wide=("probs",), differentiable=False
        ),
        **_ELSEWHERE,
    ),
    "grouped_gemm_packed": OpSamples(*packed_signatures(_PACKED, ", bias[G,{0}]?, bias_scale[T]?")),
    "grouped_gemm_scaled": OpSamples(
        QuantizedSignature(f"{_SCALED} -> y[T,N]", requires={"bias_scale": "bias"}),
    ),
    "grouped_gemm_scaled.out": OpSamples(
        QuantizedSignature(f"{_SCALED}, out[T,N]! ->", requires={"bias_scale": "bias"}),
    ),
    "grouped_gemm_scaled_activation_quantize": OpSamples(
        QuantizedSignature(f"{_SCALED_FUSED} -> h[T,N]"), **_ELSEWHERE
    ),
    "grouped_gemm_scaled_wgrad": OpSamples(
        QuantizedSignature(f"{_SCALED_WGRAD} -> dw[G,M,N]"),
    ),
    "grouped_gemm_scaled_wgrad.out": OpSamples(
        QuantizedSignature(f"{_SCALED_WGRAD}, out[G,M,N]! ->"),
    ),
    "grouped_gemm_scaled_wgrad_accumulate_": OpSamples(
        QuantizedSignature(f"{_SCALED_WGRAD.replace('ends', 'ends, main_grad[G,M,N]!')} ->", accumulates=True),
    ),
    "grouped_gemm_scaled_wgrad_accumulate_.requested": OpSamples(needs="a compiled backward", **_ELSEWHERE),
    "fp8_scale_from_history": OpSamples(*QUANTIZED_SIGNATURES["fp8_scale_from_history"], variant="float32"),
    "fp8_update_history_": OpSamples(*QUANTIZED_SIGNATURES["fp8_update_history_"], variant="float32"),
    "scale_to_layout": OpSamples(
        Signature("scale[T,S]:derived, offs[G]:ends, shape[]:derived -> converted[S]", **_CONVERSION), **_ELSEWHERE
    ),
    "scale_from_layout": OpSamples(
        Signature("scale[S]:derived, offs[G]:ends, shape[]:derived -> converted[T,S]", **_CONVERSION), **_ELSEWHERE
    ),
    "aten::_grouped_mm": OpSamples(Signature("self[T,K], mat2[G,K,N], offs[G]:ends -> y[T,N]"), **_ELSEWHERE),
    "aten::_scaled_grouped_mm": OpSamples(
        Signature(
            "self[]:derived, mat2[]:derived, scale_a[]:derived, scale_b[]:derived, offs[G]:ends -> y[T,N]",
            **{**_ATENS, "derive": aten_operands},
        ),
        variant=ROW_WISE,
        **_ELSEWHERE,
    ),
    "aten::_scaled_grouped_mm_v2": OpSamples(
        Signature(
            f"self[]:derived, mat2[]:derived, {_LISTS}, offs[G]:ends -> y[T,N]",
            **{**_ATENS, "derive": aten_lists},
        ),
        variant=ROW_WISE,
        **_ELSEWHERE,
    ),
    "ep_route": OpSamples(needs="a process group", **_ELSEWHERE),
    "ep_dispatch": OpSamples(needs="a process group", **_ELSEWHERE),
    "ep_combine": OpSamples(needs="a process group", **_ELSEWHERE),
    "allocate_wgrad": OpSamples(Signature("-> out[G,M,N]", options=_ALLOCATION), **_ELSEWHERE),
    "wgrad_stash_": OpSamples(
        Signature("sources[]:derived, state[]:derived!, buffers[]:derived! ->", derive=stash), **_ELSEWHERE
    ),
    "wgrad_stash_.requested": OpSamples(needs="a compiled backward", **_ELSEWHERE),
    "same_offs": OpSamples(Signature("offs[G]:ends, quantized_with[G]:ends -> same[G]"), **_ELSEWHERE),
    "after": OpSamples(Signature("x[T,K], dependency[G]:ends -> y[T,K]"), **_ELSEWHERE),
    "offload": OpSamples(Signature("x[T,K] -> y[T,K]"), **_ELSEWHERE),
    "reload": OpSamples(Signature("x[T,K] -> y[T,K]", options={"device": (torch.device("cpu"),)}), **_ELSEWHERE),
}
"""The samples by op, in the order of a layer: its name without the namespace ``tgl``, with the overload if any."""

SIGNATURES: dict[str, tuple[Signature, ...]] = {
    name: entry.signatures for name, entry in OPS.items() if entry.contracts
}
"""Signatures by op name (without namespace, with the overload unless it is the default one)."""


def overload(name: str) -> torch._ops.OpOverload:
    """Return the op of an entry of ``OPS``."""
    library, _, own = name.rpartition("::")
    packet, _, kind = own.partition(".")
    found: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, library or "tgl"), packet), kind or "default")
    return found


def options_of(variant: str) -> dict[str, Any]:
    """Return the options of ``sample_call`` for an entry of ``OpSamples.variants``."""
    return {"format": variant} if variant in FORMATS else {}


def sample_call(
    name: str,
    *,
    dtype: torch.dtype | None = None,
    routing: GroupSizes = USUAL,
    sizes: Mapping[str, int] = WIDTHS,
    given: Sequence[str] = (),
    wide: bool = False,
    **options: Any,
) -> tuple[tuple, dict[str, Any]]:
    """Make the arguments of one call of an op, on the CPU: by the first of its signatures that has what is asked for.

    Tensors are row-major, and their tail is zero. Scales are in the layout of the tensor cores if the format has it.

    Args:
        name: as in ``OPS``.
        dtype: of the operands, or of the results of quantised ones; default: bfloat16, or the op's own.
        routing: the groups.
        sizes: of the letters of the signature.
        given: optional arguments to make.
        wide: whether the arguments in ``Signature.wide`` are float32.
        options: options of the call; the first value of the signature for all others.

    Raises:
        ValueError: no entry, or no signature for these options and arguments.
    """
    if name not in OPS:
        raise ValueError(f"`name` must be one of {', '.join(OPS)}, but got {name!r}")
    op = overload(name)
    if "format" in options and any(a.name == "scale_layout" for a in op._schema.arguments):
        blocked = "blocked" in FORMATS[options["format"]].layouts
        options.setdefault("scale_layout", "blocked" if blocked else "compact")
    if dtype is None:
        dtype = getattr(torch, OPS[name].variants[0], torch.bfloat16)
    for signature in OPS[name].signatures:
        if any(value not in signature.options.get(option, (value,)) for option, value in options.items()):
            continue
        sized = {letter: sizes.get(letter, size) for letter, size in signature.dimensions.items()}
        wanted = tuple(given), "row", wide and bool(signature.wide)
        for sample in replace(signature, dimensions=sized).samples(routings=(routing,), dtypes=[dtype], full=True):
            fits = all(sample.options.get(option, value) == value for option, value in options.items())
            if fits and (sample.given, sample.layout, sample.widened) == wanted:
                chosen = replace(sample, options={**sample.options, **options})
                return chosen.call(op, chosen.tensors(tail=0.0))
    raise ValueError(f"no signature of {name} has {', '.join([*given, *(f'{k}={v!r}' for k, v in options.items())])}")


def elsewhere(call: tuple[tuple, dict[str, Any]], device: torch.device) -> tuple[tuple, dict[str, Any]]:
    """Return a call with uninitialised tensors on ``device`` for its own, fake ones in a ``FakeTensorMode``."""

    def like(t: Tensor) -> Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)

    moved: tuple[tuple, dict[str, Any]] = tree_map_only(Tensor, like, call)
    return moved


def sample_inputs(op: Any, **axes: Any) -> Iterator[SampleInput]:
    """Yield sample inputs of one of our ops; ``axes`` as for ``Signature.samples``.

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

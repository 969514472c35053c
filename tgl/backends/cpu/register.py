"""Register the implementations that run on a CPU only."""

from __future__ import annotations

from ...meta.memory import copies_to_lines, copies_unless, has_rows
from .. import Implementation, add
from . import activation, dactivation, gemm, low_rank_gemm, packed_gemm, permutation, quantize, routing, scaled_gemm

_GEMM = "small bfloat16 groups in batches; the loop of torch.nn.functional.grouped_mm where that takes the operands"
_DECODED = "float32 products of decoded groups"
_PRODUCT = copies_to_lines("a", "b")

add(
    Implementation(
        "grouped_gemm",
        "loop of mm",
        "cpu",
        gemm.grouped_gemm,
        produce=gemm.produce_grouped_gemm,
        copies=_PRODUCT,
        note=_GEMM,
        slots=True,
        rows=True,
        begins=True,
    )
)
add(
    Implementation(
        "grouped_gemm_wgrad",
        "loop of mm",
        "cpu",
        gemm.grouped_gemm_wgrad,
        produce=gemm.produce_grouped_gemm_wgrad,
        copies=_PRODUCT,
        note=_GEMM,
        slots=True,
        rows=True,
    )
)
add(
    Implementation(
        "grouped_gemm_wgrad_accumulate_",
        "loop of mm",
        "cpu",
        gemm.grouped_gemm_wgrad_accumulate,
        copies=_PRODUCT,
        slots=True,
        rows=True,
    )
)
_low_rank = copies_to_lines("a", "b", "low", "up")
add(Implementation("grouped_gemm_low_rank", "loop of mm", "cpu", low_rank_gemm.gemm, copies=_low_rank))
add(
    Implementation(
        "grouped_gemm_packed",
        "decode and mm",
        "cpu",
        packed_gemm.gemm,
        copies=copies_to_lines("a"),
        note="one decoded matrix at a time",
    )
)
add(Implementation("grouped_gemm_scaled", "decode and mm", "cpu", scaled_gemm.gemm, note=_DECODED))
for _op, _slots in (("grouped_gemm_scaled_wgrad", False), ("grouped_gemm_scaled_wgrad_accumulate_", True)):
    add(Implementation(_op, "decode and mm", "cpu", scaled_gemm.wgrad, note=_DECODED, slots=_slots))
add(Implementation("route", "stable sort", "cpu", None, produce=routing.produce_route))
add(Implementation("group_quantize", "steps of aten", "cpu", quantize.group_quantize, slots=True, rows=True))
add(Implementation("group_dequantize", "steps of aten", "cpu", quantize.group_dequantize))
add(Implementation("grouped_activation", "steps of aten", "cpu", activation.forward, copies=activation.forward_copies))
add(
    Implementation(
        "grouped_activation_backward", "steps of aten", "cpu", activation.backward, copies=activation.backward_copies
    )
)
add(
    Implementation(
        "grouped_gemm_dactivation",
        "grouped GEMM, then the activation's backward",
        "cpu",
        None,
        produce=dactivation.produce,
        copies=dactivation.copies,
        note="one pass over the product",
        rows=True,
    )
)
add(Implementation("dispatch", "index_select", "cpu", permutation.dispatch, produce=permutation.produce_dispatch))
add(
    Implementation(
        "combine",
        "embedding_bag",
        "cpu",
        permutation.combine,
        produce=permutation.produce_combine,
        copies=copies_unless(has_rows, "y"),
    )
)
add(Implementation("combine_backward", "steps of aten", "cpu", permutation.combine_backward))

"""Register the steps of ATen for ops on CUDA, and on a CPU where it has nothing better."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...meta.memory import copies_to_lines, copies_unless
from .. import Implementation, add
from . import (
    activation,
    batched_syrk,
    empty_contraction,
    fp8_history,
    grouped_mm,
    loops,
    offsets,
    permutation,
    router,
    routing,
    scale_layout,
)

GROUPED_MM = "aten grouped_mm"
GROUPED_MM_ARCHS = frozenset({"sm_90", "sm_100", "sm_103"})
_LOOP = "reads offs on the host; one GEMM per group"
_MAP = "a dozen index ops of aten; groups read on the device"

for _device in ("cpu", "cuda"):
    add(Implementation("splits_to_offsets", "cumsum", _device, offsets.splits_to_offsets))
    add(Implementation("fp8_scale_from_history", "steps of aten", _device, fp8_history.scale_from_history))
    add(Implementation("fp8_update_history_", "steps of aten", _device, fp8_history.update_history))
    add(Implementation("batched_syrk", "aten bmm", _device, batched_syrk.batched_syrk, note="both triangles"))
    _note, _copies = "a sort and small ops of aten", copies_unless(Tensor.is_contiguous, "logits")
    add(Implementation("topk_router", "steps of aten", _device, router.forward, note=_note, copies=_copies))
    _copies = copies_unless(Tensor.is_contiguous, "grad_weights", "logits")
    add(Implementation("topk_router_backward", "steps of aten", _device, router.backward, copies=_copies))
    for _op, _move in (("scale_to_layout", scale_layout.scatter), ("scale_from_layout", scale_layout.gather)):
        _note = "" if _device == "cpu" else _MAP
        add(Implementation(_op, "map of offsets", _device, _move, note=_note, rows=_move is scale_layout.scatter))

add(Implementation("route", "stable sort", "cuda", routing.route, note="a sort and small ops of aten"))
add(Implementation("grouped_activation", "masked aten", "cuda", activation.forward))
add(Implementation("grouped_activation_backward", "masked aten", "cuda", activation.backward))

for _op, _step in (
    ("dispatch", permutation.dispatch),
    ("combine", permutation.combine),
    ("combine_backward", permutation.combine_backward),
):
    add(Implementation(_op, "steps of aten", "cuda", _step, note="a few for every top-k slot"))

for _op, _loop, _begins in (
    ("grouped_gemm", loops.grouped_gemm, True),
    ("grouped_gemm_wgrad", loops.grouped_gemm_wgrad, False),
    ("grouped_gemm_wgrad_accumulate_", loops.grouped_gemm_wgrad_accumulate, False),
):
    add(
        Implementation(
            _op,
            "loop of mm",
            "cuda",
            _loop,
            priority=-10,
            syncs=True,
            copies=copies_to_lines("a", "b"),
            note=_LOOP,
            slots=True,
            rows=True,
            begins=_begins,
        )
    )
for _op, _sums in (("grouped_dbias", loops.grouped_dbias), ("grouped_dbias_dscales", loops.grouped_dbias_dscales)):
    _copies = copies_to_lines("dy")
    add(Implementation(_op, "loop of sums", "cpu", _sums, copies=_copies))
    _options: dict[str, Any] = {"priority": -10, "syncs": True, "note": "reads offs on the host", "copies": _copies}
    add(Implementation(_op, "loop of sums", "cuda", _sums, **_options))

for _op, _run, _supports, _begins, _note in (
    (
        "grouped_gemm",
        grouped_mm.grouped_gemm,
        grouped_mm.grouped_gemm_supports,
        True,
        "then a masked copy for the tail",
    ),
    ("grouped_gemm_wgrad", grouped_mm.grouped_gemm_wgrad, grouped_mm.grouped_gemm_wgrad_supports, False, "then a copy"),
):
    add(
        Implementation(
            _op,
            GROUPED_MM,
            "cuda",
            _run,
            _supports,
            archs=GROUPED_MM_ARCHS,
            note=f"torch.nn.functional.grouped_mm, {_note}",
            begins=_begins,
        )
    )

for _op, _alone, _dense in (
    ("grouped_gemm", empty_contraction.grouped_gemm, True),
    ("grouped_gemm_scaled", empty_contraction.grouped_gemm_scaled, False),
):
    add(
        Implementation(
            _op,
            "bias alone",
            "cuda",
            _alone,
            empty_contraction.supports,
            priority=3,
            note="steps of aten, for K = 0",
            emulable=True,
            slots=_dense,
            rows=_dense,
            begins=_dense,
        )
    )

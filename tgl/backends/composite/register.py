"""Register the compositions on every device, for ops without a fused kernel."""

from __future__ import annotations

from collections.abc import Callable

from .. import Implementation, add
from . import (
    activations,
    constituent_ops,
    emulation,
    expert_parallel,
    low_rank_gemm,
    mlp,
    moe,
    packed_gemm,
    quantize_steps,
    requantize,
    row_scaled,
    scaled_activation_quantize,
)

_PARTS = "the implementations of its steps; see `explain` of each"
_TWO_OPS = "two ops; see `explain` of each"
_EXPERTS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "grouped_mlp": (mlp.forward, ("y", "h", "act")),
    "grouped_mlp_backward": (mlp.backward, ("dx", "dw1", "dw2", "dprobs", "dbias1", "dbias2")),
    "moe": (moe.forward, ("y", "h")),
    "moe_backward_hidden": (moe.backward_hidden, ("dh", "dw2", "dweights", "dbias2")),
    "moe_backward_input": (moe.backward_input, ("dx", "dw1", "dbias1")),
}
"""For every op, the function that produces its outputs, and their names."""
_HINTED = ("moe", "moe_backward_hidden", "moe_backward_input")

_COLLECTIVES = "sizes are static and counts stay on the device; sends unused places as zeros"

for _device in ("cpu", "cuda"):
    for _op, _run in (
        ("ep_route", expert_parallel.route),
        ("ep_dispatch", expert_parallel.dispatch),
        ("ep_combine", expert_parallel.combine),
    ):
        add(Implementation(_op, "all_to_all_single", _device, _run, expert_parallel.supports, note=_COLLECTIVES))
    # Implementations that serve no call are registered so that ``explain`` reports the reason.
    if _device == "cpu":
        for _op in ("ep_route", "ep_dispatch", "ep_combine"):
            _why = expert_parallel.why_no_symmetric_memory
            add(Implementation(_op, "symmetric memory", _device, None, _why, priority=-1))
    for _op in ("ep_dispatch", "ep_combine"):
        _why = expert_parallel.why_not_by_device_counts
        add(Implementation(_op, "all_to_all_vdev_2d", _device, None, _why, priority=-2))
    for _op, (_produce, _outputs) in _EXPERTS.items():
        add(
            Implementation(
                _op,
                "composition",
                _device,
                None,
                emulable=_device == "cuda",
                note=_PARTS,
                produce=_produce,
                parts=constituent_ops.of_produce(_produce, *_outputs),
                expects=_op in _HINTED,
            )
        )
    add(
        Implementation(
            "grouped_gemm_activation",
            "GEMM, then activation",
            _device,
            None,
            priority=-10,
            note=_TWO_OPS,
            produce=activations.produce_gemm_activation,
            parts=constituent_ops.of_produce(activations.produce_gemm_activation, "y", "h"),
            rows=True,
            expects=True,
        )
    )
    add(
        Implementation(
            "grouped_gemm_low_rank_activation",
            "sum of two GEMMs, then activation",
            _device,
            None,
            priority=-10,
            note=_TWO_OPS,
            produce=activations.produce_low_rank_activation,
            parts=constituent_ops.of_produce(activations.produce_low_rank_activation, "y", "h"),
        )
    )
    add(
        Implementation(
            "grouped_gemm_dactivation",
            "grouped GEMM, then the activation's backward",
            _device,
            None,
            priority=-10,
            note="two ops",
            produce=activations.produce_gemm_dactivation,
            parts=constituent_ops.of_produce(activations.produce_gemm_dactivation, "dh", "dprobs", "act"),
            rows=True,
            expects=True,
        )
    )
    add(
        Implementation(
            "grouped_activation_quantize",
            "activation, then quantise",
            _device,
            activations.activation_quantize,
            priority=-10,
            parts=constituent_ops.of_run(activations.activation_quantize),
        )
    )
    add(
        Implementation(
            "grouped_gemm_scaled_activation_quantize",
            "GEMM, then activation and quantise",
            _device,
            scaled_activation_quantize.run,
            scaled_activation_quantize.supports,
            priority=-10,
            note=_TWO_OPS,
            parts=constituent_ops.of_run(scaled_activation_quantize.run),
        )
    )
    add(
        Implementation(
            "group_requantize",
            "through float32",
            _device,
            requantize.run,
            requantize.supports,
            note="group_dequantize into a float32 [T, K], group_quantize",
            parts=constituent_ops.of_run(requantize.run),
        )
    )

add(
    Implementation(
        "grouped_gemm_low_rank",
        "two GEMMs and an addition",
        "cuda",
        low_rank_gemm.run,
        priority=-10,
        emulable=True,
        note="each product and the sum is rounded to the dtype of the result",
        parts=constituent_ops.of_run(low_rank_gemm.run),
    )
)

add(
    Implementation(
        "group_quantize",
        "steps of aten",
        "cuda",
        quantize_steps.run,
        quantize_steps.supports,
        priority=-10,
        note="two dozen steps per matrix, or for all rows; groups read on the device",
        slots=True,
        rows=True,
    )
)

for _implementation in (
    *emulation.implementations("cuda"),
    *packed_gemm.implementations("cuda"),
    *row_scaled.implementations("cuda"),
    *row_scaled.implementations("cpu"),
):
    add(_implementation)

"""The kernels of ``tgl.cutlass_kernels`` as implementations of the ops; the DSL is imported at the first call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from .. import backends
from ..cutlass_kernels import copies, host, launch, launch_activated, launch_gradient, launch_quantizing, launch_scaled
from ..cutlass_kernels.activation import calls as activations
from ..cutlass_kernels.gemm.scaling import MXFP8
from ..cutlass_kernels.quantize import calls as quantizers
from ..cutlass_kernels.quantize import calls_dequantize as dequantizers
from ..cutlass_kernels.reduce import calls
from .group_dequantize import NAME as DEQUANTIZE
from .group_quantize import NAME as QUANTIZE
from .grouped_activation import BACKWARD as ACTIVATION_BACKWARD
from .grouped_activation import NAME as ACTIVATION
from .grouped_activation_quantize import NAME as ACTIVATION_QUANTIZE
from .grouped_dbias import NAME as DBIAS
from .grouped_dbias import SCALED as DBIAS_DSCALES
from .grouped_gemm import NAME as GEMM
from .grouped_gemm_activation import NAME as GEMM_ACTIVATION
from .grouped_gemm_dactivation import NAME as DACTIVATION
from .grouped_gemm_scaled import NAME as SCALED_GEMM
from .grouped_gemm_scaled_activation_quantize import NAME as SCALED_ACTIVATION_QUANTIZE
from .grouped_gemm_scaled_wgrad import ACCUMULATE as SCALED_ACCUMULATE
from .grouped_gemm_scaled_wgrad import NAME as SCALED_WGRAD
from .grouped_gemm_wgrad import ACCUMULATE
from .grouped_gemm_wgrad import NAME as WGRAD
from .splits_to_offsets import NAME as OFFSETS

ARCHS = frozenset(host.GPU_ARCH)


class Kernel(NamedTuple):
    """What serves an op."""

    op: str
    run: Callable[..., None]
    supports: Callable[..., backends.Reason]
    prepare: Callable[..., None] | None = None
    attempt: Callable[..., backends.Reason] | None = None
    archs: frozenset[str] = ARCHS
    note: str = "one launch, groups read on the device"


_prepare_accumulate = functools.partial(launch.prepare_grouped_gemm_wgrad, accumulate=True)

IN_PLACE = (
    Kernel(
        GEMM,
        launch.grouped_gemm,
        launch.grouped_gemm_supports,
        launch.prepare_grouped_gemm,
        launch.attempt_grouped_gemm,
    ),
    Kernel(
        WGRAD,
        launch.grouped_gemm_wgrad,
        launch.grouped_gemm_wgrad_supports,
        launch.prepare_grouped_gemm_wgrad,
        launch.attempt_grouped_gemm_wgrad,
    ),
    Kernel(
        ACCUMULATE,
        launch.grouped_gemm_wgrad_accumulate,
        launch.grouped_gemm_wgrad_supports,
        _prepare_accumulate,
        launch.attempt_grouped_gemm_wgrad_accumulate,
    ),
    Kernel(
        DBIAS,
        calls.grouped_dbias,
        calls.grouped_dbias_supports,
        calls.prepare_grouped_dbias,
        calls.attempt_grouped_dbias,
    ),
    Kernel(
        DBIAS_DSCALES,
        calls.grouped_dbias_dscales,
        calls.grouped_dbias_dscales_supports,
        calls.prepare_grouped_dbias_dscales,
        calls.attempt_grouped_dbias_dscales,
    ),
    Kernel(
        ACTIVATION,
        activations.grouped_activation,
        activations.grouped_activation_supports,
        activations.prepare_grouped_activation,
        activations.attempt_grouped_activation,
    ),
    Kernel(
        ACTIVATION_BACKWARD,
        activations.grouped_activation_backward,
        activations.grouped_activation_backward_supports,
        activations.prepare_grouped_activation_backward,
        activations.attempt_grouped_activation_backward,
    ),
    Kernel(
        GEMM_ACTIVATION,
        launch_activated.grouped_gemm_activation,
        launch_activated.grouped_gemm_activation_supports,
        launch_activated.prepare_grouped_gemm_activation,
        launch_activated.attempt_grouped_gemm_activation,
    ),
    Kernel(
        DACTIVATION,
        launch_gradient.grouped_gemm_dactivation,
        launch_gradient.grouped_gemm_dactivation_supports,
        launch_gradient.prepare_grouped_gemm_dactivation,
        launch_gradient.attempt_grouped_gemm_dactivation,
        note="one launch and, for dprobs, a sum over tiles; groups read on the device",
    ),
    Kernel(OFFSETS, calls.splits_to_offsets, calls.splits_to_offsets_supports, calls.prepare_splits_to_offsets),
    Kernel(
        SCALED_GEMM,
        launch_scaled.grouped_gemm_scaled,
        launch_scaled.supports,
        launch_scaled.prepare_grouped_gemm_scaled,
        launch_scaled.attempt_grouped_gemm_scaled,
    ),
    *(
        Kernel(
            op,
            launch_scaled.grouped_gemm_scaled_wgrad,
            launch_scaled.supports,
            launch_scaled.prepare_grouped_gemm_scaled_wgrad,
            launch_scaled.attempt_grouped_gemm_scaled_wgrad,
        )
        for op in (SCALED_WGRAD, SCALED_ACCUMULATE)
    ),
    Kernel(
        SCALED_ACTIVATION_QUANTIZE,
        launch_quantizing.grouped_gemm_scaled_activation_quantize,
        launch_quantizing.supports,
        launch_quantizing.prepare_grouped_gemm_scaled_activation_quantize,
        launch_quantizing.attempt_grouped_gemm_scaled_activation_quantize,
        archs=frozenset(MXFP8.archs),
    ),
    Kernel(
        QUANTIZE,
        quantizers.group_quantize,
        quantizers.group_quantize_supports,
        quantizers.prepare_group_quantize,
        note="one look at x, two for scales per group; groups read on the device",
    ),
    Kernel(
        DEQUANTIZE,
        dequantizers.group_dequantize,
        dequantizers.group_dequantize_supports,
        dequantizers.prepare_group_dequantize,
        dequantizers.attempt_group_dequantize,
        note="one launch, groups read on the device; components that do not begin on 16 bytes are copied",
    ),
    Kernel(
        ACTIVATION_QUANTIZE,
        quantizers.grouped_activation_quantize,
        quantizers.grouped_activation_quantize_supports,
        quantizers.prepare_grouped_activation_quantize,
        quantizers.attempt_grouped_activation_quantize,
        note="one pass over x, groups read on the device",
    ),
)
_COPIES = "what the kernel cannot reach in place is copied; no synchronisation"
BETWEEN_COPIES = (
    *(
        Kernel(
            op,
            copies.between_copies(run, keeps=op != WGRAD),
            copies.supports,
            copies.prepare_between_copies(prepare),
            note=_COPIES,
        )
        for op, run, prepare in (
            (GEMM, launch.grouped_gemm, launch.prepare_grouped_gemm),
            (WGRAD, launch.grouped_gemm_wgrad, launch.prepare_grouped_gemm_wgrad),
            (ACCUMULATE, launch.grouped_gemm_wgrad_accumulate, _prepare_accumulate),
        )
    ),
    *(
        Kernel(op, copies.between_copies_scaled(run), launch_scaled.supports_copies_of, prepare, note=_COPIES)
        for op, run, prepare in (
            (SCALED_GEMM, launch_scaled.grouped_gemm_scaled, launch_scaled.prepare_grouped_gemm_scaled),
            (SCALED_WGRAD, launch_scaled.grouped_gemm_scaled_wgrad, launch_scaled.prepare_grouped_gemm_scaled_wgrad),
            (
                SCALED_ACCUMULATE,
                launch_scaled.grouped_gemm_scaled_wgrad,
                launch_scaled.prepare_grouped_gemm_scaled_wgrad,
            ),
        )
    ),
)

for _name, _priority, _kernels in (
    ("tgl kernel", 10, IN_PLACE),
    ("tgl kernel between copies", 5, BETWEEN_COPIES),
):
    for _kernel in _kernels:
        backends.add(
            backends.Implementation(
                op=_kernel.op,
                name=_name,
                device="cuda",
                run=_kernel.run,
                supports=_kernel.supports,
                archs=_kernel.archs,
                priority=_priority,
                note=_kernel.note,
                emulable=True,
                prepare=_kernel.prepare,
                attempt=_kernel.attempt,
            )
        )

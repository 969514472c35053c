"""The kernels of ``tgl.cutlass_kernels`` as implementations of the ops; the DSL is imported at the first call."""

from __future__ import annotations

import functools
from collections.abc import Callable

from .. import backends
from ..cutlass_kernels import launch, launch_scaled
from ..cutlass_kernels.activation import calls as activations
from ..cutlass_kernels.quantize import calls as quantizers
from ..cutlass_kernels.reduce import calls
from .group_quantize import NAME as QUANTIZE
from .grouped_activation import BACKWARD as ACTIVATION_BACKWARD
from .grouped_activation import NAME as ACTIVATION
from .grouped_activation_quantize import NAME as ACTIVATION_QUANTIZE
from .grouped_dbias import NAME as DBIAS
from .grouped_dbias import SCALED as DBIAS_DSCALES
from .grouped_gemm import NAME as GEMM
from .grouped_gemm_scaled import NAME as SCALED_GEMM
from .grouped_gemm_scaled_wgrad import NAME as SCALED_WGRAD
from .grouped_gemm_wgrad import ACCUMULATE
from .grouped_gemm_wgrad import NAME as WGRAD
from .splits_to_offsets import NAME as OFFSETS

PRIORITY = 10
ARCHS = frozenset(launch.GPU_ARCH)

# op: (run, supports, prepare)
_KERNELS: dict[str, tuple[Callable[..., None], Callable[..., backends.Reason], Callable[..., None]]] = {
    GEMM: (launch.grouped_gemm, launch.grouped_gemm_supports, launch.prepare_grouped_gemm),
    WGRAD: (launch.grouped_gemm_wgrad, launch.grouped_gemm_wgrad_supports, launch.prepare_grouped_gemm_wgrad),
    ACCUMULATE: (
        launch.grouped_gemm_wgrad_accumulate,
        launch.grouped_gemm_wgrad_supports,
        functools.partial(launch.prepare_grouped_gemm_wgrad, accumulate=True),
    ),
    DBIAS: (calls.grouped_dbias, calls.grouped_dbias_supports, calls.prepare_grouped_dbias),
    DBIAS_DSCALES: (
        calls.grouped_dbias_dscales,
        calls.grouped_dbias_dscales_supports,
        calls.prepare_grouped_dbias_dscales,
    ),
    ACTIVATION: (
        activations.grouped_activation,
        activations.grouped_activation_supports,
        activations.prepare_grouped_activation,
    ),
    ACTIVATION_BACKWARD: (
        activations.grouped_activation_backward,
        activations.grouped_activation_backward_supports,
        activations.prepare_grouped_activation_backward,
    ),
    OFFSETS: (calls.splits_to_offsets, calls.splits_to_offsets_supports, calls.prepare_splits_to_offsets),
}

for _op, (_run, _supports, _prepare) in _KERNELS.items():
    backends.add(
        backends.Implementation(
            op=_op,
            name="tgl kernel",
            device="cuda",
            run=_run,
            supports=_supports,
            archs=ARCHS,
            priority=PRIORITY,
            note="one launch, groups read on the device",
            emulable=True,
            prepare=_prepare,
            attempt=launch.ATTEMPTS.get(_run),
        )
    )

for _op, _run, _supports in (
    (SCALED_GEMM, launch_scaled.grouped_gemm_scaled, launch_scaled.grouped_gemm_scaled_supports),
    (SCALED_WGRAD, launch_scaled.grouped_gemm_scaled_wgrad, launch_scaled.grouped_gemm_scaled_wgrad_supports),
):
    backends.add(
        backends.Implementation(
            op=_op,
            name="tgl kernel",
            device="cuda",
            run=_run,
            supports=_supports,
            archs=frozenset({launch_scaled.ARCH}),
            priority=PRIORITY,
            note="one launch, groups read on the device",
            emulable=True,
        )
    )

for _op, _run, _supports, _prepare in (
    (QUANTIZE, quantizers.group_quantize, quantizers.group_quantize_supports, quantizers.prepare_group_quantize),
    (
        ACTIVATION_QUANTIZE,
        quantizers.grouped_activation_quantize,
        quantizers.grouped_activation_quantize_supports,
        quantizers.prepare_grouped_activation_quantize,
    ),
):
    backends.add(
        backends.Implementation(
            op=_op,
            name="tgl kernel",
            device="cuda",
            run=_run,
            supports=_supports,
            archs=ARCHS,
            priority=PRIORITY,
            note="one pass over x, groups read on the device",
            emulable=True,
            prepare=_prepare,
        )
    )

"""The kernels of ``tgl.cutlass_kernels`` as implementations of the ops; the DSL is imported at the first call."""

from __future__ import annotations

import functools

from .. import backends
from ..cutlass_kernels import launch
from ..cutlass_kernels.reduce import calls
from .grouped_dbias import NAME as DBIAS
from .grouped_dbias import SCALED as DBIAS_DSCALES
from .grouped_gemm import NAME as GEMM
from .grouped_gemm_wgrad import ACCUMULATE
from .grouped_gemm_wgrad import NAME as WGRAD
from .splits_to_offsets import NAME as OFFSETS

PRIORITY = 10
ARCHS = frozenset(launch.GPU_ARCH)

_kernel = functools.partial(
    backends.Implementation,
    name="tgl kernel",
    device="cuda",
    archs=ARCHS,
    priority=PRIORITY,
    emulable=True,
    note="one launch, groups read on the device",
)

backends.add(
    _kernel(
        op=GEMM,
        run=launch.grouped_gemm,
        supports=launch.grouped_gemm_supports,
        prepare=launch.prepare_grouped_gemm,
    )
)
backends.add(
    _kernel(
        op=WGRAD,
        run=launch.grouped_gemm_wgrad,
        supports=launch.grouped_gemm_wgrad_supports,
        prepare=launch.prepare_grouped_gemm_wgrad,
    )
)
backends.add(
    _kernel(
        op=ACCUMULATE,
        run=launch.grouped_gemm_wgrad_accumulate,
        supports=launch.grouped_gemm_wgrad_supports,
        prepare=functools.partial(launch.prepare_grouped_gemm_wgrad, accumulate=True),
    )
)
backends.add(
    _kernel(
        op=DBIAS,
        run=calls.grouped_dbias,
        supports=calls.grouped_dbias_supports,
        prepare=calls.prepare_grouped_dbias,
    )
)
backends.add(
    _kernel(
        op=OFFSETS,
        run=calls.splits_to_offsets,
        supports=calls.splits_to_offsets_supports,
        prepare=calls.prepare_splits_to_offsets,
    )
)
backends.add(
    _kernel(
        op=DBIAS_DSCALES,
        run=calls.grouped_dbias_dscales,
        supports=calls.grouped_dbias_dscales_supports,
        prepare=calls.prepare_grouped_dbias_dscales,
    )
)

"""The kernels of ``tgl.cutlass_kernels`` as implementations of the ops; the DSL is imported at the first call."""

from __future__ import annotations

import functools

from .. import backends
from ..cutlass_kernels import launch
from .grouped_gemm import NAME as GEMM
from .grouped_gemm_wgrad import ACCUMULATE
from .grouped_gemm_wgrad import NAME as WGRAD

PRIORITY = 10
ARCHS = frozenset(launch.GPU_ARCH)

_gemm = functools.partial(
    backends.Implementation,
    name="tgl kernel",
    device="cuda",
    archs=ARCHS,
    priority=PRIORITY,
    emulable=True,
    note="one launch, groups read on the device",
)

backends.add(
    _gemm(
        op=GEMM,
        run=launch.grouped_gemm,
        supports=launch.grouped_gemm_supports,
        prepare=launch.prepare_grouped_gemm,
    )
)
backends.add(
    _gemm(
        op=WGRAD,
        run=launch.grouped_gemm_wgrad,
        supports=launch.grouped_gemm_wgrad_supports,
        prepare=launch.prepare_grouped_gemm_wgrad,
    )
)
backends.add(
    _gemm(
        op=ACCUMULATE,
        run=launch.grouped_gemm_wgrad_accumulate,
        supports=launch.grouped_gemm_wgrad_supports,
        prepare=functools.partial(launch.prepare_grouped_gemm_wgrad, accumulate=True),
    )
)

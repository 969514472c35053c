"""One GEMM kernel with a second pair of operands, run on the emulator between canaries; what the tests share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import cute_emulator
from tests.cutlass_kernels.gemm_cases import CLUSTERS, Case
from tests.kernel_cases import CANARY, framed, integers, poisoned, product, stored
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import VARLEN_M
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.launchers.gemm import GemmKey
from tgl.cutlass_kernels.launchers.gemm_low_rank import GROUPED_GEMM_LOW_RANK
from tgl.cutlass_kernels.runtime.names import name
from tgl.testing import emulate

_compiled: dict = {}


@dataclass(frozen=True)
class PairedCase(Case):
    """``Case`` with the contraction of the second pair."""

    rank: int = 16


def kernel(arch: str, case: PairedCase):
    """The compiled kernel; compiled once per process. Only inside ``emulate``."""
    spec = EpilogueSpec(name(case.out), name(case.bias), name(case.bias_scale), tail=case.zero_tail)
    key = GemmKey(VARLEN_M, arch, True, name(case.dtype), 2 if case.b_row_major else 1, spec, case.config)
    if key not in _compiled:
        _compiled[key] = GROUPED_GEMM_LOW_RANK.build(key)
    return _compiled[key]


def run(arch: str, case: PairedCase, seeds=(0, 1)) -> cute_emulator.LaunchRecord:
    """Run ``case`` and compare every byte of the output's buffer, for every seed."""
    groups, sizes = len(case.sizes), case.sizes
    a, low = (poisoned(integers(case.rows, k, dtype=case.dtype), sizes) for k in (case.depth, case.rank))
    b, up = (integers(groups, k, case.columns, dtype=case.dtype) for k in (case.depth, case.rank))
    bias = integers(groups, case.columns, dtype=case.bias) if case.bias else None
    scale = poisoned(integers(case.rows, dtype=case.bias_scale), sizes) if case.bias_scale else None
    expected = product(a, b, sizes, bias, scale) + product(low, up, sizes)
    if not case.zero_tail:
        expected[sum(sizes) :] = CANARY
    a, low, b, up = stored(a, True), stored(low, True), stored(b, case.b_row_major), stored(up, case.b_row_major)
    frame = framed(case.rows, case.columns, dtype=case.out)
    with emulate(ARCHS[arch].target) as machine, backends.emulated_device(arch):
        function = kernel(arch, case)
        for seed in seeds:
            frame.refill()
            machine.seed = seed
            function(a, b, low, up, case.ends, frame.inside, bias, scale, CLUSTERS)
            assert torch.equal(frame.inside, expected.to(case.out)), f"seed {seed}"
            assert frame.intact(), f"seed {seed}: written around the output"
        return machine.launches[-1]

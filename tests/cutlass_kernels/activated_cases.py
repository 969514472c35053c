"""One GEMM with an activation as second output, compiled for a given tiling and run on the emulator."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.cutlass_kernels.gemm_cases import CANARY, CLUSTERS, framed, integers, stored
from tests.memory import same_bytes
from tgl import backends
from tgl.cutlass_kernels.activation.activation_spec import spec_of
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import VARLEN_M, GemmConfig
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.ops import gemm, gemm_activation
from tgl.cutlass_kernels.runtime import names
from tgl.ops.grouped_activation import Params
from tgl.testing import emulator

SWIGLU = Params()
_compiled: dict = {}


@dataclass(frozen=True)
class Case:
    """A kernel and the sizes it is run on. ``sizes`` are the groups' rows, then ``tail`` rows that hold NaN."""

    config: GemmConfig
    sizes: tuple[int, ...]
    params: Params = SWIGLU
    tail: int = 9
    depth: int = 72
    columns: int = 72  # of y
    dtype: torch.dtype = torch.bfloat16
    out: torch.dtype = torch.bfloat16
    b_row_major: bool = False  # weights [G, 2 I, K] come as b [G, K, 2 I] with K contiguous
    bias: torch.dtype | None = None
    probs: torch.dtype | None = torch.float32
    offs: tuple[int, ...] | None = None  # other than the sizes say


def kernel(arch: str, case: Case):
    """The compiled kernel; compiled once per process. Only inside ``emulate``."""
    name = names.name
    activation = spec_of(case.params)
    spec = EpilogueSpec(name(case.out), name(case.bias), tail=True, activation=activation, probs=name(case.probs))
    key = gemm.GemmKey(VARLEN_M, arch, True, name(case.dtype), 2 if case.b_row_major else 1, spec, case.config)
    if key not in _compiled:
        _compiled[key] = gemm_activation.GROUPED_GEMM_ACTIVATION.build(key)
    return _compiled[key]


def run(arch: str, case: Case, seeds=(0, 1)) -> emulator.LaunchRecord:
    """Run ``case``: ``h`` exact, ``y`` the bytes of the activation kernel on ``h``, both between canaries."""
    torch.manual_seed(case.columns)
    groups, routed = len(case.sizes), sum(case.sizes)
    rows, width = routed + case.tail, case.columns * (2 if case.params.gated else 1)
    a = integers(rows, case.depth, dtype=case.dtype)
    b = integers(groups, case.depth, width, dtype=case.dtype)
    bias = integers(groups, width, dtype=case.bias) if case.bias else None
    probs = torch.rand(rows).to(case.probs) if case.probs else None
    exact = torch.zeros(rows, width, dtype=torch.float64)
    for g, (size, end) in enumerate(zip(case.sizes, torch.tensor(case.sizes).cumsum(0).tolist())):
        product = a[end - size : end].double() @ b[g].double()
        exact[end - size : end] = product if bias is None else product + bias[g].double()
    a[routed:] = float("nan")
    if probs is not None:
        probs[routed:] = float("nan")
    ends = torch.tensor(case.sizes if case.offs is None else case.offs)
    offs = (ends.cumsum(0) if case.offs is None else ends).to(torch.int32)
    a, b = stored(a, True), stored(b, case.b_row_major)
    (h_frame, h), (y_frame, y) = (framed(rows, n, dtype=case.out) for n in (width, case.columns))
    wanted, wanted_y = exact.to(case.out), torch.empty(rows, case.columns, dtype=case.out)
    with emulator.emulate(ARCHS[arch].target) as machine, backends.emulated_device(arch):
        backends.run("grouped_activation", a.device, wanted, offs, probs, params=case.params, out=wanted_y)
        assert len(machine.launches) == 1
        assert len(machine.launches) == 1
        function, first = kernel(arch, case), None
        for seed in seeds:
            h_frame.fill_(CANARY)
            y_frame.fill_(CANARY)
            machine.seed = seed
            function(a, b, offs, h, y, bias, probs, CLUSTERS)
            if case.offs is None:
                assert torch.equal(h, wanted), f"seed {seed}: {(h != wanted).nonzero()[:3].tolist()} of h"
                assert _same_bytes(y, wanted_y), f"seed {seed}: {(y != wanted_y).nonzero()[:3].tolist()} of y"
            first = first or (h.clone(), y.clone())
            assert _same_bytes(h, first[0])
            assert _same_bytes(y, first[1])
            for frame, inside in ((h_frame, h), (y_frame, y)):
                before = inside.clone()
                inside.fill_(CANARY)
                assert (frame == CANARY).all(), f"seed {seed}: written around the output"
                inside.copy_(before)
        return machine.launches[-1]


def _same_bytes(x: torch.Tensor, y: torch.Tensor) -> bool:
    return same_bytes(x, y)

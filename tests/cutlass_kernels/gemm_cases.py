"""One GEMM kernel, compiled for a given tiling and run on the emulator between canaries; what the tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import cute_emulator
from tests.kernel_cases import CANARY, Framed, ends, framed, gradient, integers, poisoned, product, stored
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import VARLEN_K, VARLEN_M, GemmConfig
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.launchers import gemm
from tgl.cutlass_kernels.runtime import names
from tgl.testing import emulate

CLUSTERS = 3  # so that clusters take several tiles, in turn
MANY = (*([0, 3, 0, 0, 9, 0, 0, 2] * 4), 0, 130, 1, 0, 0, 70)  # more groups than a warp holds, and tiles in the others
_compiled: dict = {}


@dataclass(frozen=True)
class Case:
    """A kernel and the sizes it is run on. ``sizes`` are the groups' rows, then ``tail`` rows that hold NaN."""

    config: GemmConfig
    sizes: tuple[int, ...]
    tail: int = 9
    depth: int = 72  # varlen_m: K; varlen_k: M
    columns: int = 136
    dtype: torch.dtype = torch.bfloat16
    out: torch.dtype = torch.bfloat16
    b_row_major: bool = True
    bias: torch.dtype | None = None
    bias_scale: torch.dtype | None = None
    zero_tail: bool = True
    accumulate: bool = False
    offs: tuple[int, ...] | None = field(default=None)  # other than the sizes say

    @property
    def rows(self) -> int:
        return sum(self.sizes) + self.tail

    @property
    def ends(self) -> torch.Tensor:
        if self.offs is not None:
            return torch.tensor(self.offs, dtype=torch.int32)
        return ends(self.sizes)


def build(key: gemm.GemmKey):
    """Compile the kernel of a key of either kind."""
    launcher = gemm.GROUPED_GEMM if key.kind == VARLEN_M else gemm.GROUPED_GEMM_WGRAD
    return launcher.build(key)


def kernel(arch: str, kind: str, case: Case):
    """The compiled kernel; compiled once per process. Only inside ``emulate``."""
    name = names.name
    spec = EpilogueSpec(
        name(case.out), name(case.bias), name(case.bias_scale), case.accumulate, case.zero_tail and kind == VARLEN_M
    )
    b_unit = (2 if case.b_row_major else 1) if kind == VARLEN_M else 1
    key = gemm.GemmKey(kind, arch, True, name(case.dtype), b_unit, spec, case.config)
    if key not in _compiled:
        _compiled[key] = build(key)
    return _compiled[key]


def run(arch: str, kind: str, case: Case, seeds=(0, 1), edit_ptx=None) -> cute_emulator.LaunchRecord:
    """Run ``case``, maybe of edited PTX, and compare every byte of the output's buffer, for every seed."""
    with emulate(ARCHS[arch].target) as machine, backends.emulated_device(arch):
        machine.edit_ptx = edit_ptx
        call, frame, expected = (_varlen_m if kind == VARLEN_M else _varlen_k)(arch, case)
        for seed in seeds:
            frame.refill()
            machine.seed = seed
            call()
            assert torch.equal(frame.inside, expected), f"seed {seed}: {_differences(frame.inside, expected)}"
            assert frame.intact(), f"seed {seed}: written around the output"
        return machine.launches[-1]


def _differences(out: torch.Tensor, expected: torch.Tensor) -> str:
    where = (out != expected).nonzero()
    return f"{len(where)} elements differ, the first at {where[:3].tolist()}"


def _varlen_m(arch: str, case: Case) -> tuple[Callable[[], None], Framed, torch.Tensor]:
    groups, sizes = len(case.sizes), case.sizes
    a = poisoned(integers(case.rows, case.depth, dtype=case.dtype), sizes)
    b = integers(groups, case.depth, case.columns, dtype=case.dtype)
    bias = integers(groups, case.columns, dtype=case.bias) if case.bias else None
    scale = poisoned(integers(case.rows, dtype=case.bias_scale), sizes) if case.bias_scale else None
    expected = product(a, b, sizes, bias, scale)
    if not case.zero_tail:
        expected[sum(sizes) :] = CANARY
    a, b = stored(a, True), stored(b, case.b_row_major)
    frame = framed(case.rows, case.columns, dtype=case.out)
    function, offs = kernel(arch, VARLEN_M, case), case.ends
    return (
        lambda: function(a, b, offs, frame.inside, bias, scale, None, None, CLUSTERS),
        frame,
        expected.to(case.out),
    )


def _varlen_k(arch: str, case: Case) -> tuple[Callable[[], None], Framed, torch.Tensor]:
    a, b = (poisoned(integers(case.rows, n, dtype=case.dtype), case.sizes) for n in (case.depth, case.columns))
    expected = gradient(a, b, case.sizes)
    total = integers(*expected.shape, dtype=case.out) if case.accumulate else None
    a, b = stored(a, True), stored(b, True)
    frame = framed(*expected.shape, dtype=case.out)
    function, offs = kernel(arch, VARLEN_K, case), case.ends

    def call() -> None:
        if total is not None:
            frame.inside.copy_(total)
        function(a, b, offs, frame.inside, None, None, None, None, CLUSTERS)

    return call, frame, (expected if total is None else expected + total).to(case.out)

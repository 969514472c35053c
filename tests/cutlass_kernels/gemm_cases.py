"""One GEMM kernel, compiled for a given tiling and run on the emulator between canaries; what the tests share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import VARLEN_K, VARLEN_M, GemmConfig
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.ops import gemm
from tgl.cutlass_kernels.runtime import names
from tgl.testing import emulator

CANARY = 7.0
CLUSTERS = 3  # so that clusters take several tiles, in turn
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
        return torch.tensor(self.sizes).cumsum(0).to(torch.int32)


def integers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-1, 2, shape).to(dtype)


def stored(t: torch.Tensor, row_major: bool) -> torch.Tensor:
    """``t`` with its last two dimensions in the given memory order; rows start on 16 bytes."""
    if not row_major:
        return stored(t.transpose(-1, -2), True).transpose(-1, -2)
    step = 16 // t.element_size()
    padded = t.new_full((*t.shape[:-1], (t.shape[-1] + step - 1) // step * step), CANARY)
    padded[..., : t.shape[-1]] = t
    return padded[..., : t.shape[-1]]


def framed(*shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer of canaries and the output in the middle of it, with padded rows."""
    step = 16 // dtype.itemsize
    width = (shape[-1] + step - 1) // step * step + step
    if len(shape) == 2:
        buffer = torch.full((shape[0] + 4, width), CANARY, dtype=dtype)
        return buffer, buffer[2:-2, : shape[1]]
    buffer = torch.full((shape[0] + 2, shape[1] + 2, width), CANARY, dtype=dtype)
    return buffer, buffer[1:-1, 1:-1, : shape[2]]


def kernel(arch: str, kind: str, case: Case):
    """The compiled kernel; compiled once per process. Only inside ``emulate``."""
    name = names.name
    spec = EpilogueSpec(
        name(case.out), name(case.bias), name(case.bias_scale), case.accumulate, case.zero_tail and kind == VARLEN_M
    )
    b_unit = (2 if case.b_row_major else 1) if kind == VARLEN_M else 1
    key = gemm.GemmKey(kind, arch, True, name(case.dtype), b_unit, spec, case.config)
    if key not in _compiled:
        _compiled[key] = gemm.build(key)
    return _compiled[key]


def run(arch: str, kind: str, case: Case, seeds=(0, 1)) -> emulator.LaunchRecord:
    """Run ``case`` and compare every byte of the output's buffer, for every seed."""
    with emulator.emulate(ARCHS[arch].target) as machine, backends.emulated_device(arch):
        call, (buffer, out), expected = (_varlen_m if kind == VARLEN_M else _varlen_k)(arch, case)
        for seed in seeds:
            buffer.fill_(CANARY)
            machine.seed = seed
            call()
            record = machine.launches[-1]
            frame = buffer.clone()
            assert torch.equal(out, expected), f"seed {seed}: {_differences(out, expected)}"
            out.fill_(CANARY)
            assert (buffer == CANARY).all(), f"seed {seed}: written around the output"
            buffer.copy_(frame)
        return record


def _differences(out: torch.Tensor, expected: torch.Tensor) -> str:
    where = (out != expected).nonzero()
    return f"{len(where)} elements differ, the first at {where[:3].tolist()}"


def _varlen_m(arch: str, case: Case):
    groups = len(case.sizes)
    a = integers(case.rows, case.depth, dtype=case.dtype)
    a[sum(case.sizes) :] = float("nan")
    b = integers(groups, case.depth, case.columns, dtype=case.dtype)
    bias = integers(groups, case.columns, dtype=case.bias) if case.bias else None
    scale = integers(case.rows, dtype=case.bias_scale) if case.bias_scale else None
    if scale is not None:
        scale[sum(case.sizes) :] = float("nan")
    expected = torch.full((case.rows, case.columns), 0 if case.zero_tail else CANARY, dtype=torch.float64)
    start = 0
    for g, size in enumerate(case.sizes):
        rows = slice(start, start + size)
        value = a[rows].double() @ b[g].double()
        if bias is not None:
            value += bias[g].double() * (scale[rows, None].double() if scale is not None else 1)
        expected[rows] = value
        start += size
    a, b = stored(a, True), stored(b, case.b_row_major)
    buffer, out = framed(case.rows, case.columns, dtype=case.out)
    function = kernel(arch, VARLEN_M, case)
    offs = case.ends
    return lambda: function(a, b, offs, out, bias, scale, None, CLUSTERS), (buffer, out), expected.to(case.out)


def _varlen_k(arch: str, case: Case):
    groups = len(case.sizes)
    a = integers(case.rows, case.depth, dtype=case.dtype)
    b = integers(case.rows, case.columns, dtype=case.dtype)
    a[sum(case.sizes) :] = float("nan")
    b[sum(case.sizes) :] = float("nan")
    expected = torch.full((groups, case.depth, case.columns), CANARY if case.accumulate else 0, dtype=torch.float64)
    start = 0
    for g, size in enumerate(case.sizes):
        rows = slice(start, start + size)
        expected[g] += a[rows].double().t() @ b[rows].double()
        start += size
    a, b = stored(a, True), stored(b, True)
    buffer, out = framed(groups, case.depth, case.columns, dtype=case.out)
    function = kernel(arch, VARLEN_K, case)
    offs = case.ends
    return lambda: function(a, b, offs, out, None, None, None, CLUSTERS), (buffer, out), expected.to(case.out)

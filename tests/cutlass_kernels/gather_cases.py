"""One GEMM kernel that reads rows of an operand by an index, run on the emulator; what the tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import cute_emulator
from tests.cutlass_kernels import gemm_cases
from tests.cutlass_kernels.gemm_cases import CLUSTERS
from tests.kernel_cases import CANARY, Framed, ends, framed, gradient, integers, poisoned, product, stored
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import VARLEN_K, VARLEN_M, GemmConfig
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.launchers import gemm
from tgl.cutlass_kernels.runtime import names
from tgl.testing import emulate

ABSENT = (-1, -(1 << 31), (1 << 31) - 1)  # and the number of tokens: no row has these
_compiled: dict = {}


@dataclass(frozen=True)
class Case:
    """A kernel and the sizes it is run on. ``sizes`` are the groups' rows, then ``tail`` rows that no token has."""

    config: GemmConfig
    sizes: tuple[int, ...]
    tokens: int = 50
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
    absent: bool = True  # whether groups have rows of no token
    slots: bool = False

    @property
    def rows(self) -> int:
        return sum(self.sizes) + self.tail


def random_index(tokens: int, sizes: tuple[int, ...], tail: int, absent: bool) -> torch.Tensor:
    """Return the token of each row: -1 in the tail and, if some are ``absent``, in one row of a few."""
    routed = sum(sizes)
    index = torch.full((routed + tail,), -1, dtype=torch.int32)
    index[:routed] = torch.randint(0, tokens, (routed,))
    if absent:
        for first, number in enumerate((*ABSENT, tokens)):
            index[:routed][3 * first :: 29] = number
    return index


def scattered(values: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``values [S, n]``, NaN in rows that ``index`` does not name, and the rows ``[T, n]`` that it does, or zeros."""
    present = (index >= 0) & (index < len(values))
    named = torch.zeros(len(values), dtype=torch.bool)
    named[index[present].long()] = True
    rows = torch.zeros(len(index), values.shape[1], dtype=values.dtype)
    rows[present] = values[index[present].long()]
    return values.masked_fill(~named[:, None], float("nan")), rows


def kernel(arch: str, kind: str, gathered: str, case: Case):
    """The compiled kernel; compiled once per process. Only inside ``emulate``."""
    name, tail = names.name, case.zero_tail and kind == VARLEN_M
    spec = EpilogueSpec(name(case.out), name(case.bias), name(case.bias_scale), case.accumulate, tail)
    b_unit = (2 if case.b_row_major else 1) if kind == VARLEN_M else 1
    key = gemm.GemmKey(kind, arch, True, name(case.dtype), b_unit, spec, case.config, case.slots, gathered)
    if key not in _compiled:
        _compiled[key] = gemm_cases.build(key)
    return _compiled[key]


def run(arch: str, kind: str, gathered: str, case: Case, seeds=(0, 1)) -> cute_emulator.LaunchRecord:
    """Run ``case`` and compare every byte of the output's buffer, for every seed."""
    torch.manual_seed(case.columns)
    with emulate(ARCHS[arch].target) as machine, backends.emulated_device(arch):
        call, frame, expected = (_varlen_m if kind == VARLEN_M else _varlen_k)(arch, gathered, case)
        for seed in seeds:
            frame.refill()
            machine.seed = seed
            call()
            where = (frame.inside != expected).nonzero()
            assert not len(where), f"seed {seed}: {len(where)} elements differ, the first at {where[:3].tolist()}"
            assert frame.intact(), f"seed {seed}: written around the output"
        return machine.launches[-1]


def _varlen_m(arch: str, gathered: str, case: Case) -> tuple[Callable[[], None], Framed, torch.Tensor]:
    groups, sizes = len(case.sizes), case.sizes
    index = random_index(case.tokens, sizes, case.tail, case.absent)
    a, rows = scattered(integers(case.tokens, case.depth, dtype=case.dtype), index)
    b = integers(groups, case.depth, case.columns, dtype=case.dtype)
    bias = integers(groups, case.columns, dtype=case.bias) if case.bias else None
    scale = poisoned(integers(case.rows, dtype=case.bias_scale), sizes) if case.bias_scale else None
    expected = product(rows, b, sizes, bias, scale)
    if not case.zero_tail:
        expected[sum(sizes) :] = CANARY
    slots = torch.arange(groups, dtype=torch.int32).flip(0) if case.slots else None
    a, b = stored(a, True), stored(b.flip(0) if case.slots else b, case.b_row_major)
    frame = framed(case.rows, case.columns, dtype=case.out)
    function, offs = kernel(arch, VARLEN_M, gathered, case), ends(sizes)
    arguments = (a, b, offs, frame.inside, bias, scale, slots, None, index, CLUSTERS)
    return lambda: function(*arguments), frame, expected.to(case.out)


def _varlen_k(arch: str, gathered: str, case: Case) -> tuple[Callable[[], None], Framed, torch.Tensor]:
    index = random_index(case.tokens, case.sizes, case.tail, case.absent)
    widths = {"a": case.depth, "b": case.columns}
    operands, rows = {}, {}
    for name, width in widths.items():
        if name == gathered:
            operands[name], rows[name] = scattered(integers(case.tokens, width, dtype=case.dtype), index)
        else:
            operands[name] = rows[name] = poisoned(integers(case.rows, width, dtype=case.dtype), case.sizes)
    expected = gradient(rows["a"], rows["b"], case.sizes)
    total = integers(*expected.shape, dtype=case.out) if case.accumulate else None
    frame = framed(*expected.shape, dtype=case.out)
    function, offs = kernel(arch, VARLEN_K, gathered, case), ends(case.sizes)
    a, b = (stored(operands[name], True) for name in "ab")
    arguments = (a, b, offs, frame.inside, None, None, None, None, index, CLUSTERS)

    def call() -> None:
        if total is not None:
            frame.inside.copy_(total)
        function(*arguments)

    return call, frame, (expected if total is None else expected + total).to(case.out)

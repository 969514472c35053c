"""GEMM kernels on quantised operands, run on the emulator between canaries against the CPU implementation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import cute_emulator
import tgl
from tests.cutlass_kernels.gemm_cases import CLUSTERS
from tests.kernel_cases import CANARY, ends, exact, framed, poisoned
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import VARLEN_M, GemmConfig
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.gemm.operand_formats import OPERANDS
from tgl.cutlass_kernels.launchers import gemm_scaled
from tgl.cutlass_kernels.runtime import names
from tgl.testing import emulate

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_compiled: dict = {}


@dataclass(frozen=True)
class ScaledCase:
    """A kernel and the sizes it is run on; ``tail`` rows hold NaN before they are quantised."""

    format: str
    tile_m: int
    tile_n: int
    sizes: tuple[int, ...]
    direction: str = "rowwise"
    tail: int = 9
    depth: int = 192  # varlen_m: K; varlen_k: M
    columns: int = 160
    out: torch.dtype = torch.bfloat16
    bias: torch.dtype | None = None
    bias_scale: torch.dtype | None = None
    zero_tail: bool = True
    accumulate: bool = False
    b_dtype: torch.dtype | None = None
    arch: str = "sm_100"
    cluster_n: int = 1

    def config(self, kind: str) -> GemmConfig:
        """The tiling; of mma.sync kernels with as many stages as fit in shared memory."""
        arch, form = ARCHS[self.arch], OPERANDS[self.format]
        if not arch.wider_mmas:
            return arch.tilings.deepest(self.tile_m, self.tile_n, kind, form)
        pair = self.arch == "sm_100" and self.tile_m == 256
        return GemmConfig(self.tile_m, self.tile_n, form.tile_k, two_cta=pair, cluster_n=self.cluster_n)

    @property
    def options(self) -> dict:
        return {"format": self.format} | ({"scale_layout": "blocked"} if OPERANDS[self.format].vector else {})


def build(key: gemm_scaled.ScaledGemmKey):
    """Compile the kernel of a key of either kind."""
    launcher = gemm_scaled.GROUPED_GEMM_SCALED if key.kind == VARLEN_M else gemm_scaled.GROUPED_GEMM_SCALED_WGRAD
    return launcher.build(key)


def function(kind: str, case: ScaledCase, a: torch.Tensor, b: torch.Tensor):
    """The compiled kernel; compiled once per process. Only inside ``emulate``."""
    name, form = names.name, OPERANDS[case.format]
    tail = case.zero_tail and kind == VARLEN_M
    spec = EpilogueSpec(
        name(case.out), name(case.bias), name(case.bias_scale), case.accumulate, tail=tail, alpha=form.alpha
    )
    rows_first = kind == VARLEN_M and (case.direction == "rowwise" or form.placed)
    key = gemm_scaled.ScaledGemmKey(
        kind, case.arch, True, case.format, name(a.dtype), name(b.dtype), rows_first, spec, case.config(kind)
    )
    if key not in _compiled:
        _compiled[key] = build(key)
    return _compiled[key]


def run(kind: str, case: ScaledCase, seeds=(0,), edit_ptx=None) -> cute_emulator.LaunchRecord:
    """Run ``case``, maybe of edited PTX, and compare every byte of the output's buffer, for every seed."""
    torch.manual_seed(sum(case.sizes))
    rows, groups = sum(case.sizes) + case.tail, len(case.sizes)
    offs = ends(case.sizes)
    x = poisoned(exact(rows, case.depth), case.sizes)
    bias = torch.randint(-3, 4, (groups, case.columns)).to(case.bias) if case.bias else None
    scale = torch.randint(-2, 3, (rows,)).to(case.bias_scale) if case.bias_scale else None
    q = tgl.group_quantize(x, offs, **case.options)
    shape = (rows, case.columns) if kind == VARLEN_M else (groups, case.depth, case.columns)
    frame = framed(*shape, dtype=case.out)
    expected = torch.full(shape, CANARY, dtype=case.out)
    amax = OPERANDS[case.format].alpha == "amax"
    if kind == VARLEN_M:
        across = case.direction == "columnwise"
        w = exact(groups, *((case.depth, case.columns) if across else (case.columns, case.depth)))
        p = tgl.group_quantize(w, None, **case.options, block_2d=case.format == "fp8_block")
        b = p[3:6] if across else p[:3]
        a = q[:3]
        options = case.options | {"b_direction": case.direction}
        value = tgl.grouped_gemm_scaled
    else:
        dy = poisoned(exact(rows, case.columns), case.sizes)
        p = tgl.group_quantize(dy, offs, **case.options, **({"dtype": case.b_dtype} if case.b_dtype else {}))
        a, b, options, value = q[3:6], p[3:6], case.options, tgl.grouped_gemm_scaled_wgrad
    if OPERANDS[case.format].alpha:  # groups differ in their factors
        which = 2 if amax else 1
        a = (*a[:which], a[which] * 2.0 ** (torch.arange(groups) % 3), *a[which + 1 :])
    factors = (a[2], b[2]) if amax else (None, None)
    if kind == VARLEN_M:
        reference = value(a[0], a[1], b[0], b[1], offs, *factors, bias, scale, **options, out_dtype=case.out)
        end = rows if case.zero_tail else rows - case.tail
        expected[:end] = reference[:end]
    else:
        reference = value(a[0], a[1], b[0], b[1], offs, *factors, **options, out_dtype=torch.float32)
        if case.accumulate:
            total = torch.randint(-3, 4, shape).to(case.out)
            reference += total
        expected = reference.to(case.out)
    with emulate(ARCHS[case.arch].target) as machine, backends.emulated_device(case.arch):
        machine.edit_ptx = edit_ptx
        call = function(kind, case, a[0], b[0])
        for seed in seeds:
            frame.refill()
            if case.accumulate:
                frame.inside.copy_(total)
            machine.seed = seed
            call(a[0], a[1], b[0], b[1], offs, *factors, frame.inside, bias, scale, None, CLUSTERS)
            differ = (frame.inside != expected).sum()
            assert torch.equal(frame.inside, expected), f"seed {seed}: {differ} elements differ"
            assert frame.intact(), f"seed {seed}: written around the output"
        return machine.launches[-1]

"""A kernel that decodes B, compiled for a given tiling and run on the emulator between canaries; what tests share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

import cute_emulator
import tgl
from tests.kernel_cases import CANARY, ends, exact, framed, integers, poisoned, product, stored
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS, DECODING, SWAPPED
from tgl.cutlass_kernels.config import GemmConfig
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.gemm.mma_sync.packed_tilings import PackedSpec, with_stages
from tgl.cutlass_kernels.gemm.sm90.tilings import few_swapped, swapped
from tgl.cutlass_kernels.launchers.gemm_packed import GROUPED_GEMM_PACKED, PACKED, PackedKey
from tgl.cutlass_kernels.runtime import names
from tgl.meta.formats import E4M3, FORMATS
from tgl.testing import emulate

CTAS = 3  # so that they take several tiles, in turn
_compiled: dict = {}


@dataclass(frozen=True)
class Case:
    """A kernel and the sizes it is run on. ``sizes`` are the groups' rows, then ``tail`` rows that hold NaN."""

    shape: tuple[int, int]
    sizes: tuple[int, ...]
    format: str = "mxfp4"
    over_rows: bool = False
    tail: int = 9
    height: int = 136  # N
    width: int = 160  # K
    data: torch.dtype = E4M3  # of 8-bit formats
    dtype: torch.dtype = torch.bfloat16
    out: torch.dtype = torch.bfloat16
    bias: torch.dtype | None = None
    bias_scale: torch.dtype | None = None
    offs: tuple[int, ...] | None = None  # other than the sizes say
    kernel: str = PACKED
    few: bool = False  # a swap AB tile has a multiprocessor for itself

    @property
    def packed(self) -> PackedSpec:
        element = "float4_e2m1" if FORMATS[self.format].per_byte == 2 else names.name(self.data)
        return PackedSpec(self.format, element, self.over_rows)

    @property
    def depth(self) -> int:
        return self.height if self.over_rows else self.width

    @property
    def columns(self) -> int:
        return self.width if self.over_rows else self.height


def tiling(arch: str, case: Case) -> GemmConfig:
    """Return a tiling with as many stages as fit in shared memory."""
    if case.kernel == SWAPPED:
        return few_swapped(case.shape[1]) if case.few else swapped(*case.shape, case.packed)
    if case.kernel == DECODING:
        return GemmConfig(*case.shape)
    return with_stages(case.packed, GemmConfig(*case.shape), ARCHS[arch].smem_bytes)


def kernel(arch: str, case: Case):
    """The compiled kernel; compiled once per process. Only inside ``emulate``."""
    name = names.name
    spec = EpilogueSpec(name(case.out), name(case.bias), name(case.bias_scale), tail=True)
    key = PackedKey(arch, True, case.kernel, name(case.dtype), case.packed, spec, tiling(arch, case))
    if key not in _compiled:
        _compiled[key] = GROUPED_GEMM_PACKED.build(key)
    return _compiled[key]


def components(format: str, shape: tuple[int, int, int], data: torch.dtype = E4M3):
    """Components of matrices ``[G, N, K]`` of which every sum of products with integers is exact."""
    form = FORMATS[format]
    options: dict = {"power_of_two": True} if "power_of_two" in form.options else {}
    if len(form.data_dtypes) > 1:
        options["dtype"] = data
    made = tgl.group_quantize(
        exact(*shape), None, format=format, columnwise=False, block_2d=form.square_scales, **options
    )
    powers = 2.0 ** (torch.arange(shape[0]) % 8)  # other factors for neighbours
    scale = made.scale if form.block else made.scale * powers
    return made.data, scale, 6.0 * 448.0 * powers if form.decodes_with_amax else None


FACTORS = torch.tensor([1.0, 0.1, 0.0, 1e-30, 2.0**-149, 3e38, math.inf, math.nan])
SEAMS = (1.0914713144302368, 2.4518232345581055, 1.6725258827209473)
"""Largest magnitudes of groups whose factors have no two parts in bfloat16 that multiply to the bit."""
NUDGED = (2.0849685668945312, 1.5216737985610962, 1.628003716468811, 0.6842133402824402)
"""Of groups whose factors have two such parts, of which the lower is not the nearest number."""
ENDS = (688127.94, 688128.0, 2688 * 2.0**-80, 2687.9 * 2.0**-80)
"""Of groups at either end of the factors that are taken apart."""
AMAXES = torch.tensor(
    [1.0, 0.0, 0.7, 2688.0, 2.3e-27, 3e38, 2.1e-27, 1e-42, math.inf, math.nan, -1.0, SEAMS[0], *NUDGED, *ENDS]
)
"""Of groups whose weights are anywhere."""


def every_value_of(format, element):
    """Components of matrices that have every code under every scale, at the edges of their range too: scales of NVFP4
    in 256 columns and codes along 16 of a row, else codes in the columns and scales in the groups."""
    codes = torch.arange(256, dtype=torch.uint8)
    if format == "nvfp4":
        groups, along = len(AMAXES), codes[:16:2] | codes[1:16:2] << 4
        data = torch.cat((along, along.flip(0)))[None, None].expand(groups, 256, 16)
        return data.contiguous(), codes[None, :, None].expand(groups, 256, 2).contiguous(), AMAXES
    groups = len(FACTORS)
    data = codes[None, :, None].expand(groups, 256, 32).contiguous().view(element)
    if format == "mxfp8":
        scales = torch.tensor([0, 1, 2, 100, 127, 128, 254, 255], dtype=torch.uint8)
        return data, scales[:, None, None].expand(groups, 256, 1).contiguous(), None
    return data, FACTORS if format == "fp8_tensor" else FACTORS[:, None, None].expand(groups, 2, 1).contiguous(), None


def decoded(format: str, data, scale, amax) -> torch.Tensor:
    """``[G, N, K]`` in float32."""
    square = FORMATS[format].square_scales
    return tgl.group_dequantize(data, scale, None, amax, format=format, out_dtype=torch.float32, block_2d=square)


def run(arch: str, case: Case, seeds=(0, 1), edit_ptx=None, timing: str = "adversarial") -> cute_emulator.LaunchRecord:
    """Run ``case``, maybe of edited PTX, and compare every byte of the output's buffer, for every seed."""
    groups, sizes = len(case.sizes), case.sizes
    parts = components(case.format, (groups, case.height, case.width), case.data)
    w = decoded(case.format, *parts)
    a = poisoned(integers(sum(sizes) + case.tail, case.depth, dtype=case.dtype), sizes)
    bias = integers(groups, case.columns, dtype=case.bias) if case.bias else None
    scale = poisoned(integers(a.shape[0], dtype=case.bias_scale), sizes) if case.bias_scale else None
    expected = product(a, w if case.over_rows else w.transpose(1, 2), sizes, bias, scale).to(case.out)
    offs = ends(sizes) if case.offs is None else torch.tensor(case.offs, dtype=torch.int32)
    frame = framed(a.shape[0], case.columns, dtype=case.out)
    operands = (stored(a, True), parts[0].view(torch.uint8), parts[1], parts[2], offs, frame.inside, bias, scale)
    ordered = case.offs is None  # groups of other offsets overlap, and several CTAs write their rows
    with emulate(ARCHS[arch].target, timing=timing, detect_races=ordered) as machine, backends.emulated_device(arch):
        machine.edit_ptx = edit_ptx
        function = kernel(arch, case)
        for seed in seeds:
            frame.refill()
            machine.seed = seed
            function(*operands, CTAS)
            if ordered:
                assert torch.equal(frame.inside, expected), f"seed {seed}: {(frame.inside != expected).nonzero()[:3]}"
            assert frame.intact(), f"seed {seed}: written around the output"
        assert CANARY not in frame.inside[sum(sizes) :]
        return machine.launches[-1]

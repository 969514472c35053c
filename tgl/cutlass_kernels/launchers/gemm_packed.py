"""GEMMs of dense rows with packed matrices (mixed input)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import backends
from ...meta.formats import FORMATS
from ..archs import ARCHS, DECODING, SWAPPED, Arch, having, serving
from ..config import GemmConfig
from ..epilogue import EpilogueSpec
from ..gemm.mma_sync.packed_tilings import PackedSpec, choose, sharing
from ..runtime import device
from ..runtime.launcher import busy_groups, power_of_two, rows_class, warm
from ..runtime.names import name
from ..runtime.operands import Operand, tensor
from ..runtime.requirements import ROW_MAJOR, ROWS, Need
from .gemm import BIAS, BIAS_SCALE, OFFS, gemm_reason
from .gemm_launcher import OperandLauncher

PACKED = "PackedGroupedGemm"
FEW_ROWS = 32  # per group, up to which swap AB kernels are used
MANY_ROWS = {PACKED: 512, DECODING: 1024}
"""Rows per group from which decoding first and a dense GEMM of wide MMAs is faster, by the packed kernel.

Decoding the matrices to memory first costs 4 bytes written and read per element, 1 ps at 4 TB/s. Per element and row,
mma.sync kernels take 3.3 fs longer, at 300 TFLOP/s instead of 600, and wide MMAs with B decoded by threads 1.4 fs, at
460 instead of 680. The latter was measured: on an H100 it was 1.15 times as fast as the dense GEMM over 512 rows, which
was 1.27 times as fast over 4096.
"""


class PackedKey(NamedTuple):
    """Key of a compiled kernel."""

    arch: str
    emulated: bool
    kernel: str
    element: str
    packed: PackedSpec
    spec: EpilogueSpec
    config: GemmConfig


class PackedGemmCall(NamedTuple):
    """Arguments of ``grouped_gemm_packed``."""

    a: Tensor
    b: Tensor
    b_scale: Tensor
    offs: Tensor
    b_amax: Tensor | None
    bias: Tensor | None
    bias_scale: Tensor | None
    format: str
    over_rows: bool
    out: Tensor


def _scale(key: PackedKey) -> Any:
    """Return what the compiler gets instead of the scales."""
    from ..runtime.compiling import matrix, vector

    scale = "float32" if key.packed.decoding.scale == "float32" else "uint8"
    return matrix(scale, 3, pitch=1, align=4) if key.packed.decoding.block else vector(scale)


def _amax(key: PackedKey) -> Any:
    """Return what the compiler gets instead of the amax of matrices."""
    from ..runtime.compiling import vector

    return vector("float32") if key.packed.decoding.amax else None


class PackedGemmLauncher(OperandLauncher[PackedGemmCall]):
    """``out[t] = a[t] @ w[g] + bias[g] * bias_scale[t]``, where ``w`` is decoded on its way to the tensor cores."""

    op = "grouped_gemm_packed"
    call = PackedGemmCall
    archs = having(PACKED)
    note = "one launch, groups read on the device, matrices decoded on their way to the tensor cores"
    operands = (
        Operand("a", "TK", "element", ROWS),
        Operand("b", "GKN", "packed.element", ROW_MAJOR, stand_in=tensor("matrix", "uint8", 3)),
        # A one-byte scale is copied with the word around it.
        Operand("b_scale", need=Need("rows", pitch=1, address=4), stand_in=_scale),
        Operand("b_amax", stand_in=_amax),
        OFFS,
        Operand("out", "TN", "spec.out", ROW_MAJOR, output=True),
        BIAS,
        BIAS_SCALE,
    )

    def reject_reason(self, c: PackedGemmCall) -> backends.Reason:
        """Return why the kernel does not take the dtypes or K = 0, or that decoding first is faster, or None."""
        reason = gemm_reason(c.a, c.out)
        if reason is not None or self.is_empty(c):
            return reason
        arch, rows = serving(backends.device_arch(c.a.device)), rows_of(c)
        if arch is None or not arch.wider_mmas:
            return None
        many = MANY_ROWS[DECODING if DECODING in arch.kernels else PACKED]
        return None if rows < many else f"decodes in every tile, slower from {many} rows a group on than decoding once"

    def plan_key(self, c: PackedGemmCall) -> tuple | None:
        """Return the plan key; the number of rows enters it as the class of rows per group."""
        a, b, b_scale, _, _, bias, bias_scale, form, over_rows, out = c
        if not warm(a.shape[0], a.data_ptr() | b.data_ptr() | b_scale.data_ptr() | out.data_ptr()):
            return None
        layouts = (a.stride(), out.stride(), b.shape)
        dtypes = (a.dtype, b.dtype, out.dtype, bias is None or bias.dtype, bias_scale is None or bias_scale.dtype)
        return layouts, dtypes, rows_class(a.shape[0], b.shape[0]), form, over_rows

    def key(self, c: PackedGemmCall, arch: str) -> PackedKey:
        """Return the key of the kernel; the tiling follows from the class of rows per group."""
        form = FORMATS[c.format]
        element = "float4_e2m1" if form.per_byte == 2 else name(c.b.dtype)
        packed = PackedSpec(c.format, element, c.over_rows)
        sizes = c.a.shape[0], c.b.shape[0]
        kernel, tiling = kernel_of(ARCHS[arch], packed, name(c.a), rows_of(c), busy_groups(*sizes), c.out.shape[1])
        spec = EpilogueSpec(name(c.out), name(c.bias), name(c.bias_scale), tail=True)
        return PackedKey(arch, not c.a.is_cuda, kernel, name(c.a), packed, spec, tiling)

    def kernel(self, key: PackedKey) -> Callable:
        """Return the kernel of ``key``, to be compiled."""
        from ..runtime.elements import TYPES

        arch = ARCHS[key.arch]
        more = (sharing(key.packed, key.config, arch.smem_bytes),) if key.kernel == PACKED else ()
        return arch.kernel(key.kernel)(key.config, key.spec, TYPES[key.element], key.packed, *more)

    def arguments(self, c: PackedGemmCall) -> tuple:
        """Return the arguments of the kernel, with the matrices as bytes."""
        return self.operand_arguments(c if c.b.dtype == torch.uint8 else c._replace(b=c.b.view(torch.uint8)))

    def warmup_call(self, c: PackedGemmCall) -> None:
        """Return None: the first launch loads the kernel."""

    def device_arguments(self, key: PackedKey, where: torch.device) -> tuple:
        """Return the number of CTAs that run at once."""
        tilings, smem_bytes = ARCHS[key.arch].tilings, ARCHS[key.arch].smem_bytes
        shared = {
            PACKED: lambda: sharing(key.packed, key.config, smem_bytes),
            DECODING: lambda: 1,
            SWAPPED: lambda: tilings.shared_by(key.config),
        }[key.kernel]()
        return (device.clusters(where, 1) * shared,)


def kernel_of(
    arch: Arch, packed: PackedSpec, rows_element: str, rows: int, groups: int, columns: int
) -> tuple[str, GemmConfig]:
    """Return the kernel for groups of ``rows`` rows on average, and its tiling.

    mma.sync kernels are used only where there are no wider MMAs: otherwise the bits of a row would depend on the number
    of rows. The swap AB kernel gives the same bits as the kernel for many rows.

    Args:
        arch: the architecture.
        packed: how the matrices are packed.
        rows_element: dtype of the rows.
        rows: of a group on average.
        groups: how many groups have rows, at most.
        columns: of the product.
    """
    tilings = arch.tilings
    if SWAPPED in arch.kernels and rows <= FEW_ROWS and swappable(packed, rows_element):
        return SWAPPED, tilings.choose_swapped(rows, packed, groups, columns)
    if DECODING in arch.kernels:
        return DECODING, tilings.choose_decoding(rows, packed.elements)
    return PACKED, choose(packed, rows, arch.smem_bytes)


def swappable(packed: PackedSpec, rows_element: str) -> bool:
    """Return whether matrices may be the first operand of wide MMAs.

    Lanes decode pairs of neighbours along the contraction to bfloat16.
    """
    return not packed.over_rows and rows_element == "bfloat16"


def rows_of(c: PackedGemmCall) -> int:
    """Return the rows of a group on average, coarsely."""
    return power_of_two(c.a.shape[0] // c.b.shape[0])


GROUPED_GEMM_PACKED = PackedGemmLauncher()

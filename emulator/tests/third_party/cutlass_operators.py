"""Runs kernels of the ``nvidia-cutlass-operators`` package in the emulator and compares them with torch.

``python -m tests.third_party.cutlass_operators CASE [SEED ...]`` prints one JSON line; inputs are small
integers (and power-of-two scales), so that every sum is exact and equality is demanded.
"""

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack, make_ptr

from . import common

IMPL = "cutlass.operators.providers.cutedsl.gemm.implementations."
STREAM = cuda.CUstream(0)
MAX_CLUSTERS = 4
F8 = {torch.float8_e4m3fn: cutlass.Float8E4M3FN, torch.float8_e5m2: cutlass.Float8E5M2}
DTYPES = {
    "bf16": (torch.bfloat16, cutlass.BFloat16),
    "f16": (torch.float16, cutlass.Float16),
    "f32": (torch.float32, cutlass.Float32),
    "e4m3": (torch.float8_e4m3fn, cutlass.Float8E4M3FN),
    "e5m2": (torch.float8_e5m2, cutlass.Float8E5M2),
    "s8": (torch.int8, cutlass.Int8),
    "s32": (torch.int32, cutlass.Int32),
}


def implementation(module, name):
    return getattr(__import__(IMPL + module, fromlist=[name]), name)


def device_tensor(t):
    """A CuTe tensor over a CPU tensor, with dynamic shape and strides."""
    leading = t.stride().index(1)
    raw = t.view(torch.uint8) if t.dtype in F8 else t
    c = from_dlpack(raw, assumed_align=16)
    if t.dtype in F8:
        c.element_type = F8[t.dtype]
    return c.mark_layout_dynamic(leading_dim=leading)


def by_pieces(t):
    """Return a tensor whose contiguous dimension is a multiple of 16 bytes, for kernels that copy such pieces."""
    leading, order = t.stride().index(1), sorted(range(t.dim()), key=lambda i: -t.stride(i))
    c = from_dlpack(t, assumed_align=16)
    return c.mark_compact_shape_dynamic(leading, tuple(order), divisibility=16 // t.element_size())


def integers(gen, shape, dtype, low=-2, high=2):
    return torch.randint(low, high + 1, shape, generator=gen).to(dtype)


def major(t, transposed):
    """The same values with the last or (``transposed``) the second-last dimension contiguous."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2) if transposed else t.contiguous()


def dense(arch, kernel, ab, acc, out, m, n, k, batch=1, a_major="k", b_major="k", tensor=device_tensor, **_):
    gen = torch.Generator().manual_seed(1)
    dt = DTYPES[ab][0]
    span = 1 if acc == "f16" else 2
    a = major(integers(gen, (batch, m, k), torch.float32, -span, span), a_major == "m").to(dt)
    b = major(integers(gen, (batch, k, n), torch.float32, -span, span), b_major == "k").to(dt)
    c = torch.empty(batch, m, n, dtype=DTYPES[out][0])
    args = [*[tensor(x) for x in (a, b, c)], STREAM]
    compiled = cute.compile[cute.GPUArch(arch)](kernel, *args)
    want = torch.bmm(a.to(torch.float64), b.to(torch.float64)).to(c.dtype)
    return lambda: compiled(*args), c, want


def sm80_dense(arch, ab, acc, out, tile, **case):
    types = (DTYPES[name][1] for name in (ab, ab, out, acc))
    kernel = implementation("sm80_tensorop_gemm_impl", "Sm80TensorOpGemmKernel")(*types)
    assert kernel.cta_tiler[:2] == tile

    @cute.jit
    def call(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
        kernel(a, b, c, stream)

    return dense(arch, call, ab=ab, acc=acc, out=out, tensor=by_pieces, **case)


def sm90_dense(arch, tile, cluster, acc, **case):
    cls = implementation("sm90_static_persistent_impl", "Sm90StaticPersistentGemmKernel")
    kernel = cls(DTYPES[acc][1], tile, cluster)

    @cute.jit
    def call(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
        kernel(a, b, c, MAX_CLUSTERS, stream)

    return dense(arch, call, acc=acc, **case)


def sm100_dense(arch, tile, cluster, acc, two_cta, scheduler="STATIC_PERSISTENT", tma_store=True, **case):
    module = IMPL + "sm100_persistent_impl"
    cls = implementation("sm100_persistent_impl", "PersistentDenseGemmKernel")
    kinds = __import__(module, fromlist=["x"]).PersistentTileSchedulerType
    kernel = cls(DTYPES[acc][1], two_cta, tile, cluster, tma_store, getattr(kinds, scheduler), lambda x: x)

    @cute.jit
    def call(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
        kernel(a, b, c, stream, MAX_CLUSTERS)

    return dense(arch, call, acc=acc, **case)


def sm100_grouped(arch, tile, cluster, two_cta, ab, out, sizes, n, k, b_major="k", **_):
    cls = implementation("sm100_contiguous_offset_2d3d_dense_gemm_impl", "ContiguousOffset2D3DGemmDenseKernel")
    kernel = cls(cutlass.Float32, two_cta, tile, cluster)
    gen = torch.Generator().manual_seed(2)
    dt = DTYPES[ab][0]
    total = sum(sizes)
    a = integers(gen, (total, k), torch.float32).to(dt)
    b = major(integers(gen, (len(sizes), k, n), torch.float32), b_major == "k").to(dt)
    c = torch.empty(total, n, dtype=DTYPES[out][0])
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)

    @cute.jit
    def call(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, offs: cute.Tensor, stream: cuda.CUstream):
        kernel(a, b, c, offs, MAX_CLUSTERS, stream)

    args = [*[device_tensor(x) for x in (a, b, c, ends)], STREAM]
    compiled = cute.compile[cute.GPUArch(arch)](call, *args)
    parts, start = [], 0
    for g, size in enumerate(sizes):
        parts.append(a[start : start + size].double() @ b[g].double())
        start += size
    return lambda: compiled(*args), c, torch.cat(parts).to(c.dtype)


FP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def quantised(gen, fmt, rows, k):
    """K-major data (raw bytes), float64 values, and the CuTe type."""
    if fmt == "e2m1":
        codes = torch.randint(0, 16, (rows, k), generator=gen)
        packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
        return packed.contiguous(), FP4_VALUES[codes].double(), cutlass.Float4E2M1FN
    t, c = DTYPES[fmt]
    values = integers(gen, (rows, k), torch.float32).to(t)
    return values.view(torch.uint8).contiguous(), values.double(), c


def blocked_scales(gen, fmt, rows, blocks):
    """Power-of-two scales and their bytes in 128x4 blocks: byte (r%32)*16 + (r%128//32)*4 + block%4."""
    codes = torch.randint(126, 129, (rows, blocks), generator=gen) if fmt == "ue8m0" else None
    if codes is None:
        codes = torch.tensor([0x30, 0x38, 0x40])[torch.randint(0, 3, (rows, blocks), generator=gen)]
        values = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
    else:
        values = torch.pow(2.0, codes.double() - 127)
    tiles_r, tiles_k = math.ceil(rows / 128), math.ceil(blocks / 4)
    out = torch.zeros(tiles_r, tiles_k, 32, 4, 4, dtype=torch.uint8)
    r, b = torch.meshgrid(torch.arange(rows), torch.arange(blocks), indexing="ij")
    out[r // 128, b // 4, r % 32, r % 128 // 32, b % 4] = codes.to(torch.uint8)
    return out.reshape(-1), values


def sm100_block_scaled(arch, tile, cluster, a_fmt, b_fmt, scale, vec, out, m, n, k, **_):
    module = "sm100_dense_blockscaled_static_persistent_impl"
    cls = implementation(module, "PersistentDenseBlockScaledGemmKernel")
    kernel = cls(vec, tile, cluster)
    major_k = __import__(IMPL + module, fromlist=["x"]).OperandMajorMode.K
    layouts = (major_k, major_k, cutlass.tensor_utils.LayoutEnum.ROW_MAJOR)
    gen = torch.Generator().manual_seed(3)
    a, av, a_type = quantised(gen, a_fmt, m, k)
    b, bv, b_type = quantised(gen, b_fmt, n, k)
    sfa, sav = blocked_scales(gen, scale, m, k // vec)
    sfb, sbv = blocked_scales(gen, scale, n, k // vec)
    c = torch.empty(m, n, dtype=DTYPES[out][0])
    sf_type = cutlass.Float8E8M0FNU if scale == "ue8m0" else cutlass.Float8E4M3FN

    def pointer(t, kind, align=16):
        return make_ptr(kind, t.data_ptr(), cute.AddressSpace.gmem, assumed_align=align)

    @cute.jit
    def call(
        a: cute.Pointer,
        b: cute.Pointer,
        sa: cute.Pointer,
        sb: cute.Pointer,
        c: cute.Pointer,
        mm: cutlass.Int32,
        nn: cutlass.Int32,
        kk: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        kernel(a, b, sa, sb, c, layouts, (mm, nn, kk, cutlass.Int32(1)), MAX_CLUSTERS, stream)

    args = [
        pointer(a, a_type),
        pointer(b, b_type),
        pointer(sfa, sf_type),
        pointer(sfb, sf_type),
        pointer(c, DTYPES[out][1]),
        cutlass.Int32(m),
        cutlass.Int32(n),
        cutlass.Int32(k),
        STREAM,
    ]
    compiled = cute.compile[cute.GPUArch(arch)](call, *args)
    want = (av * sav.repeat_interleave(vec, 1)) @ (bv * sbv.repeat_interleave(vec, 1)).T
    keep = (a, b, sfa, sfb)
    return lambda: (compiled(*args), keep), c, want.to(c.dtype)


def _warps(arch, **kw):
    return {"build": sm80_dense, "arch": arch, "kind": "dense", "tile": (128, 128), "cluster": (1, 1), **kw}


def _sm90(**kw):
    return {"build": sm90_dense, "arch": "sm_90a", "kind": "dense", **kw}


def _sm100(**kw):
    return {"build": sm100_dense, "arch": "sm_100a", "kind": "dense", "two_cta": False, **kw}


def _grouped(**kw):
    return {"build": sm100_grouped, "arch": "sm_100a", "kind": "grouped", "ab": "bf16", "out": "f32", **kw}


def _scaled(**kw):
    return {"build": sm100_block_scaled, "arch": "sm_100a", "kind": "block-scaled", "out": "f32", **kw}


MX8 = {"a_fmt": "e4m3", "b_fmt": "e4m3", "scale": "ue8m0", "vec": 32}
MX4 = {"a_fmt": "e2m1", "b_fmt": "e2m1", "scale": "ue8m0", "vec": 32}
NV4 = {"a_fmt": "e2m1", "b_fmt": "e2m1", "scale": "ue4m3", "vec": 16}
BF16 = {"ab": "bf16", "acc": "f32", "out": "f32"}
CASES = {
    "sm80_bf16": _warps("sm_80", **BF16, m=200, n=264, k=136),
    "sm80_f16_mn_major": _warps(
        "sm_80", ab="f16", acc="f32", out="f16", m=136, n=256, k=72, batch=2, a_major="m", b_major="n"
    ),
    "sm80_f16_accumulate_f16": _warps("sm_80", ab="f16", acc="f16", out="f16", m=256, n=128, k=128),
    "sm80_bf16_out": _warps("sm_80", ab="bf16", acc="f32", out="bf16", m=128, n=136, k=320),
    "sm120_bf16": _warps("sm_120a", **BF16, m=130, n=128, k=96),
    "sm120_f16_mn_major": _warps("sm_120a", ab="f16", acc="f32", out="f32", m=72, n=136, k=200, a_major="m"),
    "sm90_bf16": _sm90(**BF16, tile=(128, 128), cluster=(1, 1), m=200, n=264, k=136),
    "sm90_bf16_cluster_mn_major": _sm90(
        **BF16, tile=(128, 256), cluster=(2, 1), m=384, n=512, k=128, batch=2, a_major="m", b_major="n"
    ),
    "sm90_f16_accumulate_f16": _sm90(
        ab="f16", acc="f16", out="f16", tile=(64, 128), cluster=(1, 2), m=136, n=256, k=128
    ),
    "sm90_fp8": _sm90(ab="e4m3", acc="f32", out="f32", tile=(128, 64), cluster=(1, 1), m=256, n=136, k=256),
    "sm90_int8": _sm90(ab="s8", acc="s32", out="s32", tile=(64, 64), cluster=(1, 1), m=136, n=96, k=160),
    "sm100_bf16": _sm100(**BF16, tile=(128, 128), cluster=(1, 1), m=200, n=264, k=136),
    "sm100_bf16_2cta_mn_major": _sm100(
        **BF16, two_cta=True, tile=(256, 128), cluster=(2, 1), m=520, n=264, k=200, a_major="m", b_major="n"
    ),
    "sm100_bf16_2cta_m128": _sm100(**BF16, two_cta=True, tile=(128, 128), cluster=(2, 2), m=256, n=512, k=128),
    "sm100_bf16_m64": _sm100(**BF16, tile=(64, 64), cluster=(1, 1), m=128, n=128, k=128),
    "sm100_bf16_dynamic": _sm100(**BF16, tile=(128, 128), cluster=(2, 1), m=512, n=384, k=128, scheduler="CLC"),
    "sm100_f16_accumulate_f16": _sm100(
        ab="f16", acc="f16", out="f16", tile=(128, 128), cluster=(1, 1), m=256, n=128, k=128
    ),
    "sm100_tf32": _sm100(ab="f32", acc="f32", out="f32", tile=(128, 64), cluster=(1, 1), m=256, n=128, k=64),
    "sm100_fp8": _sm100(
        ab="e5m2", acc="f32", out="f32", two_cta=True, tile=(256, 64), cluster=(2, 1), m=512, n=128, k=256
    ),
    "sm100_int8": _sm100(ab="s8", acc="s32", out="s32", tile=(128, 64), cluster=(1, 1), m=256, n=128, k=128),
    "sm100_grouped": _grouped(
        two_cta=False, tile=(128, 128), cluster=(1, 1), sizes=(0, 1, 127, 128, 0, 129, 60), n=192, k=136
    ),
    "sm100_grouped_2cta": _grouped(
        two_cta=True, tile=(256, 128), cluster=(2, 1), sizes=(300, 0, 5, 256, 90), n=256, k=128, b_major="n"
    ),
    "sm100_mxfp8": _scaled(**MX8, tile=(128, 128), cluster=(1, 1), m=256, n=256, k=256),
    "sm100_mxfp8_2cta": _scaled(**MX8, tile=(256, 128), cluster=(2, 1), m=512, n=256, k=256),
    "sm100_mxfp8_n64": _scaled(**MX8, tile=(128, 64), cluster=(1, 1), m=256, n=192, k=128),
    "sm100_mxfp8_n192": _scaled(**MX8, tile=(128, 192), cluster=(1, 2), m=256, n=768, k=128),
    "sm100_mxfp4": _scaled(**MX4, tile=(128, 128), cluster=(1, 1), m=256, n=256, k=256),
    "sm100_nvfp4": _scaled(**NV4, tile=(128, 128), cluster=(1, 1), m=256, n=256, k=256),
    "sm100_nvfp4_2cta": _scaled(**NV4, tile=(256, 128), cluster=(4, 1), m=600, n=256, k=512),
    "sm100_mxfp4_mxfp8": _scaled(
        a_fmt="e2m1", b_fmt="e4m3", scale="ue8m0", vec=32, tile=(128, 128), cluster=(1, 1), m=256, n=256, k=256
    ),
}

if __name__ == "__main__":
    common.main("nvidia-cutlass-operators", CASES)

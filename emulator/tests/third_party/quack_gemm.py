"""Runs GEMM kernels of the ``quack-kernels`` package in the emulator and compares them with torch.

``python -m tests.third_party.quack_gemm CASE [SEED ...]`` prints one JSON line. quack patches the DSL when it
is imported, hence a process of its own; it takes the architecture from the environment, hence the late imports.
"""

import importlib.util
import os
import re
import sys
import types

import torch

from . import common

MAX_CLUSTERS = 4
FP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FP6_BIAS = {"mxfp6_e2m3_packed": (3, 1), "mxfp6_e3m2_packed": (2, 3)}


def without_autotuner():
    """Replace quack's autotuner, unused here: it needs triton, which a CPU build of torch does not bring along."""
    if importlib.util.find_spec("triton") is None:
        stub = types.ModuleType("quack.autotuner")
        stub.autotune = lambda *args, **kwargs: lambda function: function
        stub.AutotuneConfig = types.SimpleNamespace
        sys.modules["quack.autotuner"] = stub


def load(arch):
    """quack's GEMM entry for an architecture, told how many clusters fit on the device."""
    os.environ["QUACK_ARCH"] = arch.removesuffix("a")
    os.environ["QUACK_CACHE_ENABLED"] = "0"
    without_autotuner()
    import quack.gemm as module

    module.get_max_active_clusters = lambda *a, **k: MAX_CLUSTERS
    return module.gemm


def integers(gen, *shape, dtype=torch.bfloat16):
    return torch.randint(-2, 3, shape, generator=gen).to(dtype)


def ends(sizes):
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)


def caller(gemm, tile, cluster, a, b, d, **kw):
    """A function that launches the kernel; the first call compiles it."""

    def call():
        gemm(a, b, d, None, None, *tile, *cluster, **kw)

    return call


def dense(arch, tile, cluster, m, n, k, batch=1, options=None, **_):
    gemm = load(arch)
    gen = torch.Generator().manual_seed(1)
    a, b = integers(gen, batch, m, k), integers(gen, batch, n, k)
    d = torch.empty(batch, m, n, dtype=torch.float32)
    want = torch.bmm(a.double(), b.double().transpose(1, 2)).float()
    return caller(gemm, tile, cluster, a, b, d, **(options or {})), d, want


def varlen_m(arch, tile, cluster, sizes, n, k, options=None, gather=False, **_):
    """One group of rows of A per matrix of B; ``gather``: rows of A picked by index."""
    gemm = load(arch)
    gen = torch.Generator().manual_seed(2)
    total = sum(sizes)
    a, b = integers(gen, total, k), integers(gen, len(sizes), n, k)
    d = torch.empty(total, n, dtype=torch.float32)
    kw = dict(options or {}, cu_seqlens_m=ends(sizes))
    rows = a
    if gather:
        a = integers(gen, 2 * total, k)
        index = torch.randperm(2 * total, generator=gen)[:total].to(torch.int32)
        kw["A_idx"], rows = index, a[index.long()]
    parts = rows.double().split(list(sizes))
    want = torch.cat([p @ w.double().T for p, w in zip(parts, b, strict=True)]).float()
    return caller(gemm, tile, cluster, a, b, d, **kw), d, want


def varlen_k(arch, tile, cluster, sizes, m, n, options=None, **_):
    """One product per group of columns of A and B (weight gradients)."""
    gemm = load(arch)
    gen = torch.Generator().manual_seed(3)
    total = sum(sizes)
    a, b = integers(gen, total, m).T, integers(gen, total, n).T
    d = torch.empty(len(sizes), m, n, dtype=torch.float32)
    parts = zip(a.double().split(list(sizes), 1), b.double().split(list(sizes), 1), strict=True)
    want = torch.stack([x @ y.T for x, y in parts]).float()
    return caller(gemm, tile, cluster, a, b, d, **dict(options or {}, cu_seqlens_k=ends(sizes))), d, want


def quantised(gen, fmt, rows, k):
    """K-major data in quack's storage type and its float64 values."""
    if fmt in ("mxfp4", "nvfp4"):
        codes = torch.randint(0, 16, (rows, k), generator=gen)
        packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
        return packed.contiguous().view(torch.float4_e2m1fn_x2), FP4_VALUES[codes].double()
    if fmt in FP6_BIAS:
        mbits, bias = FP6_BIAS[fmt]
        codes = torch.randint(0, 64, (rows, k), generator=gen)
        e, m = codes >> mbits & (1 << 5 - mbits) - 1, codes & (1 << mbits) - 1
        normal = (m + (1 << mbits)) * torch.pow(2.0, (e - bias - mbits).double())
        v = torch.where(e == 0, m * 2.0 ** (1 - bias - mbits), normal) * torch.where(codes >> 5 > 0, -1.0, 1.0)
        word = (codes.reshape(rows, k // 4, 4) << torch.tensor([0, 6, 12, 18])).sum(-1)
        packed = torch.stack([word >> s & 255 for s in (0, 8, 16)], -1).reshape(rows, -1)
        return packed.to(torch.uint8).contiguous(), v
    dt = torch.float8_e4m3fn if fmt == "mxfp8_e4m3" else torch.float8_e5m2
    v = integers(gen, rows, k, dtype=torch.float32).to(dt)
    return v, v.double()


def scales(gen, fmt, rows, blocks):
    """Power-of-two scales and their codes."""
    if fmt == "nvfp4":
        codes = torch.tensor([0x30, 0x38, 0x40])[torch.randint(0, 3, (rows, blocks), generator=gen)].to(torch.uint8)
        return codes, codes.view(torch.float8_e4m3fn).double()
    codes = torch.randint(126, 129, (rows, blocks), generator=gen)
    return codes.to(torch.uint8), torch.pow(2.0, codes.double() - 127)


def blocked(codes, tiles=None, place=None):
    """Scale codes in 128x4 blocks [tiles, k blocks/4, 32, 4, 4]; ``place``: row of each input row."""
    rows, blocks = codes.shape
    place = torch.arange(rows) if place is None else place
    out = torch.zeros(tiles or -(-rows // 128), -(-blocks // 4), 32, 4, 4, dtype=torch.uint8)
    r, b = torch.meshgrid(place, torch.arange(blocks), indexing="ij")
    out[r // 128, b // 4, r % 32, r % 128 // 32, b % 4] = codes
    return out


def block_scaled(arch, tile, cluster, a_fmt, b_fmt, n, k, m=None, sizes=None, options=None, **_):
    """Dense (``m``) or with one group of rows per matrix of B (``sizes``)."""
    gemm = load(arch)
    gen = torch.Generator().manual_seed(4)
    vec = 16 if a_fmt == "nvfp4" else 32
    sf = torch.float8_e4m3fn if a_fmt == "nvfp4" else torch.float8_e8m0fnu
    total, groups = (m, 1) if sizes is None else (sum(sizes), len(sizes))
    a, av = quantised(gen, a_fmt, total, k)
    ac, asv = scales(gen, a_fmt, total, k // vec)
    av = av * asv.repeat_interleave(vec, 1)
    bs, wants, b_blocks = [], [], []
    for part in av.split([total] if sizes is None else list(sizes)):
        b, bv = quantised(gen, b_fmt, n, k)
        bc, bsv = scales(gen, b_fmt, n, k // vec)
        bs.append(b.view(torch.uint8))
        b_blocks.append(blocked(bc))
        wants.append(part @ (bv * bsv.repeat_interleave(vec, 1)).T)
    b = torch.stack(bs).view(a.dtype if a_fmt == b_fmt else quantised(gen, b_fmt, 1, 128)[0].dtype)
    kw = dict(options or {}, bs_format_a=a_fmt, bs_format_b=b_fmt, SFB=torch.stack(b_blocks).view(sf))
    if sizes is None:
        a, want = a[None], torch.stack(wants)
        kw["SFA"] = blocked(ac)[None].view(sf)
        d = torch.empty(1, total, n)
    else:
        # every group starts on a 128-row block of the scales: block (start + 128 * group) // 128
        starts = ends(sizes)[:-1].long()
        place = torch.cat([(starts[g] // 128 + g) * 128 + torch.arange(s) for g, s in enumerate(sizes)])
        kw["SFA"] = blocked(ac, -(-total // 128) + groups, place)[None].view(sf)
        kw["cu_seqlens_m"] = ends(sizes)
        want = torch.cat(wants)
        d = torch.empty(total, n)
    return caller(gemm, tile, cluster, a, b, d, **kw), d, want.float()


def _case(build, arch, kind, **kw):
    return {"build": build, "arch": arch, "kind": kind, "ab": "bf16", "out": "f32", **kw}


def _scaled(a_fmt, b_fmt=None, arch="sm_100a", **kw):
    case = _case(block_scaled, arch, "block-scaled", a_fmt=a_fmt, b_fmt=b_fmt or a_fmt, **kw)
    del case["ab"]
    return case


def _sm120(build, kind, **kw):
    return _case(build, "sm_120a", kind, cluster=(1, 1), **kw)


def fenced(before):
    """A repair: a proxy fence in front of every instruction ``before``."""
    return lambda text: re.sub(
        rf"(?m)^(\s*(?:@!?%\w+\s+)?{re.escape(before)})", r"fence.proxy.async.shared::cta;\n\1", text
    )


# rows gathered by cp.async (generic proxy) are read by the tensor core (async proxy)
UNFENCED = "without fence.proxy.async"
SIZES = (0, 1, 127, 128, 0, 129, 60)
PINGPONG = {"pingpong": True}
CASES = {
    "sm90_dense": _case(dense, "sm_90a", "dense", tile=(128, 128), cluster=(1, 1), m=200, n=264, k=136),
    "sm90_dense_pingpong": _case(
        dense, "sm_90a", "dense", tile=(64, 128), cluster=(2, 1), m=392, n=256, k=128, options=PINGPONG
    ),
    "sm90_grouped": _case(varlen_m, "sm_90a", "grouped", tile=(128, 128), cluster=(1, 1), sizes=SIZES, n=192, k=136),
    "sm90_grouped_pingpong": _case(
        varlen_m, "sm_90a", "grouped", tile=(64, 128), cluster=(1, 2), sizes=SIZES, n=256, k=128, options=PINGPONG
    ),
    "sm90_grouped_gather": _case(
        varlen_m,
        "sm_90a",
        "grouped",
        tile=(128, 128),
        cluster=(1, 1),
        sizes=SIZES,
        n=128,
        k=128,
        gather=True,
        finding={"message": UNFENCED, "repair": fenced("wgmma.fence")},
    ),
    "sm90_weight_gradient": _case(
        varlen_k, "sm_90a", "grouped", tile=(128, 128), cluster=(1, 1), sizes=(64, 0, 1, 200, 63), m=136, n=192
    ),
    "sm100_dense": _case(dense, "sm_100a", "dense", tile=(128, 128), cluster=(1, 1), m=200, n=264, k=136),
    "sm100_dense_2cta": _case(dense, "sm_100a", "dense", tile=(256, 128), cluster=(2, 1), m=520, n=256, k=128, batch=2),
    "sm100_dense_dynamic": _case(
        dense,
        "sm_100a",
        "dense",
        tile=(128, 128),
        cluster=(2, 1),
        m=512,
        n=384,
        k=128,
        options={"is_dynamic_persistent": True},
    ),
    "sm100_grouped": _case(varlen_m, "sm_100a", "grouped", tile=(128, 128), cluster=(1, 1), sizes=SIZES, n=192, k=136),
    "sm100_grouped_2cta": _case(
        varlen_m, "sm_100a", "grouped", tile=(256, 128), cluster=(2, 1), sizes=(300, 0, 5, 256, 90), n=256, k=128
    ),
    "sm100_grouped_gather": _case(
        varlen_m,
        "sm_100a",
        "grouped",
        tile=(128, 128),
        cluster=(1, 1),
        sizes=SIZES,
        n=128,
        k=128,
        gather=True,
        finding={"message": UNFENCED, "repair": fenced("tcgen05.mma")},
    ),
    "sm100_grouped_tma_gather": _case(
        varlen_m,
        "sm_100a",
        "grouped",
        tile=(128, 128),
        cluster=(1, 1),
        sizes=SIZES,
        n=128,
        k=128,
        gather=True,
        options={"use_tma_gather": True},
    ),
    "sm100_weight_gradient": _case(
        varlen_k, "sm_100a", "grouped", tile=(128, 128), cluster=(1, 1), sizes=(64, 0, 1, 200, 63), m=136, n=192
    ),
    "sm100_mxfp8": _scaled("mxfp8_e4m3", tile=(128, 128), cluster=(1, 1), m=200, n=256, k=256),
    "sm100_mxfp8_grouped": _scaled("mxfp8_e4m3", tile=(128, 128), cluster=(1, 1), sizes=SIZES, n=256, k=256),
    "sm100_mxfp8_grouped_2cta": _scaled("mxfp8_e4m3", tile=(256, 128), cluster=(2, 1), sizes=SIZES, n=256, k=256),
    "sm100_mxfp4": _scaled("mxfp4", tile=(128, 128), cluster=(1, 1), m=256, n=256, k=256),
    "sm100_nvfp4": _scaled("nvfp4", tile=(128, 128), cluster=(1, 1), m=256, n=256, k=256),
    "sm100_nvfp4_2cta": _scaled("nvfp4", tile=(256, 192), cluster=(2, 1), m=512, n=384, k=512),
    "sm100_fp6_fp6": _scaled(
        "mxfp6_e2m3_packed", "mxfp6_e3m2_packed", tile=(128, 128), cluster=(1, 1), m=256, n=256, k=256
    ),
    "sm100_fp8_fp4": _scaled("mxfp8_e5m2", "mxfp4", tile=(256, 128), cluster=(2, 1), m=512, n=256, k=256),
    "sm120_dense": _sm120(dense, "dense", tile=(128, 128), m=200, n=264, k=136),
    "sm120_dense_pingpong": _sm120(dense, "dense", tile=(64, 128), m=392, n=256, k=128, options=PINGPONG),
    "sm120_grouped": _sm120(varlen_m, "grouped", tile=(128, 128), sizes=SIZES, n=192, k=136),
    "sm120_grouped_pingpong": _sm120(varlen_m, "grouped", tile=(64, 128), sizes=SIZES, n=256, k=128, options=PINGPONG),
    "sm120_grouped_gather": _sm120(varlen_m, "grouped", tile=(128, 128), sizes=SIZES, n=128, k=128, gather=True),
    "sm120_weight_gradient": _sm120(varlen_k, "grouped", tile=(128, 128), sizes=(64, 1, 200, 63), m=136, n=192),
    "sm120_mxfp8": _scaled("mxfp8_e4m3", arch="sm_120a", tile=(128, 128), cluster=(1, 1), m=200, n=256, k=256),
    "sm120_mxfp8_grouped": _scaled(
        "mxfp8_e4m3", arch="sm_120a", tile=(128, 128), cluster=(1, 1), sizes=SIZES, n=256, k=256
    ),
    "sm120_mxfp4": _scaled("mxfp4", arch="sm_120a", tile=(128, 128), cluster=(1, 1), m=256, n=256, k=256),
    "sm120_nvfp4": _scaled("nvfp4", arch="sm_120a", tile=(128, 128), cluster=(1, 1), m=256, n=256, k=256),
    "sm120_nvfp4_grouped": _scaled("nvfp4", arch="sm_120a", tile=(128, 128), cluster=(1, 1), sizes=SIZES, n=256, k=256),
}

if __name__ == "__main__":
    common.main("quack-kernels", CASES)

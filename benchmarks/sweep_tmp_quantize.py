
import torch

import tgl

torch.manual_seed(0)
dev = "cuda"


def cpu(c):
    return [t.cpu().view(torch.uint8) for t in c]


# correctness
for sizes, tail, K in (((5, 0, 130, 127, 128, 129, 1, 0, 40), 9, 272), ((300,) * 5, 100, 2048)):
    T = sum(sizes) + tail
    x = (torch.randn(T, K) * torch.exp2(torch.randint(-20, 20, (T, K)).float())).bfloat16()
    x[sum(sizes) :] = float("nan")
    x[3, 5] = float("inf")
    offs = torch.tensor(sizes).cumsum(0).int()
    for lay in ("blocked", "compact"):
        for sc in ("rceil", "floor", "even"):
            ref = cpu(tgl.group_quantize(x, offs, format="mxfp8", scale_layout=lay, scaling=sc))
            got = cpu(tgl.group_quantize(x.to(dev), offs.to(dev), format="mxfp8", scale_layout=lay, scaling=sc))
            assert all(torch.equal(a, b) for a, b in zip(ref, got)), (
                lay,
                sc,
                [(a != b).sum() for a, b in zip(ref, got)],
            )
print("bytes equal to the CPU's")
w = torch.randn(4, 200, 256).bfloat16()
assert all(
    torch.equal(a, b)
    for a, b in zip(
        cpu(tgl.group_quantize(w, None, format="mxfp8", scale_layout="blocked")),
        cpu(tgl.group_quantize(w.to(dev), None, format="mxfp8", scale_layout="blocked")),
    )
)
flush = torch.empty(256 << 20, dtype=torch.uint8, device=dev)


def graph(f):
    s = torch.cuda.Stream()
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        f()
        f()
    torch.cuda.current_stream().wait_stream(s)
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        f()
    return g


def time(gs, n=40):
    ts = {k: [] for k in gs}
    for i in range(n):
        for k, g in gs.items():
            flush.zero_()
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            g.replay()
            b.record()
            torch.cuda.synchronize()
            ts[k].append(a.elapsed_time(b))
    return {k: sorted(v)[len(v) // 2] for k, v in ts.items()}


import tempfile

from tgl.cutlass_kernels import cache
from tgl.cutlass_kernels.quantize import calls, mxfp8

VARIANTS = [
    dict(OCCUPANCY=o, AHEAD=a, CHUNK=c, BLOCKS=b)
    for o, a, c, b in (
        (3, False, 8, 2048),
        (2, False, 8, 2048),
        (4, False, 8, 2048),
        (2, True, 8, 2048),
        (3, False, 2, 2048),
        (3, False, 8, 512),
        (3, False, 4, 4096),
        (3, False, 1, 1),
    )
]
SHAPES = (
    ("mixtral-fc1", 16384, 4096, 8),
    ("mixtral-fc2", 16384, 14336, 8),
    ("qwen3-g128-fc1", 65536, 2048, 128),
    ("qwen3-g128-fc2", 65536, 768, 128),
    ("deepseek-fc1", 65536, 7168, 32),
)

for name, T, K, G in SHAPES:
    for rout in ("balanced", "zipf"):
        p = torch.ones(G) if rout == "balanced" else 1 / torch.arange(1, G + 1).float()
        sizes = (p / p.sum() * T).int()
        sizes[0] += T - sizes.sum()
        offs = sizes.cumsum(0).int().to(dev)
        x = torch.randn(T, K, device=dev, dtype=torch.bfloat16)
        y = torch.empty_like(x)
        gs = {"copy": graph(lambda: y.copy_(x))}
        keep = []
        for v, var in enumerate(VARIANTS):
            for n_, val in var.items():
                setattr(mxfp8, n_, val)
            calls._plans.clear()
            cache.set_directory(f"{tempfile.gettempdir()}/qs{v}")
            for mode, o in (("both", {}), ("row", dict(columnwise=False)), ("col", dict(rowwise=False))):
                b = tgl.group_quantize(x, offs, format="mxfp8", scale_layout="blocked", **o)
                gs[f"{v}{mode}"] = graph(
                    lambda o=o, b=b: tgl.group_quantize(x, offs, format="mxfp8", scale_layout="blocked", out=b, **o)
                )
                keep.append(b)
        t = time(gs, 12)
        cb = 4 * T * K / t["copy"] / 1e9
        by = {"both": 4 + 2 / 32, "row": 3 + 1 / 32, "col": 3 + 1 / 32}
        print(name, rout, f"copy {cb:.2f} TB/s", flush=True)
        for v, var in enumerate(VARIANTS):
            print(
                "   ",
                list(var.values()),
                {m: round(by[m] * T * K / t[f"{v}{m}"] / 1e9 / cb, 3) for m in by},
                flush=True,
            )
        del gs, keep
        torch.cuda.empty_cache()

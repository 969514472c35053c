"""The two kinds of MMA of a Hopper device on the same products: ``mma.sync`` m16n8k16 against ``wgmma`` m64n8k16.

Both take bfloat16 and add to float32, step by step along K. Fragments of A and of the sums are the same registers for
both; B lies in shared memory for one and comes from there for the other.
"""

from typing import NamedTuple

import numpy as np

from ..ptx import module

STEPS, THREADS, SHARED = 8, 128, 8192
M, N, K = 64, 8, 16 * STEPS
ROUNDING = K * 2.0**-22
"""Of a sum whose every term loses up to two of float32's last bits, as a fraction of the terms' magnitude."""


class Outcome(NamedTuple):
    """Sums, how many differ between the two, and the largest error of either as a fraction of the terms' magnitude."""

    sums: int
    differing: int
    error: float


def text():
    """Return a kernel with one CTA per product of 64 x 8."""
    body = [
        "  mov.u32 %r4, %ctaid.x;",
        f"  mad.lo.u32 %r5, %r4, {STEPS * THREADS}, %r0;",
        "  mad.wide.u32 %rd3, %r5, 16, %rd0;",
        f"  mad.lo.u32 %r6, %r4, {STEPS * 64}, %r0;",
        "  mad.wide.u32 %rd4, %r6, 4, %rd1;",
        f"  mad.lo.u32 %r7, %r4, {THREADS}, %r0;",
        "  mad.wide.u32 %rd5, %r7, 32, %rd2;",
        "  setp.lt.u32 %p1, %r0, 64;",
        "  shl.b32 %r8, %r0, 2;",
        "  add.u32 %r8, %r8, %r2;",
        "  and.b32 %r9, %r0, 31;",
        "  shl.b32 %r9, %r9, 2;",
        "  add.u32 %r9, %r9, %r2;",
    ]
    for step in range(STEPS):
        a = [f"%r{16 + 4 * step + i}" for i in range(4)]
        body += [
            f"  ld.global.v4.b32 {{{', '.join(a)}}}, [%rd3+{step * THREADS * 16}];",
            f"  @%p1 ld.global.b32 %r10, [%rd4+{step * 256}];",
            f"  @%p1 st.shared.b32 [%r8+{step * 256}], %r10;",
        ]
    body += [f"  mov.f32 %f{i}, 0f00000000;" for i in range(8)]
    body += ["  fence.proxy.async.shared::cta;", "  bar.sync 0;", "  wgmma.fence.sync.aligned;"]
    for step in range(STEPS):
        a = ", ".join(f"%r{16 + 4 * step + i}" for i in range(4))
        body += [
            f"  add.u32 %r11, %r2, {step * 256};",
            "  shr.u32 %r11, %r11, 4;",
            "  cvt.u64.u32 %rd6, %r11;",
            "  or.b64 %rd6, %rd6, 68720001024;",  # from one block of 8 x 8 to the next along K and N: 128, 256 bytes
            f"  wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f0, %f1, %f2, %f3}}, {{{a}}}, %rd6, 1, 1, 1, 0;",
        ]
    body += ["  wgmma.commit_group.sync.aligned;", "  wgmma.wait_group.sync.aligned 0;"]
    for step in range(STEPS):
        a = ", ".join(f"%r{16 + 4 * step + i}" for i in range(4))
        body += [
            f"  ld.shared.b32 %r12, [%r9+{step * 256}];",
            f"  ld.shared.b32 %r13, [%r9+{step * 256 + 128}];",
            "  mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            f"{{%f4, %f5, %f6, %f7}}, {{{a}}}, {{%r12, %r13}}, {{%f4, %f5, %f6, %f7}};",
        ]
    body += ["  st.global.v4.f32 [%rd5], {%f0, %f1, %f2, %f3};", "  st.global.v4.f32 [%rd5+16], {%f4, %f5, %f6, %f7};"]
    return module("\n".join(body), pointers=3)


def operands(products, spread, seed=0):
    """bfloat16 bits of A ``[products, 64, K]`` and B ``[products, 8, K]``; ``spread``: of the exponents, both ways."""
    made = np.random.default_rng(seed)

    def bits(*shape):
        values = made.standard_normal(shape) * np.exp2(made.integers(-spread, spread + 1, shape))
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    return bits(products, M, K), bits(products, N, K)


def fragments(a, b):
    """The words of both as the threads read them."""
    thread, register, half = np.ogrid[:THREADS, :4, :2]
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (register % 2)
    column = 2 * (thread % 4) + half + 8 * (register // 2)
    word, other = np.ogrid[:64, :2]
    depth = 8 * (word // 32) + 2 * (word % 4) + other
    steps = 16 * np.arange(STEPS)
    left = a[:, row[None], column[None] + steps[:, None, None, None]]
    right = b[:, (word % 32 // 4)[None], depth[None] + steps[:, None, None]]
    return tuple(np.ascontiguousarray(t).view(np.uint32)[..., 0] for t in (left, right))


def outcome(a, b, sums):
    """Return the results of both kinds for ``a`` and ``b``: ``sums``, float32 ``[products, 128, 8]`` by thread."""
    thread, register = np.ogrid[:THREADS, :4]
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (register // 2)
    column = 2 * (thread % 4) + register % 2
    left, right = ((t.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for t in (a, b))
    exact = np.einsum("pmk,pnk->pmn", left, right)[:, row, column]
    magnitude = np.einsum("pmk,pnk->pmn", abs(left), abs(right))[:, row, column]
    first, second = sums[..., :4], sums[..., 4:]
    error = max((abs(t - exact) / magnitude).max() for t in (first, second))
    return Outcome(first.size, int((first.view(np.uint32) != second.view(np.uint32)).sum()), float(error))


def compare(device, products=256, spread=12):
    """The outcome on a device."""
    a, b = operands(products, spread)
    given = [device.upload(t.tobytes()) for t in fragments(a, b)]
    size = products * THREADS * 8 * 4
    written = device.upload(bytes(size))
    params = [p.to_bytes(8, "little") for p in (*given, written)]
    device.launch(device.load(text().encode(), "kernel"), (products, 1, 1), (THREADS, 1, 1), params, SHARED)
    return outcome(a, b, np.frombuffer(device.download(written, size), np.float32).reshape(products, THREADS, 8))

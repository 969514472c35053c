"""Operand order and modifiers of instructions as they are translated: each computes a value from the lane number.

The arithmetic itself is tested on the functions of ``numerics``; here the expected value is a Python integer.
"""

import struct

import pytest
import torch

from cute_emulator import SyncError, emulate

from .ptx import module

M32 = 0xFFFFFFFF


def bits(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def run(body, arch="sm_90a", warps=1, cluster=1, ctas=1):
    """Value of %r5 (32 bits) of every thread."""
    out = torch.zeros(ctas * 32 * warps, dtype=torch.int32)
    store = """
  mov.u32 %r60, %ctaid.x;
  mov.u32 %r61, %ntid.x;
  mad.lo.s32 %r62, %r60, %r61, %r0;
  mul.wide.u32 %rd30, %r62, 4;
  add.s64 %rd30, %rd0, %rd30;
  st.global.b32 [%rd30], %r5;
"""
    with emulate(arch) as m:
        m.launch_ptx(
            module(body + store, 1, arch), (out,), grid=(ctas, 1, 1), block=(32 * warps, 1, 1),
            cluster=(cluster, 1, 1), smem=4096,
        )  # fmt: skip
    return [v & M32 for v in out.tolist()]


# %r0 is the lane, i in the expected value
CASES = {
    "sub": ("sub.s32 %r5, 10, %r0;", lambda i: 10 - i),
    "mad.lo": ("mad.lo.s32 %r5, %r0, 7, 100;", lambda i: 7 * i + 100),
    "mad.wide": ("mad.wide.u32 %rd5, %r0, 3, 5; cvt.u32.u64 %r5, %rd5;", lambda i: 3 * i + 5),
    "mul.hi": ("shl.b32 %r4, %r0, 28; mul.hi.u32 %r5, %r4, 64;", lambda i: ((i << 28 & M32) * 64) >> 32),
    "div": ("div.u32 %r5, 1000, %r0;", lambda i: 1000 // i if i else M32),
    "rem": ("rem.s32 %r5, %r0, 7;", lambda i: i % 7),
    "min of signed": ("sub.s32 %r4, %r0, 16; min.s32 %r5, %r4, 3;", lambda i: min(i - 16, 3)),
    "least, not negative": ("sub.s32 %r4, %r0, 5; min.relu.s32 %r5, %r4, 9;", lambda i: max(min(i - 5, 9), 0)),
    "max of halves": ("max.u16x2 %r5, 0xFFFF0007, %r0;", lambda i: 0xFFFF0000 | max(i, 7)),
    "min of signed halves": ("sub.s32 %r4, 7, %r0; min.s16x2 %r5, %r4, 0x1FFFF;", lambda i:
                             (0 if i <= 7 else 0xFFFF0000) | (0xFFFF if i <= 7 else (7 - i) & 0xFFFF)),
    "abs": ("sub.s32 %r4, %r0, 16; abs.s32 %r5, %r4;", lambda i: abs(i - 16)),
    "neg": ("neg.s32 %r5, %r0;", lambda i: -i),
    "not": ("not.b32 %r5, %r0;", lambda i: ~i),
    "shl beyond the width": ("shl.b32 %r5, 3, %r0; shl.b32 %r5, %r5, 8;", lambda i: 3 << i << 8),
    "shr of signed": ("sub.s32 %r4, %r0, 16; shr.s32 %r5, %r4, 2;", lambda i: (i - 16) >> 2),
    "shf.l": ("shf.l.wrap.b32 %r5, 0xF0000000, 0x12345678, %r0;",
              lambda i: (((0x12345678 << 32 | 0xF0000000) << i) >> 32)),
    "shf.r": ("shf.r.clamp.b32 %r5, 0xF0000000, 0x12345678, %r0;", lambda i: (0x12345678 << 32 | 0xF0000000) >> i),
    "prmt": ("prmt.b32 %r5, %r0, 0x44332211, 0x7054;", lambda i: 0x44 << 24 | i << 16 | 0x22 << 8 | 0x11),
    "dp4a": ("mul.lo.u32 %r4, %r0, 0x01010101; dp4a.u32.s32 %r5, %r4, 0xFF020304, -7;", lambda i: 8 * i - 7),
    "dp2a.lo": ("mul.lo.u32 %r4, %r0, 0x00010001; dp2a.lo.s32.u32 %r5, %r4, 0x010203FF, 5;", lambda i: 258 * i + 5),
    "dp2a.hi": ("mul.lo.u32 %r4, %r0, 0x00010001; dp2a.hi.u32.s32 %r5, %r4, 0xFE05FFFF, 5;", lambda i: 3 * i + 5),
    "lop3": ("lop3.b32 %r5, %r0, 12, 10, 0xCA;", lambda i: (i & 12) | (~i & 10)),
    "bfe": ("bfe.u32 %r5, 0x12345678, %r0, 8;", lambda i: 0x12345678 >> i & 255),
    "bfi": ("bfi.b32 %r5, %r0, 0xFFFF0000, 4, 5;", lambda i: 0xFFFF0000 | i << 4),
    "clz": ("clz.b32 %r5, %r0;", lambda i: 32 - i.bit_length()),
    "popc": ("popc.b32 %r5, %r0;", lambda i: bin(i).count("1")),
    "brev": ("brev.b32 %r5, %r0;", lambda i: int(f"{i:032b}"[::-1], 2)),
    "bfind": ("bfind.u32 %r5, %r0;", lambda i: i.bit_length() - 1),
    "fns": ("fns.b32 %r5, 0x0000F0F1, 5, %r0;", lambda i: [5, 5, 6, 7, 12, 13, 14, 15][i] if i < 8 else M32),
    "fns downwards": ("neg.s32 %r4, %r0; fns.b32 %r5, 0x0000F0F1, 6, %r4;",
                      lambda i: [6, 6, 5, 4, 0][i] if i < 5 else M32),
    "selp": ("setp.lt.u32 %p1, %r0, 5; selp.b32 %r5, 1, 2, %p1;", lambda i: 1 if i < 5 else 2),
    "setp of signed": ("sub.s32 %r4, %r0, 16; setp.lt.s32 %p1, %r4, -3; selp.b32 %r5, 1, 2, %p1;",
                       lambda i: 1 if i - 16 < -3 else 2),
    "setp of unsigned": ("sub.s32 %r4, %r0, 16; setp.lo.u32 %p1, %r4, 5; selp.b32 %r5, 1, 2, %p1;",
                         lambda i: 1 if (i - 16) & M32 < 5 else 2),
    "setp with and": ("setp.gt.s32 %p2, %r0, 3; setp.lt.and.s32 %p1, %r0, 9, %p2; selp.b32 %r5, 1, 2, %p1;",
                      lambda i: 1 if 3 < i < 9 else 2),
    "setp with two results": ("setp.lt.s32 %p1|%p2, %r0, 9; selp.b32 %r4, 1, 0, %p1; selp.b32 %r5, 6, %r4, %p2;",
                              lambda i: 1 if i < 9 else 6),
    "guard": ("mov.b32 %r5, 7; setp.gt.s32 %p1, %r0, 20; @%p1 mov.b32 %r5, 9; @!%p1 add.s32 %r5, %r5, 1;",
              lambda i: 9 if i > 20 else 8),
    "guard inside a diverged block": (
        "setp.gt.s32 %p1, %r0, 20; @%p1 bra SKIP; mov.b32 %r4, 7; setp.gt.s32 %p2, %r0, 10; @%p2 mov.b32 %r4, 9; "
        "add.s32 %r5, %r4, 1;\nSKIP:\n", lambda i: 0 if i > 20 else 10 if i > 10 else 8),
    "mov to halves": ("mov.b32 {%h1, %h2}, 0x00070003; cvt.u32.u16 %r4, %h2; add.s32 %r5, %r4, %r0;", lambda i: 7 + i),
    "mov from halves": ("cvt.u16.u32 %h1, %r0; mov.b32 %r5, {%h1, 5};", lambda i: 5 << 16 | i),
    "mov to words": ("mul.wide.u32 %rd5, %r0, 0x10000000; mov.b64 {%r4, %r5}, %rd5;", lambda i: i * 0x10000000 >> 32),
    "cvt of signed": ("sub.s32 %r4, %r0, 16; cvt.s8.s32 %r5, %r4;", lambda i: i - 16),
    "cvt.pack": ("sub.s32 %r4, %r0, 16; cvt.pack.sat.s8.s32.b32 %r5, %r4, 300, 0x4321;",
                 lambda i: (0x4321 << 16 | ((i - 16) & 255) << 8 | 127)),
    "guarded pair": ("mov.b128 %q1, {1, 2}; cvt.u64.u32 %rd5, %r0; setp.gt.s32 %p1, %r0, 20; "
                     "@%p1 mov.b128 %q1, {%rd5, %rd5}; mov.b128 {%rd6, %rd7}, %q1; cvt.u32.u64 %r5, %rd7;",
                     lambda i: i if i > 20 else 2),
    "cvt to float": ("cvt.rn.f32.u32 %f1, %r0; mov.b32 %r5, %f1;", lambda i: bits(float(i))),
    "fma": ("cvt.rn.f32.u32 %f1, %r0; fma.rn.f32 %f2, %f1, 0f40000000, 0f3F800000; mov.b32 %r5, %f2;",
            lambda i: bits(2.0 * i + 1)),
    "sub of floats": ("cvt.rn.f32.u32 %f1, %r0; sub.rn.f32 %f2, %f1, 0f40000000; mov.b32 %r5, %f2;",
                      lambda i: bits(i - 2.0)),
    "setp of floats": ("cvt.rn.f32.u32 %f1, %r0; setp.geu.f32 %p1, %f1, 0f40A00000; selp.b32 %r5, 1, 2, %p1;",
                       lambda i: 1 if i >= 5 else 2),
    "packed bf16": ("mov.b32 %r4, 0x3F804000; fma.rn.bf16x2 %r5, %r4, %r4, %r4;", lambda i: 0x400040C0),
    "cvt to bf16x2": ("cvt.rn.f32.u32 %f1, %r0; cvt.rn.bf16x2.f32 %r5, 0f3F800000, %f1;",
                      lambda i: 0x3F80 << 16 | bits(float(i)) >> 16),
    "shfl.idx": ("shfl.sync.idx.b32 %r5, %r0, 5, 31, -1;", lambda i: 5),
    "shfl.bfly": ("shfl.sync.bfly.b32 %r5, %r0, 3, 31, -1;", lambda i: i ^ 3),
    "shfl.up": ("shfl.sync.up.b32 %r5, %r0, 4, 0, -1;", lambda i: i - 4 if i >= 4 else i),
    "shfl.down in segments": ("shfl.sync.down.b32 %r5, %r0, 1, 0x181F, -1;", lambda i: i + 1 if i % 8 < 7 else i),
    "shfl with a predicate": ("shfl.sync.down.b32 %r4|%p1, %r0, 1, 31, -1; selp.b32 %r5, %r4, 99, %p1;",
                              lambda i: i + 1 if i < 31 else 99),
    "vote.ballot": ("setp.lt.u32 %p1, %r0, 3; vote.sync.ballot.b32 %r5, %p1, -1;", lambda i: 7),
    "vote.all": ("setp.lt.u32 %p1, %r0, 3; vote.sync.all.pred %p2, %p1, -1; selp.b32 %r5, 1, 0, %p2;", lambda i: 0),
    "redux": ("redux.sync.max.u32 %r5, %r0, -1;", lambda i: 31),
    "elect": ("elect.sync _|%p1, -1; selp.b32 %r5, 1, 0, %p1;", lambda i: int(i == 0)),
    "lanemask": ("mov.u32 %r5, %lanemask_lt;", lambda i: (1 << i) - 1),
    "local memory": ("mov.u64 %rd5, depot; mul.wide.u32 %rd6, %r0, 4; add.s64 %rd5, %rd5, 8; "
                     "st.local.b32 [%rd5], %r0; st.local.b32 [%rd5+4], 77; ld.local.b32 %r5, [%rd5];", lambda i: i),
    "generic address": ("cvt.u64.u32 %rd5, %r2; cvta.shared.u64 %rd5, %rd5; mul.wide.u32 %rd6, %r0, 4; "
                        "add.s64 %rd5, %rd5, %rd6; st.b32 [%rd5], %r0; ld.b32 %r5, [%rd5];", lambda i: i),
    "bytes": ("add.s32 %r3, %r2, %r0; st.shared.b8 [%r3], %r0; ld.shared.s8 %r5, [%r3];", lambda i: i),
    "vectors": ("shl.b32 %r3, %r0, 4; add.s32 %r3, %r3, %r2; st.shared.v4.b32 [%r3], {%r0, 1, 2, 3}; "
                "ld.shared.v2.b32 {%r6, %r7}, [%r3]; ld.shared.b32 %r8, [%r3+12]; add.s32 %r5, %r6, %r8;",
                lambda i: i + 3),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_value_of_every_lane(name):
    body, want = CASES[name]
    body = "  .local .align 8 .b8 depot[64];\n  mov.b32 %r5, 0;\n  " + body.replace("; ", ";\n  ")
    assert run(body) == [want(i) & M32 for i in range(32)]


def test_special_registers():
    body = "  mov.u32 %r3, %cluster_ctarank;\n  mov.u32 %r4, %warpid;\n  mov.u32 %r6, %nctaid.x;\n"
    body += "  mad.lo.s32 %r5, %r3, 100, %r4;\n  mad.lo.s32 %r5, %r6, 1000, %r5;"
    assert run(body, warps=2, cluster=2, ctas=4) == [
        4000 + 100 * (c % 2) + t // 32 for c in range(4) for t in range(64)
    ]


def test_distributed_shared_memory():
    body = """
  mov.u32 %r3, %cluster_ctarank;
  xor.b32 %r4, %r3, 1;
  mapa.shared::cluster.u32 %r6, %r2, %r4;
  shl.b32 %r7, %r0, 2;
  add.s32 %r6, %r6, %r7;
  barrier.cluster.arrive.aligned;
  barrier.cluster.wait.aligned;
  mad.lo.s32 %r8, %r3, 100, %r0;
  st.shared::cluster.b32 [%r6], %r8;
  barrier.cluster.arrive.aligned;
  barrier.cluster.wait.aligned;
  add.s32 %r7, %r7, %r2;
  ld.shared.b32 %r5, [%r7];
"""
    assert run(body, cluster=2, ctas=2) == [100 + i for i in range(32)] + list(range(32))


def test_matrices_move_as_documented():
    """stmatrix and ldmatrix: lane t holds row t / 4, columns 2 (t % 4) and + 1; transposed, the other way round."""
    store = """
  and.b32 %r3, %r0, 7;
  shl.b32 %r3, %r3, 4;
  add.s32 %r3, %r3, %r2;
  shl.b32 %r4, %r0, 17;
  mad.lo.s32 %r4, %r0, 2, %r4;
  add.s32 %r4, %r4, 65536;
  stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r3], {%r4};
"""
    same = run(store + "  ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [%r3];\n")
    assert same == [(2 * t + 1) << 16 | 2 * t for t in range(32)]
    turned = run(store + "  ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r5}, [%r3];\n")
    assert turned == [(8 * (2 * (t % 4) + 1) + t // 4) << 16 | (8 * (2 * (t % 4)) + t // 4) for t in range(32)]


@pytest.mark.parametrize("register", range(4))
def test_matrices_of_bytes_move_as_documented(register):
    """Lane t gets rows 4 (t % 4) to + 3 of columns t / 4 and t / 4 + 8, of 16 rows and then of the next 16."""
    names = [f"%r{3 + i}" for i in range(4)]
    names[register], names[2] = names[2], names[register]
    body = """
  shl.b32 %r3, %r0, 4;
  add.s32 %r4, %r3, %r2;
  and.b32 %r3, %r3, 255;
  mul.lo.s32 %r3, %r3, 16843009;
  add.s32 %r3, %r3, 50462976;
  st.shared.b32 [%r4], %r3;
  add.s32 %r3, %r3, 67372036;
  st.shared.b32 [%r4+4], %r3;
  add.s32 %r3, %r3, 67372036;
  st.shared.b32 [%r4+8], %r3;
  add.s32 %r3, %r3, 67372036;
  st.shared.b32 [%r4+12], %r3;
"""
    load = f"  ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 {{{', '.join(names)}}}, [%r4];\n"
    column = register % 2 * 8
    want = [sum((16 * (4 * (t % 4) + i) + t // 4 + column) << 8 * i for i in range(4)) for t in range(32)]
    assert run(body + load) == want


@pytest.mark.parametrize(
    "op, value, final",
    [("add.u32", "%r0", sum(range(32))), ("max.s32", "%r0", 31), ("or.b32", "%r0", 31), ("inc.u32", "9", 2)],
)
def test_atomics_on_shared_memory(op, value, final):
    body = f"""
  @%p0 st.shared.b32 [%r2], 0;
  bar.sync 0;
  atom.shared.{op} %r4, [%r2], {value};
  bar.sync 0;
  ld.shared.b32 %r5, [%r2];
"""
    assert run(body) == [final] * 32


def test_compare_and_swap_happens_once():
    body = """
  @%p0 st.shared.b32 [%r2], 0;
  bar.sync 0;
  add.s32 %r6, %r0, 1;
  atom.shared.cas.b32 %r5, [%r2], 0, %r6;
"""
    assert run(body).count(0) == 1


def test_a_shuffle_from_an_inactive_lane():
    body = "  setp.lt.u32 %p1, %r0, 8;\n  @%p1 bra IN;\n  bra OUT;\nIN:\n"
    body += "  shfl.sync.idx.b32 %r5, %r0, 20, 31, 255;\nOUT:\n"
    with pytest.raises(SyncError, match="inactive lane"):
        run(body)


def test_bytes_of_plain_loads_and_stores_are_those_of_the_lanes_that_take_part():
    """16 bytes of 5 lanes, 4 of 3 lanes, and 8 at one address of all."""
    tensor = torch.arange(256, dtype=torch.int32)
    body = """
  mul.wide.u32 %rd1, %r0, 16;
  add.s64 %rd1, %rd0, %rd1;
  setp.lt.u32 %p1, %r0, 5;
  setp.lt.u32 %p2, %r0, 3;
  @%p1 ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd1];
  @%p2 st.global.b32 [%rd1], %r4;
  ld.global.b64 %rd2, [%rd0];
  st.global.b64 [%rd0], %rd2;
"""
    with emulate("sm_90a") as m:
        record = m.launch_ptx(module(body, 1), (tensor,))
    assert record.global_bytes == {"load": 5 * 16 + 8, "store": 3 * 4 + 8}
    assert record.copied_bytes == 0


def test_bytes_of_asynchronous_copies_are_those_that_are_read():
    """16 bytes of 5 lanes, of which the first has 4 that count and zeros behind them."""
    tensor = torch.arange(256, dtype=torch.int32)
    body = """
  mul.wide.u32 %rd1, %r0, 16;
  add.s64 %rd1, %rd0, %rd1;
  mad.lo.u32 %r3, %r0, 16, %r2;
  setp.lt.u32 %p1, %r0, 5;
  setp.eq.u32 %p2, %r0, 0;
  selp.b32 %r4, 4, 16, %p2;
  @%p1 cp.async.cg.shared.global [%r3], [%rd1], 16, %r4;
  cp.async.commit_group;
  cp.async.wait_group 0;
"""
    with emulate("sm_90a") as m:
        record = m.launch_ptx(module(body, 1), (tensor,), smem=512)
    assert (record.copied_bytes, record.global_bytes["load"]) == (4 * 16 + 4, 0)

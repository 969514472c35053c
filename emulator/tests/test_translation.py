"""Parser, instruction table, translator and its cache."""

import re
import subprocess

import numpy as np
import pytest
import torch

from cute_emulator import EmulatorError, UnsupportedError, cache, emulate, hostlib
from cute_emulator.codegen import definitions_and_uses
from cute_emulator.isa import TABLE, lookup
from cute_emulator.parser import Insn, build_blocks, parse_int, parse_module

from .ptx import module


def parse(body, pointers=0):
    return parse_module(module(body, pointers)).kernels["kernel"]


def instructions(body):
    """Parsed instructions of ``body`` alone."""
    start = len(parse("").code) - 1
    return [c for c in parse(body).code[start:-1] if isinstance(c, Insn)]


# ---- parser ----
@pytest.mark.parametrize(
    "text, operand",
    [
        ("mov.b32 %r4, %r5;", ("reg", "%r5")),
        ("mov.b32 %r4, -7;", ("imm", -7, "-7")),
        ("mov.b32 %r4, 0x1F;", ("imm", 31, "0x1F")),
        ("mov.b32 %f4, 0f3F800000;", ("imm", 0x3F800000, "0f3F800000")),
        ("mov.u32 %r4, %tid.x;", ("special", "%tid.x")),
        ("mov.u32 %r4, smem+16;", ("sym", "smem", 16)),
        ("mov.b64 %rd4, {%r5, _};", ("vec", [("reg", "%r5"), ("sink",)])),
        ("ld.shared.b32 %r4, [%r5];", ("mem", ("reg", "%r5"), 0, [])),
        ("ld.shared.b32 %r4, [%r5+-8];", ("mem", ("reg", "%r5"), -8, [])),
        ("ld.shared.b32 %r4, [smem+12];", ("mem", ("sym", "smem", 0), 12, [])),
        (
            "ld.shared.b32 %r4, [%rd1, {%r5, %r6}];",
            ("mem", ("reg", "%rd1"), 0, [("vec", [("reg", "%r5"), ("reg", "%r6")])]),
        ),
        ("selp.b32 %r4, 1, !%p3;", None),
    ],
)
def test_operands(text, operand):
    (ins,) = instructions(text)
    if operand is not None:
        assert ins.ops[1] == operand
    else:
        assert ins.ops[2] == ("not", ("reg", "%p3"))


@pytest.mark.parametrize(
    "text, value", [("017", 15), ("0b101", 5), ("12U", 12), ("-0x10", -16), ("0d3FF0000000000000", 1023 << 52)]
)
def test_integer_literals(text, value):
    assert parse_int(text) == value


def test_guards_lines_and_comments():
    text = module("  // a comment; with a semicolon\n  /* two\n  lines */ @!%p3 add.s32 %r4, %r5, 1;")
    ins = parse_module(text).kernels["kernel"].code[-2]
    assert ins.pred == ("%p3", True)
    assert "add.s32" in text.split("\n")[ins.line - 1]


def test_scopes_have_their_own_registers_and_labels():
    body = """
  {
  .reg .pred P1;
  .reg .b32 tmp;
LOOP:
  mov.b32 tmp, 1;
  @P1 bra DONE;
  bra LOOP;
DONE:
  }
  {
  .reg .pred P1;
  .reg .b32 tmp;
LOOP:
  mov.b32 tmp, 2;
  @P1 bra LOOP;
  }"""
    k = parse(body)
    names = [r for r in k.regs if r.startswith(("tmp", "P1"))]
    assert len(names) == len(set(names)) == 4
    targets = [c.ops[0][1] for c in k.code if isinstance(c, Insn) and c.parts[0] == "bra"]
    assert len(set(targets)) == 3
    labels = {c[1] for c in k.code if isinstance(c, tuple)}
    assert set(targets) <= labels


def test_vector_registers():
    k = parse("  {\n  .reg .v4 .s32 abcd;\n  mov.s32 abcd.x, %r5;\n  st.shared.v4.s32 [%r2], abcd;\n  }")
    *_, move, store, _ = k.code
    kind, elements = store.ops[1]
    assert kind == "vec"
    assert move.ops[0] == elements[0]
    assert len(set(elements)) == 4


def test_line_information():
    text = module("  .loc 1 42 7, function_name $L, inlined_at 2 1 1\n  add.s32 %r4, %r5, 1;") + '.file 1 "kernel.py"\n'
    m = parse_module(text)
    assert m.files == {1: "kernel.py"}
    assert m.kernels["kernel"].code[-2].loc == (1, 42)


def test_parameters_and_static_memory():
    text = """
.version 8.7
.target sm_100a
.address_size 64
.shared .align 16 .b8 fixed[40];
.visible .entry k(.param .u32 a, .param .align 64 .b8 map[128], .param .u64 b) .reqntid 96, 2, 1
{
  .local .align 8 .b8 depot[24];
  ret;
}
"""
    m = parse_module(text)
    k = m.kernels["k"]
    assert m.target == "sm_100a"
    assert k.params == [(0, 4), (64, 128), (192, 8)]
    assert k.reqntid == (96, 2, 1)
    assert k.local_size == 24
    assert k.module_shared["fixed"][0] == 40


@pytest.mark.parametrize("text", [".func (.param .b32 r) f() { ret; }", None])
def test_what_the_parser_refuses(text):
    with pytest.raises(UnsupportedError, match="PTX line"):
        parse_module(module("") + text if text else module("  .weird directive;"))


# ---- blocks ----
def test_a_block_that_jumps_back_into_a_loop_is_numbered_inside_it():
    k = parse("""
HEAD:
  @%p1 bra OUTLINE;
JOIN:
  add.s32 %r4, %r4, 1;
  @%p2 bra HEAD;
  bra AFTER;
OUTLINE:
  add.s32 %r5, %r5, 1;
  bra JOIN;
AFTER:
""")
    blocks = build_blocks(k)
    at = {b.insns[0].text: b.idx for b in blocks}
    outline = at["add.s32 %r5, %r5, 1"]
    join = at["add.s32 %r4, %r4, 1"]
    after = next(b.idx for b in blocks if b.insns[-1].parts[0] == "ret")
    assert outline < join < after


def test_diverged_lanes_meet_again():
    body = """
  and.b32 %r4, %r0, 1;
  setp.eq.s32 %p1, %r4, 0;
  mov.b32 %r5, 10;
  @%p1 bra EVEN;
  mov.b32 %r5, 20;
EVEN:
  add.s32 %r5, %r5, %r0;
  vote.sync.ballot.b32 %r6, %p1, -1;
  mul.wide.u32 %rd2, %r0, 8;
  add.s64 %rd2, %rd0, %rd2;
  st.global.v2.b32 [%rd2], {%r5, %r6};
"""
    out = torch.zeros(32, 2, dtype=torch.int32)
    with emulate("sm_90a") as m:
        m.launch_ptx(module(body, 1), (out,))
    lane = torch.arange(32)
    assert torch.equal(out[:, 0], (lane + torch.where(lane % 2 == 0, 10, 20)).int())
    assert (out[:, 1] == 0x55555555).all()


def test_loops_with_different_trip_counts():
    body = """
  mov.b32 %r4, 0;
  mov.b32 %r5, 0;
LOOP:
  add.s32 %r5, %r5, %r4;
  add.s32 %r4, %r4, 1;
  setp.le.s32 %p1, %r4, %r0;
  @%p1 bra LOOP;
  mul.wide.u32 %rd2, %r0, 4;
  add.s64 %rd2, %rd0, %rd2;
  st.global.b32 [%rd2], %r5;
"""
    out = torch.zeros(32, dtype=torch.int32)
    with emulate("sm_90a") as m:
        m.launch_ptx(module(body, 1), (out,))
    assert out.tolist() == [i * (i + 1) // 2 for i in range(32)]


def test_lanes_that_leave_early():
    body = """
  setp.ge.s32 %p1, %r0, 20;
  @%p1 ret;
  mul.wide.u32 %rd2, %r0, 4;
  add.s64 %rd2, %rd0, %rd2;
  st.global.b32 [%rd2], 1;
"""
    out = torch.zeros(32, dtype=torch.int32)
    with emulate("sm_90a") as m:
        m.launch_ptx(module(body, 1), (out,))
    assert out.sum() == 20
    assert out[:20].all()


# ---- instruction table ----
def test_longest_prefix_wins():
    assert lookup(instructions("cp.async.bulk.commit_group;")[0]).name == "cp.async.bulk.commit_group"
    assert lookup(instructions("bar.warp.sync -1;")[0]).name == "bar.warp.sync"


def test_entries_name_their_own_prefix():
    for name, entry in TABLE.items():
        assert entry.name == name
        assert re.fullmatch(r"[a-z0-9_.:]+", name)


@pytest.mark.parametrize(
    "text, defs, uses",
    [
        ("add.s32 %r4, %r5, %r6;", {"%r4"}, {"%r5", "%r6"}),
        ("@%p1 mov.b32 %r4, %r5;", {"%r4"}, {"%r4", "%r5", "%p1"}),
        ("st.shared.b32 [%r4], %r5;", set(), {"%r4", "%r5"}),
        ("setp.eq.and.s32 %p1|%p2, %r4, %r5, %p3;", {"%p1", "%p2"}, {"%r4", "%r5", "%p3"}),
        ("mbarrier.arrive.shared.b64 _, [%r4], %r5;", set(), {"%r4", "%r5"}),
        ("mbarrier.arrive.shared.b64 %rd1, [%r4];", {"%rd1"}, {"%r4"}),
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd1, %rd2, %p1, 1, 1, 0, 0;",
         {"%f0", "%f1", "%f2", "%f3"}, {"%f0", "%f1", "%f2", "%f3", "%rd1", "%rd2", "%p1"}),
        ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r4, %r5}, [%r6];", {"%r4", "%r5"}, {"%r6"}),
    ],
)  # fmt: skip
def test_definitions_and_uses(text, defs, uses):
    d, u = definitions_and_uses(instructions(text)[0])
    assert (set(d), set(u)) == (defs, uses)


# ---- cache ----
def test_translations_are_kept_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "directory", lambda: tmp_path)
    monkeypatch.setattr(cache, "_programs", {})
    text = module("  add.s32 %r4, %r0, 1;")
    first = cache.get_program(text, "kernel")
    (entry,) = [p for p in tmp_path.rglob("*") if p.is_file()]
    monkeypatch.setattr(cache, "_programs", {})
    monkeypatch.setattr(cache, "_translate", lambda *_: pytest.fail("translated again"))
    second = cache.get_program(text, "kernel")
    assert second.histogram == first.histogram
    assert cache.get_program(text, "kernel") is second
    monkeypatch.undo()
    monkeypatch.setattr(cache, "directory", lambda: tmp_path)
    monkeypatch.setattr(cache, "_programs", {})
    whole = entry.read_bytes()
    for at in range(0, len(whole), 97):  # one flipped bit, anywhere
        monkeypatch.setattr(cache, "_programs", {})
        entry.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert cache.get_program(text, "kernel").histogram == first.histogram
        assert entry.read_bytes() == whole


def test_no_place_for_the_cache(monkeypatch):
    monkeypatch.setattr(cache, "directory", lambda: None)
    monkeypatch.setattr(cache, "_programs", {})
    assert cache.get_program(module("  add.s32 %r4, %r0, 2;"), "kernel").target == "sm_90a"
    assert cache.load_ptx("0" * 32) is None


def test_ptx_of_a_cubin_is_found_by_later_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "directory", lambda: tmp_path)
    cache.store_ptx("abc", "some text")
    assert cache.load_ptx("abc") == "some text"
    (tmp_path / "ptx" / "abc").write_bytes(b"not compressed")
    assert cache.load_ptx("abc") is None
    cache.store_ptx("abc", "some text")
    assert cache.load_ptx("abc") == "some text"


# ---- host library ----
def test_a_missing_compiler_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "directory", lambda: tmp_path)
    monkeypatch.setattr(hostlib.shutil, "which", lambda name: None)
    with pytest.raises(EmulatorError, match="needs a C compiler"):
        hostlib.build()


def test_a_failing_compiler_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "directory", lambda: tmp_path)
    monkeypatch.setattr(
        hostlib.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 1, stdout="", stderr="broken header")
    )
    with pytest.raises(EmulatorError, match="broken header"):
        hostlib.build()
    assert list(tmp_path.iterdir()) == []


def test_the_cubin_inside_a_fatbin():
    payload = bytes(range(64))
    header = b"\x50\xed\x55\xba" + bytes(2) + (16).to_bytes(2, "little") + bytes(8)
    entry = bytes(4) + (24).to_bytes(4, "little") + len(payload).to_bytes(8, "little") + bytes(8)
    image = np.frombuffer(header + entry + payload, np.uint8).copy()
    assert hostlib.image_bytes(image.ctypes.data) == payload

"""Multicast addresses: one access to the memory of all ranks (``multimem``), to the bit, in the order of ranks."""

import itertools

import pytest
import torch

from cute_emulator import MemoryAccessError, RaceError, Ranks, UnsupportedError, active, emulate

from .ptx import module
from .ranks_ptx import exchange

DTYPES = {
    "f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16, "u32": torch.int32,
    "s32": torch.int32, "u64": torch.int64, "s64": torch.int64, "b32": torch.int32, "b64": torch.int64,
}  # fmt: skip
REGISTERS = {2: "%h", 4: "%r", 8: "%rd"}
COUNT = 3


def element(ty):
    return DTYPES[ty.removesuffix("x2")]


def width(ty):
    """Bytes of a register's worth."""
    return element(ty).itemsize * (2 if ty.endswith("x2") else 1)


def registers(ty, vector):
    """Registers of an access: from number 20 on, of halves from 4."""
    name = REGISTERS[width(ty)]
    return [f"{name}{(4 if name == '%h' else 20) + i}" for i in range(vector or 1)]


def operand(ty, vector):
    names = ", ".join(registers(ty, vector))
    return f"{{{names}}}" if vector else names


def index(address, size):
    """The address of this thread's ``size`` bytes in %rd10."""
    return f"  mul.wide.u32 %rd10, %r0, {size};\n  add.s64 %rd10, {address}, %rd10;\n"


def loads(ty, vector):
    """Load this thread's operand from the own tensor."""
    names, each = registers(ty, vector), width(ty)
    lines = [f"  ld.global.b{8 * each} {name}, [%rd10+{i * each}];\n" for i, name in enumerate(names)]
    return index("%rd0", each * len(names)) + "".join(lines)


def everywhere(dtype, n):
    """Values of every rank; floats with sums that round, infinities and NaN."""
    if dtype.is_floating_point:
        data = torch.randn(COUNT, n, dtype=torch.float64).mul_(3).to(dtype)
        data[0, 0], data[1, 0] = float("inf"), float("-inf")
        data[1, 1] = float("nan")
        data[0, 2], data[1, 2] = 0.0, -0.0
        return data
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, (COUNT, n), dtype=dtype)


def run(body, data, operand_of_rank=None):
    """Ranks with these values run ``body`` on %rd0 an own tensor and %rd1 the data at multicast addresses."""
    ranks = Ranks(COUNT)
    shared = ranks.share(list(data.clone()))
    own = [data[0].clone().zero_() if operand_of_rank is None else operand_of_rank[rank] for rank in range(COUNT)]
    text = module(body, 2)
    with emulate("sm_90a"):
        ranks.run(lambda rank: active().launch_ptx(text, [own[rank], shared.multicast]))
    return own, shared


def same(a, b):
    """Equal bits, of NaNs that both are NaN."""
    if a.dtype.is_floating_point:
        assert torch.equal(a.isnan(), b.isnan())
        a, b = (t[~t.isnan()] for t in (a, b))
    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


LOADS = [
    *itertools.product(["add"], ["f32", "f16x2.acc::f32", "bf16x2.acc::f32", "f16x2", "bf16x2"], [None, 2, 4]),
    *itertools.product(["add"], ["f16", "bf16", "f16.acc::f32", "bf16.acc::f32"], [2, 4, 8]),
    *itertools.product(["min", "max"], ["f16x2", "bf16x2"], [None, 4]),
    *itertools.product(["min", "max"], ["f16", "bf16"], [8]),
    *itertools.product(["min", "max"], ["u32", "s32", "u64", "s64"], [None]),
    *itertools.product(["add"], ["u32", "s32", "u64", "f64"], [None]),
    *itertools.product(["and", "or", "xor"], ["b32", "b64"], [None]),
]


def reduced(op, ty, wide, data):
    """Return the result of a reduction in the order of ranks, by torch's arithmetic of one element type."""
    unsigned = ty[0] == "u" and op != "add"
    flip = torch.iinfo(data.dtype).min if unsigned else 0  # the order of unsigned integers as that of signed ones
    out, *others = data.float() if wide else data ^ flip if unsigned else data
    for values in others:
        if op in ("min", "max") and values.dtype.is_floating_point:
            pick = (torch.fmin if op == "min" else torch.fmax)(out.float(), values.float())
            zeros = (out == 0) & (values == 0)  # -0 is less than 0
            either = torch.bitwise_or if op == "min" else torch.bitwise_and
            negative = either(torch.signbit(out), torch.signbit(values))
            out = torch.where(zeros, torch.where(negative, -0.0, 0.0), pick).to(out.dtype)
        else:
            functions = {
                "add": torch.add, "min": torch.minimum, "max": torch.maximum, "and": torch.bitwise_and,
                "or": torch.bitwise_or, "xor": torch.bitwise_xor,
            }  # fmt: skip
            out = functions[op](out, values)
    return (out ^ flip if unsigned else out).to(data.dtype)


@pytest.mark.parametrize("op, ty, vector", LOADS)
def test_load_reduce(op, ty, vector):
    ty, _, accumulator = ty.partition(".")
    dtype, pair = element(ty), 2 if ty.endswith("x2") else 1
    n = (vector or 1) * pair
    data = everywhere(dtype, 32 * n)
    mods = ".".join(filter(None, [op, accumulator, f"v{vector}" if vector else "", ty]))
    bits = f"b{8 * width(ty)}"
    store = f"  st.global.{f'v{vector}.' if vector else ''}{bits} [%rd10], {operand(ty, vector)};\n"
    if vector == 8:  # 16 bytes of halves
        names = registers(ty, vector)
        halves = (", ".join(names[4 * i : 4 * i + 4]) for i in (0, 1))
        store = "".join(f"  st.global.v4.{bits} [%rd10+{8 * i}], {{{half}}};\n" for i, half in enumerate(halves))
    size = dtype.itemsize * n
    body = index("%rd1", size) + f"  multimem.ld_reduce.weak.global.{mods} {operand(ty, vector)}, [%rd10];\n"
    own, _ = run(body + index("%rd0", size) + store, data)
    for out in own:
        same(out, reduced(op, ty, bool(accumulator), data))


def test_the_order_and_the_precision_of_a_sum():
    """Rank 0 first; in float16 the small values are lost one by one, in float32 they count."""
    data = torch.tensor([[2048.0] * 64, [1.0] * 64, [1.0] * 64], dtype=torch.float16)
    load = index("%rd1", 4) + "  multimem.ld_reduce.relaxed.sys.global.add{}.f16x2 %r20, [%rd10];\n" + index("%rd0", 4)
    for accumulator, value in ("", 2048.0), (".acc::f32", 2050.0):
        own, _ = run(load.format(accumulator) + "  st.global.b32 [%rd10], %r20;\n", data)
        assert all((out == value).all() for out in own)
    own, _ = run(load.format("") + "  st.global.b32 [%rd10], %r20;\n", data.flip(0))
    assert all((out == 2050.0).all() for out in own)


@pytest.mark.parametrize("ty, vector", [("b32", None), ("u64", None), ("f32", 4), ("bf16x2", 2), ("f16", 8)])
def test_store(ty, vector):
    """The last rank alone stores its own values to all."""
    dtype, n = element(ty), (vector or 1) * (2 if ty.endswith("x2") else 1)
    values = everywhere(dtype, 32 * n)
    size = dtype.itemsize * n
    mods = f"v{vector}.{ty}" if vector else ty
    store = f"  multimem.st.weak.global.{mods} [%rd10], {operand(ty, vector)};\n"
    ranks = Ranks(COUNT)
    shared = ranks.symmetric(32 * n, dtype=dtype)
    text = module(loads(ty, vector) + index("%rd1", size) + store, 2)
    with emulate("sm_90a"):
        ranks.run(lambda rank: rank == 2 and active().launch_ptx(text, [values[2], shared.multicast]))
    for out in shared:
        same(out, values[2])


REDUCTIONS = [
    ("add", "s32", None),
    ("max", "u64", None),
    ("xor", "b32", None),
    ("add", "f32", 4),
    ("add", "bf16x2", 2),
    ("add", "f64", None),
]


@pytest.mark.parametrize("op, ty, vector", REDUCTIONS)
def test_reduction_in_memory(op, ty, vector):
    """Every rank adds what it holds, so that all have the sum of all; exact, whatever comes first."""
    dtype, n = element(ty), (vector or 1) * (2 if ty.endswith("x2") else 1)
    small = torch.randint(0, 9, (COUNT, 32 * n)).to(dtype)
    size = dtype.itemsize * n
    mods = f"{op}.v{vector}.{ty}" if vector else f"{op}.{ty}"
    red = f"  multimem.red.relaxed.sys.global.{mods} [%rd10], {operand(ty, vector)};\n"
    _, shared = run(loads(ty, vector) + index("%rd1", size) + red, small * 0, small)
    for out in shared:
        same(out, reduced(op, ty, False, torch.cat([small[:1] * 0, small])))


# ---- flags for all ranks at once ----
WRITE = "  mul.wide.u32 %rd10, %r0, 4;\n  add.s64 %rd11, %rd0, %rd10;\n  add.s64 %rd12, %rd5, %rd10;\n"
WRITE += "  add.s64 %rd13, %rd4, %rd10;\n  add.s32 %r11, %r10, 1;\n  st.global.b32 [%rd11], %r11;\n  bar.sync 0;\n"
RAISE = "  @%p0 multimem.red.release.sys.global.add.s32 [%rd6], 1;\n"
WAIT = """  @!%p0 bra WAITED;
SPIN:
  atom.cas.acquire.sys.global.b32 %r12, [%rd1], 3, 0;
  setp.ne.s32 %p1, %r12, 3;
  @%p1 bra SPIN;
WAITED:
  bar.sync 0;
"""
SUM = "  multimem.ld_reduce.weak.global.add.u32 %r13, [%rd12];\n  st.global.b32 [%rd13], %r13;\n"
REDUCE = WRITE + RAISE + WAIT + SUM


def test_a_sum_over_all_ranks():
    for seed in range(10):
        own, data, machine = exchange(REDUCE, COUNT, warps=2, seed=seed)
        assert all((out == 6).all() for out in own)
        assert all((t == rank + 1).all() for rank, t in enumerate(data))
        assert not any(record.warnings for record in machine.launches)


FAULTS = {
    "not released": REDUCE.replace("red.release", "red.relaxed"),
    "not acquired": REDUCE.replace("cas.acquire", "cas.relaxed"),
    "released to the GPU": REDUCE.replace("red.release.sys", "red.release.gpu"),
    "one rank too few": REDUCE.replace("[%rd1], 3, 0", "[%rd1], 2, 0").replace("%r12, 3", "%r12, 2"),
    "flag before the write": RAISE + WRITE + WAIT + SUM,
    "no barrier of the CTA": REDUCE.replace("  bar.sync 0;\n", "", 1),
    "sum stored to all": REDUCE + "  multimem.st.weak.global.b32 [%rd12], %r13;\n",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_race_by_multicast_addresses_is_reported(fault):
    for seed in range(3):
        with pytest.raises(RaceError, match=r"race: rank \d, .* of symmetric buffer 0 of rank \d"):
            exchange(FAULTS[fault], COUNT, warps=2, seed=seed)


# ---- refused ----
REFUSED = {
    "ld_reduce.weak.global.add.acc::f16.e4m3x4 %r20, [%rd5]": "does not say how a result is rounded to an FP8 type",
    "ld_reduce.weak.global.add.s64 %rd20, [%rd5]": "has no multimem.ld_reduce.add of s64",
    "ld_reduce.weak.global.min.f32 %r20, [%rd5]": "has no multimem.ld_reduce.min of f32",
    "ld_reduce.weak.global.add.f16 %h4, [%rd5]": "one integer, one f64, or floats of 32, 64 or 128 bits in all",
    "ld_reduce.weak.global.add.v2.f64 {%rd20, %rd21}, [%rd5]": "one integer, one f64, or floats of 32, 64 or 128 bits",
    "ld_reduce.weak.global.add.v2.u32 {%r20, %r21}, [%rd5]": "one integer, one f64, or floats of 32, 64 or 128 bits",
    "ld_reduce.weak.global.add.acc::f32.f32 %r20, [%rd5]": "has .acc::f32 for f16 and bf16",
    "ld_reduce.acquire.global.add.f32 %r20, [%rd5]": "weak, or relaxed or acquire with a scope",
    "ld_reduce.release.sys.global.add.f32 %r20, [%rd5]": "weak, or relaxed or acquire with a scope",
    "ld_reduce.relaxed.sys.global.inc.u32 %r20, [%rd5]": r"modifier .inc of multimem",
    "red.relaxed.sys.global.max.f16x2 [%rd5], %r20": "has no multimem.red.max of f16x2",
    "red.acquire.sys.global.add.u32 [%rd5], %r20": "is weak, or relaxed or release with a scope",
}


@pytest.mark.parametrize("instruction", REFUSED)
def test_refused(instruction):
    with pytest.raises(UnsupportedError, match=REFUSED[instruction]):
        exchange(f"  multimem.{instruction};\n")


def test_which_addresses():
    cases = {
        "  multimem.st.weak.global.b32 [%rd0], %r10;\n": "which is no multicast address",
        "  multimem.st.weak.global.b32 [%rd5+256], %r10;\n": "which is no multicast address",
        "  multimem.st.weak.global.v4.f32 [%rd5+248], {%r10, %r10, %r10, %r10};\n": "ends 8 bytes past it",
        "  multimem.st.weak.global.f64 [%rd5+4], %rd0;\n": "misaligned global store of 8 bytes",
        "  ld.global.b32 %r11, [%rd5];\n": "multicast address .* which only multimem instructions may access",
        "  st.global.b32 [%rd5], %r10;\n": "multicast address .* which only multimem instructions may access",
        "  red.relaxed.sys.global.add.u32 [%rd6], 1;\n": "which only multimem instructions may access",
    }
    for body, said in cases.items():
        with pytest.raises(MemoryAccessError, match=f"rank ., warp 0 of .*{said}"):
            exchange("  @%p0 bra GO;\n  ret;\nGO:\n" + body)


def test_a_multimem_access_of_one_device():
    """A launch without ranks has no multicast addresses."""
    with emulate("sm_90a") as machine, pytest.raises(MemoryAccessError, match="which is no multicast address"):
        machine.launch_ptx(module("  multimem.red.relaxed.sys.global.add.u32 [%rd0], 1;\n", 1), [torch.zeros(1)])

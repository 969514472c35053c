"""Tensor maps: boxes read and written element by element from the addresses that the fields define."""

import itertools

import numpy as np
import pytest

from cute_emulator.errors import EmulatorError, MemoryAccessError, UnsupportedError
from cute_emulator.tma import TensorMap, replace_field

CODES = {
    "u8": 0,
    "u16": 1,
    "u32": 2,
    "s32": 3,
    "u64": 4,
    "f16": 6,
    "f32": 7,
    "f64": 9,
    "bf16": 10,
    "fp4": 11,
    "fp4_unpack": 12,
    "fp6_unpack": 13,
}
BYTES = {
    "u8": 1,
    "u16": 2,
    "u32": 4,
    "s32": 4,
    "u64": 8,
    "f16": 2,
    "f32": 4,
    "f64": 8,
    "bf16": 2,
    "fp4": 1,
    "fp4_unpack": 1,
    "fp6_unpack": 1,
}
BASE = 1 << 20


class Region:
    def __init__(self, base, size):
        self.base, self.size, self.end = base, size, base + size
        self.u8 = np.zeros(size, np.uint8)
        self.shadow = None  # races are not detected


class Launch:
    """Global memory of one allocation; everything else is out of bounds."""

    def __init__(self, size=1 << 16):
        self.region = Region(BASE, size)

    def find(self, addr, n, who):
        if addr < self.region.base or addr + n > self.region.end:
            raise MemoryAccessError(f"global access of {n} bytes at {addr:#x}")
        return self.region


class Cta:
    def __init__(self):
        self.smem = np.full(1 << 16, 0xEE, np.uint8)

    def read_chunks(self, idx, what):
        return self.smem.reshape(-1, 16)[idx]

    def write_chunks(self, idx, data):
        self.smem.reshape(-1, 16)[idx] = data


def fail(message):
    raise MemoryAccessError(message)


def encode(*args, **fields):
    return TensorMap.decode(descriptor(*args, **fields))


def descriptor(dtype, sizes, strides, box, swizzle=0, base=BASE, nan_fill=False, **extra):
    """The 64 bytes of a tensor map; ``strides`` in bytes for dimensions 1 and up."""
    u = base | (len(sizes) - 1) << 68 | CODES[dtype] << 71 | swizzle << 77 | int(nan_fill) << 79
    for i, s in enumerate(sizes):
        u |= (s - 1) << (256 + 32 * i)
    for i, s in enumerate(strides):
        u |= (s >> 4 & 0xFFFFFFFF) << (96 + 32 * i) | (s >> 36) << (224 + 4 * i)
    for i, b in enumerate(box):
        u |= (b - 1) << (440 + 8 * i)
    u |= extra.get("raw", 0)
    return u.to_bytes(64, "little")


def expected_box(memory, dtype, sizes, strides, box, coords):
    """Values of a box, one element at a time, zero outside the tensor; innermost dimension last."""
    es = BYTES[dtype]
    out = np.zeros(box[::-1], np.uint64)
    for index in itertools.product(*[range(b) for b in box]):
        at = [c + i for c, i in zip(coords, index, strict=True)]
        if all(0 <= x < s for x, s in zip(at, sizes, strict=True)):
            off = at[0] * es + sum(x * s for x, s in zip(at[1:], strides, strict=True))
            out[index[::-1]] = int.from_bytes(memory[off : off + es].tobytes(), "little")
    return out


@pytest.mark.parametrize("dtype", ["u8", "bf16", "f32", "u64"])
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_boxes_inside_and_across_every_edge(dtype, rank):
    es = BYTES[dtype]
    sizes = [20, 7, 5, 3, 2][:rank]
    strides = [16 * -(-20 * es // 16) * f for f in (1, 8, 40, 120)][: rank - 1]
    box = [16 // es * (2 if es < 8 else 1), 4, 3, 2, 1][:rank]
    launch = Launch()
    launch.region.u8[:] = np.random.default_rng(0).integers(0, 256, launch.region.size)
    t = encode(dtype, sizes, strides, box)
    assert (t.rank, t.nbytes, t.inner) == (rank, es * int(np.prod(box)), es * box[0])
    for coords in ([0] * rank, [-2] * rank, [s - 1 for s in sizes], [s + 3 for s in sizes], [1] * rank):
        coords[0] = coords[0] // (16 // es) * (16 // es)  # the innermost coordinate is a multiple of 16 bytes
        want = expected_box(launch.region.u8, dtype, sizes, strides, box, coords)
        assert np.array_equal(t.read(launch, coords, fail), want)


@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
def test_swizzle_and_round_trip(swizzle):
    """Row r, 16-byte chunk c of a dense box is at address a with bits 4.. XORed by bits 7.. of a."""
    span = 16 << swizzle
    t = encode("u8", [span, 32], [128], [span, 16], swizzle)
    launch, cta = Launch(), Cta()
    launch.region.u8[:] = np.random.default_rng(1).integers(0, 256, launch.region.size)
    box = t.read(launch, [0, 3], fail)
    start = 1024 + 256
    t.scatter(cta, start, box)
    for r in range(16):
        for c in range(span // 16):
            a = start + r * span + c * 16
            a ^= ((a >> 7) & ((1 << swizzle) - 1)) << 4
            assert np.array_equal(cta.smem[a : a + 16], launch.region.u8[(3 + r) * 128 + 16 * c :][:16])
    assert (cta.smem[:start] == 0xEE).all()
    assert (cta.smem[start + 16 * span :] == 0xEE).all()
    assert np.array_equal(t.gather(cta, start), box)


def test_four_gathered_rows_are_stored_one_after_another():
    t = encode("u16", [64, 100], [128], [64, 1], 3)
    launch, cta = Launch(), Cta()
    launch.region.u8[:] = np.random.default_rng(2).integers(0, 256, launch.region.size)
    rows = [5, 99, 0, 42]
    box = np.concatenate([t.read(launch, [0, r], fail) for r in rows])
    t.scatter(cta, 1024, box)
    assert np.array_equal(t.gather(cta, 1024, 4), box)
    for i, r in enumerate(rows):
        assert np.array_equal(box[i].view(np.uint8), launch.region.u8[r * 128 : r * 128 + 128])


def test_store_clips_and_leaves_the_rest():
    sizes, strides, box = [10, 6], [32], [16, 4]
    t = encode("bf16", sizes, strides, box)
    launch = Launch(6 * 32)
    data = np.arange(64, dtype=np.uint16).reshape(4, 16) + 1
    t.write(launch, [0, 4], data, None, fail)
    got = launch.region.u8.view(np.uint16).reshape(6, 16)
    want = np.zeros((6, 16), np.uint16)
    want[4:6, :10] = data[:2, :10]
    assert np.array_equal(got, want)
    t.write(launch, [8, 5], data, None, fail)
    want[5, 8:10] = data[0, :2]
    assert np.array_equal(got, want)
    for outside in ([24, 0], [0, 6], [0, (1 << 31) - 1]):
        t.write(launch, outside, data, None, fail)
        assert np.array_equal(got, want)


@pytest.mark.parametrize("red", [None, "add"])
def test_no_store_begins_at_a_negative_coordinate(red):
    """A load may, and reads zeros there."""
    t = encode("bf16", [16, 4, 3], [32, 128], [16, 4, 1])
    launch = Launch(3 * 128)
    data = np.ones((1, 4, 16), np.uint16)
    for coords in ([-8, 0, 0], [0, -1, 0], [0, 0, -1], [0, 0, -(1 << 31)]):
        t.read(launch, coords, fail)
        with pytest.raises(MemoryAccessError, match="TMA store to negative coordinates"):
            t.write(launch, coords, data, red, fail)
    assert not launch.region.u8.any()


@pytest.mark.parametrize(
    ("dtype", "op"),
    [("f32", "add"), ("bf16", "add"), ("f16", "min"), ("s32", "max"), ("u32", "inc"), ("u64", "add"), ("u32", "xor")],
)
def test_reduction(dtype, op):
    np_type = {2: np.uint16, 4: np.uint32, 8: np.uint64}[BYTES[dtype]]
    t = encode(dtype, [16, 4], [256], [16, 2])
    launch = Launch(1024)
    rng = np.random.default_rng(3)

    def values():
        v = rng.integers(-9, 9, (4, 16))
        if dtype == "bf16":
            return (v.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        if dtype in ("f16", "f32"):
            return v.astype({"f16": np.float16, "f32": np.float32}[dtype]).view(np_type)
        return v.astype({4: np.int32, 8: np.int64}[BYTES[dtype]]).view(np_type)

    def number(u):
        if dtype == "bf16":
            return (u.astype(np.uint32) << 16).view(np.float32)
        return u.view({"f16": np.float16, "f32": np.float32, "s32": np.int32}.get(dtype, np_type))

    memory = np.ndarray((4, 16), np_type, buffer=launch.region.u8, strides=(256, BYTES[dtype]))
    memory[...] = values()
    old, src = memory.copy(), values()[:2]
    t.write(launch, [0, 1], src, op, fail)
    x, y = number(old[1:3]), number(np.ascontiguousarray(src))
    want = {
        "add": lambda: x + y,
        "min": lambda: np.minimum(x, y),
        "max": lambda: np.maximum(x, y),
        "inc": lambda: np.where(x >= y, 0, x + np.uint32(1)),
        "xor": lambda: x ^ y,
    }[op]()
    assert np.array_equal(number(np.ascontiguousarray(memory[1:3])), want)
    assert np.array_equal(memory[[0, 3]], old[[0, 3]])
    with pytest.raises(UnsupportedError):
        encode("u8", [16], [], [16]).write(launch, [0], np.zeros(16, np.uint8), "inc", fail)


@pytest.mark.parametrize(("start", "length"), [(0, 5), (3, 4), (9, 1), (2, 0)])
def test_ragged_map_wraps_the_address(start, length):
    """A group of ``length`` rows bounded by coordinates alone: huge sizes, and strides that add up modulo 2**64."""
    row = 64  # bytes
    big = 1 << 30
    sizes = [32, big, 1 << 31, 1 << 31]
    sizes[2] = sizes[3] = (1 << 31) - 1
    t = encode("u16", sizes, [row, (1 << 34) - row, row], [32, 8, 1, 1])
    launch = Launch(10 * row)
    launch.region.u8[:] = np.random.default_rng(4).integers(0, 256, launch.region.size)
    box = t.read(launch, [0, big - length, big, start + length], fail).reshape(8, 32)
    want = np.zeros((8, 32), np.uint16)
    want[:length] = launch.region.u8.view(np.uint16).reshape(10, 32)[start : start + length]
    assert np.array_equal(box, want)
    before = launch.region.u8.copy()
    t.write(launch, [0, big - length, big, start + length], np.full((1, 1, 8, 32), 7, np.uint16), None, fail)
    before.view(np.uint16).reshape(10, 32)[start : start + length] = 7
    assert np.array_equal(launch.region.u8, before)


@pytest.mark.parametrize(("start", "length"), [(0, 5), (3, 4), (9, 1)])
def test_ragged_map_that_begins_below_address_zero(start, length):
    """The other way to bound a group by coordinates: a base so far in front that low memory has it below zero, of which
    a descriptor holds 57 bits."""
    row, big = 64, 1 << 30
    sizes = [32, big, (1 << 31) - 1]
    t = encode("u16", sizes, [row, row], [32, 8, 1], base=(BASE - big * row) % (1 << 57))
    launch = Launch(10 * row)
    launch.region.u8[:] = np.random.default_rng(4).integers(0, 256, launch.region.size)
    box = t.read(launch, [0, big - length, start + length], fail).reshape(8, 32)
    want = np.zeros((8, 32), np.uint16)
    want[:length] = launch.region.u8.view(np.uint16).reshape(10, 32)[start : start + length]
    assert np.array_equal(box, want)


def test_packed_fp4_counts_elements():
    t = encode("fp4", [64, 4], [32], [32, 2])
    launch = Launch(128)
    launch.region.u8[:] = np.arange(128)
    assert (t.nbytes, t.tx_bytes, t.inner) == (32, 32, 16)
    assert t.read(launch, [32, 1], fail).tolist() == [list(range(48, 64)), list(range(80, 96))]
    with pytest.raises(MemoryAccessError, match="not on a byte"):
        t.read(launch, [1, 0], fail)


def test_unpacked_fp4_leaves_a_gap_after_eight_bytes():
    t = encode("fp4_unpack", [128, 2], [64], [32, 2])
    launch, cta = Launch(128), Cta()
    launch.region.u8[:] = np.arange(128)
    assert (t.nbytes, t.tx_bytes, t.inner) == (64, 32, 32)
    t.scatter(cta, 1024, t.read(launch, [0, 0], fail))
    rows = cta.smem[1024:1088].reshape(4, 16)
    assert rows[:, :8].tolist() == [list(range(8)), list(range(8, 16)), list(range(64, 72)), list(range(72, 80))]
    with pytest.raises(MemoryAccessError, match="store"):
        t.write(launch, [0, 0], np.zeros((2, 32), np.uint8), None, fail)


def test_unpacked_fp6_leaves_a_gap_after_twelve_bytes():
    t = encode("fp6_unpack", [128, 2], [96], [32, 2])
    launch, cta = Launch(192), Cta()
    launch.region.u8[:] = np.arange(192)
    assert (t.nbytes, t.tx_bytes, t.inner) == (64, 48, 32)
    t.scatter(cta, 1024, t.read(launch, [64, 0], fail))
    rows = cta.smem[1024:1088].reshape(4, 16)
    assert rows[:, :12].tolist() == [list(range(s, s + 12)) for s in (48, 60, 144, 156)]
    assert (rows[:, 12:] == 0xFF).all()


def test_out_of_bounds_fill_with_nan():
    t = encode("f32", [4], [], [8], nan_fill=True)
    box = t.read(Launch(), [0], fail).view(np.float32)
    assert np.isnan(box).tolist() == [False] * 4 + [True] * 4
    with pytest.raises(MemoryAccessError, match="NaN"):
        encode("u32", [4], [], [8], nan_fill=True).read(Launch(), [0], fail)


@pytest.mark.parametrize(("dtype", "bad", "good"), [("u8", 8, 16), ("bf16", 4, 8), ("f32", -2, -4), ("fp4", 16, 32)])
def test_innermost_coordinate_is_a_multiple_of_16_bytes(dtype, bad, good):
    t = encode(dtype, [64], [], [32])
    launch = Launch()
    box = t.read(launch, [good], fail)
    for transfer in (lambda: t.read(launch, [bad], fail), lambda: t.write(launch, [bad], box, None, fail)):
        with pytest.raises(MemoryAccessError, match="multiple of 16"):
            transfer()


def test_alignment_rules():
    def problem(t, off=1024):
        with pytest.raises(EmulatorError) as e:
            t.check_dst(off, fail)
        return str(e.value)

    assert "128-byte" in problem(encode("u8", [64], [], [64]), 1040)
    assert "base" in problem(encode("u8", [64], [], [64], base=BASE + 8))
    assert "inner box" in problem(encode("u8", [64], [], [24]))
    assert "span" in problem(encode("u8", [256], [], [128], swizzle=1))
    encode("u8", [64], [], [64], swizzle=2).check_dst(1024, fail)


@pytest.mark.parametrize("raw", [1 << 75, 1 << 416, 15 << 71])
def test_unknown_fields_are_refused(raw):
    with pytest.raises(UnsupportedError):
        encode("u8", [64], [], [64], raw=raw)


def test_replaced_fields_decode_again():
    u = int.from_bytes(bytes(64), "little") | 10 << 71
    edits = [
        ("rank", 0, 2),
        ("global_address", 0, 0x123450),
        *[("global_dim", i, s) for i, s in enumerate((100, 200, 300))],
        *[("box_dim", i, b) for i, b in enumerate((64, 8, 2))],
        ("global_stride", 0, 256),
        ("global_stride", 1, 1 << 38),
        *[("element_stride", i, 1) for i in range(3)],
        ("swizzle_mode", 0, 3),
    ]
    for field, ordinal, value in edits:
        u = replace_field(u, field, ordinal, value)
    t = TensorMap.decode(u.to_bytes(64, "little"))
    assert (t.rank, t.base, t.size[:3], t.box[:3]) == (3, 0x123450, [100, 200, 300], [64, 8, 2])
    assert (t.strides[:3], t.swizzle, t.dtype) == ([2, 256, 1 << 38], 3, "bf16")
    with pytest.raises(MemoryAccessError):
        replace_field(u, "global_stride", 0, 24)
    with pytest.raises(UnsupportedError):
        replace_field(u, "interleave_layout", 0, 1)

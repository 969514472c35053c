"""Instructions on the device against the emulator's arithmetic, bit for bit."""

import itertools
from dataclasses import dataclass

import numpy as np

from cute_emulator import numerics as N

from ..reference import edges

WIDTH = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "f16x2": 32, "bf16x2": 32, "f32x2": 64, "tf32": 32}
WIDTH |= {t + str(b): max(b, 16) for t in "usb" for b in (8, 16, 32, 64)}
WIDTH |= {f"{t}x2": 16 for t in ("e4m3", "e5m2")}
_DTYPE = {16: np.uint16, 32: np.uint32, 64: np.uint64}


@dataclass
class Form:
    """``text``: the instruction with {d}, {a}, {b}, {c} for its registers; ``widths``: of d and the sources."""

    text: str
    widths: tuple
    emulate: object
    columns: list

    @property
    def name(self):
        return self.text.split(" ")[0] if not self.text.startswith("{") else self.text


def combinations(ty, n, limit=20000, seed=0):
    """Operand columns: every combination of edge values as far as ``limit`` goes, then random bits."""
    rng = np.random.default_rng(seed)
    base = {"f16x2": "f16", "bf16x2": "bf16"}.get(ty, ty)
    if base in ("f16", "bf16", "f32", "f64"):
        pool = edges(base)
    else:
        bits = WIDTH[ty]
        pool = [
            0,
            1,
            2,
            3,
            7,
            31,
            32,
            33,
            63,
            64,
            255,
            256,
            (1 << bits - 1) - 1,
            1 << bits - 1,
            (1 << bits) - 2,
            (1 << bits) - 1,
        ]
        pool = sorted({x & (1 << bits) - 1 for x in pool})
    rows = list(itertools.product(pool, repeat=n))
    if len(rows) > limit:
        rows = [rows[i] for i in rng.choice(len(rows), limit, replace=False)]
    width = WIDTH[base]
    cols = [np.array(c, np.uint64) for c in zip(*rows, strict=True)]
    noise = (
        rng.integers(0, 1 << width, (n, 4096), dtype=np.uint64, endpoint=False)
        if width < 64
        else rng.integers(0, 2**64, (n, 4096), dtype=np.uint64)
    )
    cols = [np.concatenate([c, x]) for c, x in zip(cols, noise, strict=True)]
    if ty != base:
        cols = [c | (np.roll(c, 7) << np.uint64(16)) for c in cols]
    return [c.astype(_DTYPE[WIDTH[ty]]) for c in cols]


def arithmetic():
    """Floating-point arithmetic."""
    for ty, rounds in (
        ("f32", ("rn", "rz", "rm", "rp")),
        ("f64", ("rn", "rz", "rm", "rp")),
        ("f16", ("rn",)),
        ("bf16", ("rn",)),
        ("f16x2", ("rn",)),
        ("bf16x2", ("rn",)),
    ):
        small = ty in ("f16", "f16x2")
        for name, n in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3)):
            extras = [(), ("ftz",), ("sat",)] if ty == "f32" else [(), ("sat",)] if small else [()]
            if name == "fma" and WIDTH[ty] < 64 and ty != "f32":
                extras.append(("relu",))
            for rnd, extra in itertools.product(rounds, extras):
                mods = (rnd, *extra)
                yield fop(name, ty, mods, n)
    for name, rounds in (("div", "rn rz rm rp"), ("rcp", "rn rz rm rp"), ("sqrt", "rn rz rm rp")):
        for rnd, ftz in itertools.product(rounds.split(), ((), ("ftz",))):
            yield fop(name, "f32", (rnd, *ftz), 2 if name == "div" else 1)
        for rnd in ("rn",) if name == "sqrt" else rounds.split():
            yield fop(name, "f64", (rnd,), 2 if name == "div" else 1)
    for ty in ("f32", "f16", "bf16", "f16x2", "bf16x2"):
        for name in ("min", "max"):
            extras = [(), ("NaN",), ("xorsign", "abs")] + ([("ftz",), ("ftz", "NaN")] if ty == "f32" else [])
            for mods in extras:
                yield fop(name, ty, mods, 2)
        for name in ("neg", "abs"):
            yield fop(name, ty, (), 1)
    for name in ("min", "max"):
        yield fop(name, "f64", (), 2)
    for name in ("neg", "abs"):
        yield fop(name, "f64", (), 1)
    for cmp in ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"):
        for ty, mods in (("f32", ()), ("f32", ("ftz",)), ("f64", ()), ("f16", ()), ("bf16", ())):
            f = N.make_fsetp(cmp, ty, mods)
            text = (
                f"{{{{ .reg .pred p; setp.{'.'.join((cmp, *mods, ty))} p, {{a}}, {{b}}; selp.u32 {{d}}, 1, 0, p; }}}}"
            )
            yield Form(
                text, (32, WIDTH[ty], WIDTH[ty]), lambda a, b, f=f: f(a, b).astype(np.uint32), combinations(ty, 2)
            )


def fop(name, ty, mods, n):
    w = WIDTH[ty]
    sources = ", ".join(("{a}", "{b}", "{c}")[:n])
    return Form(
        f"{'.'.join((name, *mods, ty))} {{d}}, {sources};",
        (w,) * (n + 1),
        N.make_fop(name, ty, mods),
        combinations(ty, n, 6000),
    )


def conversion(mods, dty, sty, n=1, columns=None):
    dw = WIDTH[dty]
    sources = ", ".join(("{a}", "{b}")[:n])
    text = f"{'.'.join(('cvt', *mods, dty, sty))} {{d}}, {sources};"
    sw = WIDTH[sty]
    return Form(text, (dw, *(sw,) * n), N.make_cvt(mods, dty, sty, dw), columns or combinations(sty, n))


def conversions():
    """``cvt`` in the forms of sm_90."""
    every16 = [np.arange(1 << 16, dtype=np.uint16)]
    bf16_as_f32 = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    dense = np.concatenate(
        [
            bf16_as_f32,
            bf16_as_f32 + np.uint32(0x8000),
            bf16_as_f32 + np.uint32(0x8001),
            np.array(edges("f32"), np.uint32),
        ]
    )
    f16 = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    dense = np.concatenate([dense, f16, f16 + np.uint32(0x1000), f16 + np.uint32(0x0FFF), f16 + np.uint32(0x1001)])
    for ty in ("f16", "bf16"):
        for mods in (("rn",), ("rz",), ("rn", "relu"), ("rz", "relu")):
            yield conversion(mods, ty, "f32", columns=[dense])
            yield conversion(mods, ty + "x2", "f32", 2, [dense, dense[::-1].copy()])
        yield conversion((), "f32", ty, columns=every16)
    for rnd in ("rm", "rp"):
        yield conversion((rnd,), "f16", "f32", columns=[dense])
    yield conversion(("rna",), "tf32", "f32", columns=[dense])
    for mods in (("rn",), ("rz",), ("rn", "relu"), ("rz", "relu")):
        yield conversion(mods, "tf32", "f32", columns=[dense])
    for ty in ("e4m3x2", "e5m2x2"):
        for mods in (("rn", "satfinite"), ("rn", "satfinite", "relu")):
            yield conversion(mods, ty, "f32", 2, [dense, dense[::-1].copy()])
            words = np.arange(1 << 16, dtype=np.uint32) | np.arange(1 << 16, dtype=np.uint32)[::-1] << np.uint32(16)
            yield conversion(mods, ty, "f16x2", columns=[words])
        for mods in (("rn",), ("rn", "relu")):
            yield conversion(mods, "f16x2", ty, columns=every16)
    ints = [t + str(b) for t in "us" for b in (8, 16, 32, 64)]
    for dst, src in itertools.product(ints, repeat=2):
        if dst[1:] != "8" and src[1:] != "8":
            yield conversion((), dst, src)
            if WIDTH[src] > WIDTH[dst] or src[0] == "s" != dst[0] or (src[0] != dst[0] and WIDTH[src] == WIDTH[dst]):
                yield conversion(("sat",), dst, src)
    for dst in ints:
        if dst[1:] == "8":
            continue
        for src, rnd in itertools.product(("f16", "f32", "f64"), ("rni", "rzi", "rmi", "rpi")):
            yield conversion((rnd,), dst, src)
        yield conversion(("rzi", "ftz"), dst, "f32")
        for ty, rnd in itertools.product(("f16", "bf16", "f32", "f64"), ("rn", "rz", "rm", "rp")):
            if not (ty == "bf16" and rnd != "rn" and dst[1:] == "64"):
                yield conversion((rnd,), ty, dst)
    for rnd in ("rni", "rzi", "rmi", "rpi"):
        yield conversion((rnd,), "f32", "f32", columns=[dense])
        yield conversion((rnd, "ftz"), "f32", "f32", columns=[dense])
    for rnd in ("rn", "rz", "rm", "rp"):
        yield conversion((rnd,), "f32", "f64")
        yield conversion((rnd,), "f16", "f64")
    yield conversion((), "f64", "f32", columns=[dense])
    yield conversion((), "f64", "f16", columns=every16)
    yield conversion(("rn", "sat"), "f32", "f64")
    yield conversion(("rn", "ftz"), "f32", "f64")
    yield conversion(("sat",), "f32", "f32", columns=[dense])


def integers():
    """Integer and bit operations."""

    def form(text, widths, fn, types):
        return Form(text, widths, fn, [c for c in combinations(types, len(widths) - 1)])

    for b in (32, 64):
        u, s = f"u{b}", f"s{b}"
        for ty, sg in ((u, False), (s, True)):
            yield form(
                f"mul.hi.{ty} {{d}}, {{a}}, {{b}};",
                (b,) * 3,
                lambda x, y, b=b, sg=sg: vectorised(N.mulhi, b)(x, y, b, sg),
                u,
            )
            for name, mx in (("min", False), ("max", True)):
                yield form(
                    f"{name}.{ty} {{d}}, {{a}}, {{b}};",
                    (b,) * 3,
                    lambda x, y, b=b, sg=sg, mx=mx: N.iminmax(x, y, b, sg, mx),
                    u,
                )
        for name, fn in (("clz", N.clz), ("brev", N.brev)):
            yield form(
                f"{name}.b{b} {{d}}, {{a}};", (32 if name == "clz" else b, b), lambda x, fn=fn, b=b: lanes(fn, x, b), u
            )
        yield form(f"popc.b{b} {{d}}, {{a}};", (32, b), lambda x: lanes(N.popc, x), u)
        for ty, sg in ((u, False), (s, True)):
            for sh in (False, True):
                yield form(
                    f"bfind{'.shiftamt' if sh else ''}.{ty} {{d}}, {{a}};",
                    (32, b),
                    lambda x, b=b, sg=sg, sh=sh: lanes(N.bfind, x, b, sg, sh),
                    u,
                )
    for mode in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"):
        yield form(
            f"prmt.b32{mode} {{d}}, {{a}}, {{b}}, {{c}};",
            (32,) * 4,
            lambda x, y, z, mode=mode: lanes(N.prmt, x, y, z, mode[1:]),
            "u32",
        )
    for ta, tb in itertools.product(("u32", "s32"), repeat=2):
        signs = (ta == "s32", tb == "s32")
        yield form(
            f"dp4a.{ta}.{tb} {{d}}, {{a}}, {{b}}, {{c}};",
            (32,) * 4,
            lambda x, y, z, signs=signs: lanes(N.dp4a, x, y, z, *signs),
            "u32",
        )
        for half in ("lo", "hi"):
            yield form(
                f"dp2a.{half}.{ta}.{tb} {{d}}, {{a}}, {{b}}, {{c}};",
                (32,) * 4,
                lambda x, y, z, signs=signs, high=half == "hi": lanes(N.dp2a, x, y, z, *signs, high),
                "u32",
            )
    for direction, wrap in itertools.product("lr", ("wrap", "clamp")):
        yield form(
            f"shf.{direction}.{wrap}.b32 {{d}}, {{a}}, {{b}}, {{c}};",
            (32,) * 4,
            lambda x, y, z, l=direction, w=wrap: lanes(N.shf, x, y, z, l == "l", w == "wrap"),
            "u32",
        )
    for name, fn in (("shl.b32", N.shl), ("shr.u32", N.shru), ("shr.s32", N.shrs)):
        yield form(f"{name} {{d}}, {{a}}, {{b}};", (32,) * 3, lambda x, y, fn=fn: fn(x, y, 32), "u32")
    for ty, sg in (("u32", False), ("s32", True)):
        yield form(
            f"bfe.{ty} {{d}}, {{a}}, {{b}}, {{c}};",
            (32,) * 4,
            lambda x, y, z, sg=sg: lanes(N.bfe, x, y, z, 32, sg),
            "u32",
        )
        yield form(
            f"mul.wide.{ty} {{d}}, {{a}}, {{b}};", (64, 32, 32), lambda x, y, sg=sg: N.mulwide(x, y, 32, sg), "u32"
        )
        for name, rem in (("div", False), ("rem", True)):
            yield form(
                f"{name}.{ty} {{d}}, {{a}}, {{b}};",
                (32,) * 3,
                lambda x, y, sg=sg, rem=rem: lanes(N.idiv, x, y, 32, sg, rem),
                "u32",
            )
    yield form("add.sat.s32 {d}, {a}, {b};", (32,) * 3, lambda x, y: lanes(N.addsat, x, y, False), "u32")
    yield form("sub.sat.s32 {d}, {a}, {b};", (32,) * 3, lambda x, y: lanes(N.addsat, x, y, True), "u32")
    for lut in (0x96, 0xE8, 0x1D, 0xCA):
        yield form(
            f"lop3.b32 {{d}}, {{a}}, {{b}}, {{c}}, {lut};",
            (32,) * 4,
            lambda x, y, z, lut=lut: lanes(N.lop3, x, y, z, lut),
            "u32",
        )


def lanes(fn, *args):
    """A 32-lane function over longer columns."""
    cols = [a for a in args if isinstance(a, np.ndarray)]
    rest = [a for a in args if not isinstance(a, np.ndarray)]
    n = len(cols[0])
    pad = -n % 32
    cols = [np.concatenate([c, c[:pad] if pad <= n else np.resize(c, pad)]) for c in cols]
    parts = [N.full(fn(*[c[i : i + 32] for c in cols], *rest), 64) for i in range(0, n + pad, 32)]
    return np.concatenate(parts)[:n]


def vectorised(fn, bits):
    """64-bit products need the 32-lane path."""
    return fn if bits == 32 else lambda *args: lanes(fn, *args)


def kernel(forms):
    """PTX text with one kernel per form: thread i handles element i."""
    reg = {16: "b16", 32: "b32", 64: "b64"}
    out = [".version 8.4\n.target sm_90a\n.address_size 64\n"]
    for i, f in enumerate(forms):
        names = ["d", "a", "b", "c"][: len(f.widths)]
        params = ", ".join(f".param .u64 p{n}" for n in names)
        regs = " ".join(f".reg .{reg[w]} v{n};" for n, w in zip(names, f.widths, strict=True))
        loads = "".join(
            f"  ld.param.u64 q{n}, [p{n}]; mad.wide.u32 q{n}, i, {w // 8}, q{n};\n"
            + (f"  ld.global.{reg[w]} v{n}, [q{n}];\n" if n != "d" else "")
            for n, w in zip(names, f.widths, strict=True)
        )
        body = f.text.format(**{n: f"v{n}" for n in names})
        out.append(
            f".visible .entry k{i}({params}, .param .u32 pn) {{\n  .reg .b64 {', '.join('q' + n for n in names)};\n"
            f"  .reg .b32 i, t, n; .reg .pred out; {regs}\n"
            "  mov.u32 i, %ctaid.x; mov.u32 t, %tid.x; mad.lo.u32 i, i, 256, t; ld.param.u32 n, [pn];\n"
            f"  setp.ge.u32 out, i, n; @out ret;\n{loads}  {body}\n"
            f"  st.global.{reg[f.widths[0]]} [qd], vd;\n  ret;\n}}\n"
        )
    return "".join(out)


def compare(device, forms):
    """[(instruction, elements, mismatches, first mismatch)] of each form."""
    out = []
    for f in forms:
        try:
            function = device.load(kernel([f]).encode(), "k0")
        except RuntimeError as e:
            out.append((f.name, 0, 1, f"the driver refuses it: {e}"))
            continue
        n = len(f.columns[0])
        buffers = [device.upload(np.ascontiguousarray(c).tobytes()) for c in f.columns]
        dt = _DTYPE[f.widths[0]]
        result = device.upload(bytes(n * dt().itemsize))
        params = [p.to_bytes(8, "little") for p in (result, *buffers)] + [n.to_bytes(4, "little")]
        device.launch(function, (-(-n // 256), 1, 1), (256, 1, 1), params)
        got = np.frombuffer(device.download(result, n * dt().itemsize), dt)
        want = np.asarray(f.emulate(*f.columns)).astype(dt)
        bad = np.flatnonzero(got != want)
        first = None
        if len(bad):
            pick = bad[np.linspace(0, len(bad) - 1, 4).astype(int)]
            first = "; ".join(
                f"{[hex(int(c[i])) for c in f.columns]}: device {int(got[i]):#x}, emulator {int(want[i]):#x}"
                for i in pick
            )
        out.append((f.name, n, len(bad), first))
    return out


def everything():
    return [*arithmetic(), *conversions(), *integers()]

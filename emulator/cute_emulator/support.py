"""Functions for generated code besides the methods of the warp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import mma
from . import numerics as N
from .errors import SyncError, UnsupportedError
from .happens_before import Order
from .memory import LOCAL_BASE, SHARED_BASE
from .registers import peek, ready
from .warp import unsupported

_ONE_HOT = [np.arange(32) == i for i in range(32)]
_FIELD = {8: (np.uint16, 0xFF), 16: (np.uint16, 0xFFFF), 32: (np.uint32, 0xFFFFFFFF)}
_LANE = np.arange(32)


def elect(w: Any, m: np.ndarray) -> tuple[int, Any]:
    """elect.sync: the first active lane."""
    i = int(m.argmax())
    return i, True if w.nlive == 1 else _ONE_HOT[i]


def field(v: Any, shift: int, bits: int) -> Any:
    """Return ``bits`` bits of a register from ``shift`` up."""
    if type(v) is int:
        return (v >> shift) & N.MASK[bits]
    dt, mask = _FIELD[bits]
    if v.dtype == np.uint8:
        v = v.astype(np.uint16)
    return (v >> v.dtype.type(shift)).astype(dt) & dt(mask)


def pack(vals: tuple, each: int, bits: int) -> Any:
    """Return registers of ``each`` bits, lowest first, as one of ``bits``."""
    if all(type(v) is int for v in vals):
        return sum((v & N.MASK[each]) << (i * each) for i, v in enumerate(vals))
    dt = N.UDT[bits]
    r = np.zeros(32, dt)
    for i, v in enumerate(vals):
        r |= (dt(v & N.MASK[each]) if type(v) is int else v.astype(dt)) << dt(i * each)
    return r


def merge_pair(m: np.ndarray, new: tuple, old: Any) -> tuple:
    """Return ``merge`` of a 128-bit register, a pair of 64-bit values (0 before its first write)."""
    low, high = (0, 0) if type(old) is int else old
    return N.merge(m, new[0], low, 64), N.merge(m, new[1], high, 64)


def mapa(a: Any, r: Any, generic: bool) -> Any:
    """Return the same shared offset in CTA rank ``r``."""
    if type(a) is int and type(r) is int:
        return (a & ~0xFF000000 if generic else a & 0xFFFFFF) | r << 24
    if generic:
        return (N.vec(a, 64) & np.uint64(~0xFF000000 & N.M64)) | N.vec(r, 64) << np.uint64(24)
    return (N.vec(a, 32) & np.uint32(0xFFFFFF)) | N.vec(r, 32) << np.uint32(24)


def sext(v: Any, narrow: int, wide: int) -> Any:
    """Return the sign extension of raw bits."""
    if type(v) is int:
        return (v - (1 << narrow) if v >> (narrow - 1) & 1 else v) & N.MASK[wide]
    return v.astype(N.UDT[narrow]).view(N.SDT[narrow]).astype(N.SDT[wide]).view(N.UDT[wide])


def zext(v: Any, wide: int) -> Any:
    return v if type(v) is int else v.astype(N.UDT[wide])


def _source_lanes(mode: str, b: Any, c: int) -> tuple[np.ndarray, np.ndarray]:
    clamp, segment = c & 31, c >> 8 & 31
    highest = (_LANE & segment) | (clamp & ~segment)
    lowest = _LANE & segment
    b = b if type(b) is int else b.astype(np.int64)
    if mode == "idx":
        j = lowest | (b & ~segment & 31)
    elif mode == "bfly":
        j = _LANE ^ b
    elif mode == "down":
        j = _LANE + b
    else:
        j = _LANE - b
        ok = j >= highest
        return np.where(ok, j, _LANE), ok
    ok = j <= highest
    return np.where(ok, j, _LANE), ok


def shfl(mode: str, a: Any, b: Any, c: Any, m: np.ndarray) -> Any:
    """shfl.sync; every lane reads its source lane's value."""
    if type(a) is int:
        return a
    if mode == "idx" and type(b) is int and c == 31:
        if not m[b & 31]:
            raise SyncError("shfl.sync reads an inactive lane")
        return int(a[b & 31])
    return shfl_pred(mode, a, b, c, m)[0]


def shfl_pred(mode: str, a: Any, b: Any, c: Any, m: np.ndarray) -> tuple[Any, np.ndarray]:
    source, ok = _source_lanes(mode, b, c if type(c) is int else int(c[int(m.argmax())]))
    if (ok & m & ~m[source]).any():
        raise SyncError("shfl.sync reads an inactive lane")
    return (a if type(a) is int else a[source]), ok


def maskbits(m: np.ndarray) -> int:
    return int(np.packbits(m, bitorder="little").view(np.uint32)[0])


def vote(mode: str, p: Any, m: np.ndarray) -> Any:
    p = N.fullp(p)
    if mode == "any":
        return bool((p & m).any())
    if mode == "all":
        return bool((p | ~m).all())
    if mode == "uni":
        return bool((p | ~m).all() or not (p & m).any())
    return maskbits(p & m)


_WINDOW = {"shared": 1, "shared::cta": 1, "shared::cluster": 1, "local": 2, "global": 0}


def isspacep(space: str, a: Any) -> Any:
    k = _WINDOW[space]
    return (a >> 56) == k if type(a) is int else (a >> np.uint64(56)) == k


def clc_canceled(v: tuple) -> Any:
    """Return whether a try_cancel response (two 64-bit registers) holds a cluster."""
    hi = v[1]
    return bool(hi >> 32 & 1) if type(hi) is int else (hi >> np.uint64(32) & np.uint64(1)) != 0


def clc_ctaid(v: tuple, i: int) -> Any:
    x = v[i // 2]
    if type(x) is int:
        return x >> (32 * (i & 1)) & 0xFFFFFFFF
    return (x >> np.uint64(32 * (i & 1))).astype(np.uint32)


def bulk_reduction(op: str, ty: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return a function of two byte arrays for cp.reduce.async.bulk."""
    if ty in ("b32", "b64"):
        ty = "u" + ty[1:]
    bits = int(ty[-2:])
    dt = N.UDT[bits]

    def reduce(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        r = N.reduce_array(op, ty, np.ascontiguousarray(old).view(dt), np.ascontiguousarray(new).view(dt))
        return np.ascontiguousarray(r).view(np.uint8)

    if op in ("inc", "dec"):
        raise UnsupportedError(f"cp.reduce.async.bulk.{op}")
    return reduce


_NUMERICS = [
    "s16",
    "s32",
    "s64",
    "merge",
    "mergep",
    "selp",
    "shl",
    "shru",
    "shrs",
    "mulhi",
    "mulwide",
    "idiv",
    "iminmax",
    "iminmax2",
    "prmt",
    "dp2a",
    "dp4a",
    "lop3",
    "shf",
    "bfe",
    "bfi",
    "clz",
    "popc",
    "brev",
    "bfind",
    "fns",
    "addsat",
    "copysign",
    "cvt_pack",
    "testp",
    "redux",
    "make_fop",
    "make_fop_mixed",
    "make_fsetp",
    "make_cvt",
    "make_atom",
    "make_reduction",
]

NAMESPACE: dict[str, Any] = {
    "SHARED_BASE": SHARED_BASE,
    "LOCAL_BASE": LOCAL_BASE,
    "Order": Order,
    "mma_scaled": mma.mma_scaled,
    "mma_sync": mma.mma_sync,
    **{
        f.__name__: f
        for f in (
            elect, merge_pair, field, pack, mapa, sext, zext, shfl, shfl_pred, maskbits, vote, isspacep, clc_canceled,
            clc_ctaid, bulk_reduction, ready, peek, unsupported,
        )
    },
    **{name: getattr(N, name) for name in _NUMERICS},
}  # fmt: skip

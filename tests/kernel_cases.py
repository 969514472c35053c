"""Problems for grouped kernels, and their answers: operands, offsets, outputs between canaries, an oracle.

The tests on the emulator, the tests on a device and the benchmarks, which time no result that is wrong, make their
problems here. ``sizes`` are the rows of each group; the groups follow one another from row 0, and what lies behind the
last of them is the tail. Random values come from the generator of ``torch.manual_seed``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tests.memory import like

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CANARY = 7.0
BYTE, MARGIN = 0xA5, 64  # around outputs of any dtype; the margin is in bytes
ROUTINGS = {
    "edges": (5, 0, 130, 127, 128, 129, 1, 0, 40),
    "forty": tuple((i * 37) % 150 for i in range(40)),
    "one takes all": (0, 0, 2000, 0),
    "all empty": (0, 0, 0),
    "even": (256, 256, 256, 256),
    "many": tuple(i % 5 for i in range(300)),
}
Place = torch.device | str


def ends(sizes: Sequence[int], device: Place = "cpu") -> Tensor:
    """``offs``: int32 ``[G]``, where each group ends."""
    return torch.tensor(sizes, dtype=torch.int64, device=device).cumsum(0).to(torch.int32)


def spans(sizes: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Every group's number and rows."""
    for g, (size, end) in enumerate(zip(sizes, accumulate(sizes))):
        yield g, slice(end - size, end)


# --- operands ---------------------------------------------------------------------------------------------------------


def integers(*shape: int, dtype: torch.dtype = BF16, device: Place = "cpu") -> Tensor:
    """-1, 0 and 1: sums of their products are exact in float32."""
    return torch.randint(-1, 2, shape, device=device).to(dtype)


def exact(*shape: int) -> Tensor:
    """-1, 0 and 1 times a power of two per square of 16: every sum of products of their quantised values is exact."""
    values = torch.randint(-1, 2, shape).float()
    blocks = torch.randint(0, 3, (*shape[:-2], -(-shape[-2] // 16), -(-shape[-1] // 16)))
    powers = blocks.repeat_interleave(16, -2).repeat_interleave(16, -1)[..., : shape[-2], : shape[-1]]
    return (values * 2.0**powers).bfloat16()


def poisoned(t: Tensor, sizes: Sequence[int]) -> Tensor:
    """``t`` with NaN in its tail, which no result may depend on."""
    t[sum(sizes) :] = float("nan")
    return t


def column_major(t: Tensor) -> Tensor:
    """The values of ``t``, those of a column side by side."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def stored(t: Tensor, row_major: bool) -> Tensor:
    """``t`` with its last two dimensions in the given memory order; rows start on 16 bytes."""
    if not row_major:
        return stored(t.transpose(-1, -2), True).transpose(-1, -2)
    step = 16 // t.element_size()
    padded = t.new_full((*t.shape[:-1], (t.shape[-1] + step - 1) // step * step), CANARY)
    padded[..., : t.shape[-1]] = t
    return padded[..., : t.shape[-1]]


# --- outputs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Framed:
    """An output and the memory around it, which holds canaries."""

    room: Tensor
    inside: Tensor
    canary: float = CANARY

    def refill(self) -> None:
        """Canaries everywhere, in the output as well."""
        self.room.fill_(self.canary)

    def intact(self) -> bool:
        """Return whether nothing was written around the output."""
        outside = torch.ones_like(self.room, dtype=torch.bool)
        like(outside.view(-1)[self.inside.storage_offset() :], self.inside).fill_(False)
        return bool((self.room == self.canary)[outside].all())


def framed(*shape: int, dtype: torch.dtype, device: Place = "cpu") -> Framed:
    """Memory for an output ``[T, N]`` or ``[G, M, N]``, with further rows around it and columns after each row."""
    step = 16 // dtype.itemsize
    width = (shape[-1] + step - 1) // step * step + step
    if len(shape) == 2:
        room = torch.full((shape[0] + 4, width), CANARY, dtype=dtype, device=device)
        return Framed(room, room[2:-2, : shape[1]])
    room = torch.full((shape[0] + 2, shape[1] + 2, width), CANARY, dtype=dtype, device=device)
    return Framed(room, room[1:-1, 1:-1, : shape[2]])


@dataclass(frozen=True)
class FramedBytes:
    """Outputs of any dtypes, each in the middle of a buffer of bytes."""

    rooms: tuple[Tensor, ...]
    inside: tuple[Tensor, ...]

    def refill(self) -> None:
        """Canaries everywhere, in the outputs as well."""
        for room in self.rooms:
            room.fill_(BYTE)

    def intact(self) -> bool:
        """Return whether nothing was written around any output."""
        return all(bool((torch.cat([room[:MARGIN], room[-MARGIN:]]) == BYTE).all()) for room in self.rooms)

    def untouched(self) -> bool:
        """Return whether nothing was written at all since the canaries."""
        return all(bool((room == BYTE).all()) for room in self.rooms)


def framed_like(outputs: Iterable[Tensor], device: Place = "cpu") -> FramedBytes:
    """Rooms for outputs laid out as these are."""
    rooms, inside = [], []
    for t in outputs:
        size = t.numel() * t.element_size() + 2 * MARGIN
        rooms.append(torch.full((size,), BYTE, dtype=torch.uint8, device=device))
        inside.append(like(rooms[-1][MARGIN:-MARGIN].view(t.dtype), t))
    return FramedBytes(tuple(rooms), tuple(inside))


# --- oracle -----------------------------------------------------------------------------------------------------------


def product(
    a: Tensor,
    b: Tensor,
    sizes: Sequence[int],
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    dtype: torch.dtype = F64,
) -> Tensor:
    """``grouped_gemm`` of ``[T, K]`` and ``[G, K, N]``, computed in ``dtype``; zeros in the tail."""
    out = torch.zeros(a.shape[0], b.shape[2], dtype=dtype, device=a.device)
    for g, rows in spans(sizes):
        out[rows] = a[rows].to(dtype) @ b[g].to(dtype)
        if bias is not None:
            out[rows] += bias[g].to(dtype) * (1 if scale is None else scale[rows, None].to(dtype))
    return out


def gradient(a: Tensor, b: Tensor, sizes: Sequence[int], dtype: torch.dtype = F64) -> Tensor:
    """``grouped_gemm_wgrad`` of ``[T, M]`` and ``[T, N]``, computed in ``dtype``; zeros for an empty group."""
    out = torch.zeros(len(sizes), a.shape[1], b.shape[1], dtype=dtype, device=a.device)
    for g, rows in spans(sizes):
        out[g] = a[rows].to(dtype).t() @ b[rows].to(dtype)
    return out


def row_sums(dy: Tensor, sizes: Sequence[int], dtype: torch.dtype = F64) -> Tensor:
    """``grouped_dbias`` of ``[T, N]``, computed in ``dtype``; zeros for an empty group."""
    out = torch.zeros(len(sizes), dy.shape[1], dtype=dtype, device=dy.device)
    for g, rows in spans(sizes):
        out[g] = dy[rows].to(dtype).sum(0)
    return out

"""Calls of every op that has kernels, in every layout and of every width: from the ops' own signatures."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from tgl import NoImplementationError, backends
from tgl.meta.formats import FORMATS
from tgl.testing import SIGNATURES, GroupSizes, SampleInput
from tgl.testing.scaled_samples import QuantizedSignature
from tgl.testing.signatures import overload

from .odd_strides import MATRICES

ROUTING = GroupSizes("few", (3, 0, 5, 1), 12)
WIDTHS = {
    "64 x 64": (64, 64),
    "72 x 40": (72, 40),
    "100 x 60": (100, 60),
    "38 x 22": (38, 22),
    "37 x 23": (37, 23),
    "none x 24": (0, 24),
}
GAPS = ("64 x 64", "37 x 23")  # widths of operands with gaps
PLACINGS = ("as made", "misaligned", "one value", "with gaps")
DTYPES = (torch.bfloat16, torch.float32)
OPS = [
    name
    for name in SIGNATURES
    if any(i.archs for i in backends.registry.implementations.get((name.partition(".")[0], "cuda"), ()))
]


@dataclass(frozen=True)
class Call:
    """A call of an op.

    Attributes:
        name: as in ``SIGNATURES``.
        signature: which of its signatures.
        sample: what makes the arguments.
        width: key of ``WIDTHS``.
        placing: one of ``PLACINGS``: where the arguments that are read begin, that each is one value, expanded, or that
            neither their rows nor their columns have elements side by side.
    """

    name: str
    signature: int
    sample: SampleInput
    width: str
    placing: str

    @property
    def op(self):
        return overload(self.name)

    @property
    def plain(self) -> tuple:
        """Return the facts that a call shares with one that needs no copies."""
        s = self.sample
        elements = getattr(s, "a_dtype", None), getattr(s, "b_dtype", None)
        return self.name, self.signature, s.dtype, s.given, tuple(s.options.items()), s.widened, elements

    @property
    def is_plain(self) -> bool:
        return self.width == "64 x 64" and self.placing == "as made" and self.sample.layout == "row"

    def __str__(self) -> str:
        return f"{self.name} {self.width} {self.placing} {self.sample.name}"

    def arguments(self, tail: float = 0.0) -> tuple[tuple, dict]:
        """Made anew, the same values every time."""
        tensors = self.sample.tensors(tail=tail)
        operands = {o.name: o for o in self.sample.signature.operands}
        dense = not isinstance(self.sample.signature, QuantizedSignature)
        for name, t in tensors.items():
            operand = operands[name]
            if t is None or operand.written or operand.role in ("ends", "sizes") or not t.numel():
                continue
            if self.placing == "misaligned" and name not in ("rng", "noop"):
                tensors[name] = shifted(t)
            elif self.placing == "one value" and dense and operand.role == "data" and t.dim() > 1:
                tensors[name] = t.flatten()[:1].view((1,) * t.dim()).expand(t.shape)
            elif self.placing == "with gaps" and dense and operand.role == "data" and t.dim() > 1:
                tensors[name] = MATRICES["turned, with gaps"](t)
        return self.sample.call(self.op, tensors)


def shifted(t: torch.Tensor) -> torch.Tensor:
    """The same values and strides, one element further on."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
    room = torch.empty(extent + 1, dtype=t.dtype, device=t.device).as_strided(t.shape, t.stride(), 1)
    if 0 in t.stride():
        return shifted(t.contiguous())
    return room.copy_(t)


def calls(name: str) -> Iterator[Call]:
    """Every layout, width, placing and dtype of an op's calls, with all the optional arguments."""
    for i, signature in enumerate(SIGNATURES[name]):
        most = max(signature.presence(), key=len)
        for width, (k, n) in WIDTHS.items():
            sizes = {"K": k, "M": k, "N": n, "I": n}
            dims = {
                **signature.dimensions,
                **{letter: sizes[letter] for letter in signature.dimensions if letter in sizes},
            }
            for sample in replace(signature, dimensions=dims).samples(dtypes=DTYPES, routings=[ROUTING]):
                form = FORMATS.get(sample.options.get("format"))
                if sample.given != most or (form is not None and (k % form.per_byte or n % form.per_byte)):
                    continue  # elements share a byte
                for placing in PLACINGS if sample.layout == "row" else PLACINGS[:1]:
                    if placing != "with gaps" or width in GAPS:
                        yield Call(name, i, sample, width, placing)


def placed(value, device: torch.device | str):
    """A copy of a tensor in memory of its own on ``device``: its strides, and where it begins, as they are.

    ``Tensor.to`` closes the gaps between rows; and bytes are copied, since devices lack copies of some dtypes.
    """
    if not isinstance(value, torch.Tensor):
        return value
    extent = 0
    if value.numel():
        extent = value.storage_offset() + 1
        extent += sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
    room = value.as_strided((extent,), (1,), 0).view(torch.uint8).to(device, copy=True).view(value.dtype)
    return room.as_strided(value.shape, value.stride(), value.storage_offset())


def served(call: Call, device: torch.device | str) -> list[torch.Tensor] | None:
    """Return a call's results on ``device`` and the tensors it writes, on the CPU; None without GEMMs of the format."""
    args, named = call.arguments()
    try:
        made = outputs(call, tuple(placed(t, device) for t in args), {k: placed(t, device) for k, t in named.items()})
    except NoImplementationError as error:
        if ", not on sm_" not in str(error):
            raise
        return None
    return [placed(t, "cpu") for t in made]


TAILS_OF_NOBODY = {("moe", 1)}
"""Ops and outputs whose rows past the last group's hold anything on a GPU."""


def outputs(call: Call, args: tuple, named: dict) -> list[torch.Tensor]:
    """The results of a call without undefined rows, and the tensors that it writes."""
    result = call.op(*args, **named)
    returned = result if isinstance(result, (tuple, list)) else () if result is None else (result,)
    written = {o.name for o in call.sample.signature.operands if o.written}
    given = {**dict(zip((a.name for a in call.op._schema.arguments), args)), **named}
    name = call.name.partition(".")[0]
    returned = [t[: int(given["offs"][-1])] if (name, i) in TAILS_OF_NOBODY else t for i, t in enumerate(returned)]
    return [*returned, *(t for name, t in given.items() if name in written)]


BYTES = {"group_quantize", "group_dequantize", "splits_to_offsets", "route"}
"""Ops whose results are the CPU's to the byte; others sum in another order, or have another exponential."""


def agree(call: Call, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether an output equals the CPU's, in its layout too; both lie on the CPU."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if any(n > 1 and a != b for n, a, b in zip(theirs.shape, ours.stride(), theirs.stride())) and theirs.numel():
        return False
    if call.name.partition(".")[0] in BYTES or not theirs.dtype.is_floating_point:
        return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (ours, theirs)))
    one, other = ours.double(), theirs.double()
    return bool((one - other).norm() <= 4 * torch.finfo(theirs.dtype).eps * other.norm())


def check(call: Call, device: torch.device | str, running: AbstractContextManager | None = None) -> bool:
    """Compare what a device makes of a call with the CPU's, drawn anew; False where ``served`` has nothing.

    Args:
        running: around the device's own call, to emulate it.
    """
    with running or nullcontext():
        ours = served(call, device)
    if ours is None:
        return False
    for i, (a, b) in enumerate(zip(ours, outputs(call, *call.arguments()), strict=True)):
        assert agree(call, a, b), f"{call}: output {i}"
    return True


def cover(calls: Iterator[Call], strength: int, *options: str) -> list[Call]:
    """Calls in which every ``strength`` values of different axes that occur together do so once, not the plain ones.

    Pairs are of widths and of places, and of ``options`` where given; single values of all axes.
    """
    seen: set[tuple] = set()
    chosen = []
    for call in calls:
        s = call.sample
        where = s.layout if call.placing == "as made" else call.placing
        axes = {"width": call.width, "where": where, **{f"option {key}": s.options.get(key) for key in options}}
        if strength == 1:
            axes |= {"signature": call.signature, "dtype": s.dtype, "given": s.given}
            axes |= {f"option {key}": value for key, value in s.options.items()}
        new = set(itertools.combinations(sorted(axes.items()), strength)) - seen
        if new and not call.is_plain:
            seen |= new
            chosen.append(call)
    return chosen

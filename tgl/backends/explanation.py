"""The implementation that serves a call, and why others do not: the report, and the error where none does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import target
from .implementation import HINT, Implementation, Reason


def qualified(op: str) -> str:
    """Return the op's name with its library."""
    return op if "::" in op else f"tgl::{op}"


class NoImplementationError(RuntimeError):
    """No registered implementation can serve the call; the message lists every reason."""


class GraphCaptureError(RuntimeError):
    """The only implementation that can serve the call synchronises with the host, during CUDA graph capture."""


@dataclass(frozen=True)
class Explanation:
    """The implementation that serves a call, and why the others do not. ``str()`` of it is the report.

    Attributes:
        op: name of the op.
        device: the device of the operands.
        chosen: the implementation that runs, or None.
        refused: ``(implementation, reason)`` for those tried before it and those that could not have served.
        unasked: implementations of lower priority that could have served as well.
        copies: names of the tensors that ``chosen`` copies because of their layout or device, and their bytes.
        batch_invariant: whether ``chosen`` gives a row of the results the same bits in any batch.
        parts: explanations of the ops that ``chosen`` is composed of, in order.
        tiling: tiling of the GEMM that ``chosen`` launches, a ``tgl.cutlass_kernels.config.GemmConfig``; None
            if it launches no such GEMM.
    """

    op: str
    device: torch.device
    chosen: Implementation | None
    refused: tuple[tuple[Implementation, str], ...]
    unasked: tuple[Implementation, ...]
    copies: tuple[tuple[str, int], ...] = ()
    batch_invariant: bool = False
    parts: tuple[Explanation, ...] = ()
    tiling: Any = None

    @property
    def emulates(self) -> bool:
        """Whether ``chosen`` emulates a kernel of the operands' format, which is slower."""
        return self.chosen is not None and (self.chosen.emulates or any(p.emulates for p in self.parts))

    @property
    def syncs(self) -> bool:
        """Whether the call synchronises the device with the host."""
        if self.chosen is None or self.device.type == "cpu":
            return False
        return self.chosen.syncs or any(p.syncs for p in self.parts)

    @property
    def copied(self) -> str:
        """``copies`` as text."""
        return " and ".join(f"`{name}` ({size} bytes)" for name, size in self.copies)

    def _every_part(self) -> Iterator[Explanation]:
        """Yield the parts, and theirs, recursively."""
        for part in self.parts:
            yield part
            yield from part._every_part()

    def reason(self) -> Reason:
        """None if an implementation serves the call, else all reasons in one line."""
        if self.chosen is not None:
            return None
        return f"no {self.op}: " + "; ".join(f"{i.name}: {reason}" for i, reason in self.refused)

    def __str__(self) -> str:
        lines = [f"{qualified(self.op)} on {self.device} ({target.device_arch(self.device)})"]
        if self.chosen is None:
            lines.append("  no implementation")
        else:
            parts = [
                "syncs with the host" if self.syncs else "",
                self.chosen.note,
                "" if self.tiling is None else f"tiles of {self.tiling.words}",
                self.copied and f"copies {self.copied}",
                "batch-invariant" if self.batch_invariant else "",
            ]
            about = "; ".join(filter(None, parts))
            lines.append(f"  runs {self.chosen.name}" + (f" ({about})" if about else ""))
            lines += [f"       of which {p.op} copies {p.copied}" for p in self._every_part() if p.copies]
        lines += [f"  not  {i.name}: {reason}" for i, reason in self.refused]
        lines += [f"  not  {i.name}: lower priority" for i in self.unasked]
        return "\n".join(lines)


def find_serving(
    op: str, device: torch.device, candidates: Sequence[Implementation], args: Sequence, kwargs: dict
) -> Explanation:
    """Find the implementation that serves a call, without the fields that only ``report`` fills."""
    chosen: Implementation | None = None
    refused, unasked = [], []
    for implementation in candidates:
        given = implementation.takes(kwargs) if HINT in kwargs else kwargs
        reason = implementation.reason_against_device(device) or implementation.reason_against(device, args, given)
        if reason is not None:
            refused.append((implementation, reason))
        elif chosen is None:
            chosen = implementation
        else:
            unasked.append(implementation)
    return Explanation(op, device, chosen, tuple(refused), tuple(unasked))


def unsupported(explanation: Explanation) -> RuntimeError:
    """Return the error of a call that no implementation can serve."""
    if target.capturing(explanation.device):
        return GraphCaptureError(f"{qualified(explanation.op)} cannot be captured in a CUDA graph:\n{explanation}")
    return NoImplementationError(str(explanation))

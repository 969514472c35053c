"""An implementation of an op, and whether it can serve a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import target
from .op_recorder import Composition

Reason = str | None

ROW_INDICES = ("rows", "a_rows", "b_rows")
"""Keywords that pass the index by which an operand's rows are read."""

HINT = "expected_rows"
"""The keyword for the number of rows that the groups are expected to have in all, where the capacity is larger."""


@dataclass(frozen=True)
class Implementation:
    """One way to run an op on one type of device.

    Attributes:
        op: name of the op, for example ``"grouped_gemm"``; with its library if that is another, ``"library::name"``.
        name: what ``explain`` calls it.
        device: device type, ``"cpu"``, ``"cuda"``, ...
        run: called with the op's positional arguments and the destination keywords of the op (see
            ``docs/extending.md``). None for one that only produces.
        supports: called like ``run``; returns None if it can serve the call, else the reason why not.
        archs: CUDA architectures such as ``"sm_90"``; None means any.
        priority: higher is tried first; the built-in implementations use 0 and below.
        emulable: whether it is a kernel compiled for ``archs`` that an emulator can run on CPU tensors.
        syncs: whether it reads a device tensor on the host, hence cannot run under CUDA graph capture.
        slots: whether it takes a table of ``slots``; the keyword is passed only to calls that have one.
        rows: whether it reads rows by an index, passed the same way as one of ``ROW_INDICES``.
        begins: whether it takes ``begin``, passed the same way: int32 ``[1]``, the row offset of the first group.
            Rows before it are neither read nor written.
        expects: whether it takes ``expected_rows``, the number of rows that the groups are expected to have in all,
            where it is below the capacity. It changes no result; other implementations serve without it.
        note: a sentence for ``explain`` about what to expect.
        declines: a quick reject, called with the positional arguments alone before any output is made: returns a reason
            that follows from them at little cost. ``supports`` need not repeat it.
        prepare: called like ``run``; does once what a first ``run`` would do besides computing (compile, load).
        produce: for an implementation that serves every call and makes the outputs itself: called with their specs (see
            ``tgl.backends.produce``), a list of the positional arguments, which it may empty to free memory early,
            and the keywords of ``run`` except destinations; returns the outputs.
        copies: called like ``run``; returns the names of the tensors that it copies for such a call, and their bytes.
        emulates: whether it emulates a kernel of the operands' format, which is slower.
        batch_invariant: called like ``run``; whether the bits of a result row depend only on the row's operands and
            its group's: not on other rows, their number or the row's position. None: never promised.
        parts: called like ``run``; for an implementation that is composed of other ops, and otherwise works element by
            element or row by row: records the ops of such a call. It promises what all of its ops promise, and
            ``prepare``, where it has none of its own, prepares each of them.
        tiling: called with the device's architecture and like ``run``; returns the tiling of the GEMM that it
            launches (a ``GemmConfig``), None for a call that has nothing to launch.
        attempt: called with a call's positional arguments and keywords: ``supports`` and ``run`` in one, for an
            implementation that looks a call up once for both. Returns None if it has served the call, else the reason
            why not, with nothing written.
        plain: whether nothing but ``supports`` and the keywords decides whether it serves a call.
        untaken: keywords of tables that it does not take; follows from ``slots``, ``rows`` and ``begins``.
    """

    op: str
    name: str
    device: str
    run: Callable[..., None] | None = field(repr=False)
    supports: Callable[..., Reason] | None = field(default=None, repr=False)
    archs: frozenset[str] | None = None
    priority: int = 0
    syncs: bool = False
    note: str = ""
    emulable: bool = False
    slots: bool = False
    rows: bool = False
    begins: bool = False
    expects: bool = False
    emulates: bool = False
    declines: Callable[[Sequence], Reason] | None = field(default=None, repr=False)
    prepare: Callable[..., None] | None = field(default=None, repr=False)
    produce: Callable[..., Any] | None = field(default=None, repr=False)
    copies: Callable[..., dict[str, int]] | None = field(default=None, repr=False)
    batch_invariant: Callable[..., bool] | None = field(default=None, repr=False)
    parts: Callable[..., Composition] | None = field(default=None, repr=False)
    tiling: Callable[..., Any] | None = field(default=None, repr=False)
    attempt: Callable[[Sequence, dict], Reason] | None = field(default=None, repr=False)
    untaken: frozenset[str] = field(init=False, repr=False, compare=False)
    plain: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        taken = {"slots": self.slots, "begin": self.begins, **dict.fromkeys(ROW_INDICES, self.rows)}
        object.__setattr__(self, "untaken", frozenset(name for name in taken if not taken[name]))
        object.__setattr__(self, "plain", self.run is not None and not self.syncs and self.declines is None)

    def takes(self, kwargs: dict) -> dict:
        """Return the keywords of a call that ``run`` gets: all but a hint that it does not take."""
        if self.expects or HINT not in kwargs:
            return kwargs
        return {name: value for name, value in kwargs.items() if name != HINT}

    def reason_against_device(self, device: torch.device) -> Reason:
        """Return why this implementation cannot run on ``device`` at all, or None if it can."""
        if self.archs is not None:
            arch = target.device_arch(device)
            if arch not in self.archs:
                return f"built for {', '.join(sorted(self.archs))}, this device is {arch}"
        return None

    def reason_against(self, device: torch.device, args: Sequence, kwargs: dict) -> Reason:
        """Return why this implementation, which runs on ``device``, cannot serve the call, or None if it can."""
        if self.syncs and target.capturing(device):
            return "reads offs on the host, which CUDA graph capture forbids"
        if "slots" in kwargs and not self.slots:
            return "takes matrices in the order of the groups, not at `slots`"
        if "begin" in kwargs and not self.begins:
            return "takes groups from the first row on, not from `begin`"
        if not self.rows:
            for index in ROW_INDICES:
                if index in kwargs:
                    return f"reads rows in the order of the groups, not by `{index}`"
        if self.declines is not None and (reason := self.declines(args)) is not None:
            return reason
        return self.supports(*args, **kwargs) if self.supports is not None else None

    def serve(self, device: torch.device, args: Sequence, kwargs: dict) -> Reason:
        """Run the call and return None, or return the reason why it is unsupported, with nothing written."""
        if self.attempt is not None:
            return self.attempt(args, kwargs)
        if self.run is None:
            return "makes its outputs itself"
        reason = self.reason_against(device, args, kwargs)
        if reason is None:
            self.run(*args, **kwargs)
        return reason

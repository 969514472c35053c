"""From an op's call to a launch: what every family of kernels does alike, once.

A ``Launcher`` serves one op. Its family states what a call holds (``call``, a named tuple of the op's arguments as
implementations get them), which calls no kernel takes (``refuses``), what a compiled kernel depends on (``key``), how
it is compiled (``build``) and what it is called with (``arguments``). Everything else is here: a kernel is compiled at
most once per key and device, kept on disk, and launched on the device of its first argument and the current stream.

A warm call costs one look-up. It is found by ``alike``: dtypes, memory orders, alignment, sizes of matrices and the
class of rows per group, which another kernel, launch or check would need; never by a token count, an outer stride that
follows from one, or an address. So calls of ever new sizes fill no table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ... import backends
from ..archs import ARCHS, arch_of, chips
from ..config import GemmConfig
from . import cache, device
from .reach import Reach
from .requirements import ALIGNMENT, MAX_ROWS

Call = TypeVar("Call", bound=Any)


class Plan(NamedTuple):
    """A compiled kernel: what launches it, and what it was compiled for."""

    launch: Callable[..., None]
    key: Any


plans: dict[tuple[str, Hashable, torch.device], Plan] = {}
"""All compiled kernels in use, by op, key and device."""

known: dict[tuple, Plan] = {}
"""What serves calls like one before, by launcher, device and ``Launcher.alike``."""


def forget() -> None:
    """Look every call up from scratch again; for when tilings have changed."""
    known.clear()


class Launcher(ABC, Generic[Call]):
    """Serves the calls of one op; see the module.

    Attributes:
        op: the op's name.
        call: the named tuple of its arguments and destinations, by the names that an ``Implementation`` is called with.
        reach: what the kernel asks of where tensors lie.
        archs: the entries of ``ARCHS`` that have a kernel.
        note: for ``tgl.explain``.
    """

    op: str
    call: type[Call]
    reach: ClassVar[Reach] = Reach({})
    archs: frozenset[str] = frozenset(ARCHS)
    note: str = "one launch, groups read on the device"

    # --- what a family states -----------------------------------------------------------------------------------------

    @abstractmethod
    def refuses(self, c: Call) -> backends.Reason:
        """Why no kernel takes the call, wherever its tensors lie, or None."""

    @abstractmethod
    def key(self, c: Call, arch: str) -> Any:
        """What the compiled kernel for the call depends on: a named tuple.

        The name of its architecture is in it, and ``emulated``: whether it takes tensors of a CPU, for an emulator.
        """

    @abstractmethod
    def build(self, key: Any) -> Callable:
        """Compile the kernel for ``key``. Needs no GPU; may import the compiler."""

    @abstractmethod
    def arguments(self, c: Call) -> tuple:
        """What the kernel is called with, without what ``last`` adds; a tensor first."""

    def alike(self, c: Call) -> tuple | None:
        """What decides the kernel and the checks of a call, hashable; None of one that is looked at from scratch.

        Two calls with the same answer on one device get the same kernel and are refused or not alike.
        """
        return None

    def nothing(self, c: Call) -> bool:
        """Whether there is nothing to launch."""
        return False

    def without(self, c: Call) -> None:
        """Write what a call asks for that has nothing to launch."""

    def last(self, key: Any, where: torch.device) -> tuple:
        """What the kernel takes behind ``arguments`` that depends on the device alone."""
        return ()

    def start(self, plan: Plan, c: Call) -> None:
        """Launch the kernel."""
        plan.launch(*self.arguments(c))

    def scratch(self, c: Call) -> Call | None:
        """A small call for the same kernel that touches nothing of ``c``, which loads the kernel; None: needs none."""
        return None

    def tiling(self, c: Call, chip: str) -> GemmConfig | None:
        """How a GEMM of the call is cut up on a device such as ``"sm_90"``; None of what is no GEMM."""
        return None

    def batch_invariant(self, c: Call) -> bool:
        """Whether the kernel gives a row of the results the same bits in any batch; see ``Implementation``."""
        return False

    # --- what follows -------------------------------------------------------------------------------------------------

    def remembered(self, c: Call) -> Plan | None:
        """What served a call like this one before, if anything did."""
        alike = self.alike(c)
        return None if alike is None else known.get((self, backends.emulated_arch, c[0].device, alike))

    def serve(self, args: Sequence, kwargs: dict) -> backends.Reason:
        """Run the call if a kernel takes it, else the reason why not; then nothing has been written."""
        c = self.call(*args, **kwargs)
        alike = self.alike(c)
        if alike is not None:
            alike = (self, backends.emulated_arch, args[0].device, alike)
            plan = known.get(alike)
            if plan is not None:
                self.start(plan, c)
                return None
        reason = self.reason(c)
        if reason is None:
            plan = self.run(c)
            if alike is not None and plan is not None and not self.reach.overlaps(c):
                known[alike] = plan
        return reason

    def reason(self, c: Call) -> backends.Reason:
        """Why the kernel cannot serve the call where its tensors lie, or None."""
        reason = self.refuses(c)
        return reason if reason is not None or self.nothing(c) else self.reach.reason(c)

    def run(self, c: Call) -> Plan | None:
        """Serve a call that has no reason against it; the kernel that did, if one was needed."""
        if self.nothing(c):
            self.without(c)
            return None
        plan = self.plan(c)
        self.start(plan, c)
        return plan

    def plan(self, c: Call) -> Plan:
        """The compiled kernel for the call: from this process, from disk, or compiled now.

        Raises:
            GraphCaptureError: it is not compiled yet, and a CUDA graph is being captured.
        """
        where = c[0].device
        key = self.key(c, arch_of(backends.device_arch(where)).name)
        plan = plans.get((self.op, key, where))
        if plan is None:
            kernel = compiled(self.op, key, where, lambda: self.build(key))
            plan = plans[self.op, key, where] = Plan(device.on_its_device(kernel, *self.last(key, where)), key)
        return plan

    def prepare(self, c: Call) -> None:
        """Compile and load what the call needs, without touching its tensors; on a pretended device, store it alone."""
        if self.nothing(c):
            return
        if backends.pretended_arch is not None:
            key = self.key(c, arch_of(backends.pretended_arch).name)._replace(emulated=False)
            cache.store((self.op, key), lambda: self.build(key))
        else:
            plan, small = self.plan(c), self.scratch(c)
            if small is not None:
                self.start(plan, small)

    def run_copied(self, c: Call) -> None:
        """Serve a call whose tensors the kernel cannot reach where they lie, by copies of those."""
        self.reach.copied(c, self.run)

    def prepare_copied(self, c: Call) -> None:
        """``prepare`` for what ``run_copied`` runs."""
        self.reach.moved(c, self.prepare)

    def copies(self, c: Call) -> dict[str, int]:
        """Bytes of what ``run_copied`` copies, by name."""
        return self.reach.copies(c)

    # --- as implementations of the op ---------------------------------------------------------------------------------

    def _taking(self, method: Callable[[Call], Any]) -> Callable[..., Any]:
        """``method`` of a call, for the arguments of one."""
        return lambda *args, **kwargs: method(self.call(*args, **kwargs))

    def implementation(self, name: str = "tgl kernel", priority: int = 10) -> Launched:
        """The kernel, on tensors where they lie."""
        return Launched(
            op=self.op,
            name=name,
            device="cuda",
            run=self._taking(self.run),
            supports=self._taking(self.reason),
            archs=frozenset(chips(self.archs)),
            priority=priority,
            note=self.note,
            emulable=True,
            slots="slots" in self.call._fields,
            rows=bool(self.reach.indexed),
            begins="begin" in self.call._fields,
            expects=backends.HINT in self.call._fields,
            prepare=self._taking(self.prepare),
            batch_invariant=self._taking(self.batch_invariant),
            tiling=lambda chip, *args, **kwargs: self.tiling(self.call(*args, **kwargs), chip),
            launcher=self,
        )

    def copying(self, name: str = "tgl kernel between copies", priority: int = 5) -> backends.Implementation:
        """The kernel, between copies of whatever it cannot reach."""
        return backends.Implementation(
            op=self.op,
            name=name,
            device="cuda",
            run=self._taking(self.run_copied),
            supports=self._taking(self.refuses),
            archs=frozenset(chips(self.archs)),
            priority=priority,
            note="what the kernel cannot reach in place is copied; no synchronisation",
            emulable=True,
            slots="slots" in self.call._fields,
            rows=bool(self.reach.indexed),
            begins="begin" in self.call._fields,
            expects=backends.HINT in self.call._fields,
            prepare=self._taking(self.prepare_copied),
            copies=self._taking(self.copies),
            batch_invariant=self._taking(self.batch_invariant),
        )


@dataclass(frozen=True)
class Launched(backends.Implementation):
    """An implementation that looks a call up once, for the check and for the kernel."""

    launcher: Any = None

    def serve(self, device: torch.device, args: Sequence, kwargs: dict) -> backends.Reason:
        """Run if the kernel takes the call, else the reason why not."""
        return self.launcher.serve(args, kwargs)


def compiled(op: str, key: Hashable, where: torch.device, build: Callable[[], Callable]) -> Callable:
    """The kernel for ``key``, to run on a device: for a GPU from the cache on disk, else built.

    Raises:
        GraphCaptureError: during CUDA graph capture.
    """
    if where.type != "cuda":
        return build()  # an emulator needs the PTX of what it runs, which an object file on disk does not hold
    if torch.cuda.is_current_stream_capturing():
        raise backends.GraphCaptureError(
            f"{backends.qualified(op)}: the kernel for this call is not compiled yet, which CUDA graph capture forbids;"
            f" call tgl.warmup({op!r}, ...) with such arguments, or the op itself, before the capture"
        )
    return cache.fetch((op, key), build)


def warm(rows: int, addresses: int) -> bool:
    """Whether a call may be looked up: it has rows, not too many, and all that matters lies on 16 bytes.

    Args:
        addresses: those of the tensors that the kernel wants on 16 bytes, or-ed.
    """
    return 0 < rows <= MAX_ROWS and not addresses % ALIGNMENT


def load(room: int, expected: int | None) -> int:
    """The rows that tilings follow from: those that are expected, else those that there is room for."""
    return room if expected is None else expected


def rows_class(rows: int, groups: int) -> int:
    """What tilings follow from: calls of one class have one tiling.

    Of the rows per group on average; where there are fewer rows than groups, of the rows.
    """
    return (rows // (groups or 1)).bit_length() if rows >= groups else -rows.bit_length()


def busy_groups(rows: int, groups: int) -> int:
    """How many groups have rows, at most, as far as ``rows_class`` tells."""
    return groups if rows >= groups else power_of_two(rows)


def power_of_two(count: int) -> int:
    """The largest power of two up to ``count``; 0 for 0."""
    return 1 << count.bit_length() >> 1


def small(like: Tensor, *shape: int) -> Tensor:
    """A tensor of zeros of the dtype, device and memory order of ``like``, for ``Launcher.scratch``."""
    t = torch.zeros(shape, dtype=like.dtype, device=like.device)
    last_is_unit = like.stride(-1) == 1
    return t if last_is_unit else t.transpose(-1, -2).contiguous().transpose(-1, -2)

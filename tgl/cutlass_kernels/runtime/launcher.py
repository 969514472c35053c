"""The path from an op's call to a launch, common to all families of kernels.

A ``Launcher`` serves one op. Its family states the arguments of a call (``call``, a named tuple of the op's arguments
as implementations get them), which calls are unsupported (``reject_reason``), what a compiled kernel depends on
(``key``), how it is compiled (``build``) and its arguments (``arguments``). Everything else is here: a kernel is
compiled at most once per key and device, cached on disk, and launched on the device of its first argument and the
current stream.

A warm call costs one look-up, by its ``plan_key``: dtypes, memory orders, alignment, sizes of matrices and the class of
rows per group, which would need another kernel, launch or check; never a token count, an outer stride that follows from
one, or an address. So calls of ever new sizes do not grow a table.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ... import backends
from ...backends import cpu_target
from ..archs import ARCHS, arch_of, chips
from ..config import GemmConfig
from . import cache, device
from .reach import Reach
from .requirements import ALIGNMENT, MAX_ROWS

_log = logging.getLogger(__name__)

Call = TypeVar("Call", bound=Any)


class Plan(NamedTuple):
    """A plan: a compiled kernel with its launch function, and the key that it was compiled for."""

    launch: Callable[..., None]
    key: Any


compiled_kernels: dict[tuple[str, Hashable, torch.device], Plan] = {}
"""All compiled kernels in use, by op, key and device."""

warm_plans: dict[tuple, Plan] = {}
"""The warm plans, by launcher, device and ``Launcher.plan_key``."""


def forget() -> None:
    """Drop all warm plans, for when tilings have changed."""
    warm_plans.clear()


class Launcher(ABC, Generic[Call]):
    """A launcher serves the calls of one op; see the module.

    Attributes:
        op: the op's name.
        call: the named tuple of its arguments and destinations, by the names that an ``Implementation`` is called with.
        reach: layout requirements of the kernel's tensors.
        archs: the entries of ``ARCHS`` that have a kernel.
        note: for ``tgl.explain``.
    """

    op: str
    call: type[Call]
    reach: Reach = Reach({})
    archs: frozenset[str] = frozenset(ARCHS)
    note: str = "one launch, groups read on the device"

    # --- what a family states -----------------------------------------------------------------------------------------

    @abstractmethod
    def reject_reason(self, c: Call) -> backends.Reason:
        """Return why no kernel takes the call, whatever its layouts, or None."""

    @abstractmethod
    def key(self, c: Call, arch: str) -> Any:
        """Return what the compiled kernel for the call depends on, as a named tuple.

        It contains the name of its architecture, and ``emulated``: whether it takes CPU tensors, for an emulator.
        """

    @abstractmethod
    def build(self, key: Any) -> Callable:
        """Compile the kernel for ``key``. Needs no GPU; may import the compiler."""

    @abstractmethod
    def arguments(self, c: Call) -> tuple:
        """Return the kernel's arguments, without those that ``device_arguments`` appends; a tensor first."""

    def plan_key(self, c: Call) -> tuple | None:
        """Return the plan key, hashable: everything that decides a call's kernel and checks; None: no warm plan.

        Two calls with the same plan key on one device get the same kernel, and both or neither are unsupported.
        """
        return None

    def is_empty(self, c: Call) -> bool:
        """Return whether the problem is empty, so that nothing is launched."""
        return False

    def zero_outputs(self, c: Call) -> None:
        """Write the outputs of an empty problem."""

    def device_arguments(self, key: Any, where: torch.device) -> tuple:
        """Return the kernel's last arguments, which depend on the device alone."""
        return ()

    def start(self, plan: Plan, c: Call) -> None:
        """Launch the kernel."""
        plan.launch(*self.arguments(c))

    def warmup_call(self, c: Call) -> Call | None:
        """Return a small warm-up call for the same kernel, which loads it without touching ``c``; None: not needed."""
        return None

    def tiling(self, c: Call, chip: str) -> GemmConfig | None:
        """Return the tiling of the call's GEMM on a device such as ``"sm_90"``; None if it is no GEMM."""
        return None

    def batch_invariant(self, c: Call) -> bool:
        """Return whether the kernel gives a row of the results the same bits in any batch; see ``Implementation``."""
        return False

    # --- what follows -------------------------------------------------------------------------------------------------

    def warm_plan(self, c: Call) -> Plan | None:
        """Return the warm plan for the call, or None."""
        plan_key = self.plan_key(c)
        return None if plan_key is None else warm_plans.get((self, cpu_target.arch, c[0].device, plan_key))

    def serve(self, args: Sequence, kwargs: dict) -> backends.Reason:
        """Run the call and return None, or return the reason why no kernel takes it, with nothing written."""
        c = self.call(*args, **kwargs)
        plan_key = self.plan_key(c)
        if plan_key is not None:
            plan_key = (self, cpu_target.arch, args[0].device, plan_key)
            plan = warm_plans.get(plan_key)
            if plan is not None:
                self.start(plan, c)
                return None
        reason = self.reason(c)
        if reason is None:
            plan = self.run(c)
            if plan_key is not None and plan is not None and not self.reach.overlaps(c):
                warm_plans[plan_key] = plan
        return reason

    def reason(self, c: Call) -> backends.Reason:
        """Return why the kernel cannot serve the call with its layouts, or None."""
        reason = self.reject_reason(c)
        return reason if reason is not None or self.is_empty(c) else self.reach.reason(c)

    def run(self, c: Call) -> Plan | None:
        """Serve a supported call; return the plan, or None if the problem is empty."""
        if self.is_empty(c):
            self.zero_outputs(c)
            return None
        plan = self.plan(c)
        self.start(plan, c)
        return plan

    def plan(self, c: Call) -> Plan:
        """Return the compiled kernel for the call: from this process, from disk, or compiled now.

        Raises:
            GraphCaptureError: it is not compiled yet, and a CUDA graph is being captured.
        """
        where = c[0].device
        key = self.key(c, arch_of(backends.device_arch(where)).name)
        plan = compiled_kernels.get((self.op, key, where))
        if plan is None:
            kernel = compiled(self.op, key, where, lambda: self.build(key))
            plan = compiled_kernels[self.op, key, where] = Plan(
                device.on_its_device(kernel, *self.device_arguments(key, where)), key
            )
        return plan

    def prepare(self, c: Call) -> None:
        """Compile and load the kernels of the call, without touching its tensors; in compile-only mode, only store."""
        if self.is_empty(c):
            return
        if cpu_target.compile_only:
            key = self.key(c, arch_of(backends.device_arch(c[0].device)).name)._replace(emulated=False)
            cache.store((self.op, key), lambda: self.build(key))
        else:
            plan, small = self.plan(c), self.warmup_call(c)
            if small is not None:
                self.start(plan, small)

    def run_copied(self, c: Call) -> None:
        """Serve a call by copies of the tensors whose layouts the kernel does not take."""
        if _log.isEnabledFor(logging.DEBUG):
            copies = " and ".join(f"`{name}` ({size} bytes)" for name, size in self.copies(c).items())
            _log.debug("%s copies %s", backends.qualified(self.op), copies)
        self.reach.copied(c, self.run)

    def prepare_copied(self, c: Call) -> None:
        """Run ``prepare`` for the call that ``run_copied`` runs."""
        self.reach.moved(c, self.prepare)

    def copies(self, c: Call) -> dict[str, int]:
        """Return the bytes of the tensors that ``run_copied`` copies, by name."""
        return self.reach.copies(c)

    # --- as implementations of the op ---------------------------------------------------------------------------------

    def _taking(self, method: Callable[[Call], Any]) -> Callable[..., Any]:
        """Wrap ``method`` of a call to take the call's arguments."""
        return lambda *args, **kwargs: method(self.call(*args, **kwargs))

    def implementation(self, name: str = "tgl kernel", priority: int = 10) -> backends.Implementation:
        """Return the kernel as an implementation for tensors that meet its layout requirements."""
        return backends.Implementation(
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
            attempt=self.serve,
        )

    def copying(self, name: str = "tgl kernel between copies", priority: int = 5) -> backends.Implementation:
        """Return the kernel as an implementation that copies tensors that do not meet its layout requirements."""
        return backends.Implementation(
            op=self.op,
            name=name,
            device="cuda",
            run=self._taking(self.run_copied),
            supports=self._taking(self.reject_reason),
            archs=frozenset(chips(self.archs)),
            priority=priority,
            note="tensors whose layout the kernel does not take are copied; no synchronisation",
            emulable=True,
            slots="slots" in self.call._fields,
            rows=bool(self.reach.indexed),
            begins="begin" in self.call._fields,
            expects=backends.HINT in self.call._fields,
            prepare=self._taking(self.prepare_copied),
            copies=self._taking(self.copies),
            batch_invariant=self._taking(self.batch_invariant),
        )


def compiled(op: str, key: Hashable, where: torch.device, build: Callable[[], Callable]) -> Callable:
    """Return the kernel for ``key``, to run on a device: for a GPU from the cache on disk, else built.

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
    """Return whether a call may have a warm plan: it has rows, not too many, and its tensors are aligned to 16 bytes.

    Args:
        addresses: addresses of the tensors that need 16-byte alignment, or-ed.
    """
    return 0 < rows <= MAX_ROWS and not addresses % ALIGNMENT


def load(room: int, expected: int | None) -> int:
    """Return the rows by which tilings are chosen: the expected number, else the capacity."""
    return room if expected is None else expected


def rows_class(rows: int, groups: int) -> int:
    """Return the class of rows that tilings depend on: calls of one class have one tiling.

    It is that of the average rows per group; with fewer rows than groups, that of the rows.
    """
    return (rows // (groups or 1)).bit_length() if rows >= groups else -rows.bit_length()


def busy_groups(rows: int, groups: int) -> int:
    """Return how many groups have rows, at most, as far as ``rows_class`` determines it."""
    return groups if rows >= groups else power_of_two(rows)


def power_of_two(count: int) -> int:
    """Return the largest power of two up to ``count``; 0 for 0."""
    return 1 << count.bit_length() >> 1


def small(like: Tensor, *shape: int) -> Tensor:
    """Return zeros with the dtype, device and memory order of ``like``, for ``Launcher.warmup_call``."""
    t = torch.zeros(shape, dtype=like.dtype, device=like.device)
    last_is_unit = like.stride(-1) == 1
    return t if last_is_unit else t.transpose(-1, -2).contiguous().transpose(-1, -2)

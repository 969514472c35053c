"""The registry of implementations: it decides which one serves an op on a device, and can report why.

An op of ``torch.ops.tgl`` checks its arguments, allocates its outputs and then tries the implementations registered for
the device, in order of priority. An implementation that cannot serve a call returns the reason as text, and
``tgl.explain`` prints it; there are no silent fallbacks, and no environment variable is read.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.utils._pytree import tree_map_only

from .layer_path import LayerPath as LayerPath
from .op_recorder import Composition as Composition
from .op_recorder import record, recorder

Reason = str | None

NOT_LOOKED_UP: tuple[Any, tuple[Implementation, ...]] = None, ()
"""The item of ``kept``, an argument of ``produce``, before the first call."""

ROW_INDICES = ("rows", "a_rows", "b_rows")
"""Keywords that pass the index by which an operand's rows are read."""

HINT = "expected_rows"
"""The keyword for the number of rows that the groups are expected to have in all, where the capacity is larger."""


class NoImplementationError(RuntimeError):
    """No registered implementation can serve the call; the message lists every reason."""


class GraphCaptureError(RuntimeError):
    """The only implementation that can serve the call synchronises with the host, during CUDA graph capture."""


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
            ``produce`` of this module), a list of the positional arguments, which it may empty to free memory early,
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
            arch = device_arch(device)
            if arch not in self.archs:
                return f"built for {', '.join(sorted(self.archs))}, this device is {arch}"
        return None

    def reason_against(self, device: torch.device, args: Sequence, kwargs: dict) -> Reason:
        """Return why this implementation, which runs on ``device``, cannot serve the call, or None if it can."""
        if self.syncs and capturing(device):
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


def device_arch(device: torch.device) -> str:
    """Return ``"sm_90"`` and the like for a CUDA device (also an emulated one), the device type for any other."""
    if device.type == "cuda":
        return _cuda_arch(device)
    if device.type == "meta" and recorder.device is not None:
        return device_arch(recorder.device)
    return (compile_only_arch or emulated_arch or device.type) if device.type == "cpu" else device.type


@functools.lru_cache(maxsize=64)
def _cuda_arch(device: torch.device) -> str:
    if not torch.cuda.is_available():
        return "no such device here"  # fake tensors: explain still reports what it can
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def capturing(device: torch.device) -> bool:
    """Return whether ``device`` is capturing a CUDA graph; False where CUDA was never initialised."""
    return device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


emulated_arch: str | None = None


@contextmanager
def emulated_device(arch: str) -> Iterator[None]:
    """Let CUDA kernels for ``arch`` (``"sm_100"``) serve CPU tensors, with an emulator that takes their launches.

    Ops that have no such kernel keep their CPU implementation; ``explain`` reports which.
    """
    global emulated_arch
    before, emulated_arch = emulated_arch, arch
    _forget_candidates()
    try:
        yield
    finally:
        emulated_arch = before
        _forget_candidates()


compile_only_arch: str | None = None


@contextmanager
def compile_only(arch: str) -> Iterator[None]:
    """Serve CPU tensors as CUDA tensors on ``arch`` (``"sm_100"``) would be, but compile kernels and launch none.

    ``explain`` then reports for such a GPU, ``warmup`` stores compiled kernels on disk and loads none, and a call does
    the same for its kernels. Other steps of an op run on the tensors, whose outputs of kernels stay uninitialised, so
    fake ones will do. (Fake CUDA tensors would not: a torch built for CPUs has no views of them.)
    """
    global compile_only_arch
    before, compile_only_arch = compile_only_arch, arch
    _forget_candidates()
    try:
        yield
    finally:
        compile_only_arch = before
        _forget_candidates()


def _preparing(i: Implementation) -> Implementation:
    """Return the implementation with ``prepare`` as its ``run`` if it is a kernel; any other as it is."""
    if not i.emulable or i.prepare is None:
        return i
    return replace(i, run=i.prepare, attempt=None)


def _recording(op: str) -> Implementation:
    """Return the implementation that serves an op on the meta tensors of the op recorder."""
    run = functools.partial(recorder.instead, op)
    return Implementation(op, "op recorder", "meta", run, slots=True, rows=True, begins=True, expects=True)


def _candidates(op: str, device: torch.device) -> tuple[Implementation, ...]:
    if compile_only_arch is not None:
        return _table.get((op, "cuda"), ())
    own = _table.get((op, device.type), ())
    if emulated_arch is None or device.type != "cpu":
        return own
    return (*(i for i in _table.get((op, "cuda"), ()) if i.emulable), *own)


def _find_on_device(op: str, device: torch.device) -> tuple[Implementation, ...]:
    """Return the candidates that run on ``device``, cached until the table changes."""
    if device.type == "meta" and recorder.device is not None:
        return (_recording(op),)  # not cached: it belongs to this thread
    found = _on_device  # a changed table has a new dict, so that a stale answer is not stored
    able = tuple(i for i in _candidates(op, device) if i.reason_against_device(device) is None)
    if compile_only_arch is not None:
        able = tuple(map(_preparing, able))
    found[op, device] = able
    return able


def in_order(op: str, device: torch.device) -> tuple[Implementation, ...]:
    """Return the implementations that run on ``device``, in the order in which they are tried."""
    return _on_device.get((op, device)) or _find_on_device(op, device)


def first(op: str, device: torch.device) -> Implementation | None:
    """Return the implementation that is tried first for calls of ``op`` on ``device``."""
    asked = in_order(op, device)
    return asked[0] if asked else None


def on_change(hook: Callable[[], None]) -> None:
    """Call ``hook()`` whenever the first implementation of an op may have changed."""
    _change_hooks.append(hook)


def _forget_candidates() -> None:
    global _on_device
    _on_device = {}
    for hook in _change_hooks:
        hook()


_on_device: dict[tuple[str, torch.device], tuple[Implementation, ...]] = {}
_table: dict[tuple[str, str], tuple[Implementation, ...]] = {}
_arguments: dict[str, Callable[..., tuple[torch.device, tuple, dict]]] = {}
_devices: list[str] = []
_device_hooks: list[Callable[[str], None]] = []
_change_hooks: list[Callable[[], None]] = []


def describe_op(op: str, arguments: Callable[..., tuple[torch.device, tuple, dict]]) -> None:
    """Declare ``op``, which exists already; ``"library::name"`` if it belongs to another library.

    Args:
        op: its name.
        arguments: maps a call of the public op to the device, args and kwargs that implementations get.
    """
    _arguments[op] = arguments


def ops() -> tuple[str, ...]:
    """Return the names of all ops that have been declared."""
    return tuple(_arguments)


def qualified(op: str) -> str:
    """Return the op's name with its library."""
    return op if "::" in op else f"tgl::{op}"


def device_types() -> tuple[str, ...]:
    """Return the device types that have implementations."""
    return tuple(_devices)


def on_device(hook: Callable[[str], None]) -> None:
    """Call ``hook(device_type)`` for every device type that has implementations, now or later."""
    _device_hooks.append(hook)
    for device in _devices:
        hook(device)


def add(implementation: Implementation) -> Implementation:
    """Add ``implementation`` to the table, replacing one of the same op, device and name."""
    if implementation.op not in _arguments:
        known = ", ".join(sorted(_arguments))
        raise ValueError(f"`op` must be one of {known}, but got {implementation.op!r}")
    if implementation.device not in _devices:
        _devices.append(implementation.device)
        for hook in _device_hooks:
            hook(implementation.device)
    key = (implementation.op, implementation.device)
    others = [i for i in _table.get(key, ()) if i.name != implementation.name]
    _table[key] = tuple(sorted([*others, implementation], key=lambda i: -i.priority))
    _forget_candidates()
    return implementation


def remove(implementation: Implementation) -> None:
    """Remove ``implementation`` from the table."""
    key = (implementation.op, implementation.device)
    _table[key] = tuple(i for i in _table.get(key, ()) if i is not implementation)
    _forget_candidates()


def register_implementation(
    op: str,
    name: str,
    *,
    device: str,
    supports: Callable[..., Reason] | None = None,
    archs: set[str] | None = None,
    priority: int = 10,
    syncs: bool = False,
    slots: bool = False,
    rows: bool = False,
    begins: bool = False,
    expects: bool = False,
    note: str = "",
) -> Callable[[Callable[..., None]], Implementation]:
    """Decorator that lets a function serve ``op`` on ``device``, ahead of everything of lower ``priority``.

    The function writes into destinations that the op has checked and allocated; see ``Implementation`` for the meaning
    of the arguments. The decorated name becomes the ``Implementation``; ``tgl.backends.remove`` takes it out again.

    Example::

        @tgl.register_implementation("grouped_dbias", "ours", device="cpu", supports=lambda dy, offs, **_: None)
        def ours(dy, offs, *, out): ...
    """

    def decorate(run: Callable[..., None]) -> Implementation:
        frozen = frozenset(archs) if archs is not None else None
        takes: dict[str, Any] = {"slots": slots, "rows": rows, "begins": begins, "expects": expects}
        return add(Implementation(op, name, device, run, supports, frozen, priority, syncs, note, **takes))

    return decorate


def produce(
    op: str,
    device: torch.device,
    specs: Any,
    operands: list,
    more: dict[str, Any] | None = None,
    kept: list | None = None,
    /,
    stage: str | None = None,
    **options: Any,
) -> Any:
    """Produce the outputs of ``op`` with the first implementation that can serve the call.

    Args:
        op, device: the op and the device whose implementation runs.
        specs: the output's spec, whose ``empty`` allocates it, or of several outputs a dict from the names of
            destinations to specs, or to None where an output is not requested.
        operands: the op's positional arguments, which the caller must not use any more.
        more, options: keywords of the op; from a dict they cost less.
        kept: keeps the implementations that are tried, for other calls of the op on the device.
        stage: what the op does in an expert layer, such as ``"FC1"``: the range ``tgl: FC1`` of a profile.

    Returns:
        The output, or a dict of them.
    """
    if stage is not None and profiler._is_profiler_enabled:
        with profiler.record_function(f"tgl: {stage}"):
            return produce(op, device, specs, operands, more, kept, **options)
    if more:
        options |= more
    made: Any = None
    hinted = HINT in options
    several = isinstance(specs, dict)
    table, candidates = NOT_LOOKED_UP if kept is None else kept[0]
    if table is not _on_device:
        table = _on_device
        candidates = table.get((op, device)) or _find_on_device(op, device)
        if kept is not None:
            kept[0] = table, candidates
    for implementation in candidates:
        if implementation.produce is not None:
            if made is not None:  # allocated for an earlier candidate
                made = None
                for name in specs if several else ("out",):
                    del options[name]
            return implementation.produce(specs, operands, **(implementation.takes(options) if hinted else options))
        if implementation.declines is not None and implementation.declines(operands) is not None:
            continue
        if made is None:
            if several:
                made = {}
                for name, spec in specs.items():  # a comprehension would add a frame
                    made[name] = spec and spec.empty()
                options |= made
            else:
                options["out"] = made = specs.empty()
        given = implementation.takes(options) if hinted else options
        if implementation.attempt is not None:  # ``serve``, without its frame
            if implementation.attempt(operands, given) is None:
                return made
        elif implementation.plain and implementation.untaken.isdisjoint(given):
            if implementation.supports is None or implementation.supports(*operands, **given) is None:
                implementation.run(*operands, **given)  # type: ignore[misc]  # not None if `plain`
                return made
        elif implementation.serve(device, operands, given) is None:
            return made
    if made is None:
        options |= {name: spec and spec.empty() for name, spec in (specs if several else {"out": specs}).items()}
    raise _no_implementation(op, device, operands, options)


def run(op: str, device: torch.device, *args: Any, stage: str | None = None, **kwargs: Any) -> None:
    """Run the first implementation of ``op`` that can serve the call; ``stage``: see ``produce``."""
    if stage is not None and profiler._is_profiler_enabled:
        with profiler.record_function(f"tgl: {stage}"):
            return run(op, device, *args, **kwargs)
    hinted = HINT in kwargs
    for implementation in _on_device.get((op, device)) or _find_on_device(op, device):
        if implementation.declines is not None and implementation.declines(args) is not None:
            continue
        if implementation.serve(device, args, implementation.takes(kwargs) if hinted else kwargs) is None:
            return
    raise _no_implementation(op, device, args, kwargs)


def _no_implementation(op: str, device: torch.device, args: Sequence, kwargs: dict) -> RuntimeError:
    explanation = _explain(op, device, args, kwargs)
    if capturing(device):
        return GraphCaptureError(f"{qualified(op)} cannot be captured in a CUDA graph:\n{explanation}")
    return NoImplementationError(str(explanation))


def reason_against(op: str, device: torch.device, *args: Any, **kwargs: Any) -> Reason:
    """Return why ``run`` with these arguments would find no implementation, or None; for ops built of other ops."""
    explanation = _explain(op, device, args, kwargs)
    return None if explanation.chosen is not None else explanation.reason()


def report(op: str, device: torch.device, *args: Any, **kwargs: Any) -> Explanation:
    """Return the ``explain`` report of ``run`` with these arguments."""
    found = _explain(op, device, args, kwargs)
    chosen = found.chosen
    if chosen is None:
        return found
    kwargs = chosen.takes(kwargs)
    copies = () if chosen.copies is None else tuple(chosen.copies(*args, **kwargs).items())
    if chosen.parts is not None:
        parts = record(chosen.parts(*args, **kwargs), report)
        return replace(found, copies=copies, parts=parts, batch_invariant=all(p.batch_invariant for p in parts))
    promised = chosen.batch_invariant is not None and chosen.batch_invariant(*args, **kwargs)
    tiling = None if chosen.tiling is None else chosen.tiling(device_arch(found.device), *args, **kwargs)
    return replace(found, copies=copies, batch_invariant=promised, tiling=tiling)


def prepare(op: str, device: torch.device, *args: Any, **kwargs: Any) -> None:
    """Do everything that the first ``run`` with these arguments would do besides computing."""
    chosen = _explain(op, device, args, kwargs).chosen
    if chosen is None:
        return
    kwargs = chosen.takes(kwargs)
    if chosen.prepare is not None:
        chosen.prepare(*args, **kwargs)
    elif chosen.parts is not None:
        record(chosen.parts(*args, **kwargs), _prepare_part)


def _prepare_part(op: str, _: torch.device, *args: Any, **kwargs: Any) -> None:
    """Prepare a recorded op; kernels prepare with uninitialised tensors on their device."""
    device = recorder.device
    assert device is not None

    def there(t: Tensor) -> Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)

    given, named = tree_map_only(Tensor, there, (args, kwargs))
    prepare(op, device, *given, **named)


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
        lines = [f"{qualified(self.op)} on {self.device} ({device_arch(self.device)})"]
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


def _explain(op: str, device: torch.device, args: Sequence, kwargs: dict) -> Explanation:
    """Find the implementation that serves a call, without the fields that only ``report`` fills."""
    if device.type == "meta":
        device = recorder.stands_for(device)
    chosen: Implementation | None = None
    refused, unasked = [], []
    for implementation in _candidates(op, device):
        given = implementation.takes(kwargs) if HINT in kwargs else kwargs
        reason = implementation.reason_against_device(device) or implementation.reason_against(device, args, given)
        if reason is not None:
            refused.append((implementation, reason))
        elif chosen is None:
            chosen = implementation
        else:
            unasked.append(implementation)
    return Explanation(op, device, chosen, tuple(refused), tuple(unasked))


@overload
def explain(
    op: str | torch._ops.OpOverload | torch._ops.OpOverloadPacket, *args: Any, **kwargs: Any
) -> Explanation: ...


@overload
def explain(op: torch.nn.Module, *args: Any, **kwargs: Any) -> LayerPath: ...


@overload
def explain(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...


def explain(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Report which implementation of ``op`` a call would run and why the others do not; nothing is computed.

    Args:
        op: ``torch.ops.tgl.grouped_gemm``, one of its overloads, ``tgl.grouped_gemm`` or the name ``"grouped_gemm"``.
            Or an expert layer, a ``tgl.MoE``, ``tgl.GroupedMLP`` or ``tgl.ExpertParallelMLP``, or ``tgl.moe``.
        *args, **kwargs: the arguments of the call; fake tensors will do.

    Returns:
        An ``Explanation``. For an expert layer a ``LayerPath``: whether it runs as one op, as one autograd function or
        layer by layer, and why.

    Raises:
        ValueError, TypeError: what the call itself would raise for bad arguments.
    """
    of_layer = getattr(op, "__explain__", None)
    if of_layer is not None:
        return of_layer(*args, **kwargs)
    return _explain_op(op, args, kwargs)


def _explain_op(op: Any, args: tuple, kwargs: dict) -> Explanation:
    if isinstance(op, torch._ops.OpOverload):
        op = op._schema.name
    elif isinstance(op, torch._ops.OpOverloadPacket):
        op = op._qualified_op_name
    name = op if isinstance(op, str) else getattr(op, "__name__", str(op))
    name = name.removeprefix("tgl::").split(".")[0]
    if name not in _arguments:
        raise ValueError(f"`op` must be one of {', '.join(sorted(_arguments))}, but got {name!r}")
    device, call_args, call_kwargs = _described(name, args, kwargs)
    return report(name, device, *call_args, **call_kwargs)


def _described(name: str, args: tuple, kwargs: dict) -> tuple[torch.device, tuple, dict]:
    """Check the arguments against the op's schema, and return the device, args and kwargs that implementations get."""
    describe = _arguments[name]
    try:
        given = inspect.signature(describe).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{qualified(name)}: {error}") from None
    for argument in torch._C._get_schema(qualified(name), "").arguments:
        value = given.get(argument.name, argument)
        if isinstance(argument.type, torch.TensorType) and value is not argument and not isinstance(value, Tensor):
            shown = None if value is None else f"a {type(value).__name__}"
            raise TypeError(f"{qualified(name)}: `{argument.name}` must be a tensor, but got {shown}")
    return describe(*args, **kwargs)


def warmup(op: Any, *args: Any, **kwargs: Any) -> Explanation:
    """Compile and load what a call of ``op`` needs, without making the call: no argument is read or written.

    Later calls with equal dtypes, layouts, N and K, and about as many rows per group, then find their kernel ready.
    CUDA graph capture requires that. For an op composed of others, such as ``moe``, each of them is prepared in turn,
    so that memory is needed for one at a time. Arguments and result are those of ``explain`` for an op.
    ``python -m tgl.warmup`` compiles the kernels of whole steps, also where there is no GPU.

    Raises:
        ValueError, TypeError: what the call itself would raise for bad arguments.
    """
    explanation = _explain_op(op, args, kwargs)
    device, call_args, call_kwargs = _described(explanation.op, args, kwargs)
    prepare(explanation.op, device, *call_args, **call_kwargs)
    return explanation

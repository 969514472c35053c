"""The registry of implementations: which one serves an op on a device, and why the others do not.

An op of ``torch.ops.tgl`` checks its arguments, allocates its outputs and then asks this registry for an
implementation, in order of priority. An implementation says in words why it cannot take a call, and ``tgl.explain``
prints those words; nothing is chosen silently and no environment variable is read.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .op_recorder import Rehearsal as Rehearsal
from .op_recorder import rehearse, rehearsed

Reason = str | None

ROW_INDICES = ("rows", "a_rows", "b_rows")
"""Keywords of calls that read rows of an operand by an index."""

HINT = "expected_rows"
"""The keyword of calls that say how many rows their groups are expected to have, of those that there is room for."""


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
        priority: higher is asked first; the built-in implementations use 0 and below.
        emulable: whether it is a kernel compiled for ``archs`` that an emulator can run on CPU tensors.
        syncs: whether it reads a device tensor on the host, hence cannot run under CUDA graph capture.
        slots: whether it takes a table of ``slots``, which is a keyword of calls that have one and of no others.
        rows: whether it reads rows by an index, in the same way a keyword: one of ``ROW_INDICES``.
        begins: whether it takes ``begin``, in the same way a keyword: int32 ``[1]``, the first row of the first group.
            Rows before it are neither read nor written.
        expects: whether it takes ``expected_rows``, a keyword of calls whose groups are expected to have so many rows
            in all, fewer than there is room for. It decides no result, and what does not take it serves without it.
        note: a sentence for ``explain`` about what to expect.
        declines: called with the positional arguments alone, before any output is made: the reason against a call that
            follows from them, at little cost. ``supports`` need not repeat it.
        prepare: called like ``run``; does once what a first ``run`` would do besides computing (compile, load).
        produce: for one that serves every call and makes the outputs itself: called with their specs (see ``produce``
            of this module), a list of the positional arguments, which it may empty to give memory back early, and the
            keywords of ``run`` but for destinations; returns the outputs.
        copies: called like ``run``; names of the tensors that it copies for such a call, and their bytes.
        emulates: whether it stands in for a kernel of the operands' format, at its own price.
        batch_invariant: called like ``run``; whether the bits of a row of the results depend on the row's operands and
            its group's alone: not on the other rows, on their number or on the row's place. None: never promised.
        parts: called like ``run``; of one that is made of other ops, and besides treats elements or rows one by one:
            the rehearsal of such a call. It promises what all of its ops promise, and ``prepare``, where it has none of
            its own, prepares each of them.
        tiling: called with the device's architecture and like ``run``; how a GEMM that it launches is cut up (a
            ``GemmConfig``), None of a call that has nothing to launch.
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
    parts: Callable[..., Rehearsal] | None = field(default=None, repr=False)
    tiling: Callable[..., Any] | None = field(default=None, repr=False)

    def takes(self, kwargs: dict) -> dict:
        """The keywords of a call that it is called with: without a hint that it has no use for."""
        if self.expects or HINT not in kwargs:
            return kwargs
        return {name: value for name, value in kwargs.items() if name != HINT}

    def reason_against_device(self, device: torch.device) -> Reason:
        """None if this implementation can run on ``device`` at all, else why not."""
        if self.archs is not None:
            arch = device_arch(device)
            if arch not in self.archs:
                return f"built for {', '.join(sorted(self.archs))}, this device is {arch}"
        return None

    def reason_against(self, device: torch.device, args: Sequence, kwargs: dict) -> Reason:
        """None if this implementation, which runs on ``device``, can serve the call, else why not."""
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
        """Run a call that it does not decline, else the reason why it cannot; then nothing has been written."""
        if self.run is None:
            return "makes its outputs itself"
        reason = self.reason_against(device, args, kwargs)
        if reason is None:
            self.run(*args, **kwargs)
        return reason


def device_arch(device: torch.device) -> str:
    """``"sm_90"`` and the like for a CUDA device (or one that is emulated), the device type for any other."""
    if device.type == "cuda":
        return _cuda_arch(device)
    if device.type == "meta" and rehearsed.device is not None:
        return device_arch(rehearsed.device)
    return (pretended_arch or emulated_arch or device.type) if device.type == "cpu" else device.type


@functools.lru_cache(maxsize=64)
def _cuda_arch(device: torch.device) -> str:
    if not torch.cuda.is_available():
        return "no such device here"  # fake tensors, for which explain still says what it can
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, if ``device`` is one that can; not where CUDA was never started."""
    return device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


emulated_arch: str | None = None


@contextmanager
def emulated_device(arch: str) -> Iterator[None]:
    """Let CUDA kernels for ``arch`` (``"sm_100"``) serve CPU tensors: for an emulator that takes their launches.

    Ops that have no such kernel keep their CPU implementation; ``explain`` tells which.
    """
    global emulated_arch
    before, emulated_arch = emulated_arch, arch
    _forget_candidates()
    try:
        yield
    finally:
        emulated_arch = before
        _forget_candidates()


pretended_arch: str | None = None


@contextmanager
def pretended_device(arch: str) -> Iterator[None]:
    """Let what serves CUDA tensors on a chip such as ``"sm_100"`` serve fake CPU tensors; kernels prepare, and run not.

    ``Launcher.prepare`` then stores kernels and loads none. All else of an op runs, on the fake tensors. (They are fake
    CPU tensors because a torch built for CPUs has no views of fake CUDA tensors.)
    """
    global pretended_arch
    before, pretended_arch = pretended_arch, arch
    _forget_candidates()
    try:
        yield
    finally:
        pretended_arch = before
        _forget_candidates()


def _preparing(i: Implementation) -> Implementation:
    """A kernel that prepares for a call where it would run; anything else as it is."""
    if not i.emulable or i.prepare is None:
        return i
    return Implementation(**{f.name: getattr(i, f.name) for f in fields(Implementation)} | {"run": i.prepare})


def _rehearsing(op: str) -> Implementation:
    """What serves an op on the meta tensors of a rehearsal."""
    run = functools.partial(rehearsed.instead, op)
    return Implementation(op, "rehearsal", "meta", run, slots=True, rows=True, begins=True, expects=True)


def _candidates(op: str, device: torch.device) -> tuple[Implementation, ...]:
    if pretended_arch is not None:
        return tuple(map(_preparing, _table.get((op, "cuda"), ())))
    own = _table.get((op, device.type), ())
    if emulated_arch is None or device.type != "cpu":
        return own
    return (*(i for i in _table.get((op, "cuda"), ()) if i.emulable), *own)


def _find_on_device(op: str, device: torch.device) -> tuple[Implementation, ...]:
    """The candidates that run on ``device``, remembered until the table changes."""
    if device.type == "meta" and rehearsed.device is not None:
        return (_rehearsing(op),)  # not remembered: it is this thread's
    found = _on_device  # the dict itself, so that an answer overtaken by a change of the table is stored nowhere
    able = tuple(i for i in _candidates(op, device) if i.reason_against_device(device) is None)
    found[op, device] = able
    return able


def in_order(op: str, device: torch.device) -> tuple[Implementation, ...]:
    """The implementations that run on ``device``, in the order in which they are asked."""
    return _on_device.get((op, device)) or _find_on_device(op, device)


def first(op: str, device: torch.device) -> Implementation | None:
    """The implementation that is asked first for calls of ``op`` on ``device``."""
    asked = in_order(op, device)
    return asked[0] if asked else None


def on_change(hook: Callable[[], None]) -> None:
    """Call ``hook()`` whenever another implementation may have become the first."""
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
    """Declare ``op``, which exists already; ``"library::name"`` if it is another library's.

    Args:
        op: its name.
        arguments: maps a call of the public op to the device, args and kwargs that implementations get.
    """
    _arguments[op] = arguments


def ops() -> tuple[str, ...]:
    """Every op that implementations can be asked for."""
    return tuple(_arguments)


def qualified(op: str) -> str:
    """The op's name with its library."""
    return op if "::" in op else f"tgl::{op}"


def device_types() -> tuple[str, ...]:
    """Those that have implementations."""
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
    """Take ``implementation`` out of the table again."""
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
    op: str, device: torch.device, specs: Any, operands: list, more: dict[str, Any] | None = None, /, **options: Any
) -> Any:
    """The outputs of ``op``, by the first implementation of ``op`` that can serve the call.

    Args:
        op, device: whose implementation.
        specs: the output's spec, whose ``empty`` allocates it, or of several outputs a dict from the names of
            destinations to specs, or to None where an output is not wanted.
        operands: the op's positional arguments, which are not the caller's any more.
        more, options: keywords of the op; from a dict they cost less.

    Returns:
        The output, or a dict of them.
    """
    if more:
        options |= more
    made: Any = None
    hinted = HINT in options
    several = isinstance(specs, dict)
    for implementation in _on_device.get((op, device)) or _find_on_device(op, device):
        if implementation.produce is not None:
            if made is not None:  # memory that nothing will be written to
                made = None
                for name in specs if several else ("out",):
                    del options[name]
            return implementation.produce(specs, operands, **(implementation.takes(options) if hinted else options))
        if implementation.declines is not None and implementation.declines(operands) is not None:
            continue
        if made is None:
            if several:
                made = {}
                for name, spec in specs.items():  # a comprehension would be one more call
                    made[name] = spec and spec.empty()
                options |= made
            else:
                options["out"] = made = specs.empty()
        if implementation.serve(device, operands, implementation.takes(options) if hinted else options) is None:
            return made
    if made is None:
        options |= {name: spec and spec.empty() for name, spec in (specs if several else {"out": specs}).items()}
    raise _nobody(op, device, operands, options)


def run(op: str, device: torch.device, *args: Any, **kwargs: Any) -> None:
    """Run the first implementation of ``op`` that can serve the call."""
    hinted = HINT in kwargs
    for implementation in _on_device.get((op, device)) or _find_on_device(op, device):
        if implementation.declines is not None and implementation.declines(args) is not None:
            continue
        if implementation.serve(device, args, implementation.takes(kwargs) if hinted else kwargs) is None:
            return
    raise _nobody(op, device, args, kwargs)


def _nobody(op: str, device: torch.device, args: Sequence, kwargs: dict) -> RuntimeError:
    explanation = _explain(op, device, args, kwargs)
    if capturing(device):
        return GraphCaptureError(f"{qualified(op)} cannot be captured in a CUDA graph:\n{explanation}")
    return NoImplementationError(str(explanation))


def reason_against(op: str, device: torch.device, *args: Any, **kwargs: Any) -> Reason:
    """None if ``run`` with these arguments would find an implementation, else why not; for those built of other ops."""
    explanation = _explain(op, device, args, kwargs)
    return None if explanation.chosen is not None else explanation.reason()


def report(op: str, device: torch.device, *args: Any, **kwargs: Any) -> Explanation:
    """``explain`` of what ``run`` with these arguments would find."""
    found = _explain(op, device, args, kwargs)
    chosen = found.chosen
    if chosen is None:
        return found
    kwargs = chosen.takes(kwargs)
    copies = () if chosen.copies is None else tuple(chosen.copies(*args, **kwargs).items())
    if chosen.parts is not None:
        parts = rehearse(chosen.parts(*args, **kwargs), report)
        return replace(found, copies=copies, parts=parts, batch_invariant=all(p.batch_invariant for p in parts))
    promised = chosen.batch_invariant is not None and chosen.batch_invariant(*args, **kwargs)
    tiling = None if chosen.tiling is None else chosen.tiling(device_arch(found.device), *args, **kwargs)
    return replace(found, copies=copies, batch_invariant=promised, tiling=tiling)


def prepare(op: str, device: torch.device, *args: Any, **kwargs: Any) -> None:
    """Do what the first ``run`` with these arguments would do besides computing."""
    chosen = _explain(op, device, args, kwargs).chosen
    if chosen is None:
        return
    kwargs = chosen.takes(kwargs)
    if chosen.prepare is not None:
        chosen.prepare(*args, **kwargs)
    elif chosen.parts is not None:
        rehearse(chosen.parts(*args, **kwargs), _prepare_part)


def _prepare_part(op: str, _: torch.device, *args: Any, **kwargs: Any) -> None:
    """Prepare an op of a rehearsal, which a kernel does on tensors that lie on its device: uninitialised ones."""
    device = rehearsed.device
    assert device is not None

    def there(t: Tensor) -> Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)

    given, named = tree_map_only(Tensor, there, (args, kwargs))
    prepare(op, device, *given, **named)


@dataclass(frozen=True)
class Explanation:
    """Which implementation serves a call, and why the others do not. ``str()`` of it is the report.

    Attributes:
        op: name of the op.
        device: the device of the operands.
        chosen: the implementation that runs, or None.
        refused: ``(implementation, reason)`` for those asked before it and those that could not have served.
        unasked: implementations of lower priority that could have served as well.
        copies: names of the tensors that ``chosen`` copies because of where they lie, and their bytes.
        batch_invariant: whether ``chosen`` gives a row of the results the same bits in any batch.
        parts: of the ops that ``chosen`` is made of, in order, where it is made of ops.
        tiling: how the GEMM that ``chosen`` launches is cut up, a ``tgl.cutlass_kernels.config.GemmConfig``; None of
            what is no GEMM of a kernel with one.
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
        """Whether ``chosen`` stands in for a kernel of the operands' format, which is slower."""
        return self.chosen is not None and (self.chosen.emulates or any(p.emulates for p in self.parts))

    @property
    def syncs(self) -> bool:
        """Whether the call synchronises the device with the host."""
        if self.chosen is None or self.device.type == "cpu":
            return False
        return self.chosen.syncs or any(p.syncs for p in self.parts)

    @property
    def copied(self) -> str:
        """``copies`` in words."""
        return " and ".join(f"`{name}` ({size} bytes)" for name, size in self.copies)

    def _every_part(self) -> Iterator[Explanation]:
        """Parts, and theirs."""
        for part in self.parts:
            yield part
            yield from part._every_part()

    def reason(self) -> Reason:
        """None if an implementation was found, else all reasons in one line."""
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
    """Who serves the call, without what ``report`` asks of it."""
    if device.type == "meta":
        device = rehearsed.stands_for(device)
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


def explain(op: Any, *args: Any, **kwargs: Any) -> Explanation:
    """Report which implementation of ``op`` a call would run and why the others do not; nothing is computed.

    Args:
        op: ``torch.ops.tgl.grouped_gemm``, one of its overloads, ``tgl.grouped_gemm`` or the name ``"grouped_gemm"``.
        *args, **kwargs: the arguments of the call; fake tensors will do.

    Raises:
        ValueError, TypeError: what the call itself would raise for bad arguments.
    """
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
    """What implementations of the op get for a call of it, whose arguments are checked against its schema first."""
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
    CUDA graph capture requires that. Of an op that is made of others, such as ``moe``, what each of them needs is
    prepared, which takes the memory of one of them at a time. Arguments and result are those of ``explain``.
    ``python -m tgl.warmup`` compiles the kernels of whole steps, also where there is no GPU.

    Raises:
        ValueError, TypeError: what the call itself would raise for bad arguments.
    """
    explanation = explain(op, *args, **kwargs)
    device, call_args, call_kwargs = _described(explanation.op, args, kwargs)
    prepare(explanation.op, device, *call_args, **call_kwargs)
    return explanation

"""The registry: a table of every op's implementations by device, and the functions that run an op through it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import profiler

from .explanation import Explanation, find_serving, unsupported
from .implementation import HINT, Implementation, Reason
from .op_recorder import recorder
from .target import cpu_target, device_arch

NOT_LOOKED_UP: tuple[Any, tuple[Implementation, ...]] = None, ()
"""The item of ``kept``, an argument of ``produce``, before the first call."""

implementations: dict[tuple[str, str], tuple[Implementation, ...]] = {}
"""The implementations of an op for a type of device, by falling priority."""

described: dict[str, Callable[..., tuple[torch.device, tuple, dict]]] = {}
"""For each op a function from a call's arguments to the device, args and kwargs that implementations get."""

_on_device: dict[tuple[str, torch.device], tuple[Implementation, ...]] = {}
_devices: list[str] = []
_device_hooks: list[Callable[[str], None]] = []
_change_hooks: list[Callable[[], None]] = []


@contextmanager
def _cpu_target(arch: str, compile_only: bool) -> Iterator[None]:
    before = cpu_target.arch, cpu_target.compile_only
    cpu_target.arch, cpu_target.compile_only = arch, compile_only
    forget_candidates()
    try:
        yield
    finally:
        cpu_target.arch, cpu_target.compile_only = before
        forget_candidates()


def emulated_device(arch: str) -> AbstractContextManager[None]:
    """Let CUDA kernels for ``arch`` (``"sm_100"``) serve CPU tensors, with an emulator that takes their launches.

    Ops that have no such kernel keep their CPU implementation; ``explain`` reports which.
    """
    return _cpu_target(arch, compile_only=False)


def compile_only(arch: str) -> AbstractContextManager[None]:
    """Serve CPU tensors as CUDA tensors on ``arch`` (``"sm_100"``) would be, but compile kernels and launch none.

    ``explain`` then reports for such a GPU, ``warmup`` stores compiled kernels on disk and loads none, and a call does
    the same for its kernels. Other steps of an op run on the tensors, whose outputs of kernels stay uninitialised, so
    fake ones will do. (Fake CUDA tensors would not: a torch built for CPUs has no views of them.)
    """
    return _cpu_target(arch, compile_only=True)


def _preparing(i: Implementation) -> Implementation:
    """Return the implementation with ``prepare`` as its ``run`` if it is a kernel; any other as it is."""
    if not i.emulable or i.prepare is None:
        return i
    return replace(i, run=i.prepare, attempt=None)


def _recording(op: str) -> Implementation:
    """Return the implementation that serves an op on the meta tensors of the op recorder."""
    run = functools.partial(recorder.instead, op)
    return Implementation(op, "op recorder", "meta", run, slots=True, rows=True, begins=True, expects=True)


def registered(op: str, device: torch.device) -> tuple[Implementation, ...]:
    """Return the implementations of ``op`` for the type of ``device``, by falling priority."""
    if cpu_target.compile_only:
        return implementations.get((op, "cuda"), ())
    own = implementations.get((op, device.type), ())
    if cpu_target.arch is None or device.type != "cpu":
        return own
    return (*[i for i in implementations.get((op, "cuda"), ()) if i.emulable], *own)


def _find_on_device(op: str, device: torch.device) -> tuple[Implementation, ...]:
    """Return the candidates that run on ``device``, cached until the table changes."""
    if device.type == "meta" and recorder.device is not None:
        return (_recording(op),)  # not cached: it belongs to this thread
    found = _on_device  # a changed table has a new dict, so that a stale answer is not stored
    arch = device_arch(device)
    able = tuple([i for i in registered(op, device) if i.archs is None or arch in i.archs])
    if cpu_target.compile_only:
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


def forget_candidates() -> None:
    """Look up again what runs on each device, because the table or the target of CPU tensors has changed."""
    global _on_device
    _on_device = {}
    for hook in _change_hooks:
        hook()


def describe_op(op: str, arguments: Callable[..., tuple[torch.device, tuple, dict]]) -> None:
    """Declare ``op``, which exists already; ``"library::name"`` if it belongs to another library.

    Args:
        op: its name.
        arguments: maps a call of the public op to the device, args and kwargs that implementations get.
    """
    described[op] = arguments


def ops() -> tuple[str, ...]:
    """Return the names of all ops that have been declared."""
    return tuple(described)


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
    if implementation.op not in described:
        known = ", ".join(sorted(described))
        raise ValueError(f"`op` must be one of {known}, but got {implementation.op!r}")
    if implementation.device not in _devices:
        _devices.append(implementation.device)
        for hook in _device_hooks:
            hook(implementation.device)
    key = (implementation.op, implementation.device)
    others = [i for i in implementations.get(key, ()) if i.name != implementation.name]
    implementations[key] = tuple(sorted([*others, implementation], key=lambda i: -i.priority))
    forget_candidates()
    return implementation


def remove(implementation: Implementation) -> None:
    """Remove ``implementation`` from the table."""
    key = (implementation.op, implementation.device)
    implementations[key] = tuple(i for i in implementations.get(key, ()) if i is not implementation)
    forget_candidates()


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
    stage: Any = None,  # str | None; keywords that hold tensors alone would not fit that
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
    raise unsupported(explain_call(op, device, operands, options))


def run(op: str, device: torch.device, *args: Any, stage: Any = None, **kwargs: Any) -> None:
    """Run the first implementation of ``op`` that can serve the call; ``stage``: see ``produce``."""
    if stage is not None and profiler._is_profiler_enabled:
        with profiler.record_function(f"tgl: {stage}"):
            return run(op, device, *args, **kwargs)
    hinted = HINT in kwargs
    for implementation in _on_device.get((op, device)) or _find_on_device(op, device):
        if implementation.declines is not None and implementation.declines(args) is not None:
            continue
        given = implementation.takes(kwargs) if hinted else kwargs
        if implementation.plain and implementation.attempt is None and implementation.untaken.isdisjoint(given):
            if implementation.supports is None or implementation.supports(*args, **given) is None:
                implementation.run(*args, **given)  # type: ignore[misc]  # not None if `plain`
                return
        elif implementation.serve(device, args, given) is None:
            return
    raise unsupported(explain_call(op, device, args, kwargs))


def explain_call(op: str, device: torch.device, args: Sequence, kwargs: dict) -> Explanation:
    """Find the implementation that serves a call, without the fields that only ``report`` fills."""
    if device.type == "meta":
        device = recorder.stands_for(device)
    return find_serving(op, device, registered(op, device), args, kwargs)

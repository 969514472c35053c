"""PyTorch itself: run ``torch.nn.functional.grouped_mm`` and ``torch._grouped_mm`` on the grouped ops.

One line, and code that calls ATen's grouped products runs on the kernels of this package::

    tgl.integrations.torch.enable()

Nothing else changes: shapes, strides and the derivative stay ATen's. Rows (or columns) past ``offs[-1]`` come out as
zeros, where ATen leaves them uninitialised, and are never read. What ours cannot serve is served by ATen's own kernel,
and ``tgl.explain(torch.ops.aten._grouped_mm, ...)`` tells which of them serves a call, and why. Ours take more: float16
without a host read, other dtypes than bfloat16 in graphs, rows at any distance, expanded gradients, and a bias ``[N]``
or ``[G, N]``, which the products of two and three, and of three and three dimensions have.

In a graph of ``torch.compile`` the products are ops of ``torch.ops.tgl``. Graphs compiled with ATen's kernels are not
run while ours are enabled, nor the other way round: Dynamo guards on it.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .. import backends
from . import _torch_compile
from . import _torch_products as products

_KEY = "tgl.integrations.torch"  # of what a thread holds; the threads of a backward inherit it from who starts it
_META = "Meta"
OWN = "ATen's own kernel"
_LOCK = threading.Lock()
_process: frozenset[str] = frozenset()
_registered: dict[str, torch.library.Library] = {}  # by dispatch key
_users: list[frozenset[str]] = []  # device types of every context that is entered, of all threads
_ATEN = torch.ops.aten._grouped_mm.default
_seen_compiled = "torch._dynamo" in sys.modules  # whether there may be graphs without our guard


def enable(device_types: Sequence[str] = ("cuda",)) -> None:
    """Serve ATen's grouped products on these devices by ours, in the whole process, until ``disable()``.

    Processes that are forked from this one inherit it. A second call changes the device types.

    Args:
        device_types: ``"cuda"`` for kernels; ``"cpu"`` is there for tests.

    Raises:
        ValueError: a device type that the ops have no implementations for.
    """
    _switch(_checked(device_types))


def disable() -> None:
    """Undo ``enable()``: ATen's own kernels serve again. Without an ``enable()`` before it, does nothing."""
    _switch(frozenset())


@contextmanager
def enabled(device_types: Sequence[str] = ("cuda",)) -> Iterator[None]:
    """``enable()`` for a ``with`` block, in this thread alone, and in the backwards that it starts.

    In other threads ATen's own kernels serve, unless ``enable()`` was called. Contexts may be nested; it can decorate a
    function, too. Enter it outside of what ``torch.compile`` traces.

    Raises:
        ValueError: a device type that the ops have no implementations for.
    """
    types = _checked(device_types)
    thread = _thread()
    before = thread.types
    with _LOCK:
        _users.append(types)
        _register()
    thread.types = before | types
    _forget_traces()
    try:
        yield
    finally:
        thread.types = before
        with _LOCK:
            _users.remove(types)
            _register()
        _forget_traces()


def served() -> tuple[str, ...]:
    """The device types whose products are ours in this thread."""
    return tuple(sorted(_process | _of_thread()))


def _checked(device_types: Sequence[str]) -> frozenset[str]:
    known = backends.device_types()
    for device_type in [device_types] if isinstance(device_types, str) else device_types:
        if device_type not in known:
            raise ValueError(f"`device_types` must be among {', '.join(known)}, but got {device_type!r}")
    return frozenset([device_types] if isinstance(device_types, str) else device_types)


class _Thread:
    """What contexts have enabled in a thread."""

    types: frozenset[str] = frozenset()


def _thread() -> _Thread:
    if not torch._C._is_key_in_tls(_KEY):
        made = _Thread()
        count = sys.getrefcount(made)
        torch._C._stash_obj_in_tls(_KEY, made)
        if sys.getrefcount(made) == count:  # PyTorch 2.11 gives back a reference that it has not taken
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    thread: _Thread = torch._C._get_obj_in_tls(_KEY)
    return thread


def _of_thread() -> frozenset[str]:
    return _thread().types if torch._C._is_key_in_tls(_KEY) else frozenset()


def _serves(device_type: str) -> bool:
    return device_type in _process or device_type in _of_thread()


def _switch(types: frozenset[str]) -> None:
    global _process
    with _LOCK:
        _process = types
        _register()
    _forget_traces()


# --- registration -----------------------------------------------------------------------------------------------------


def _register() -> None:
    """Hold the kernels that somebody needs, and no others."""
    types = _process.union(*_users)
    wanted = {torch._C._dispatch_key_for_device(t): functools.partial(_kernel, t) for t in types}
    if types and _META not in _registered:
        traced = _meta_kernel(_ATEN.py_kernels[torch._C.DispatchKey.Meta])
        _registered[_META] = _override(_META, traced)
        _ATEN.py_kernels[torch._C.DispatchKey.Meta] = traced  # what traces with symbols call
        _ATEN._dispatch_cache.clear()
        if _seen_compiled:  # graphs from before this module was imported have no guard
            torch.compiler.reset()
    for key in _registered.keys() - wanted.keys() - {_META}:
        _registered.pop(key)._destroy()
    for key, kernel in wanted.items():
        if key not in _registered:
            own = torch.library.get_kernel(products.OP, key)
            _registered[key] = _override(key, kernel(own), with_keyset=True)


def _override(key: str, kernel: Callable[..., Tensor], with_keyset: bool = False) -> torch.library.Library:
    """Register ``kernel`` for a dispatch key that has one, for as long as the library lives."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():  # that there is a kernel already
        warnings.simplefilter("ignore", UserWarning)
        library.impl("_grouped_mm", kernel, key, with_keyset=with_keyset, allow_override=True)
    return library


def _kernel(device_type: str, own: Any) -> Callable[..., Tensor]:
    """Ours where it serves in the thread that calls, else ATen's, which is ``own``."""

    def grouped_mm(
        keys: Any,
        mat_a: Tensor,
        mat_b: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        if _serves(device_type):
            made = products.attempt(mat_a, mat_b, offs, bias, out_dtype)
            if made is not None:
                return made
        result: Tensor = own.call_boxed(keys, mat_a, mat_b, offs, bias, out_dtype)
        return result

    return grouped_mm


def _meta_kernel(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What a trace sees: ATen's refuses most of what ours takes.

    It stays once it is registered: torch keeps one function in Python for an op and a key, and would go on calling it.
    """

    def grouped_mm(
        mat_a: Tensor,
        mat_b: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        if served() and bias is None:  # which Inductor's lowering of the product would drop; Dynamo puts our op there
            made = products.call(mat_a, mat_b, offs, None, out_dtype)
            if not isinstance(made, str):
                return made.result.empty()
        return own(mat_a, mat_b, offs, bias, out_dtype)

    return grouped_mm


def _forget_traces() -> None:
    """Drop what fake tensors remember of the products, which depends on the side."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None:
        fake.FakeTensorMode.cache_clear()


# --- the registry's answer --------------------------------------------------------------------------------------------


def _described(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.device, tuple, dict[str, Any]]:
    return mat_a.device, (mat_a, mat_b, offs, bias), {"out_dtype": out_dtype}


def _reason(op: str, syncs: bool, mat_a: Tensor, *args: Any, **kwargs: Any) -> backends.Reason:
    if not _serves(mat_a.device.type):
        return f"tgl.integrations.torch is not enabled for {mat_a.device.type}"
    return products.reason_against(op, syncs, mat_a, *args, **kwargs)


def _declare() -> None:
    """Tell the registry what may serve a product."""
    backends.describe_op(products.OP, _described)
    for device in ("cpu", "cuda"):
        entry = functools.partial(backends.Implementation, products.OP, device=device, run=None)
        for op in products.OPTIONS:
            ours: dict[str, Any] = {"prepare": products.prepare, "copies": products.copies}
            backends.add(entry(f"tgl::{op}", supports=functools.partial(_reason, op, False), priority=10, **ours))
            loop = functools.partial(_reason, op, True)
            backends.add(entry(f"tgl::{op}, group by group", supports=loop, priority=5, syncs=True, **ours))
        backends.add(entry(OWN))


def _declare_scaled(op: str) -> None:
    """Tell the registry that ATen's own kernel serves this product of quantised operands, enabled or not."""
    backends.describe_op(op, lambda mat_a, *args, **kwargs: (mat_a.device, (), {}))
    for device in ("cpu", "cuda"):
        backends.add(backends.Implementation(op, OWN, device, None, note="of quantised operands"))


_declare()
for _op in ("aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2"):
    _declare_scaled(_op)
_torch_compile.install()

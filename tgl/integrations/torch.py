"""PyTorch itself: run ``torch.nn.functional.grouped_mm`` and ``scaled_grouped_mm`` on the grouped ops.

One line, and code that calls ATen's grouped products runs on the kernels of this package::

    tgl.integrations.torch.enable()

Nothing else changes: shapes, strides and the derivative stay ATen's. Rows (or columns) past ``offs[-1]`` come out as
zeros, where ATen leaves them uninitialised, and are never read. What ours cannot serve is served by ATen's own kernel,
and ``tgl.explain(torch.ops.aten._grouped_mm, ...)`` reports which one serves a call, and why. Ours take more: float16
without a host read, other dtypes than bfloat16 in graphs, rows at any distance, expanded gradients, and a bias ``[N]``
or ``[G, N]``, which the products of two and three, and of three and three dimensions have.

Scaled products, ``torch._scaled_grouped_mm`` and its second version, are served of row-wise FP8 operands in every form,
and of MXFP8 ones where rows are multiplied by matrices or by rows. Sums are formed in float32, whatever
``use_fast_accum`` says. ``tgl.explain(torch.ops.aten._scaled_grouped_mm, ...)`` reports their implementation.

In a graph of ``torch.compile`` the products are ops of ``torch.ops.tgl``. Graphs compiled with ATen's kernels are not
run while ours are enabled, nor the other way round: Dynamo guards on it.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
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
from . import _torch_scaled_products as scaled_products
from ._torch_products import Product

_KEY = "tgl.integrations.torch"  # of a thread's state, which the threads of a backward inherit
_META = "Meta"
OWN = "ATen's own kernel"
_LOCK = threading.Lock()
_process: frozenset[str] = frozenset()
_registered: dict[tuple[str, str], torch.library.Library] = {}  # by op and dispatch key
_users: list[frozenset[str]] = []  # device types of every entered context, of all threads
PRODUCTS = (products.PRODUCT, *scaled_products.PRODUCTS)
_seen_compiled = "torch._dynamo" in sys.modules  # whether there may be graphs without our guard


def enable(device_types: Sequence[str] = ("cuda",)) -> None:
    """Serve ATen's grouped products on these devices by ours, in the whole process, until ``disable()``.

    Processes that are forked from this one inherit it. A second call changes the device types. Where torch finds no
    GPU, a call for ``"cuda"`` alone warns that it changes nothing.

    Args:
        device_types: ``"cuda"`` for kernels; ``"cpu"`` is there for tests.

    Raises:
        ValueError: a device type that the ops have no implementations for.
    """
    types = _checked(device_types)
    if types == {"cuda"} and not torch.cuda.device_count():
        warnings.warn(
            "tgl.integrations.torch.enable: torch finds no GPU, so nothing changes here; "
            "enable(['cpu']) serves the products of a CPU, for tests",
            stacklevel=2,
        )
    _switch(types)


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
    """Return the device types whose products are ours in this thread."""
    return tuple(sorted(_process | _of_thread()))


def in_place_of(op: torch._ops.OpOverload, device_type: str) -> Callable[..., Any] | None:
    """Return the kernel that serves ``op`` on a device in this thread, or None if it is not a served product of ATen.

    It takes the arguments of ``op``, and returns ``NotImplemented`` where ATen's own kernel serves a call.
    """
    product = next((p for p in PRODUCTS if _overload(p.name) is op), None)
    if product is None or not _serves(device_type):
        return None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        made = product.attempt(product.arguments(*args, **kwargs))
        return NotImplemented if made is None else made

    return kernel


def _checked(device_types: Sequence[str]) -> frozenset[str]:
    known = backends.device_types()
    for device_type in [device_types] if isinstance(device_types, str) else device_types:
        if device_type not in known:
            raise ValueError(f"`device_types` must be among {', '.join(known)}, but got {device_type!r}")
    return frozenset([device_types] if isinstance(device_types, str) else device_types)


class _Thread:
    """The device types that contexts have enabled in a thread."""

    types: frozenset[str] = frozenset()


def _thread() -> _Thread:
    if not torch._C._is_key_in_tls(_KEY):
        made = _Thread()
        count = sys.getrefcount(made)
        torch._C._stash_obj_in_tls(_KEY, made)
        if sys.getrefcount(made) == count:  # PyTorch 2.11 releases a reference that it has not taken
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
    """Hold exactly the kernels that are in use."""
    types = _process.union(*_users)
    wanted = {torch._C._dispatch_key_for_device(t): t for t in types}
    traced = {(product.name, _META) for product in PRODUCTS}
    if types and not traced <= _registered.keys():
        for product in PRODUCTS:
            _register_traced(product)
        if _seen_compiled:  # graphs from before this module was imported have no guard
            torch.compiler.reset()
    for name, key in _registered.keys() - traced:
        if key not in wanted:
            _registered.pop((name, key))._destroy()
    for key, device_type in wanted.items():
        for product in PRODUCTS:
            if (product.name, key) not in _registered:
                kernel = _kernel(device_type, product, _own(product.name, key))
                _registered[product.name, key] = _override(product.name, key, kernel, with_keyset=True)


def _register_traced(product: Product) -> None:
    overload = _overload(product.name)
    traced = _meta_kernel(product, overload.py_kernels.get(torch._C.DispatchKey.Meta))
    _registered[product.name, _META] = _override(product.name, _META, traced)
    overload.py_kernels[torch._C.DispatchKey.Meta] = traced  # used by traces with symbols
    overload._dispatch_cache.clear()


def _overload(name: str) -> torch._ops.OpOverload:
    overload: torch._ops.OpOverload = getattr(torch.ops.aten, name.removeprefix("aten::")).default
    return overload


def _own(name: str, key: str) -> Any:
    """Return ATen's kernel of an op, or None."""
    return (
        torch.library.get_kernel(name, key)
        if torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, key)
        else None
    )


def _override(name: str, key: str, kernel: Callable[..., Tensor], with_keyset: bool = False) -> torch.library.Library:
    """Register ``kernel`` for an op and a dispatch key that may have one, for as long as the library lives."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():  # about the existing kernel
        warnings.simplefilter("ignore", UserWarning)
        library.impl(name.removeprefix("aten::"), kernel, key, with_keyset=with_keyset, allow_override=True)
    return library


def _kernel(device_type: str, product: Product, own: Any) -> Callable[..., Tensor]:
    """Return a kernel that runs ours where it is enabled in the calling thread, else ATen's, which is ``own``."""

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Tensor:
        given = product.arguments(*args, **kwargs)
        if _serves(device_type):
            made = product.attempt(given)
            if made is not None:
                return made
        if own is None:
            raise _no_kernel(product, given)
        result: Tensor = own.call_boxed(keys, *given)
        return result

    return kernel


def _no_kernel(product: Product, given: Any) -> NotImplementedError:
    """Return the error where neither we nor ATen have a kernel."""
    return NotImplementedError(f"ATen has no kernel of its own, and\n{backends.explain(product.name, *given)}")


def _meta_kernel(product: Product, own: Callable[..., Tensor] | None) -> Callable[..., Tensor]:
    """Return the kernel for traces, since ATen's rejects most operands that only ours takes.

    It stays registered: torch keeps one Python function for an op and a key, and would go on calling it.
    """

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        given = product.arguments(*args, **kwargs)
        if served() and given.bias is None:  # Inductor's lowering would drop it; Dynamo puts our op there
            made = product.call(*given)
            if not isinstance(made, str):
                return made.result.empty()
        if own is None:
            raise NotImplementedError(f"{product.name}: ATen has no meta function, and tgl does not serve such a call")
        return own(*given)

    return kernel


def _forget_traces() -> None:
    """Drop the fake-tensor caches of the products, which depend on which side is enabled."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None:
        fake.FakeTensorMode.cache_clear()


# --- the registry's answer --------------------------------------------------------------------------------------------


def _reason(product: Product, op: str, syncs: bool, mat_a: Tensor, *given: Any) -> backends.Reason:
    if not _serves(mat_a.device.type):
        return f"tgl.integrations.torch is not enabled for {mat_a.device.type}"
    return product.reason_against(op, syncs, mat_a, *given)


def _declare(product: Product) -> None:
    """Declare the implementations of a product to the registry."""

    def described(*args: Any, **kwargs: Any) -> tuple[torch.device, tuple, dict[str, Any]]:
        return product.described(*args, **kwargs)

    described.__signature__ = inspect.signature(product.arguments)  # type: ignore[attr-defined]
    backends.describe_op(product.name, described)
    for device in ("cpu", "cuda"):
        entry = functools.partial(backends.Implementation, product.name, device=device, run=None)
        for op in product.ops:
            ours: dict[str, Any] = {"prepare": product.prepare, "copies": product.copies}
            kernels = functools.partial(_reason, product, op, False)
            backends.add(entry(f"tgl::{op}", supports=kernels, priority=10, **ours))
            loop = functools.partial(_reason, product, op, True)
            backends.add(entry(f"tgl::{op}, group by group", supports=loop, priority=5, syncs=True, **ours))
        backends.add(entry(OWN))


for _product in PRODUCTS:
    _declare(_product)
_torch_compile.install()

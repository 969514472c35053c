"""``cpu_offload``: keep tensors saved for the backward in host memory between the forward and the backward."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .ops import offload as ops

# ``threshold``: the innermost context's min_bytes; None or absent: offload nothing. Traced graphs guard on it.
# A plain ``threading.local``, because torch 2.11's Dynamo reads a subclass's class attributes instead of the thread's.
_state = threading.local()


class cpu_offload:
    """Context that keeps tensors saved for the backward in host memory until the backward needs them.

    Around eager code it moves the saved tensors of every module (``torch.autograd.graph.saved_tensors_hooks``). Under
    ``torch.compile``, inside or around the compiled function, it moves the saved tensors of the layers of this package,
    by the ops ``tgl::offload`` and ``tgl::reload`` in the compiled graphs. Other tensors that a compiled graph saves
    stay on the device, as Dynamo does not trace hooks. Each value of ``enabled`` and ``min_bytes`` compiles its own
    graph.

    Contexts are local to their thread. They nest, and the innermost decides: an inner ``enabled=False`` opts a layer
    out. Parameters, buffers registered as ``nn.Buffer``, views of either, quantised weights and ``main_grad`` never
    move. A quantised operand moves with all its components or not at all. A tensor that several operations save is
    copied once.

    On CUDA the copies go through pinned memory on a side stream; elsewhere they are plain copies. They cannot be
    captured in a CUDA graph. A context inside a function under ``torch.utils.checkpoint`` takes precedence over the
    recomputation. In eager code a context around such a function does not move the recomputed tensors.

    Args:
        enabled: False to keep everything on its device.
        min_bytes: smaller tensors stay; by default one MiB.

    Attributes:
        bytes_offloaded, tensors_offloaded: bytes and tensors copied while this was the innermost context, over all its
            uses. A context inside a compiled function counts nothing: use one around the call.

    Raises:
        ValueError: a negative ``min_bytes``.
    """

    def __init__(self, enabled: bool = True, *, min_bytes: int = 1 << 20) -> None:
        if min_bytes < 0:
            raise ValueError(f"`min_bytes` must be at least 0, but got {min_bytes}")
        self.enabled, self.min_bytes = enabled, min_bytes
        self.bytes_offloaded = self.tensors_offloaded = 0
        self._outer: list[int | None] = []

    def __enter__(self) -> cpu_offload:
        self._outer.append(getattr(_state, "threshold", None))
        _state.threshold = self.min_bytes if self.enabled else None
        if not torch.compiler.is_compiling():
            ops.meters.stack.append(self)
            if self.enabled:
                # A disabled context pushes no hooks: hooks of an outer context check the flag, and other hooks (those
                # of a checkpoint) must stay in place.
                torch._C._autograd._push_saved_tensors_default_hooks(_pack, _unpack)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _state.threshold = self._outer.pop()
        if not torch.compiler.is_compiling():
            ops.meters.stack.pop()
            if self.enabled:
                torch._C._autograd._pop_saved_tensors_default_hooks()

    def count(self, nbytes: int) -> None:
        """Add one tensor to the counters."""
        self.bytes_offloaded += nbytes
        self.tensors_offloaded += 1


# --- in a compiled graph ----------------------------------------------------------------------------------------------


def in_graph() -> bool:
    """Return whether a graph is being traced in which layers must offload their saved tensors."""
    return getattr(_state, "threshold", None) is not None and torch.compiler.is_compiling()


def to_host(operand: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    """Copy every tensor of ``operand`` to the host inside a graph; None if their total size is below the threshold."""
    # Imported here because it imports sympy, which `import tgl` avoids; while a graph is traced both are loaded.
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    threshold = getattr(_state, "threshold", None)
    if threshold is None or not guard_or_true(sum(t.numel() * t.element_size() for t in operand) >= threshold):
        return None
    return tuple(ops.offload(t) for t in operand)


def to_device(operand: Sequence[Tensor], device: torch.device, after: Tensor) -> tuple[Tensor, ...]:
    """Copy the result of ``to_host`` back to ``device``, once ``after`` has been computed."""
    return tuple(ops.reload(t, device, after) for t in operand)


# --- in eager code ----------------------------------------------------------------------------------------------------

_STAYS, _UNIT = "_tgl_stays", "_tgl_unit"


def announce(operand: Sequence[Tensor], resident: Sequence[Tensor | None]) -> None:
    """Mark tensors that an eager Function will save: ``operand`` moves as a whole or not at all, ``resident`` stays."""
    if getattr(_state, "threshold", None) is None:
        return
    unit = sum(map(_nbytes, operand))
    for t in operand:
        setattr(t, _UNIT, unit)
    for held in resident:
        if held is not None:
            setattr(held, _STAYS, True)


class _Kept(NamedTuple):
    """A tensor that stays, with its version, because autograd does not check versions when hooks are set."""

    tensor: Tensor
    version: int


class _Moved:
    """A plain tensor on the host. The weak reference keeps the source storage's address from being reused."""

    __slots__ = ("__weakref__", "device", "host", "source")

    def __init__(self, host: Tensor, device: torch.device, source: StorageWeakRef) -> None:
        self.host, self.device, self.source = host, device, source


class _Wrapped(NamedTuple):
    """A wrapper subclass taken apart."""

    kind: type
    parts: dict[str, Any]
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]


_moved: WeakValueDictionary[tuple, _Moved] = WeakValueDictionary()


def _pack(t: Tensor) -> _Kept | _Moved | _Wrapped:
    threshold = getattr(_state, "threshold", None)
    if threshold is None or _stays(t) or getattr(t, _UNIT, _nbytes(t)) < threshold or _called_by_a_graph():
        return _Kept(t.detach(), t._version)
    return _take(t.detach())


def _unpack(packed: _Kept | _Moved | _Wrapped) -> Tensor:
    if isinstance(packed, _Kept):
        if packed.tensor._version != packed.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"tensor of shape {tuple(packed.tensor.shape)} is at version {packed.tensor._version}; expected "
                f"version {packed.version}"
            )
        return packed.tensor
    return _give_back(packed)


def _stays(t: Tensor) -> bool:
    for held in (t, t._base):  # a view of a parameter has the parameter as its base
        if isinstance(held, (nn.Parameter, nn.Buffer)):
            return True
    if getattr(t, _STAYS, False) or t.layout != torch.strided or t.is_meta:
        return True
    # A copy of an expanded tensor would be larger than the tensor.
    return not is_traceable_wrapper_subclass(t) and t.untyped_storage().nbytes() < t.numel() * t.element_size()


def _nbytes(t: Tensor) -> int:
    if is_traceable_wrapper_subclass(t):
        parts = (getattr(t, name) for name in t.__tensor_flatten__()[0])
        return sum(_nbytes(part) for part in parts if isinstance(part, Tensor))  # a DTensor's parts include its mesh
    return t.numel() * t.element_size()


def _called_by_a_graph() -> bool:
    """Return whether the caller that saves is an AOTAutograd graph, where weights look like any other view."""
    frame = sys._getframe(2)
    for _ in range(3):
        if frame is None:
            return False
        if frame.f_globals.get("__name__", "").startswith("torch._functorch._aot_autograd"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _take(t: Tensor) -> _Moved | _Wrapped:
    if hasattr(t, "trigger_wait"):  # the result of a collective that is still under way
        t = t.trigger_wait()
    if is_traceable_wrapper_subclass(t):
        names, context = t.__tensor_flatten__()
        parts = {name: getattr(t, name) for name in names}
        taken = {name: _take(part) if isinstance(part, Tensor) else part for name, part in parts.items()}
        return _Wrapped(type(t), taken, context, t.shape, t.stride())
    source = StorageWeakRef(t.untyped_storage())
    key = (source.cdata, t.storage_offset(), t.shape, t.stride(), t.dtype, t._version)
    moved = _moved.get(key)
    if moved is None:
        host = ops.offload(t)
        setattr(host, _STAYS, True)
        moved = _moved[key] = _Moved(host, t.device, source)
    return moved


def _give_back(packed: _Moved | _Wrapped) -> Tensor:
    if isinstance(packed, _Moved):
        return ops.reload(packed.host, packed.device)
    moved = _Moved, _Wrapped
    parts = {name: _give_back(part) if isinstance(part, moved) else part for name, part in packed.parts.items()}
    return packed.kind.__tensor_unflatten__(parts, packed.context, packed.shape, packed.stride)  # type: ignore[attr-defined]

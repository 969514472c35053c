"""The aten ops that a GroupedTensor supports; every other op raises an error with its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from ..meta.quantized import SOURCES
from . import _structure

if TYPE_CHECKING:
    from .grouped_tensor import GroupedTensor

aten = torch.ops.aten

_OPS: dict[Any, Callable[..., Any]] = {}
_VIEWS = {aten.detach.default, aten.alias.default, aten.view.default, aten.as_strided.default, aten.select.int}
_VIEWS.add(aten.unbind.int)


def _op(*overloads: Any) -> Callable:
    def register(function: Callable) -> Callable:
        _OPS.update(dict.fromkeys(overloads, function))
        return function

    return register


def call(base: type[GroupedTensor], func: Any, args: tuple, kwargs: dict) -> Any:
    """Run ``func`` for ``GroupedTensor.__torch_dispatch__``."""
    if func in _VIEWS and torch.is_inference_mode_enabled() and not args[0].is_inference():
        with torch.inference_mode(False):  # a view of an ordinary tensor must be one, too
            return call(base, func, args, kwargs)
    function = _OPS.get(func)
    result = function(*args, **kwargs) if function is not None else NotImplemented
    if result is NotImplemented:
        kinds = {type(a).__name__: None for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, base)}
        raise NotImplementedError(
            f"{', '.join(kinds)} does not support {func} with these arguments: it holds the components of a format; "
            "take its values with dequantize(), its groups with split() or its components"
        )
    return return_and_correct_aliasing(func, args, kwargs, result) if func in _VIEWS else result


@_op(aten.detach.default, aten.alias.default)
def _alias(t: GroupedTensor) -> GroupedTensor:
    # The components themselves: an alias made below autograd would have its own version counter.
    return t._map(lambda part: part)


@contextmanager
def _versions_shared() -> Iterator[None]:
    """Make views share the version counter of their base, as views made above autograd do."""
    key = torch._C.DispatchKey.ADInplaceOrView
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(include.add(key), exclude.remove(key)):
        yield


@_op(aten.view.default)
def _view(t: GroupedTensor, size: Any) -> Any:
    return _alias(t) if tuple(size) == tuple(t.shape) else NotImplemented


@_op(aten.as_strided.default)
def _as_strided(t: GroupedTensor, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    return _alias(t) if (tuple(size), tuple(stride)) == (tuple(t.shape), t.stride()) else NotImplemented


@_op(aten.clone.default)
def _clone(t: GroupedTensor, *, memory_format: Any = None) -> GroupedTensor:
    return t._map(torch.clone)


@_op(aten._to_copy.default)
def _to_copy(
    t: GroupedTensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> GroupedTensor:
    dtype = t.dtype if dtype is None else dtype
    _require_logical(dtype)
    return t._cast(dtype)._map(lambda part: part.to(device, non_blocking=non_blocking, copy=True))


@_op(aten.empty_like.default)
def _empty_like(
    t: GroupedTensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: Any = None,
) -> GroupedTensor:
    dtype = t.dtype if dtype is None else dtype
    _require_logical(dtype)
    # The group ends are copied, because the other components have no meaning without them.
    return t._cast(dtype)._map(
        lambda part: part.to(device, copy=True) if part is t.offs else torch.empty_like(part, device=device)
    )


@_op(aten.is_pinned.default)
def _is_pinned(t: GroupedTensor, device: torch.device | None = None) -> bool:
    return all(part.is_pinned() for part in t.parts().values())


@_op(aten._pin_memory.default)
def _pin_memory(t: GroupedTensor, device: torch.device | None = None) -> GroupedTensor:
    return t._map(torch.Tensor.pin_memory)


def _require_logical(dtype: torch.dtype) -> None:
    if dtype not in SOURCES:
        raise TypeError(f"the dtype of a GroupedTensor must be bfloat16, float16 or float32, but got {dtype}")


@_op(aten.copy_.default)
def _copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not _structure.is_grouped(target):
        assert _structure.is_grouped(source)
        dtype = target.dtype if target.dtype in SOURCES else source.dtype
        return target.copy_(source._read(dtype), non_blocking)
    if not _structure.is_grouped(source):
        target._overwrite(source.to(target.device))
    elif target.same_structure(source):
        for name, part in target.parts().items():
            part.copy_(getattr(source, name), non_blocking)
    elif (target.shape, target.num_groups) == (source.shape, source.num_groups):
        target._overwrite(source._read(source.dtype).to(target.device), offs=source.offs)
    else:
        return NotImplemented
    # Autograd only bumps the version of the wrapper.
    torch.autograd.graph.increment_version([part for part in target.parts().values() if not part.is_inference()])
    return target


@_op(aten.unbind.int)
def _unbind(t: GroupedTensor, dim: int = 0) -> Any:
    if t.dim() != 3 or dim not in (0, -3):
        return NotImplemented
    with _versions_shared():
        return _structure.split(t, None)


@_op(aten.select.int)
def _select(t: GroupedTensor, dim: int, index: int) -> Any:
    if t.dim() != 3 or dim not in (0, -3):
        return NotImplemented
    with _versions_shared():
        return _structure.matrix_of(t, index)


@_op(aten.stack.default)
def _stack(tensors: list[GroupedTensor], dim: int = 0) -> Any:
    first = tensors[0]
    alike = first._one and dim in (0, -3)
    if not alike or not all(first.same_structure(t) for t in tensors):
        return NotImplemented
    shape = (len(tensors), *first.shape)
    specs = _structure.component_specs(type(first), first.options, shape, None, first.dtype, first.device)
    parts = {name: torch.stack([getattr(t, name) for t in tensors]) for name in first.parts()}
    if any(part.shape != specs[name].shape for name, part in parts.items()):
        return NotImplemented  # matrices from groups of rows are stored in whole blocks
    return type(first)(shape, first.dtype, first.static, parts)

"""Tensors passed to compiled functions: where they lie, and how a CPU tensor passes for CUDA memory."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

_CPU, _CUDA = 1, 2  # DLPack device types


def _dsl_tensor_type() -> Any:
    """Return the DSL's tensor class, None while the DSL is not loaded."""
    runtime = sys.modules.get("cutlass.cute.runtime")
    return runtime._Tensor if runtime is not None else None


def tensor_span(t: Any) -> tuple[int, int]:
    """Return the address of a torch tensor and the bytes up to the end of its last element."""
    if t.numel() == 0:
        return t.data_ptr(), 0
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), (last + 1) * t.element_size()


def mapped_ranges() -> list[tuple[int, int]]:
    """Return the address ranges mapped for writing in this process."""
    out = []
    with open("/proc/self/maps") as f:
        for line in f:
            span, mode = line.split(None, 2)[:2]
            if "w" in mode:
                low, high = span.split("-")
                out.append((int(low, 16), int(high, 16)))
    return out


_adopted: dict[int, weakref.WeakSet[Any]] = {}  # address -> DSL tensors that begin there


def adopted_span(address: int) -> tuple[int, int] | None:
    """Return the largest span of the living DSL tensors that begin at an address, None if there is none."""
    tensors = _adopted.get(address)
    if not tensors:
        _adopted.pop(address, None)
        return None
    return max(t._emulator_span for t in tensors)


_pointed: list[weakref.ref[Any]] = []  # tensors that launches got by address, as those of the next ones often are


def storage_spans(addresses: list[int]) -> list[tuple[int, int]]:
    """(address, bytes) of the torch CPU storages that hold the addresses; an address of none is left out."""
    import torch

    found: dict[int, tuple[int, int]] = {}

    def look(tensors: Iterable[Any]) -> None:
        for t in tensors:
            if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.device.type != "cpu":
                continue
            try:
                s = t.untyped_storage()
                start, n = s.data_ptr(), s.nbytes()
            except RuntimeError:
                continue  # no memory: of another layout, or a transform's or a compiler's stand-in that is still alive
            for a in addresses:
                if start <= a < start + n and a not in found:
                    found[a] = (start, n)
                    _pointed.append(weakref.ref(t))

    known = [t for t in (r() for r in _pointed) if t is not None]
    _pointed.clear()
    look(known)
    if len(found) < len(addresses):
        look(gc.get_objects())
    return list(set(found.values()))


def _capsule_tensor(capsule: Any) -> int | None:
    """Return the address of the DLTensor in a DLPack capsule, None if the capsule was consumed."""
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype = ctypes.c_char_p
    api.PyCapsule_GetName.argtypes = [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    try:
        name = api.PyCapsule_GetName(capsule)
    except (ValueError, TypeError):
        return None
    if name not in (b"dltensor", b"dltensor_versioned"):
        return None
    # DLManagedTensorVersioned begins with version, manager, deleter and flags
    return api.PyCapsule_GetPointer(capsule, name) + (0 if name == b"dltensor" else 32)


def pretend_cuda(capsule: Any) -> tuple[int, int] | None:
    """Make the device of a DLPack capsule CUDA; returns the tensor's (address, bytes), None if it was consumed."""
    p = _capsule_tensor(capsule)
    if p is None:
        return None
    # struct DLTensor: data pointer at 0, device type at 8 and id at 12, ndim at 16, type code, bits at 21, lanes at 22,
    # pointers to shape at 24 and strides at 32, byte offset at 40
    device = ctypes.c_int32.from_address(p + 8)
    if device.value == _CPU:
        device.value = _CUDA
    ndim = ctypes.c_int32.from_address(p + 16).value
    bits = ctypes.c_uint8.from_address(p + 21).value * ctypes.c_uint16.from_address(p + 22).value
    shape = ctypes.c_void_p.from_address(p + 24).value
    strides = ctypes.c_void_p.from_address(p + 32).value
    data = (ctypes.c_void_p.from_address(p).value or 0) + ctypes.c_uint64.from_address(p + 40).value
    sizes = [ctypes.c_int64.from_address(shape + 8 * i).value for i in range(ndim)] if shape else []
    if any(n == 0 for n in sizes):
        return data, 0
    if strides:
        last = sum((n - 1) * ctypes.c_int64.from_address(strides + 8 * i).value for i, n in enumerate(sizes))
    else:
        last = -1
        for n in sizes:
            last = (last + 1) * n - 1 if last >= 0 else n - 1
    return data, -(-(last + 1) * bits // 8)


class _CudaView:
    """A CPU tensor offered through DLPack as if it were CUDA memory."""

    def __init__(self, tensor: Any):
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self.tensor.__dlpack__()
        pretend_cuda(capsule)
        return capsule


def walk(values: Iterable[Any]) -> Iterator[Any]:
    """Arguments of a call, with containers and dataclasses opened."""
    for v in values:
        if isinstance(v, (list, tuple)):
            yield from walk(v)
        elif isinstance(v, dict):
            yield from walk(v.values())
        elif dataclasses.is_dataclass(v) and not isinstance(v, type):
            yield from walk(getattr(v, f.name) for f in dataclasses.fields(v))
        else:
            yield v


def adopt(tensor: Any) -> None:
    """A DSL tensor of CPU memory: let it pass for CUDA memory, unless it was used already, and note where it lies."""
    if not hasattr(tensor, "_emulator_span") and tensor._dltensor_wrapper is None:
        span = pretend_cuda(tensor._dlpack_data)
        if span is not None:
            tensor._emulator_span = span
            offered = vars(tensor).get("_tvm_ffi_tensor")  # from_dlpack(..., enable_tvm_ffi=True) keeps a second view
            if offered is not None:
                tensor._tvm_ffi_tensor = _cuda_tensor(offered)
            if len(_adopted) > 4096:
                for address in [a for a, tensors in _adopted.items() if not tensors]:
                    del _adopted[address]
            _adopted.setdefault(span[0], weakref.WeakSet()).add(tensor)


def _loaded_span(tensor: Any) -> tuple[int, int]:
    """(address, bytes) of a DSL tensor whose capsule was consumed before it came here."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride, strict=True))
    return tensor.data_ptr, -(-(last + 1) * tensor.element_type.width // 8)


def call_spans(arguments: Any) -> list[tuple[int, int]]:
    import torch

    spans = []
    tensor_type = _dsl_tensor_type()
    for v in walk(arguments):
        if type(v) is tensor_type:
            adopt(v)
            spans.append(v._emulator_span if hasattr(v, "_emulator_span") else _loaded_span(v))
        elif isinstance(v, torch.Tensor) and v.device.type == "cpu":
            spans.append(tensor_span(v))
    return spans


def _cuda_tensor(tensor: Any) -> Any:
    """Return the memory of a CPU tensor as a CUDA tensor of TVM-FFI."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(_CudaView(tensor))


def as_cuda(value: Any) -> Any:
    """An argument of a TVM-FFI function with every CPU tensor in it replaced by the same memory as a CUDA tensor."""
    import torch

    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return _cuda_tensor(value.detach())
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return type(value)._make(map(as_cuda, value))
    if type(value) in (tuple, list):
        return type(value)(map(as_cuda, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: as_cuda(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **fields)
    return value

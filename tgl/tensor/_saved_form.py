"""Checks of a GroupedTensor from a file, with which ``torch.load(weights_only=True)`` calls ``rebuild``.

The file controls every argument, so all of them are checked: components must have the shapes and dtypes that follow
from the format, the options and the shape of the tensor, and further attributes must not replace any of the class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..meta import checks
from ..meta.quantized import SOURCES, Options
from . import _structure
from ._structure import CLASSES, Shapes

OP = "rebuild"

_OF_TYPE: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: type(value) is str,
    "bool": lambda value: type(value) is bool,
    "bool | None": lambda value: value is None or type(value) is bool,
    "torch.dtype | None": lambda value: value is None or isinstance(value, torch.dtype),
    "float": lambda value: type(value) in (float, int),
}
_TYPES = {name: str(field.type) for name, field in Options.__dataclass_fields__.items()}


def options(format: str, saved: dict[str, Any]) -> Options:
    """Return the checked options of a tensor of ``format``."""
    known = type(format) is str and format in CLASSES
    checks.require(known, OP, "format", f"one of {', '.join(CLASSES)}", repr(format))
    fits = type(saved) is dict and all(name in _TYPES and _OF_TYPE[_TYPES[name]](v) for name, v in saved.items())
    checks.require(fits, OP, "options", f"a dict of {', '.join(f'{n}: {t}' for n, t in _TYPES.items())}", saved)
    checks.require(saved.get("format") == format, OP, "options", f"those of {format!r}", repr(saved.get("format")))
    found = Options(**saved)
    if format == "dense":
        expected = Options("dense", columnwise=False, eps=0.0)
        checks.require(found == expected, OP, "options", "those of dense values", repr(found))
        return expected
    checks.require(not found.dbias, OP, "dbias", "False", found.dbias)
    return found.resolved(OP)


def sizes(found: Options, shape: tuple[int, ...], dtype: torch.dtype, shapes: Shapes | None, *, grouped: bool) -> None:
    """Check shape and dtype of the tensor: those of rows in groups (``grouped``), of matrices or of a list of them."""
    checks.require(dtype in SOURCES, OP, "dtype", "bfloat16, float16 or float32", repr(dtype), TypeError)
    dims = (1,) if shapes is not None else (2,) if grouped else (2, 3)
    must = f"a tuple of {' or '.join(map(str, dims))} sizes"
    checks.require(_is_shape(shape) and len(shape) in dims, OP, "shape", must, repr(shape))
    every: tuple[tuple[int, ...], ...] = (shape,)
    if shapes is not None:
        pairs = type(shapes) is tuple and all(_is_shape(pair) and len(pair) == 2 for pair in shapes)
        checks.require(pairs, OP, "shapes", "None or a tuple of pairs of sizes", repr(shapes))
        checks.require(not grouped, OP, "shapes", "None for rows in groups", repr(shapes))
        total = sum(n * k for n, k in shapes)
        checks.require(shape[0] == total, OP, "shape", f"({total},), the elements of the matrices", repr(shape))
        every = shapes
    if found.format == "dense":
        return
    checks.require(not (grouped and found.block_2d), OP, "block_2d", "False for rows in groups", found.block_2d)
    if found.description.per_byte == 2:
        # A group of rows from `split` is one matrix, and may have an odd number of rows.
        whole = found.columnwise and (shapes is not None or len(shape) == 3)
        even = all(size[-1] % 2 == 0 and not (whole and size[-2] % 2) for size in every)
        checks.require(even, OP, "shape", "even (two elements share a byte)", every)


def components(
    found: Options, shape: tuple[int, ...], dtype: torch.dtype, shapes: Shapes | None, parts: dict[str, Any]
) -> dict[str, Tensor]:
    """Return the checked components as tensors of their own dtypes, after ``sizes`` has passed."""
    pairs = type(parts) is dict and all(type(part) is tuple and len(part) == 2 for part in parts.values())
    checks.require(pairs, OP, "parts", "a dict of pairs of a tensor and its dtype", type(parts).__name__)
    tensors = {name: _own_dtype(name, *part) for name, part in parts.items()}
    checks.require(bool(tensors), OP, "parts", "a dict of components", "none")
    device = next(iter(tensors.values())).device
    expected, of_rows = _specs(found, shape, dtype, shapes, tensors.get("offs"), device)
    must = f"the components {', '.join(expected)}"
    checks.require(set(tensors) == set(expected), OP, "parts", must, ", ".join(map(str, tensors)))
    for name, t in tensors.items():
        spec = expected[name]
        checks.require(t.dtype == spec.dtype, OP, name, str(spec.dtype), t.dtype, TypeError)
        if t.shape != of_rows.get(name):
            checks.shape(OP, name, t, tuple(spec.shape), "that follows from `shape` and `options`")
        checks.same_device(OP, name, t, "the first component", device)
        checks.apart(OP, name, t)
    if "offs" in tensors:
        _group_ends(tensors["offs"], shape[0])
    return tensors


def attributes(cls: type, requires_grad: bool, state: dict[str, Any], own: set[str]) -> None:
    """Check ``requires_grad`` and the user's attributes, whose names the class must not use."""
    checks.require(type(requires_grad) is bool, OP, "requires_grad", "a bool", repr(requires_grad))
    fits = type(state) is dict and all(type(name) is str for name in state)
    checks.require(fits, OP, "state", "a dict of attributes", type(state).__name__)
    taken = [name for name in state if name in own or hasattr(cls, name)]
    checks.require(not taken, OP, "state", "free of names that the class uses", ", ".join(taken))


def _is_shape(value: object) -> bool:
    if not isinstance(value, tuple):
        return False
    return all(isinstance(n, (int, SymInt)) and type(n) is not bool and n >= 0 for n in value)


def _own_dtype(name: object, t: object, dtype: object) -> Tensor:
    """Return a component in its own dtype; dtypes of one byte are saved as uint8."""
    plain = isinstance(t, Tensor) and t.layout is torch.strided and not is_traceable_wrapper_subclass(t)
    checks.require(plain, OP, str(name), "a dense tensor", type(t).__name__, TypeError)
    assert isinstance(t, Tensor)
    checks.require(not t.requires_grad, OP, str(name), "a tensor without a gradient", "requires_grad=True")
    checks.require(isinstance(dtype, torch.dtype), OP, str(name), "given with its dtype", repr(dtype), TypeError)
    assert isinstance(dtype, torch.dtype)
    same = t.dtype == dtype or (t.dtype == torch.uint8 and dtype.itemsize == 1)
    checks.require(same, OP, str(name), f"{dtype}, or bytes", t.dtype, TypeError)
    return t.view(dtype)


def _specs(
    found: Options,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    shapes: Shapes | None,
    offs: Tensor | None,
    device: torch.device,
) -> tuple[_structure.Specs, dict[str, torch.Size]]:
    """Return the expected components, and their alternative shapes for a matrix that is a group of rows."""
    cls = CLASSES[found.format]
    if shapes is not None:
        return _structure.slots(cls, found, shapes, dtype, device)[1], {}
    if offs is not None:
        checks.ndim(OP, "offs", offs, 1, "[G]")
        return _structure.component_specs(cls, found, shape, offs.shape[0], dtype, device), {}
    specs = _structure.component_specs(cls, found, shape, None, dtype, device)
    never_rows = len(shape) == 3 or found.block_2d  # blocks of several rows would span groups
    return specs, {} if never_rows else _structure.shapes_of_rows(cls, found, shape, dtype)


def _group_ends(offs: Tensor, rows: int) -> None:
    """Check that group ends ascend from 0 to at most ``rows``; tensors without values are not checked."""
    if offs.device.type == "meta" or type(offs) is not Tensor:
        return
    ends = [0, *offs.tolist(), rows]
    checks.require(ends == sorted(ends), OP, "offs", f"rising group ends from 0 to {rows}", ends[1:-1])

"""One-line texts of results and modules."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def one_line(value: Any) -> str:
    """Return a named tuple's type and fields, with dtype, shape and device instead of a tensor's values."""
    fields = ((name, field) for name, field in zip(value._fields, value) if field is not None)
    return f"{type(value).__name__}({', '.join(f'{name}={_text(field)}' for name, field in fields)})"


def _text(field: Any) -> str:
    if not isinstance(field, Tensor):
        return repr(field)
    where = "" if field.device.type == "cpu" else f" on {field.device}"
    return f"{str(field.dtype).removeprefix('torch.')}{list(field.shape)}{where}"

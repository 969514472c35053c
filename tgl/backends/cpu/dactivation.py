"""``grouped_gemm_dactivation`` on a CPU: the product, and one pass over it and ``h`` for all outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ... import backends
from ...meta.memory import copies_to_lines
from ...meta.specs import TensorSpec
from . import activation

if TYPE_CHECKING:
    from ...ops.grouped_activation import Params

_product_copies = copies_to_lines("dy", "b")


def copies(dy: Tensor, b: Tensor, h: Tensor, *_: Any, **options: Any) -> dict[str, int]:
    """Return the bytes that a call copies, by name."""
    return _product_copies(dy, b, **options) | activation.copies_as_read(h=h)


def produce(
    made: dict[str, Any],
    operands: list,
    *,
    params: Params,
    rows: Tensor | None = None,
    zero_tail: bool = True,
) -> dict[str, Tensor | None]:
    """Form the outputs; ``act`` overwrites the product, which is in the memory order of both. Tails are always zero."""
    dy, b, h, offs, probs = operands
    operands.clear()
    spec, index = TensorSpec((h.shape[0], b.shape[2]), h.dtype, h.device), {} if rows is None else {"rows": rows}
    da = backends.produce("grouped_gemm", dy.device, spec, [dy, b, offs, None, None], zero_tail=False, **index)
    del dy
    dh, dprobs = h.new_empty(h.shape), h.new_empty(made["dprobs"].shape, dtype=made["dprobs"].dtype)
    again = made["act"] is not None
    activation.differentiate((da, activation.as_read(h), offs, probs), params, dh, dprobs, again=again)
    return {"dh": dh, "dprobs": dprobs, "act": da if again else None}

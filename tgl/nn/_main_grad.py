"""``main_grad``: the buffer that weight gradients of a layer are added to instead of ``grad``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..meta.specs import accumulator
from ._errors import fail
from ._gemms import Accumulator, Gemms, Operand
from ._hooks import stand_in
from ._slots import Slots

ALIGNMENT = 16  # bytes, of a GEMM's result


class MainGrad(NamedTuple):
    """The buffers that weight gradients are added to.

    Attributes:
        parts: one tensor per weight parameter: ``[G, N, K]``, or G times ``[N, K]``; None for a frozen weight.
        packed: ``[S, N, K]`` whose slots include the parts, for a GEMM to add to; None if the parts lie apart.
        table: the slot of every part, see ``Slots``.
        slots: the ``Slots`` that ``packed`` and ``table`` come from.
        edge: see ``Accumulator``.
    """

    parts: tuple[Tensor | None, ...]
    packed: Tensor | None = None
    table: Tensor | None = None
    slots: Slots | None = None
    edge: Tensor | None = None

    def is_in_place(self) -> bool:
        """Return whether the slots of ``packed`` are still the parts, whose memory may have been replaced."""
        return self.slots is None or self.slots.hold(self.parts)

    def clear_where(self, pending: Tensor | bool) -> None:
        """Zero the parts if ``pending``, which may be a tensor on the device."""
        for part in self.parts:
            if part is not None and isinstance(pending, Tensor):
                part.masked_fill_(pending, 0)
            elif part is not None and pending:
                part.zero_()

    def add(
        self, gemms: Gemms, x: Operand, dy: Operand, offs: Tensor, wanted: Sequence[bool], *, overwrite: bool
    ) -> None:
        """Add the weight gradient of one microbatch to the parts that are ``wanted``, or ``overwrite`` them."""
        all_wanted = all(want or part is None for want, part in zip(wanted, self.parts))
        if self.packed is not None and all_wanted:
            gemms.wgrad_into(x, dy, offs, Accumulator(self.packed, self.table, self.edge), overwrite=overwrite)
        elif self.edge is not None:
            self._add_by_copy(gemms, x, dy, offs, overwrite=overwrite)
        else:
            self.add_gradients(self.gradients(gemms, x, dy, offs), wanted, overwrite=overwrite)

    def _add_by_copy(self, gemms: Gemms, x: Operand, dy: Operand, offs: Tensor, *, overwrite: bool) -> None:
        """Add in a graph, where only the op knows whether it adds, to a copy of parts that lie apart."""
        part = next(part for part in self.parts if part is not None)
        copy = torch.stack([torch.zeros_like(part) if other is None else other for other in self.parts])
        gemms.wgrad_into(x, dy, offs, Accumulator(copy, None, self.edge), overwrite=overwrite)
        for other, added in zip(self.parts, copy.unbind()):
            if other is not None:
                other.copy_(added)

    def gradients(self, gemms: Gemms, x: Operand, dy: Operand, offs: Tensor) -> Sequence[Tensor]:
        """Return the weight gradient of one microbatch, split like ``parts``, in the accumulation dtype."""
        part = next(part for part in self.parts if part is not None)
        gradient = gemms.wgrad(x, dy, offs, out_dtype=accumulator(part.dtype))
        return (gradient,) if part.dim() == gradient.dim() else gradient.unbind()

    def add_gradients(self, gradients: Sequence[Tensor], wanted: Sequence[bool], *, overwrite: bool) -> None:
        """Add or write gradients that have been computed already."""
        for part, gradient, want in zip(self.parts, gradients, wanted):
            if not want or part is None:
                continue
            if overwrite:
                part.copy_(gradient)
            else:
                part.add_(gradient)


def main_grad_of(weight: nn.Parameter, *, create: bool) -> Tensor | None:
    """Return ``weight.main_grad``; with ``get_main_grad`` (Megatron-FSDP) only if ``create``, else None."""
    if hasattr(weight, "__fsdp_param__") and hasattr(weight, "get_main_grad"):
        if create:
            weight.main_grad = weight.get_main_grad()  # type: ignore[attr-defined]
        else:
            return None
    found: Tensor | None = getattr(weight, "main_grad", None)
    return found


def is_made_later(weight: nn.Parameter) -> bool:
    """Return whether ``main_grad`` may be missing before the backward."""
    return hasattr(weight, "__fsdp_param__") and hasattr(weight, "get_main_grad")


def check_main_grad(name: str, part: Tensor | None, weight: nn.Parameter, *, dims: str) -> None:
    """Check that ``part`` can take the gradient of ``weight``, whose name is ``name``.

    Raises:
        ValueError, TypeError: it cannot.
    """
    what = f"`{name}.main_grad` must be"
    if not isinstance(part, Tensor):
        fail(
            f"{what} a tensor {dims} for fuse_wgrad_accumulation, but there is none (nor can there be one under "
            "fully_shard, which hands the layer a gathered parameter without it)"
        )
    if part.shape != weight.shape:
        fail(f"{what} of shape {dims} = {tuple(weight.shape)}, but got {tuple(part.shape)}")
    if part.dtype not in (accumulator(weight.dtype), weight.dtype):
        must = " or ".join(map(str, dict.fromkeys((accumulator(weight.dtype), weight.dtype))))
        fail(f"{what} {must}, but got {part.dtype}", TypeError)
    if part.device != weight.device:
        fail(f"{what} on {weight.device} like the weight, but got {part.device}")
    if part.requires_grad:
        fail(f"`{name}.main_grad` must require no grad, but it does")
    if dims.startswith("[G") and not torch.compiler.is_compiling() and not is_aligned(part):
        fail(f"{what} aligned to {ALIGNMENT} bytes, but got an address off by {part.data_ptr() % ALIGNMENT}")


def is_aligned(t: Tensor) -> bool:
    """Return whether ``t [G, N, K]`` and each of its slots are aligned for a GEMM to write."""
    return t.device.type == "meta" or (
        t.data_ptr() % ALIGNMENT == 0 and t.stride(0) * t.element_size() % ALIGNMENT == 0
    )


def wants_stand_in(weight: nn.Parameter) -> bool:
    """Return whether a framework that supports ``main_grad`` expects a ``grad`` as well."""
    return weight.requires_grad and hasattr(weight, "grad_added_to_main_grad")


def stand_for_main_grad(weights: Sequence[nn.Parameter]) -> None:
    """Set ``grad`` to zeros for weights that want a stand-in and have no ``grad``."""
    for weight in weights:
        if wants_stand_in(weight) and weight.grad is None:
            weight.grad = stand_in(weight.detach(), weight.shape, weight.dtype)


def mark(weights: Sequence[nn.Parameter]) -> None:
    """Set ``grad_added_to_main_grad``, where a framework has created it, because the gradient is not in ``grad``."""
    for weight in weights:
        if weight.requires_grad and hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True

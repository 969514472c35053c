"""Where the gradients of a layer's parameters go in its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..ops._engine import RETURNED
from ._gemms import Gemms, Operand
from ._hooks import (
    apply_tensor_hooks,
    defer_tensor_hooks,
    have_tensor_hooks,
    postpone_hooks,
    returned_stand_in,
    stand_in,
)
from ._main_grad import MainGrad, mark

SLOT_ALIGNMENT = 256  # bytes, of each group's weight gradient when groups have parameters of their own

Stash = Callable[..., None]
Gradients = tuple[Tensor | None, ...]


class ParameterGradients(NamedTuple):
    """The destination of the gradients of one layer's parameters.

    Attributes:
        num_weights, num_biases: numbers of parameters.
        weight_shape, weight_dtype, bias_dtype: shape and dtypes of one parameter.
        discrete: whether every group has a weight (and a bias) parameter of its own.
        main_grad: the buffers that the weight gradient is added to, or a function that returns them in the backward;
            None for ordinary gradients.
        overwrite_main_grad: replace the content of ``main_grad`` instead of adding to it.
        stands_in: for every weight, whether it gets zeros as ``grad`` besides the gradient in ``main_grad``.
        stash: called with ``(x, dy, offs, dbias, overwrite_main_grad, *edge)`` in the backward instead of forming the
            weight and bias gradients.
        parameters: the weights, then the biases, with their hooks and attributes; ``()`` in a graph.
        edge: in a graph with ``main_grad`` or ``stash`` the gradient edge of the parameters whose gradients go there,
            which is the autograd function's argument after the parameters; else ``()``.
    """

    num_weights: int
    num_biases: int
    weight_shape: torch.Size
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    discrete: bool
    main_grad: MainGrad | Callable[[], MainGrad] | None = None
    overwrite_main_grad: bool = False
    stands_in: tuple[bool, ...] = ()
    stash: Stash | None = None
    parameters: tuple[nn.Parameter, ...] = ()
    edge: tuple[Tensor, ...] = ()

    def packed(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return differentiable packed weights and biases in ``dtype``."""
        weights, biases = self.parameters[: self.num_weights], self.parameters[self.num_weights :]
        if not self.discrete:
            return weights[0].to(dtype), biases[0].to(dtype) if biases else None
        return torch.stack(weights).to(dtype), torch.stack(biases).to(dtype) if biases else None

    def checked(self, wanted: Sequence[bool]) -> ParameterGradients:
        """Return a copy with the current, checked ``main_grad``; call it before anything is written."""
        if callable(self.main_grad) and any(wanted[: self.num_weights]):
            return self._replace(main_grad=self.main_grad())
        return self

    def form(
        self,
        gemms: Gemms,
        x: Operand,
        dy: Operand,
        offs: Tensor,
        dbias: Tensor | None,
        wanted: tuple[bool, ...],
        grad: Tensor,
    ) -> Gradients:
        """Form the ``wanted`` gradients, and return those that autograd accumulates (weights, then biases).

        An empty gradient for ``edge`` follows them: with None, a graph would not lead to the parameters. ``x`` and
        ``dy`` are the operands of the weight gradient; ``dbias [G, N]`` is the bias gradient; ``grad`` any tensor of
        the backward. Writes that outlive the backward happen here, after everything else.
        """
        end = self.num_weights + self.num_biases
        edge = (self.edge[0].new_zeros(0),) if self.edge else ()
        weights, biases = wanted[: self.num_weights], wanted[self.num_weights : end]
        if not any(biases):
            dbias = None
        if not any(weights):
            return (*([None] * self.num_weights), *self._biases(dbias), *edge)
        if self.stash is not None:
            postpone_hooks(self.parameters)
            self.stash(x, dy, offs, dbias, self.overwrite_main_grad, *self.edge)
            return (*self._returned(wanted[:end]), *edge)
        dbiases = self._biases(dbias)
        if self.main_grad is not None:
            dweights = self._stand_ins(grad, weights)
            self._into_main_grad(gemms, x, dy, offs, weights)
        elif self.discrete:
            # Plain views of one allocation, so that the caching allocator and streams track the memory, which they
            # would not for raw addresses.
            dweights = gemms.wgrad(x, dy, offs, out_dtype=self.weight_dtype, alignment=SLOT_ALIGNMENT).unbind()
        else:
            dweights = (gemms.wgrad(x, dy, offs, out_dtype=self.weight_dtype),)
        return (*dweights, *dbiases, *edge)

    def _into_main_grad(self, gemms: Gemms, x: Operand, dy: Operand, offs: Tensor, wanted: tuple[bool, ...]) -> None:
        main_grad, weights = self.main_grad, self.parameters[: self.num_weights]
        assert isinstance(main_grad, MainGrad)
        if have_tensor_hooks(weights):
            defer_tensor_hooks(weights)
            gradients = apply_tensor_hooks(weights, main_grad.gradients(gemms, x, dy, offs))
            main_grad.add_gradients(gradients, wanted, overwrite=self.overwrite_main_grad)
        else:
            if self.edge:
                main_grad = main_grad._replace(edge=self.edge[0])
            main_grad.add(gemms, x, dy, offs, wanted, overwrite=self.overwrite_main_grad)
        mark([weight for weight, want in zip(weights, wanted) if want])

    def _stand_ins(self, grad: Tensor, wanted: tuple[bool, ...]) -> Gradients:
        shape, dtype = self.weight_shape, self.weight_dtype
        if RETURNED in wanted:
            return self._returned(wanted)
        return tuple([stand_in(grad, shape, dtype) if a and b else None for a, b in zip(self.stands_in, wanted)])

    def _returned(self, wanted: tuple[bool, ...]) -> Gradients:
        """Return stand-ins for the parameters whose gradients ``torch.autograd.grad`` returns but that go elsewhere."""
        if RETURNED not in wanted:
            return (None,) * len(wanted)
        named = zip(self.parameters, wanted)
        return tuple([returned_stand_in(p) if want is RETURNED else None for p, want in named])

    def _biases(self, dbias: Tensor | None) -> Gradients:
        if dbias is None:
            return (None,) * self.num_biases
        dbias = dbias.to(self.bias_dtype)
        return dbias.unbind() if self.discrete else (dbias,)

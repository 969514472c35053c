"""A plain block between exchanges whose partial sums have another dtype than tokens, on the ops of the block itself.

The ops return sums of rows and of their gradients in the dtype in which they are sent. Autograd could not take a
gradient of that dtype from them, so one node covers everything from the tokens to the returned sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..nn._linear_function import of_first_order
from ..nn.routing import Routing
from ..ops._engine import in_dynamo, requested_grads
from ..ops._library import unobserved
from ..ops.after import after
from ._wire_format import Wire


class Block(NamedTuple):
    """Static parts of the block between the exchanges.

    Attributes:
        way: the token permutation; its rows are sent unquantised.
        routing: the routing of the arrived rows.
        activation: keywords of ``tgl::moe``.
        expected_rows: another keyword, also of its backward.
        keeps: whether a backward may follow, which reads the pre-activation.
    """

    way: Wire
    routing: Routing
    activation: dict[str, Any]
    expected_rows: int | None
    keeps: bool


class SummedFunction(torch.autograd.Function):
    """The block as a function, ``apply(block, tokens, rows, weights, w1, w2, bias1, bias2)``, with the arrived
    ``rows``.

    ``rows [W P, H]``, ``weights [W P, k]``, ``w1 [L, H, N]``, ``w2 [L, I, O]``, biases or None.
    """

    @staticmethod
    def forward(ctx: Any, block: Block, tokens: Tensor, *operands: Any) -> Tensor | tuple[Tensor, Tensor]:
        rows, weights, w1, w2, bias1, bias2 = operands
        way, (source, position, offs, top_k, token), activation, expected_rows, keeps = block
        places = source, position, token, offs
        counts = {"top_k": top_k, "expected_rows": expected_rows}
        options = {"out_dtype": way.sums, "compute_h": keeps, **counts, **activation}
        sums, h = torch.ops.tgl.moe(rows, w1, w2, *places, weights, bias1, bias2, **options)
        kept = way.kept(tokens) if ctx.needs_input_grad[4] else None
        anchor = None if in_dynamo() else sums.new_empty(0)  # see ``of_first_order``
        ctx.save_for_backward(kept, w1, w2, *places, h, weights, bias2, *way.tensors, anchor)
        ctx.way, ctx.counts, ctx.activation = way.bare(), counts, activation
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in (bias1, bias2)]
        y = way.summed(sums, tokens.dtype)
        return y if anchor is None else (y, anchor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None = None) -> tuple[Tensor | None, ...]:
        return of_first_order(_backward, ctx, grad)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Send the gradients, on all ranks, and differentiate the block; operands are freed after their last use."""
    _, of_x, _, of_weights, of_w1, of_w2, of_bias1, of_bias2 = requested_grads(ctx)
    further, compiling = of_x or of_w1 or of_bias1, torch.compiler.is_compiling()
    kept, w1, w2, source, position, token, offs, h, weights, bias2, *places, _ = ctx.saved_tensors
    if not compiling and unobserved(grad):
        ctx.maybe_clear_saved_tensors()
    way, ops, counts = ctx.way.with_tensors(*places), torch.ops.tgl, ctx.counts
    answers = way.grads.values(way.dispatched(grad))
    operands = answers, w2, source, position, token, offs, h, weights, bias2
    del answers, h
    mask = [further, of_w2, of_weights, of_bias2]
    dh, dw2, dweights, dbias2 = ops.moe_backward_hidden(*operands, output_mask=mask, **counts, **ctx.activation)
    del operands
    dx = dw1 = dbias1 = None
    last = None  # result of the latest exchange; in a graph the next one depends on it, which keeps them in order
    options = {**counts, "out_dtype": way.sums}
    if of_x or of_bias1 or (of_w1 and not way.again):
        x = way.inputs.values(kept) if of_w1 and not way.again else None
        mask = [of_x, x is not None, of_bias1]
        dx, dw1, dbias1 = ops.moe_backward_input(dh, x, w1, position, token, offs, output_mask=mask, **options)
        del x
    if of_x:
        last = dx = way.summed(dx, grad.dtype)
    if of_w1 and way.again:
        way = way.after(dh if last is None else last) if compiling else way
        last = way.rows(kept)
        x, mask = way.inputs.values(last), [False, True, False]
        dw1 = ops.moe_backward_input(dh, x, w1, position, token, offs, output_mask=mask, **options)[1]
        del x
    if of_weights and compiling and last is not None:
        dweights = after(dweights, last)
    del dh, last
    asked = (of_x, dx), (False, None), (of_weights, dweights), (of_w1, dw1), (of_w2, dw2)
    biases = zip((of_bias1, of_bias2), (dbias1, dbias2), ctx.bias_dtypes)
    return (
        None,
        *(made if wanted else None for wanted, made in asked),
        *(made.to(dtype) if wanted and made is not None else None for wanted, made, dtype in biases),
    )

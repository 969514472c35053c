"""``moe`` and its backward as a sequence of ops: dispatch, the steps of an expert, and combine.

The rows of the experts ``[T, H]`` and the activation's result ``[T, I]`` live only from one op to the next. The
backward recomputes both: the rows are copies of the tokens, and the activation's result comes with its gradient. It is
two ops, so that the pre-activation is freed before the second one runs.

Rows past the last expert's are unused and, on a GPU, not written, so that a layer pays for the rows it has and not for
its capacity. This includes rows of h and of its gradient, which an op returns; on a CPU they are zero. Where a call
gives the expected number of rows, kernels are chosen by it instead of the capacity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ... import backends
from ...meta import specs
from ...meta.specs import TensorSpec, new_spec
from .activations import activate
from .mlp import FC1, FC1_DGRAD, FC1_WGRAD, FC2, FC2_DGRAD, FC2_WGRAD, Specs, Tensors, bias_gradients, wgrad

if TYPE_CHECKING:
    from ...ops.grouped_activation import Params


FIRST, BACK, FIRST_GRADIENT = 2880, 1024, 2048
"""Largest width of the activation's result up to which GEMMs gather tokens: FC1; the two that read dy; and dw1.

For dw1 it is its own width.

Gathering costs a GEMM 5 to 15 % of its time on an H100, depending on its kind. A copy in order costs the same at any
width, hence a larger share of a narrow expert's time. Widths of 256, 768, 1024, 2048, 2880 and 14336 were measured,
both ways.
"""


FEW_ROWS = 64  # per group on average: FC1 reads mostly weights, so that it gathers at any width
FEW_ROWS_OF_GRADIENT = 256  # per group on average: memory traffic is mostly dw1, so that it gathers at any width


class _Places(NamedTuple):
    """The rows of experts that top-k slots have, as in ``tgl.Routing``.

    Attributes:
        position, token, top_k: see there.
        on_cpu: whether a CPU runs the call, where ATen's loops take no index, and unused rows become zeros.
        load: number of rows to choose kernels by: the capacity, or the expected number if it is smaller.
        hint: the keyword that passes ``load`` to the GEMMs, if it is not the capacity.
    """

    position: Tensor
    token: Tensor
    top_k: int
    on_cpu: bool
    load: int
    hint: dict[str, int]

    @classmethod
    def of(cls, position: Tensor, token: Tensor, top_k: int, expected: int | None) -> _Places:
        on_cpu, room = backends.device_arch(token.device) == "cpu", token.shape[0]
        if expected is None or expected >= room:
            return cls(position, token, top_k, on_cpu, room, {})
        return cls(position, token, top_k, on_cpu, expected, {backends.HINT: expected})

    def read(self, t: Tensor, gathers: bool) -> tuple[Tensor, Tensor | None]:
        """Return the token of every row from ``t [S, columns]``, for GEMMs.

        It is ``t`` and the int32 index by which they gather the rows, or the rows ``[T, columns]`` alone.

        On a CPU it is the rows: ATen's loop over groups, which costs a third of ours, takes no index.

        Args:
            gathers: whether gathering costs a GPU less than the copy.
        """
        if not gathers or self.on_cpu:
            return self._dispatched(t, self.token, self.top_k), None
        return t, self.token if self.token.dtype == torch.int32 else self.token.int()

    def per_row(self, weights: Tensor | None, source: Tensor) -> Tensor | None:
        """Return ``[T]``: the weight of every row, from ``weights [S, k]`` by ``source``, the row's top-k slot."""
        return None if weights is None else self._dispatched(weights.reshape(-1, 1), source, 1).view(-1)

    def _dispatched(self, t: Tensor, places: Tensor, top_k: int) -> Tensor:
        spec = new_spec(((places.shape[0], t.shape[1]), t.dtype, t.device, None))
        return backends.produce(
            "dispatch",
            t.device,
            spec,
            [t, places, self.position, None],
            top_k=top_k,
            zero_tail=self.on_cpu,
            stage="dispatch",
        )

    def combined(self, rows: Tensor, spec: TensorSpec) -> Tensor:
        """Return ``[S, columns]``: the sum of every token's ``rows``."""
        given = [rows, self.position, None]
        return backends.produce("combine", rows.device, spec, given, top_k=self.top_k, stage="combine")

    def per_choice(self, t: Tensor, spec: TensorSpec) -> Tensor:
        """Return ``[S, k]``: the value of every top-k slot's row, from ``t [T]``; zero for a dropped slot."""
        column = new_spec(((self.position.shape[0], 1), t.dtype, t.device, None))
        given = [t[:, None], self.position, None]
        made = backends.produce("combine", t.device, column, given, top_k=1, stage="combine")
        return made.view(spec.shape)


def forward(
    made: dict[str, TensorSpec], operands: list, *, params: Params, top_k: int, expected_rows: int | None = None
) -> Tensors:
    """Return ``h = x[token] w1 + bias1`` and ``y = sum over top-k slots of weights (A(h) w2 + bias2)``."""
    x, w1, w2, source, position, token, offs, weights, bias1, bias2 = operands
    places, device = _Places.of(position, token, top_k, expected_rows), x.device
    probs = places.per_row(weights, source)
    first = {"y": new_spec(((token.shape[0], w2.shape[1]), x.dtype, device, None)), "h": made["h"]}
    few = places.load <= FEW_ROWS * w2.shape[0]
    tokens, index = places.read(x, few or w2.shape[1] <= FIRST)
    given = [tokens, w1, offs, bias1, probs]
    del tokens
    tables: dict[str, Any] = places.hint if index is None else {"rows": index, **places.hint}
    expert = backends.produce(
        "grouped_gemm_activation", device, first, given, params=params, zero_tail=places.on_cpu, stage=FC1, **tables
    )
    del given
    answers = new_spec(((token.shape[0], w2.shape[2]), x.dtype, device, None))
    given = [expert.pop("y"), w2, offs, bias2, None if bias2 is None else probs]
    rows = backends.produce("grouped_gemm", device, answers, given, zero_tail=places.on_cpu, stage=FC2, **places.hint)
    del given
    return {"y": places.combined(rows, made["y"]), "h": expert["h"]}


def backward_hidden(
    made: Specs, operands: list, *, params: Params, top_k: int, expected_rows: int | None = None
) -> Tensors:
    """Return the gradients of h, w2, weights and bias2 that have a spec.

    dw2 comes after the activation backward, whose kernel reads ``h`` and so also returns the activation's result; by
    then ``h`` is freed, unless the caller holds it.
    """
    dy, w2, source, position, token, offs, h, weights, bias2 = operands
    operands.clear()
    places, device = _Places.of(position, token, top_k, expected_rows), dy.device
    width = w2.shape[1]
    probs, answers = places.per_row(weights, source), places.read(dy, width <= BACK and bias2 is None)
    del dy
    grads: Tensors = dict.fromkeys(made)
    grads["dbias2"], scaled = bias_gradients(answers[0], bias2, probs, offs, made["dbias2"], made["dweights"])
    inner = new_spec(((h.shape[0], width), h.dtype, device, None))
    if made["dh"] is None and made["dweights"] is None:
        if made["dw2"] is not None:
            made_again = activate(inner, h, offs, probs, params=params)
            grads["dw2"] = wgrad((made_again, None), answers, offs, made["dw2"], FC2_WGRAD, places.hint)
        return grads

    sums = TensorSpec((0 if probs is None else h.shape[0],), specs.accumulator(h.dtype), device)
    act = None if made["dw2"] is None else inner
    wanted = {"dh": TensorSpec(tuple(h.shape), h.dtype, device), "dprobs": sums, "act": act}
    given = [answers[0], w2.transpose(1, 2), h, offs, probs]
    del h
    tables: dict[str, Any] = places.hint if answers[1] is None else {"rows": answers[1], **places.hint}
    back = backends.produce(
        "grouped_gemm_dactivation",
        device,
        wanted,
        given,
        params=params,
        zero_tail=places.on_cpu,
        stage=FC2_DGRAD,
        **tables,
    )
    del given
    dprobs, act = back["dprobs"], back.pop("act")
    if made["dw2"] is not None and act is not None:
        grads["dw2"] = wgrad((act, None), answers, offs, made["dw2"], FC2_WGRAD, places.hint)
    del answers, act
    if made["dweights"] is not None:
        dprobs = dprobs.to(made["dweights"].dtype)
        dprobs = dprobs if scaled is None else dprobs.add_(scaled.to(dprobs.dtype))
        grads["dweights"] = places.per_choice(dprobs, made["dweights"])
    if made["dh"] is not None:
        grads["dh"] = back["dh"]
    return grads


def backward_input(made: Specs, operands: list, *, top_k: int, expected_rows: int | None = None) -> Tensors:
    """Return the gradients of x, w1 and bias1 that have a spec; dx first, so that its rows are freed before dw1."""
    dh, x, w1, position, token, offs = operands
    places, device = _Places.of(position, token, top_k, expected_rows), dh.device
    grads: Tensors = dict.fromkeys(made)
    if made["dbias1"] is not None:
        grads["dbias1"] = made["dbias1"].empty()
        backends.run("grouped_dbias", device, dh, offs, out=grads["dbias1"], stage="FC1 dbias")
    if made["dx"] is not None:
        spec = new_spec(((dh.shape[0], w1.shape[1]), dh.dtype, device, None))
        given = [dh, w1.transpose(1, 2), offs, None, None]
        rows = backends.produce(
            "grouped_gemm", device, spec, given, zero_tail=places.on_cpu, stage=FC1_DGRAD, **places.hint
        )
        grads["dx"] = places.combined(rows, made["dx"])
        del given, rows
    if made["dw1"] is not None:
        few = places.load <= FEW_ROWS_OF_GRADIENT * w1.shape[0]
        tokens = places.read(x, few or w1.shape[2] <= FIRST_GRADIENT)
        grads["dw1"] = wgrad(tokens, (dh, None), offs, made["dw1"], FC1_WGRAD, places.hint)
    return grads

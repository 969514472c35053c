"""``ExpertParallelMLP``: a Mixture-of-Experts block whose experts are spread over ranks, in static sizes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..meta import expert_parallel as meta
from ..nn._errors import fail
from ..nn._inputs import result_dtype
from ..nn.moe import MoE
from ..nn.routing import route
from ._needed import Needed


class ExpertParallelMLP(MoE):
    """The experts of a Mixture-of-Experts layer over W ranks, from this rank's tokens to their weighted sums.

    Rank r holds experts ``r L`` to ``(r + 1) L - 1`` of E, where ``L = E / W``. A call sends every token once to each
    rank that holds an expert of its choice, runs the experts where they are, sums the answers of a rank to a token in
    the order of its choices, and adds the sums of the ranks in their order. All sizes follow from the arguments below
    and no count is read on the host: one graph of ``torch.compile`` serves all routings, and nothing is dropped
    silently. All ranks of the group make the calls of the layer, and its backwards, in one order; each may bring any
    number of tokens up to ``max_tokens``.

    On the wire tokens, answers and their gradients have the dtype of ``x`` (of autocast where active): sums are formed
    in float32 (float64 for float64) and rounded once on every rank, and once more at home. Routing weights have their
    own dtype there.

    **Room for rows.** The rows that arrive lie in ``W pair_rows`` places, those of the experts in ``expert_rows``. A
    step that needs more on any rank has NaN in all its outputs and gradients, on all ranks. The number that was needed
    stays on the device: ``found_inf`` says whether it was too large, and ``check()`` and the next eager call raise.

    Args:
        num_experts: E, over all ranks, a multiple of W.
        hidden_size: H, width of tokens.
        ffn_hidden_size: I, width of the activation.
        group: the ranks: a ``ProcessGroup``, or a ``DeviceMesh`` of one dimension, such as ``mesh["ep"]``.
        top_k: k, choices of each token.
        max_tokens: the most tokens that any rank brings to a call; at least 1.
        capacity_factor: ``expert_rows`` over the even load of a rank, ``max_tokens k``; None for the worst case where
            the choices of a token differ, ``W max_tokens min(k, L)``.
        pair_capacity_factor: ``pair_rows`` over the even load of a pair of ranks, ``max_tokens min(k, W) / W``; None
            for the worst case, ``max_tokens``. All ``W pair_rows`` travel, used or not.
        invariant: send an answer for every choice and sum at home in the order of choices. Outputs and gradients, those
            of weights too if the tokens are shared out in order, then have the bits of one rank with all tokens, for
            any W, if the GEMMs of a group do not depend on the other groups. Up to k times as many rows travel: the
            even load of a pair is ``max_tokens k / W``, its worst case ``max_tokens k``.
        name: what errors call the layer.
        **options: those of ``GroupedMLP``.

    Attributes:
        pair_rows: rows for each pair of ranks.
        expert_rows: rows of this rank's experts.

    Raises:
        ValueError: an argument does not fit, or the ranks do not agree on the arguments.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        group: dist.ProcessGroup | DeviceMesh,
        top_k: int,
        max_tokens: int,
        capacity_factor: float | None = 2.0,
        pair_capacity_factor: float | None = None,
        invariant: bool = False,
        name: str = "ExpertParallelMLP",
        **options: Any,
    ) -> None:
        group = _process_group(group)
        ranks = group.size()
        if num_experts < 1 or num_experts % ranks:
            raise ValueError(f"`num_experts` must be a multiple of the {ranks} ranks of `group`, but got {num_experts}")
        for argument, value in (("top_k", top_k), ("max_tokens", max_tokens)):
            if value < 1:
                raise ValueError(f"`{argument}` must be at least 1, but got {value}")
        local = num_experts // ranks
        super().__init__(local, hidden_size, ffn_hidden_size, **options)
        self.num_experts, self.top_k, self.max_tokens = num_experts, top_k, max_tokens
        self.invariant, self.name = invariant, name
        self.group_name, self.group_size = str(group.group_name), ranks
        sent, most = (top_k, top_k * max_tokens) if invariant else (min(top_k, ranks), max_tokens)
        rows = _capacity("pair_capacity_factor", pair_capacity_factor, max_tokens * sent / ranks, most)
        self.pair_rows = max(min(rows, most), int(meta.fewest_pair_rows(num_experts, ranks, top_k)))
        worst = ranks * max_tokens * min(top_k, local)
        rows = _capacity("capacity_factor", capacity_factor, max_tokens * top_k, worst)
        rows = min(rows, ranks * max_tokens * top_k)
        self.expert_rows = max(rows, int(meta.fewest_expert_rows(num_experts, ranks)))
        self._needed = Needed(2, next(self.parameters()).device)
        _check_agreement(
            group,
            {
                "num_experts": num_experts,
                "hidden_size": hidden_size,
                "top_k": top_k,
                "max_tokens": max_tokens,
                "capacity_factor": capacity_factor,
                "pair_capacity_factor": pair_capacity_factor,
                "invariant": invariant,
            },
        )

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        top_k_index: Tensor,
        weights: Tensor | None = None,
        is_first_microbatch: bool | Tensor | None = None,
    ) -> Tensor:
        """Run the block.

        Args:
            x: ``[S, H]`` or ``[..., H]``: this rank's tokens, from none to ``max_tokens``.
            top_k_index: integer ``[S, k]``: experts chosen by each token, counted over all ranks; out of range means
                none.
            weights: ``[S, k]``: routing weights, dtype of ``x`` or float32; None for ones.
            is_first_microbatch: see ``GroupedLinear``.

        Returns:
            The shape and dtype of ``x``: for every token the weighted sum of what its experts answer.

        Raises:
            TypeError, ValueError: an argument does not fit.
            RuntimeError: a call since the last ``check()`` needed more rows than there are; or another rank did not
                take part in the exchange before the time-out of the group.
        """
        if not torch.compiler.is_compiling() and (most := self._needed.arrived()):
            self._raise_if_full(most)
        tokens = x.reshape(-1, x.shape[-1]) if x.dim() > 2 else x
        tokens = tokens.to(result_dtype(tokens))
        self._check_tokens(tokens, top_k_index, weights)
        ops = torch.ops.tgl
        position, token, index, needed = ops.ep_route(
            top_k_index,
            self.num_experts,
            group_size=self.group_size,
            pair_rows=self.pair_rows,
            expert_rows=self.expert_rows,
            invariant=self.invariant,
            group_name=self.group_name,
        )
        places = token, position, meta.copies(self.top_k, self.group_size, self.invariant)
        self._needed.note(needed)
        rows, row_weights = ops.ep_dispatch(tokens, weights, *places, group_name=self.group_name)
        # NaN in every weight of a step that does not fit, for the choices that ep_route then makes.
        factor = torch.where(self._full(needed), math.nan, 1.0).to(row_weights.dtype)
        row_weights = factor.expand(index.shape) if weights is None else row_weights * factor
        arrived = route(index, self.num_gemms, self.expert_rows)
        answers = super().forward(rows, arrived, row_weights, is_first_microbatch)
        y, _ = ops.ep_combine(answers, None, *places, group_name=self.group_name)
        if not torch.compiler.is_compiling():
            self._needed.send()
        return y if x.dim() == 2 else y.view(x.shape)

    def traffic(self, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes that this rank sends to all ranks in one forward with tokens and weights of ``dtype``: in all, and of
        them those that ``max_tokens`` tokens under an even load use, at most. A backward sends the last two of the
        three parts once more: choices, tokens with their weights, answers.
        """
        row = 2 * self.in_features * dtype.itemsize + self.top_k * (dtype.itemsize + torch.int32.itemsize)
        used = self.max_tokens * (self.top_k if self.invariant else min(self.top_k, self.group_size))
        return self.group_size * self.pair_rows * row, min(used, self.group_size * self.pair_rows) * row

    def _check_tokens(self, tokens: Tensor, top_k_index: Tensor, weights: Tensor | None) -> None:
        count = tokens.shape[0]
        if (fits := count <= self.max_tokens) is False:
            fail(f"{self.name}: `x` must have at most max_tokens = {self.max_tokens} tokens, but got {count}")
        if fits is not True:
            torch._check(fits)
        if tokens.shape[1] != self.in_features:
            fail(f"{self.name}: `x` must have H = {self.in_features} columns, but got shape {tuple(tokens.shape)}")
        for argument, t in (("top_k_index", top_k_index), ("weights", weights)):
            if t is not None and (t.dim() != 2 or t.shape[0] != count or t.shape[1] != self.top_k):
                must = f"[S, k] with S like `x` and k = {self.top_k}"
                fail(f"{self.name}: `{argument}` must be {must}, but got shape {tuple(t.shape)}")

    def _full(self, needed: Tensor) -> Tensor:
        """Whether so many rows do not fit: bool ``[]``."""
        return torch.logical_or(needed[0] > self.pair_rows, needed[1] > self.expert_rows)

    @property
    def found_inf(self) -> Tensor:
        """float32 ``[1]`` on the device: 1 on all ranks if a call since ``clear()`` did not fit on one, else 0."""
        return self._full(self._needed.most).float().view(1)

    def clear(self) -> None:
        """Forget what calls have needed, on the device; for a loop that skips the steps which ``found_inf`` tells."""
        self._needed.clear()

    def check(self) -> None:
        """Raise if a call since the last ``check()`` or ``clear()`` did not fit; reads the device on the host.

        Raises:
            RuntimeError: it names the layer, the rows that were needed and those that there are.
        """
        self._raise_if_full(self._needed.most.tolist())
        self.clear()

    def _raise_if_full(self, most: list[int]) -> None:
        limits = (self.pair_rows, "pair_capacity_factor"), (self.expert_rows, "capacity_factor")
        said = [
            f"{count} {what} were needed, but there are {limit}: raise `{argument}`"
            for count, what, (limit, argument) in zip(most, ("rows of a pair of ranks", "rows of experts"), limits)
            if count > limit
        ]
        if said:
            self.clear()
            raise RuntimeError(
                f"{self.name}: {'; '.join(said)}. Outputs and gradients of that step are NaN on all ranks"
            )

    def _apply(self, fn: Any, recurse: bool = True) -> ExpertParallelMLP:
        super()._apply(fn, recurse)
        self._needed.to_device(fn)
        return self

    def reset_parameters(self) -> None:
        """Initialise both layers, and forget what calls have needed."""
        super().reset_parameters()
        self.clear()

    def extra_repr(self) -> str:
        sizes = f"num_experts={self.num_experts}, ranks={self.group_size}, max_tokens={self.max_tokens}"
        rows = f"pair_rows={self.pair_rows}, expert_rows={self.expert_rows}, invariant={self.invariant}"
        return f"{super().extra_repr()}, {sizes}, {rows}"


def _process_group(group: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise ValueError(f"`group` must be a DeviceMesh of one dimension, but got {group.ndim}; take one by its name")
    return group.get_group()


def _capacity(argument: str, factor: float | None, even: float, worst: int) -> int:
    """Rows for ``factor`` of the even load, or for the worst case."""
    if factor is not None and not factor > 0:
        raise ValueError(f"`{argument}` must be above 0 or None, but got {factor}")
    return worst if factor is None else math.ceil(factor * even)


def _check_agreement(group: dist.ProcessGroup, arguments: dict[str, Any]) -> None:
    """All ranks of ``group`` were given these ``arguments``."""
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, arguments, group=group)
    for argument, value in arguments.items():
        values = [given[argument] for given in every]
        if any(other != value for other in values):
            raise ValueError(f"`{argument}` must be equal on all ranks of `group`, but got {values}")

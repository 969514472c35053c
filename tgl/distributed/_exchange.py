"""The exchange that expert-parallel layers share: capacity, dispatch and combine over ranks, and overflow."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..meta import expert_parallel as meta
from ..meta import symmetric_memory
from ..nn._arguments import check_flags, check_number, check_size
from ..nn._errors import fail
from ..nn._parameters import decided_when_traced
from ._agreement import difference_in
from ._rows_needed import Needed
from ._wire_format import WireFormat

AS_ALWAYS = WireFormat()
Result = TypeVar("Result")


@dataclass(frozen=True)
class Sizes:
    """The arguments that determine the sizes of a layer's exchanges, equal on every rank of the group.

    Attributes:
        ranks: W.
        num_experts: E, over all ranks.
        top_k: top-k slots of each token.
        max_tokens: the most tokens of any rank.
        capacity_factor, pair_capacity_factor: capacity over the even load, None for the worst case.
        invariant: a row is sent for every top-k slot of a token instead of every destination rank.
    """

    ranks: int
    num_experts: int
    top_k: int
    max_tokens: int
    capacity_factor: float | None
    pair_capacity_factor: float | None
    invariant: bool

    def __post_init__(self) -> None:
        check_size("num_experts", self.num_experts, 1)
        check_size("max_tokens", self.max_tokens, 1)
        if check_size("top_k", self.top_k, 1) > self.num_experts:
            raise ValueError(f"`top_k` must be at most the {self.num_experts} experts, but got {self.top_k}")
        if self.num_experts % self.ranks:
            raise ValueError(
                f"`num_experts` must be a multiple of the {self.ranks} ranks of `group`, but got {self.num_experts}"
            )
        check_flags(invariant=self.invariant)
        for argument in ("capacity_factor", "pair_capacity_factor"):
            factor = getattr(self, argument)
            check_number(argument, factor)
            if factor is not None and not factor > 0:
                raise ValueError(f"`{argument}` must be above 0 or None, but got {factor}")

    @property
    def copies(self) -> int:
        """Places of each token."""
        return int(meta.copies(self.top_k, self.ranks, self.invariant))

    @property
    def used(self) -> int:
        """The most rows that ``max_tokens`` tokens are sent as."""
        return self.max_tokens * (self.top_k if self.invariant else min(self.top_k, self.ranks))

    @property
    def pair_rows(self) -> int:
        """Capacity in rows from one rank to one rank."""
        worst = self.max_tokens * (self.top_k if self.invariant else 1)
        rows = _rows(self.pair_capacity_factor, self.used / self.ranks, worst)
        return max(min(rows, worst), int(meta.fewest_pair_rows(self.num_experts, self.ranks, self.top_k)))

    @property
    def expert_rows(self) -> int:
        """Capacity in rows of one rank's experts.

        Without a factor it is the worst case of distinct experts per token, which a factor may exceed.
        """
        worst = self.ranks * self.max_tokens * min(self.top_k, self.num_experts // self.ranks)
        rows = _rows(self.capacity_factor, self.max_tokens * self.top_k, worst)
        most = self.ranks * self.max_tokens * self.top_k
        return max(min(rows, most), int(meta.fewest_expert_rows(self.num_experts, self.ranks)))

    @property
    def expected_rows(self) -> int:
        """The rows of ``expert_rows`` that the even load uses; tilings are chosen by it."""
        return min(self.max_tokens * self.top_k, self.expert_rows)

    def memory(self, hidden_size: int, dtype: torch.dtype, form: WireFormat = AS_ALWAYS) -> int:
        """Return the bytes of a rank's symmetric memory, for tokens of this width and dtype and weights up to
        float32.
        """
        rows = self.ranks * self.pair_rows
        routing = (self.ranks, self.num_experts + self.ranks, torch.int32), (rows, self.top_k, torch.int32)
        row = max(form.bytes_to(hidden_size, dtype), form.bytes_back(hidden_size, dtype))
        moving = (rows, row, torch.uint8), (rows, self.top_k, torch.float32)
        return max(symmetric_memory.size(self.ranks, specs) for specs in (routing, moving))

    def traffic(self, hidden_size: int, dtype: torch.dtype, form: WireFormat = AS_ALWAYS) -> tuple[int, int]:
        """Return the bytes of ``ExpertParallelMLP.traffic``, for tokens of this width."""
        rows = form.bytes_to(hidden_size, dtype) + form.bytes_back(hidden_size, dtype)
        row = rows + self.top_k * (dtype.itemsize + torch.int32.itemsize)
        places = self.ranks * self.pair_rows
        return places * row, min(self.used, places) * row


def _rows(factor: float | None, even: float, worst: int) -> int:
    return worst if factor is None else math.ceil(factor * even)


class Arrived(NamedTuple):
    """The rows that all ranks have sent to this one, and their origin: W P rows, unused without a slot.

    Attributes:
        rows: ``[W P, H]`` tokens, or uint8 ``[W P, bytes]`` of tokens that are sent as bytes.
        choices: int32 ``[W P, k]``: this rank's experts of the slots, counted from 0; -1 for a dropped slot.
        weights: ``[W P, k]``: routing weights; all NaN in a call over capacity.
        places: the places of this rank's tokens.
    """

    rows: Tensor
    choices: Tensor
    weights: Tensor
    places: tuple[Tensor, Tensor, int]


class Exchange:
    """The exchange of tokens with the experts of a group of ranks, there and back.

    Args:
        group: the ranks.
        sizes: the sizes of its tensors.
        name: the layer's name in errors.
        device: the device of the row counts.
        agreement: the name from ``check_agreement`` on ``sizes``.
        engine: the engine that moves rows, one of ``meta.ENGINES``.

    Attributes:
        pair_rows, expert_rows: as in ``sizes``, kept here for every call.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        sizes: Sizes,
        name: str,
        device: torch.device,
        agreement: str,
        engine: str = meta.ALL_TO_ALL,
    ) -> None:
        self.sizes, self.name, self.engine, self.agreement = sizes, name, engine, agreement
        self.dtypes: set[tuple[torch.dtype, torch.dtype | None]] = set()  # agreed dtypes of calls
        self.pair_rows, self.expert_rows = sizes.pair_rows, sizes.expert_rows
        self.group_name = str(group.group_name)
        self.needed = Needed(2, device)

    @property
    def group(self) -> dict[str, str]:
        """Keywords that the ops get."""
        return {"group_name": self.group_name, "engine": self.engine}

    def agree(self, tokens: Tensor, weights: Tensor | None) -> None:
        """Compare dtypes with the other ranks in the first call with them, before anything else in a call."""
        dtypes = tokens.dtype, None if weights is None else weights.dtype
        if torch.compiler.is_compiling() or dtypes not in self.dtypes:
            difference = self._difference_in(*dtypes)
            if difference is not None:
                fail(difference)

    @decided_when_traced
    def _difference_in(self, x: torch.dtype, weights: torch.dtype | None) -> str | None:
        """Compare the dtypes; a trace runs this on the real ranks, and its graph is valid only for these dtypes."""
        if (x, weights) in self.dtypes:
            return None
        values = {"x.dtype": x, "weights.dtype": weights}
        difference = difference_in(self.group_name, self.agreement, self.name, **values)
        if difference is None:
            self.dtypes.add((x, weights))
        return difference

    def arrive(
        self,
        tokens: Tensor,
        top_k_index: Tensor,
        weights: Tensor | None,
        packed: Tensor | None = None,
        *,
        sentinels: bool = False,
    ) -> Arrived:
        """Send tokens ``[S, H]`` with their experts and weights ``[S, k]`` to the ranks of the experts.

        If ``packed [S, ...]`` is given, its bytes are sent instead of tokens, and only routing weights have a gradient.
        """
        compiling = torch.compiler.is_compiling()
        if not compiling and (most := self.needed.arrived()):
            self._raise_if_full(most)
        sizes = self.sizes
        self._check(tokens, top_k_index, weights)
        position, token, index, needed = torch.ops.tgl.ep_route(
            top_k_index,
            sizes.num_experts,
            group_size=sizes.ranks,
            pair_rows=self.pair_rows,
            expert_rows=self.expert_rows,
            invariant=sizes.invariant,
            **({"sentinels": True} if sentinels else {}),
            **self.group,
        )
        self.needed.note(needed)
        if not compiling:
            self.needed.send()
        places = token, position, sizes.copies
        sent = tokens if packed is None else packed
        rows, row_weights = torch.ops.tgl.ep_dispatch(sent, weights, *places, **self.group)
        # NaN in every weight of a step over capacity, for the slots that ep_route then writes.
        factor = torch.where(self._full(needed), math.nan, 1.0)
        factor = factor.to(tokens.dtype if weights is None else row_weights.dtype)
        row_weights = factor.expand(index.shape) if weights is None else row_weights * factor
        return Arrived(rows, index, row_weights, places)

    def answer(self, answers: Tensor, arrived: Arrived) -> Tensor:
        """Send ``[W P, H]`` back and return the sum for every token, ``[S, H]``."""
        y: Tensor = torch.ops.tgl.ep_combine(answers, None, *arrived.places, **self.group)[0]
        return y

    def _check(self, tokens: Tensor, top_k_index: Tensor, weights: Tensor | None) -> None:
        count, most, top_k = tokens.shape[0], self.sizes.max_tokens, self.sizes.top_k
        _require(count <= most, f"{self.name}: `x` must have at most max_tokens = {most} tokens", tokens)
        for argument, t in (("top_k_index", top_k_index), ("weights", weights)):
            if t is not None:
                must = f"{self.name}: `{argument}` must be [S, k] with S like `x` and k = {top_k}"
                _require(t.dim() == 2, must, t)
                _require(t.shape[1] == top_k, must, t)
                _require(t.shape[0] == count, must, t)

    def _full(self, needed: Tensor) -> Tensor:
        """Return whether the needed rows exceed the capacity: bool ``[]``."""
        return torch.logical_or(needed[0] > self.pair_rows, needed[1] > self.expert_rows)

    @property
    def found_inf(self) -> Tensor:
        """Return float32 ``[]`` on the device: 1 on all ranks if a call since ``clear()`` overflowed, else 0."""
        return self._full(self.needed.most).float()

    def clear(self) -> None:
        """Reset the needed rows, on the device; for a loop that skips the steps reported by ``found_inf``."""
        self.needed.clear()

    def check(self) -> None:
        """Raise if a call since the last ``check()`` or ``clear()`` exceeded a capacity; reads the device on the host.

        Raises:
            RuntimeError: it names the layer, the rows that were needed and those that there are; or the rank that
                this one's device has waited for until the time-out.
        """
        self._raise_if_full(self.watched(self.needed.most.tolist))
        self.clear()

    def watched(self, call: Callable[..., Result], *args: Any) -> Result:
        """Run ``call(*args)``; if a wait of this rank's device timed out, the error names the missing rank."""
        if torch.compiler.is_compiling():
            return call(*args)
        try:
            return call(*args)
        except RuntimeError as error:
            said = symmetric_memory.failure_of(self.group_name)
            if said is None:
                raise
            raise RuntimeError(f"{self.name}: {said}") from error

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


def _require(condition: bool | torch.SymBool, must: str, t: Tensor) -> None:
    """Raise an error about ``t`` unless ``condition`` holds; a symbolic condition is checked when the graph runs."""
    if condition is False:
        fail(f"{must}, but got shape {tuple(t.shape)}")
    if condition is not True:
        torch._check(condition, lambda message=must: message)  # type: ignore[arg-type, misc]

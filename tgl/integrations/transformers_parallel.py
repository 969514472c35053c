"""Hugging Face transformers: expert parallelism of a model's experts, trainable and without a host read.

One line before a model is loaded makes it available::

    tgl.integrations.transformers_parallel.register(max_tokens=8192)
    config = DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="tgl")
    AutoModelForCausalLM.from_pretrained(name, distributed_config=config)

It serves the experts that ``tgl.integrations.transformers`` serves, whatever experts implementation the model names.
"""

from __future__ import annotations

import functools
from operator import index
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..distributed._agreement import check_agreement
from ..distributed._exchange import Exchange, Sizes
from ..distributed._symmetric_memory import reserve
from ..distributed._wire_format import DENSE
from ..meta.expert_parallel import ALL_TO_ALL, ENGINES, SYMMETRIC_MEMORY
from ..nn._parameters import decided_when_traced
from .transformers import NAME, experts_forward

_NEEDS = (
    "tgl.integrations.transformers_parallel needs transformers 5.23 or later; install it with "
    "`pip install -U torch-grouped-linear[transformers]`"
)
_WIRES = {
    "wire": (DENSE, "have no recipe whose codes could be sent"),
    "wire_dtype": (None, "sum a token's outputs in its dtype"),
}


def register(
    name: str = NAME,
    *,
    max_tokens: int,
    capacity_factor: float | None = 2.0,
    pair_capacity_factor: float | None = None,
    invariant: bool = False,
    engine: str = ALL_TO_ALL,
    **wires: Any,
) -> None:
    """Make this expert parallelism available to transformers models as an implementation of it.

    A step over capacity is NaN on all ranks, and the next one raises; see ``tgl.distributed.ExpertParallelMLP``, whose
    arguments these are. ``experts.exchange`` of every experts module has ``found_inf``, ``clear()`` and ``check()``
    after the first call.

    Args:
        name: its name for ``DistributedConfig(ep_implementation=...)``.
        max_tokens: the most tokens in a batch of a rank, all sequences together.
        capacity_factor, pair_capacity_factor, invariant: see ``ExpertParallelMLP``.
        engine: see ``ExpertParallelMLP``; a group without that memory is an error of the first call, on all ranks.
        **wires: ``wire`` and ``wire_dtype`` of ``ExpertParallelMLP``, of which these experts take the defaults alone:
            they have no recipe whose codes could be sent, and sum their answers to a token in the dtype of tokens.

    Raises:
        ImportError: transformers is not installed, or older than 5.23, which takes no implementation.
        ValueError: ``engine`` is unknown, or rows would travel in a form that these experts do not have.
    """
    if engine not in ENGINES:
        raise ValueError(f"`engine` must be one of {', '.join(map(repr, ENGINES))}, but got {engine!r}")
    for argument, given in wires.items():
        if argument not in _WIRES:
            raise TypeError(f"register() got an unexpected keyword argument {argument!r}")
        only, why = _WIRES[argument]
        if given != only:
            raise ValueError(f"`{argument}` must be {only!r}, as experts of transformers {why}, but got {given!r}")
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError as error:
        raise ImportError(_NEEDS) from error
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "capacity_factor": capacity_factor,
        "pair_capacity_factor": pair_capacity_factor,
        "invariant": invariant,
    }
    EPImplementationInterface.register(name, functools.partial(ExpertParallel, engine=engine, **options))


class ExpertParallel:
    """The exchange of tokens with the experts of one module; transformers makes and calls it.

    The ranks of ``tp_mesh`` hold one batch. Each takes a slice of its tokens, and they gather the slices of the result.

    Args:
        experts: the module, which has this rank's experts.
        ep_mesh: the ranks that share the experts.
        tp_mesh: the ranks that share a batch.
        engine, **options: arguments of ``register``.
    """

    def __init__(
        self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh, *, engine: str, **options: Any
    ) -> None:
        self.experts, self.ep_mesh, self.tp_mesh, self.engine = experts, ep_mesh, tp_mesh, engine
        slices = tp_mesh.size()
        options["max_tokens"] = -(-options["max_tokens"] // slices)
        self.options, self.slices = options, slices

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted answers ``[S, H]`` to tokens ``[S, H]``, from ``[S, k]`` experts and weights."""
        own = hidden_states, top_k_index, top_k_weights
        if self.slices > 1:
            own = tuple(self._slice(t) for t in own)  # type: ignore[assignment]
        tokens, experts = own[0], self.experts
        columns, top_k = (index(t.shape[1]) for t in (tokens, top_k_index))  # numbers where a trace has symbols
        self._make_exchange(columns, tokens.dtype, tokens.device, top_k)
        exchange: Any = experts.exchange
        exchange.agree(tokens, own[2])
        arrived = exchange.arrive(*own, sentinels=True)
        none: Any = experts.num_experts  # the number that experts take for a dropped slot
        choices = arrived.choices.masked_fill(arrived.choices < 0, none)
        rows = exchange.expert_rows
        answers = experts_forward(experts, arrived.rows, choices, arrived.weights, num_rows=rows)
        y: Tensor = exchange.answer(answers, arrived)
        if self.slices == 1:
            return y
        shape = hidden_states.shape
        whole = DTensor.from_local(
            y.contiguous(), self.tp_mesh, [Shard(0)], shape=shape, stride=(shape[1], 1), run_check=False
        )
        return whole.full_tensor()

    def _slice(self, t: Tensor) -> Tensor:
        whole = DTensor.from_local(t, self.tp_mesh, [Replicate()], run_check=False)
        return whole.redistribute(self.tp_mesh, [Shard(0)]).to_local()

    @decided_when_traced
    def _make_exchange(self, columns: int, dtype: torch.dtype, device: torch.device, top_k: int) -> None:
        """Make the exchange in the first call, which defines tokens' device, width and number of experts.

        A trace runs it eagerly, as no graph can hold the making of a group's memory, and then uses the result.
        """
        experts: Any = self.experts
        if hasattr(experts, "exchange"):
            return
        ranks, group = self.ep_mesh.size(), self.ep_mesh.get_group()
        given = {"num_experts": experts.num_experts * ranks, "top_k": top_k, **self.options}
        name = type(experts).__name__
        agreement = check_agreement(group, experts=name, hidden_size=columns, engine=self.engine, **given)
        sizes = Sizes(ranks=ranks, **given)
        if self.engine == SYMMETRIC_MEMORY:
            reserve(group, sizes.memory(columns, dtype), name)
        experts.exchange = Exchange(group, sizes, name, device, agreement, self.engine)

"""``MoELayer``: a whole Mixture-of-Experts layer, from hidden states to hidden states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .meta.checks import unknown
from .meta.router import SCORES
from .meta.specs import accumulator
from .nn._arguments import check_device, check_dtype, check_flags, check_size
from .nn._errors import fail, not_a_tensor, shown
from .nn.grouped_mlp import GroupedMLP
from .nn.moe import MoE
from .nn.router import RouterOutput, topk_router
from .ops._library import autocast_enabled
from .recipes import Recipe

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BALANCES = ("loss", "bias", "none")
ROUTER_OPTIONS = ("score_function", "renormalize", "scale", "num_groups", "topk_groups", "group_score")


class Router(nn.Module):
    """The router of a ``MoELayer``: logits in float32 (float64 for float64), then ``topk_router``.

    Args:
        hidden_size, num_experts, top_k: H, E and k.
        options: keyword arguments of ``topk_router``, those of ``ROUTER_OPTIONS``.
        bias: whether the logits have a bias.
        balanced: whether there is a bias of the choice, ``expert_bias``.
        factory: ``dtype`` and ``device`` of the parameters.

    Attributes:
        weight: parameter ``[E, H]``.
        bias: parameter ``[E]`` or None: added to the logits.
        expert_bias: float32 buffer ``[E]`` or None: added to the scores to choose experts, not to weigh them. Casts of
            the module leave it in float32.
        loads: int64 buffer ``[E]`` or None, not saved: tokens of each expert since the last update of ``expert_bias``.
    """

    bias: Tensor | None
    expert_bias: Tensor | None
    loads: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        options: Mapping[str, Any],
        *,
        bias: bool = False,
        balanced: bool = False,
        factory: Mapping[str, Any],
    ) -> None:
        super().__init__()
        dtype, device = factory["dtype"], factory["device"]
        self.top_k, self.options = top_k, dict(options)
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=dtype, device=device))
        of_logits = nn.Parameter(torch.empty(num_experts, dtype=dtype, device=device)) if bias else None
        self.register_parameter("bias", of_logits)
        device = self.weight.device
        of_choice = torch.zeros(num_experts, dtype=torch.float32, device=device) if balanced else None
        self.register_buffer("expert_bias", of_choice)
        loads = torch.zeros(num_experts, dtype=torch.int64, device=device) if balanced else None
        self.register_buffer("loads", loads, persistent=False)
        if not self.weight.is_meta:
            self.reset_parameters()
        logits = torch.empty(1, num_experts, dtype=torch.float32, device="meta")
        topk_router(logits, top_k, **self.options)  # checks the options

    def reset_parameters(self) -> None:
        """Initialise as ``nn.Linear`` does, and zero the bias of the choice."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)
        for buffer in self.buffers():
            buffer.zero_()

    def forward(
        self, x: Tensor, *, index: Tensor | None = None, mask: Tensor | None = None, losses: bool = False
    ) -> RouterOutput:
        """Return the ``RouterOutput`` for ``x [..., H]``; see ``topk_router`` for the rest."""
        if autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                logits = self.logits(x)
        else:
            logits = self.logits(x)
        bias = None if self.expert_bias is None else self.expert_bias.to(logits.dtype)
        return topk_router(logits, self.top_k, bias, **self.options, losses=losses, mask=mask, index=index)

    def logits(self, x: Tensor) -> Tensor:
        """Return ``[..., E]`` in float32, or float64 for float64."""
        dtype = accumulator(x.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return nn.functional.linear(x.to(dtype), self.weight.to(dtype), bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Router:
        before = self.expert_bias
        super()._apply(fn, recurse)
        after = self.expert_bias
        if before is not None and after is not None and after.dtype != before.dtype:
            self.expert_bias = before.to(after.device)
        return self

    def extra_repr(self) -> str:
        experts, hidden = self.weight.shape
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"hidden_size={hidden}, num_experts={experts}, top_k={self.top_k}{options}, dtype={self.weight.dtype}"


class MoELayer(nn.Module):
    """A Mixture-of-Experts layer: router, experts, an optional shared expert, and the weighted sum of their results::

        layer = tgl.MoELayer(1024, 512, num_experts=64, top_k=8, dtype=torch.bfloat16, device="cuda")
        y = layer(x)
        y, router = layer(x, return_router=True)
        loss = loss + layer.router_loss(router)

    Loads are balanced by a loss, or by a bias of the choice that ``update_expert_bias`` adapts once a step.

    Args:
        hidden_size: H, width of ``x``.
        intermediate_size: I, width of an expert's activation.
        num_experts: E.
        top_k: k, experts of each token.
        activation: name of the activation; see ``tgl.grouped_activation``.
        bias: whether the experts have biases.
        router: the score function, ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``; or a dict of options of
            ``tgl.topk_router``: ``score_function``, ``renormalize``, ``scale``, ``num_groups``, ``topk_groups`` and
            ``group_score``. By name, weights are renormalised: they sum to 1.
        router_bias: whether the router's logits have a bias, as in gpt-oss.
        shared_intermediate_size: width of the activation of an expert that gets every token; 0 for none.
        shared_gate: whether the shared expert's result is multiplied by ``sigmoid`` of a linear layer of ``x``.
        balance: ``"loss"``: by ``load_balancing_loss``; ``"bias"``: by a bias of the choice, as in DeepSeek-V3;
            ``"none"``.
        load_balancing_coefficient: factor of the load balancing loss in ``router_loss``, with ``balance="loss"``.
        z_loss_coefficient: factor of the z-loss in ``router_loss``.
        bias_update_rate: step of ``update_expert_bias``.
        recipe: how the experts' operands are quantised, a recipe of ``tgl.recipes`` or its name; the router's are not.
        dtype, device: of the parameters.
        process_group: ranks over which the experts are spread, as ``tgl.distributed.ExpertParallelMLP``; then
            ``max_tokens`` is required. Router and shared expert are replicated.
        **options: those of ``tgl.MoE``, and with a group those of ``ExpertParallelMLP``.

    Attributes:
        router: the router, with ``weight``, ``bias`` and ``expert_bias``.
        experts: ``tgl.MoE`` or ``tgl.distributed.ExpertParallelMLP``.
        shared: a ``tgl.GroupedMLP`` of one expert, or None.
        shared_gate: ``nn.Linear(H, 1)`` without a bias, or None.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        router: str | Mapping[str, Any] = "softmax",
        router_bias: bool = False,
        shared_intermediate_size: int = 0,
        shared_gate: bool = False,
        balance: str = "loss",
        load_balancing_coefficient: float = 0.01,
        z_loss_coefficient: float = 0.0,
        bias_update_rate: float = 0.001,
        recipe: Recipe | str | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        hidden_size = check_size("hidden_size", hidden_size, 1)
        intermediate_size = check_size("intermediate_size", intermediate_size, 1)
        num_experts, top_k = check_size("num_experts", num_experts, 1), check_size("top_k", top_k, 1)
        shared_intermediate_size = check_size("shared_intermediate_size", shared_intermediate_size)
        check_flags(bias=bias, router_bias=router_bias, shared_gate=shared_gate)
        check_dtype("dtype", dtype)
        check_device("device", device)
        self.load_balancing_coefficient = _number("load_balancing_coefficient", load_balancing_coefficient)
        self.z_loss_coefficient = _number("z_loss_coefficient", z_loss_coefficient)
        self.bias_update_rate = _number("bias_update_rate", bias_update_rate)
        if not isinstance(balance, str) or balance not in BALANCES:
            raise ValueError(f"`balance` must be one of {', '.join(BALANCES)}, but got {unknown(balance, BALANCES)}")
        if shared_gate and not shared_intermediate_size:
            raise ValueError("`shared_gate` must be False without `shared_intermediate_size`, but is True")
        self.balance = balance
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        self.router = Router(
            hidden_size,
            num_experts,
            top_k,
            _router_options(router),
            bias=router_bias,
            balanced=balance == "bias",
            factory=factory,
        )
        expert: dict[str, Any] = {"activation": activation, "bias": bias, "recipe": recipe, "device": device}
        expert["params_dtype"] = dtype
        self.experts: MoE
        if process_group is None:
            if "max_tokens" in options:
                raise TypeError("`max_tokens` must be left out without `process_group`, which it is for")
            self.experts = MoE(num_experts, hidden_size, intermediate_size, **expert, **options)
        else:
            from torch.distributed.device_mesh import DeviceMesh

            from .distributed.expert_parallel_mlp import ExpertParallelMLP

            if not isinstance(process_group, (dist.ProcessGroup, DeviceMesh)):
                must = "a ProcessGroup, a DeviceMesh or None"
                raise TypeError(f"`process_group` must be {must}, but got {shown(process_group)}")
            if "max_tokens" not in options:
                raise TypeError("`max_tokens` must be given with `process_group`: the most tokens of a rank in a call")
            ranks: dict[str, Any] = {"group": process_group, "top_k": top_k, **expert, **options}
            self.experts = ExpertParallelMLP(num_experts, hidden_size, intermediate_size, **ranks)
        self.shared = None
        if shared_intermediate_size:
            self.shared = GroupedMLP(1, hidden_size, shared_intermediate_size, **expert)
        self.shared_gate = nn.Linear(hidden_size, 1, bias=False, **factory) if shared_gate else None

    def forward(
        self,
        x: Tensor,
        *,
        index: Tensor | None = None,
        mask: Tensor | None = None,
        return_router: bool = False,
        is_first_microbatch: bool | Tensor | None = None,
    ) -> Any:
        """Run the layer.

        Args:
            x: ``[..., H]``.
            index: int32 or int64 ``[..., k]``: the experts of every token instead of the router's choice, -1 for a
                dropped slot (routing replay); see ``tgl.topk_router``.
            mask: bool ``[...]``: the tokens that count in losses and loads; None for all.
            return_router: return the ``RouterOutput`` too, with losses and loads.
            is_first_microbatch: see ``tgl.GroupedLinear``.

        Returns:
            ``[..., H]`` in the dtype of ``x``, or a pair of it and the ``RouterOutput``.

        Raises:
            TypeError, ValueError: an argument does not fit.
        """
        if not isinstance(x, Tensor):
            not_a_tensor("MoELayer: `x`", x)
        if x.dim() < 2 or x.shape[-1] != self.router.weight.shape[1]:
            must = f"[..., H] with H = {self.router.weight.shape[1]}"
            fail(f"MoELayer: `x` must be {must}, but got shape {tuple(x.shape)}")
        if mask is not None and not isinstance(mask, Tensor):
            not_a_tensor("MoELayer: `mask`", mask, "a tensor or None")
        if not isinstance(return_router, bool):
            fail(f"MoELayer: `return_router` must be True or False, but got {shown(return_router)}", TypeError)
        loads = self.router.loads if self.training else None
        losses = return_router or loads is not None
        router = self.router(x, index=index, mask=mask if losses else None, losses=losses)
        if loads is not None:
            loads.add_(router.tokens_per_expert)
        y = self.experts(x, router, is_first_microbatch=is_first_microbatch)
        if self.shared is not None:
            y = y + self._shared_result(self.shared, x, is_first_microbatch)
        return (y, router) if return_router else y

    def _shared_result(self, shared: GroupedMLP, x: Tensor, is_first_microbatch: bool | Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        offs = torch.full((1,), rows.shape[0], dtype=torch.int32, device=x.device)
        y = shared.forward_offsets(rows, offs, is_first_microbatch=is_first_microbatch).view(x.shape)
        return y if self.shared_gate is None else self.shared_gate(x).sigmoid() * y

    def router_loss(self, router: RouterOutput) -> Tensor:
        """Return the losses of ``router`` times their coefficients, a scalar to add to the model's loss.

        Args:
            router: the second result of a call with ``return_router``.
        """
        if router.load_balancing_loss is None or router.z_loss is None:
            fail("MoELayer: `router` must have losses, from a call with return_router=True, but has none")
        loss = self.z_loss_coefficient * router.z_loss
        if self.balance == "loss":
            loss = loss + self.load_balancing_coefficient * router.load_balancing_loss
        return loss

    @torch.no_grad()
    def update_expert_bias(self, group: dist.ProcessGroup | None = None) -> None:
        """Move the bias of every expert one ``bias_update_rate`` towards the mean load, and start to count anew.

        Call it once a step, outside of compiled functions, after the optimizer. Experts with fewer tokens than the mean
        of the training forwards since the last call get a larger bias, those with more a smaller one.

        Args:
            group: ranks that share the layer's parameters; their loads are added up.
        """
        bias, loads = self.router.expert_bias, self.router.loads
        if bias is None or loads is None:
            raise RuntimeError(f"`balance` must be 'bias' for update_expert_bias, but is {self.balance!r}")
        if group is not None:
            dist.all_reduce(loads, group=group)
        counts = loads.to(bias.dtype)
        bias.add_(torch.sign(counts.mean() - counts), alpha=self.bias_update_rate)
        loads.zero_()

    def reset_parameters(self) -> None:
        """Initialise all parameters, and zero the bias of the choice."""
        for module in (self.router, self.experts, self.shared, self.shared_gate):
            if module is not None:
                module.reset_parameters()

    def extra_repr(self) -> str:
        return f"balance={self.balance!r}"


def _number(argument: str, value: Any) -> float:
    """Return ``value``, which must be a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`{argument}` must be a number, but got {shown(value)}")
    return value


def _router_options(router: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``topk_router`` for a score function's name or a dict of options."""
    if isinstance(router, str):
        if router not in SCORES:
            raise ValueError(f"`router` must be one of {', '.join(SCORES)}, but got {unknown(router, SCORES)}")
        return {"score_function": router, "renormalize": True}
    if not isinstance(router, Mapping):
        raise TypeError(f"`router` must be the name of a score function or a dict of options, but got {router!r}")
    for name in router:
        if name not in ROUTER_OPTIONS:
            must = f"only {', '.join(ROUTER_OPTIONS)}"
            raise ValueError(f"`router` must hold {must}, but has {unknown(name, ROUTER_OPTIONS)}")
    return dict(router)

"""The parameters of ``GroupedLinear``: one packed tensor, or one parameter per group lying in one packed tensor.

The GEMMs read the packed tensor, optimizers and state dicts see the parameters, and nothing is copied between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._errors import fail
from ._slots import lies_in, pack, slots_of
from .layouts import is_extra_state


def _decided_when_traced(function: Callable) -> Callable:
    """``torch.compiler.assume_constant_result``, which would import the compiler together with this package.

    For methods: every torch knows the real module behind the object of a method, but some take no module as an argument
    of a function. ``this`` must be ``id(self)``: a trace guards by the identity that it sees taken.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def _mark(weights: Sequence[nn.Parameter]) -> None:
    for weight in weights:
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]


class GroupedParameters(nn.Module):
    """Weight ``[G, N, K]`` and bias ``[G, N]`` in either form, their initialisation and their state dicts.

    See ``GroupedLinear`` for the arguments.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool,
        params_dtype: torch.dtype | None,
        device: torch.device | str | None,
        init_method: Callable[[Tensor], Any] | None,
        single_grouped_weight: bool,
        state_dict_format: str | None,
    ) -> None:
        super().__init__()
        if state_dict_format not in (None, "packed", "discrete"):
            raise ValueError(f"`state_dict_format` must be 'packed' or 'discrete', but got {state_dict_format!r}")
        if num_gemms < 1 and not single_grouped_weight:
            raise ValueError(f"`num_gemms` must be at least 1 without `single_grouped_weight`, but got {num_gemms}")
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.init_method = init_method
        self.single_grouped_weight = single_grouped_weight
        self.state_dict_format = state_dict_format or ("packed" if single_grouped_weight else "discrete")
        self._packed: dict[str, tuple[Tensor | None, list[nn.Parameter]]] = {}
        self._main_grad: tuple[Tensor, ...] | None = None
        self._names: dict[str, list[str]] = {}
        for name, shape in (("weight", (out_features, in_features)), ("bias", (out_features,))):
            wanted = name == "weight" or bias
            full_shape = (num_gemms, *shape) if single_grouped_weight else shape
            names = [name] if single_grouped_weight else [f"{name}{i}" for i in range(num_gemms)]
            self._names[name] = names if wanted else []
            for full in names:
                data = torch.empty(full_shape, dtype=params_dtype, device=device) if wanted else None
                self.register_parameter(full, nn.Parameter(data) if data is not None else None)
        self._pack()
        if next(self.parameters()).device.type != "meta":
            self.reset_parameters()

    def group_parameters(self, name: str) -> list[nn.Parameter]:
        """The parameters that make up ``"weight"`` or ``"bias"``: one, or one per group; none for no bias."""
        return [self._parameters[full] for full in self._names[name]]  # type: ignore[misc]

    def packed(self, name: str) -> Tensor | None:
        """``weight [G, N, K]`` or ``bias [G, N]`` without grad, sharing the parameters' memory; None for no bias.

        Parameters of single groups that something else has moved apart (a wrapper that shards or gathers them) are
        copied together, by every call.
        """
        parameters = self.group_parameters(name)
        if not parameters:
            return None
        if self.single_grouped_weight:
            return parameters[0].detach()
        packed, packed_parameters = self._packed[name]
        # The identities are for a trace, which makes guards of them; addresses it sees only once.
        if all(p is q for p, q in zip(parameters, packed_parameters)) and self._still_packed(id(self), name):
            return packed
        return torch.stack([p.detach() for p in parameters])

    @_decided_when_traced
    def _still_packed(self, this: int, name: str) -> bool:
        """``lies_in`` for a trace: decided when it is made, on the real tensors."""
        packed = self._packed[name][0]
        return packed is not None and lies_in(packed, self.group_parameters(name))

    def packed_main_grad(self) -> Tensor:
        """``main_grad`` of the weight as one ``[G, N, K]``; checked.

        Raises:
            ValueError, TypeError: there is none, or it does not fit.
        """
        weights = self.group_parameters("weight")
        if self.single_grouped_weight:
            main_grad = getattr(weights[0], "main_grad", None)
            if main_grad is None:
                fail(
                    "`weight.main_grad` must be a tensor [G, N, K] for fuse_wgrad_accumulation, but there is none (nor "
                    "can there be one under fully_shard, which hands the layer a gathered parameter without it)"
                )
        else:
            main_grad = self._packed_main_grad(weights)
        shape = (self.num_gemms, self.out_features, self.in_features)
        if tuple(main_grad.shape) != shape:
            fail(f"`weight.main_grad` must be of shape [G, N, K] = {shape}, but got {tuple(main_grad.shape)}")
        if main_grad.dtype not in (torch.float32, weights[0].dtype):
            must = " or ".join(map(str, dict.fromkeys((torch.float32, weights[0].dtype))))
            fail(f"`weight.main_grad` must be {must}, but got {main_grad.dtype}", TypeError)
        if main_grad.device != weights[0].device:
            fail(f"`weight.main_grad` must be on {weights[0].device} like the weight, but got {main_grad.device}")
        if main_grad.requires_grad:
            fail("`weight.main_grad` must require no grad, but it does")
        return main_grad

    def _packed_main_grad(self, weights: Sequence[nn.Parameter]) -> Tensor:
        # A trace looks for the tensor first, since it would not see the attribute change. The comparison then makes
        # guards of it, so that other tensors in ``main_grad`` are looked at in another trace.
        if torch.compiler.is_compiling() or not self._main_grad_is_known(weights):
            self._find_main_grad(id(self))
        if not self._main_grad_is_known(weights):
            fail(
                "`weight{i}.main_grad` must be tensors [N, K] that lie in one allocation in order, evenly spaced, as "
                "the slots of tgl.allocate_wgrad do (there can be none under fully_shard, which hands the layer "
                "gathered parameters without them)"
            )
        return self._main_grad[0]  # type: ignore[index]

    @_decided_when_traced
    def _find_main_grad(self, this: int) -> None:
        """Look for the tensor whose slots are the weights' ``main_grad``; a trace calls this on the real tensors."""
        weights = self.group_parameters("weight")
        parts = [part for part in (getattr(w, "main_grad", None) for w in weights) if isinstance(part, Tensor)]
        packed = slots_of(parts) if len(parts) == len(weights) else None
        self._main_grad = (packed, *parts) if packed is not None else None

    def _main_grad_is_known(self, weights: Sequence[nn.Parameter]) -> bool:
        known = self._main_grad
        return known is not None and all(getattr(w, "main_grad", None) is m for w, m in zip(weights, known[1:]))

    def mark_main_grad(self) -> None:
        """Tell optimizers that the gradient is not in ``grad``."""
        if not torch.compiler.is_compiling() or not self._mark_while_tracing(id(self)):
            _mark(self.group_parameters("weight"))

    @_decided_when_traced
    def _mark_while_tracing(self, this: int) -> bool:
        """Mark now if the trace is inside an operator such as checkpoint, where it may set no attribute itself."""
        from torch._dynamo.symbolic_convert import InstructionTranslator

        inside = InstructionTranslator.current_tx().output.current_tracer.parent is not None
        if inside:
            _mark(self.group_parameters("weight"))
        return inside

    def overwrites_main_grad(self) -> bool:
        """Whether the gradient replaces what ``main_grad`` holds."""
        return bool(getattr(self.group_parameters("weight")[0], "overwrite_main_grad", False))

    # --- where they lie -----------------------------------------------------------------------------------------------

    def _pack(self) -> None:
        if not self.single_grouped_weight:
            for name, names in self._names.items():
                if names:
                    parameters = self.group_parameters(name)
                    self._packed[name] = pack(parameters), parameters

    def _apply(self, fn: Callable, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # moves the parameters one by one
        self._pack()
        return self

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._pack()

    def reset_parameters(self) -> None:
        """Initialise the parameters, for instance after ``to_empty`` on a module made on the meta device."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        self._pack()
        with torch.no_grad():
            weight, bias = self.packed("weight"), self.packed("bias")
            assert weight is not None
            if self.init_method is not None:
                self.init_method(weight)
            else:
                weight.uniform_(-bound, bound)
            if bias is not None:
                bias.uniform_(-bound, bound)

    # --- state dicts --------------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        discrete = self.state_dict_format == "discrete"
        if discrete != self.single_grouped_weight:
            return
        for name, names in self._names.items():
            if not names:
                continue
            if discrete:
                parts = destination.pop(prefix + name)
                destination.update({f"{prefix}{name}{i}": part for i, part in enumerate(parts)})
            else:
                parts = [destination.pop(prefix + full) for full in names]
                packed = self._packed[name][0] if self._still_packed(id(self), name) else None
                destination[prefix + name] = packed if packed is not None else torch.stack(parts)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        given = {key: value for key, value in state_dict.items() if not is_extra_state(key, prefix)}
        for name, names in self._names.items():
            keys = [f"{prefix}{name}{i}" for i in range(self.num_gemms)]
            if not names or not keys:
                continue
            if not self.single_grouped_weight and prefix + name in given:
                given.update(zip(keys, given.pop(prefix + name).unbind()))
            elif self.single_grouped_weight and all(key in given for key in keys):
                given[prefix + name] = torch.stack([given.pop(key) for key in keys])
        super()._load_from_state_dict(given, prefix, *args, **kwargs)
        self._pack()  # assign=True has put other tensors in the parameters' place

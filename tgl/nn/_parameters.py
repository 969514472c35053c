"""The parameters of ``GroupedLinear``: one packed tensor, or one parameter per group as slots of a packed tensor.

GEMMs read the packed tensor, optimizers and state dicts see the parameters, and both share memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..ops._engine import in_dynamo
from ..tensor import GroupedTensor
from ._arguments import check_callable, check_device, check_dtype, check_flags, check_size
from ._external_quantization import PLAIN, is_quantized_elsewhere, values_of
from ._hooks import have_tensor_hooks
from ._main_grad import MainGrad, check_main_grad, is_aligned, is_made_later, main_grad_of, mark
from ._slots import Slots, apart, find_slots, pack
from ._transforms import inside_of
from .layouts import is_extra_state


def decided_when_traced(function: Callable) -> Callable:
    """Mark ``function`` like ``torch.compiler.assume_constant_result``, without importing the compiler.

    It must be a method: every torch resolves the real module of a method's object, but some versions do not support a
    module as an argument of a function. Its argument ``this`` must be ``id(self)``, so that the trace guards on the
    module's identity.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def inside_operator() -> bool:
    """Return whether the current trace is inside a higher-order operator such as checkpoint; called while tracing."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().output.current_tracer.parent is not None


def _address(parameter: nn.Parameter) -> int:
    """Return the address of ``parameter``, 0 if it has none."""
    return parameter.data_ptr() if type(parameter.data) is Tensor and parameter.device.type != "meta" else 0


class GroupedParameters(nn.Module):
    """Weight ``[G, N, K]`` and bias ``[G, N]``, packed or discrete, with their initialisation and state dicts.

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
        num_gemms = check_size("num_gemms", num_gemms)
        in_features = check_size("in_features", in_features)
        out_features = check_size("out_features", out_features)
        check_flags(bias=bias, single_grouped_weight=single_grouped_weight)
        check_dtype("params_dtype", params_dtype)
        check_device("device", device)
        check_callable("init_method", init_method)
        formats = "packed", "discrete", "components"
        if state_dict_format is not None and not (isinstance(state_dict_format, str) and state_dict_format in formats):
            must = "'packed', 'discrete' or 'components'"
            raise ValueError(f"`state_dict_format` must be {must}, but got {state_dict_format!r}")
        if state_dict_format == "components" and not single_grouped_weight:
            raise ValueError("`single_grouped_weight` must be True for state_dict_format='components', but is False")
        if num_gemms < 1 and not single_grouped_weight:
            raise ValueError(f"`num_gemms` must be at least 1 without `single_grouped_weight`, but got {num_gemms}")
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.init_method = init_method
        self.single_grouped_weight = single_grouped_weight
        self.state_dict_format = state_dict_format or ("packed" if single_grouped_weight else "discrete")
        self._packed: dict[str, tuple[Slots | None, list[nn.Parameter]]] = {}
        self._main_grad = MainGrad(())
        self._own: list[nn.Parameter] = []
        self._names: dict[str, list[str]] = {}
        self._part_shapes = {"weight": (out_features, in_features), "bias": (out_features,)}
        for name, shape in self._part_shapes.items():
            wanted = name == "weight" or bias
            names = [name] if single_grouped_weight else [f"{name}{i}" for i in range(num_gemms)]
            self._names[name] = names if wanted else []
            data = torch.empty((num_gemms, *shape), dtype=params_dtype, device=device) if wanted else None
            parts = itertools.repeat(None) if data is None else (data,) if single_grouped_weight else data.unbind()
            for full, part in zip(names, parts):
                self.register_parameter(full, None if part is None else nn.Parameter(part))
        self._pack()
        if next(self.parameters()).device.type != "meta":
            self.reset_parameters()

    def group_parameters(self, name: str) -> list[nn.Parameter]:
        """Return the parameters of ``"weight"`` or ``"bias"``: one, or one per group; none without a bias.

        A parametrized one (``torch.nn.utils.parametrize``) is a tensor that every call computes anew.
        """
        own, found = self._parameters, []
        for full in self._names[name]:
            found.append(own[full] if full in own else getattr(self, full))
        return found  # type: ignore[return-value]

    def _registered(self, name: str) -> bool:
        """Return whether the layer has registered parameters of these names, none of them parametrized."""
        return all(full in self._parameters for full in self._names[name])

    def packed(self, name: str, parameters: list[nn.Parameter] | None = None) -> Tensor | None:
        """Return ``weight [G, N, K]`` or ``bias [G, N]`` without grad; None without a bias.

        It shares the parameters' memory if they are in-order slots of one tensor, and is a copy otherwise.
        """
        if not self._names[name]:
            return None
        packed, table = self.placed(name, parameters)
        return packed if table is None else packed.index_select(0, table)

    def placed(self, name: str, parameters: list[nn.Parameter] | None = None) -> tuple[Tensor, Tensor | None]:
        """Return ``packed [S, ...]`` without grad, and int32 ``[G]``, the slot of every group.

        The table is None for ``S = G`` slots in order. ``parameters`` are ``group_parameters(name)``, if the caller has
        them.

        Discrete parameters in one allocation, in any order and at any distances, are read in place. Parameters in
        several allocations (a wrapper that gathers them), or tensors that were swapped in for the registered
        parameters, are stacked in every call.
        """
        parameters = self.group_parameters(name) if parameters is None else parameters
        if self.single_grouped_weight:
            weight: Tensor = parameters[0] if in_dynamo() else inside_of(parameters[0])
            return (weight if type(weight) in PLAIN else values_of(weight)).detach(), None
        # Must run before the trace reads `_packed`. The identity comparison makes the trace guard on the parameters;
        # addresses are checked only while tracing.
        found = self._still_packed(id(self), name)
        slots, known = self._packed[name]
        if found and all(p is q for p, q in zip(parameters, known)):
            return slots.packed, slots.table  # type: ignore[union-attr]
        if not torch.compiler.is_compiling():
            parameters = [inside_of(p) for p in parameters]
        return torch.stack([values_of(p).detach() for p in parameters]), None

    @decided_when_traced
    def _still_packed(self, this: int, name: str) -> bool:
        """Return whether the parameters are slots of one tensor, after a new search if they have moved.

        A trace decides this once, on the real tensors.
        """
        slots, parameters = self._packed[name]
        if not parameters:
            return False
        if slots is None or not slots.hold(parameters):
            slots = pack(parameters, move=False)
            self._packed[name] = slots, parameters
        return slots is not None

    # --- main_grad ----------------------------------------------------------------------------------------------------

    def checked_main_grad(
        self, weights: Sequence[nn.Parameter], *, create: bool = True, required: bool = True
    ) -> MainGrad:
        """Return the checked ``main_grad`` of those ``weights`` that require grad.

        Without ``create`` a ``main_grad`` that a framework makes in the backward may be missing, and without
        ``required`` any.

        Raises:
            ValueError, TypeError: there is none, or it does not fit.
        """
        if in_dynamo():
            # The search runs first, because a trace would not see the attribute change. The comparison below makes the
            # trace guard on ``main_grad``, so that other tensors are searched in another trace.
            self._find_main_grad(id(self))
            parts = tuple([getattr(w, "main_grad", None) if w.requires_grad else None for w in weights])
            self._check_main_grad(weights, parts, required=required)
            if all(a is b for a, b in zip(parts, self._main_grad.parts)):
                return self._main_grad
            return MainGrad(parts)
        parts = tuple([main_grad_of(w, create=create) if w.requires_grad else None for w in weights])
        known = self._main_grad
        if all(a is b for a, b in zip(parts, known.parts)) and len(parts) == len(known.parts) and known.is_in_place():
            return known
        self._check_main_grad(weights, parts, create=create, required=required)
        self._main_grad = self._main_grad_in(parts)
        return self._main_grad

    def _check_main_grad(
        self,
        weights: Sequence[nn.Parameter],
        parts: Sequence[Tensor | None],
        *,
        create: bool = True,
        required: bool = True,
    ) -> None:
        dims = "[G, N, K]" if self.single_grouped_weight else "[N, K]"
        for name, weight, part in zip(self._names["weight"], weights, parts):
            if part is None and (not required or (not create and is_made_later(weight))):
                continue
            if weight.requires_grad:
                check_main_grad(name, part, weight, dims=dims)

    def _main_grad_in(self, parts: tuple[Tensor | None, ...]) -> MainGrad:
        if self.single_grouped_weight:
            return MainGrad(parts, parts[0])
        slots = find_slots(parts)
        if slots is None or not is_aligned(slots.packed):
            return MainGrad(parts)
        return MainGrad(parts, slots.packed, slots.table, slots)

    @decided_when_traced
    def _find_main_grad(self, this: int) -> None:
        """Find the tensor whose slots are the weights' ``main_grad``; a trace calls this on the real tensors."""
        weights = self.group_parameters("weight")
        parts = [getattr(w, "main_grad", None) if w.requires_grad else None for w in weights]
        self._main_grad = self._main_grad_in(tuple(p if isinstance(p, Tensor) else None for p in parts))

    def mark_main_grad(self) -> None:
        """Mark the weights in a trace, because the gradient will not be in ``grad``; see ``mark``."""
        if not self._mark_while_tracing(id(self)):
            mark(self.group_parameters("weight"))

    @decided_when_traced
    def _mark_while_tracing(self, this: int) -> bool:
        """Mark now if the trace is inside an operator such as checkpoint, where a graph may not set attributes."""
        inside = inside_operator()
        if inside:
            mark(self.group_parameters("weight"))
        return inside

    @decided_when_traced
    def _has_tensor_hooks(self, this: int) -> bool:
        return have_tensor_hooks([p for name in ("weight", "bias") for p in self.group_parameters(name)])

    def overwrites_main_grad(self) -> bool:
        """Return whether the gradient replaces the content of ``main_grad``."""
        return bool(getattr(self.group_parameters("weight")[0], "overwrite_main_grad", False))

    # --- memory -------------------------------------------------------------------------------------------------------

    def _pack(self, before: Mapping[str, int] | None = None) -> None:
        """Find the slots of the discrete parameters, and move them into one tensor if they lie apart.

        Parameters with the same addresses as ``before`` are not moved: if they lie apart, a framework put them there.
        """
        self._own = [p for names in self._names.values() for n in names if (p := self._parameters.get(n)) is not None]
        if not self.single_grouped_weight:
            for name, names in self._names.items():
                if not self._registered(name):
                    self._packed[name] = None, []
                elif names:
                    parameters = self.group_parameters(name)
                    moved = before is None or not any(_address(p) == before.get(n) for n, p in zip(names, parameters))
                    self._packed[name] = pack(parameters, move=moved), parameters

    def _addresses(self) -> dict[str, int]:
        return {
            n: _address(p)
            for names in self._names.values()
            for n in names
            if (p := self._parameters.get(n)) is not None
        }

    def _apply(self, fn: Callable, recurse: bool = True) -> Any:
        before = self._addresses()
        super()._apply(fn, recurse)  # moves the parameters one by one
        self._pack(before)
        return self

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._pack()

    def reset_parameters(self) -> None:
        """Initialise the parameters, for instance after ``to_empty`` on a module made on the meta device."""
        for name, parameter in self.named_parameters(recurse=False):
            if is_quantized_elsewhere(parameter):
                must = f"must be a plain tensor to be initialised, but is a {type(parameter).__name__}"
                raise RuntimeError(f"`{name}` {must}: initialise the layer before it is quantised")
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        self._pack(self._addresses())
        with torch.no_grad():
            for name in ("weight", "bias"):
                parameters = self.group_parameters(name)
                packed = self.packed(name, parameters)
                if packed is None:
                    continue
                registered = self._registered(name)
                if not registered:
                    packed = torch.empty_like(packed)
                if name == "weight" and self.init_method is not None:
                    self.init_method(packed)
                else:
                    packed.uniform_(-bound, bound)
                if not registered:  # a parametrization's ``right_inverse`` sets its original parameters
                    values = (packed,) if self.single_grouped_weight else packed.unbind()
                    for full, value in zip(self._names[name], values):
                        if full in self._parameters:
                            getattr(self, full).copy_(value)
                        else:
                            setattr(self, full, value)
                    continue
                for value, parameter in zip(() if self.single_grouped_weight else packed.unbind(), parameters):
                    if value.device.type != "meta" and value.data_ptr() != parameter.data_ptr():
                        parameter.copy_(value)

    # --- state dicts --------------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        discrete = self.state_dict_format == "discrete"
        for name, names in self._names.items():
            if not names or not self._registered(name):
                continue
            if discrete:
                if self.single_grouped_weight:
                    parts = destination.pop(prefix + name)
                    destination.update({f"{prefix}{name}{i}": part for i, part in enumerate(parts)})
                if not keep_vars:
                    keys = [f"{prefix}{name}{i}" for i in range(self.num_gemms)]
                    destination.update(zip(keys, apart([destination[key] for key in keys])))
            elif self.state_dict_format == "components":
                weight = destination[prefix + name]
                if isinstance(weight, GroupedTensor):
                    del destination[prefix + name]
                    destination.update({f"{prefix}{name}.{part}": t for part, t in weight.parts().items()})
            elif not self.single_grouped_weight:
                parts = [destination.pop(prefix + full) for full in names]
                destination[prefix + name] = torch.stack(parts) if keep_vars else self.packed(name)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        given = {key: value for key, value in state_dict.items() if not is_extra_state(key, prefix)}
        refused: set[str] = set()
        for name, names in self._names.items():
            if names and self.num_gemms and self._registered(name):
                errors = self._convert(given, prefix, name)
                error_msgs.extend(errors)
                refused.update(prefix + full for full in names if errors)
        missing: list[str] = []
        before = self._addresses()
        super()._load_from_state_dict(given, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs)
        missing_keys.extend(key for key in missing if key not in refused)
        self._pack(before)  # assign=True may have replaced the parameters

    def _convert(self, given: dict[str, Any], prefix: str, name: str) -> list[str]:
        """Convert the entries of ``name`` in ``given`` to the form of the parameters; returns errors."""
        packed = prefix + name
        shape = (self.num_gemms, *self._part_shapes[name])
        if not self.single_grouped_weight:
            value = given.get(packed)
            if not isinstance(value, Tensor):
                return []
            given.pop(packed)
            if value.dim() != len(shape) or value.shape[0] != self.num_gemms:
                return [_mismatch(packed, value.shape, shape)]
            given.update((f"{packed}{i}", part) for i, part in enumerate(value.unbind()))
            return []
        weight = self._parameters[name]
        if isinstance(weight, GroupedTensor) and all(f"{packed}.{part}" in given for part in weight.parts()):
            return _join(given, packed, weight)
        numbered = [key for key in given if key.startswith(packed) and key[len(packed) :].isdecimal()]
        keys = [f"{packed}{i}" for i in range(len(numbered))]
        if not keys or set(keys) != set(numbered):  # with a gap, report them as unexpected and ``weight`` as missing
            return []
        parts = [given.pop(key) for key in keys]
        if len(parts) != self.num_gemms:
            return [_mismatch(packed, (len(parts), *parts[0].shape), shape)]
        wrong = [_mismatch(key, part.shape, shape[1:]) for key, part in zip(keys, parts) if part.shape != shape[1:]]
        if not wrong:
            given[packed] = torch.stack(parts)
        return wrong


def _join(given: dict[str, Any], key: str, weight: GroupedTensor) -> list[str]:
    """Join the components of a tensor like ``weight`` to one entry ``key`` in ``given``; returns errors."""
    parts = {part: given.pop(f"{key}.{part}") for part in weight.parts()}
    errors = []
    for part, must in weight.parts().items():
        have = parts[part]
        if have.shape != must.shape:
            errors.append(_mismatch(f"{key}.{part}", have.shape, must.shape))
        elif have.dtype != must.dtype:
            errors.append(
                f"dtype mismatch for {key}.{part}: {have.dtype} in the checkpoint, {must.dtype} in the model."
            )
    if not errors:
        given[key] = type(weight)(weight.shape, weight.dtype, weight.static, parts, weight.shapes)
    return errors


def _mismatch(key: str, have: Sequence[int], must: Sequence[int]) -> str:
    """Return the message of ``torch.nn.Module.load_state_dict`` for a size mismatch."""
    return (
        f"size mismatch for {key}: copying a param with shape {torch.Size(have)} from checkpoint, the shape in current "
        f"model is {torch.Size(must)}."
    )

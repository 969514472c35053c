"""``Sequential``: run modules one after the other on the same groups of rows, with optional buffers for each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..meta import activations
from ..ops.grouped_activation import grouped_activation
from ._arguments import check_flags
from ._buffers import ARGUMENTS, check_buffer, check_disjoint
from ._errors import fail, not_a_tensor, shown
from ._inputs import MSplits, offsets_on, result_dtype
from ._submodules import check_takes, given, hooked, splits_of
from .grouped_linear import GroupedLinear
from .grouped_lora_linear import GroupedLoRALinear
from .grouped_mlp import GroupedMLP

OpKwargs = Mapping["nn.Module | int", Mapping[str, Tensor]]


class GroupedActivation(nn.Module):
    """``tgl.grouped_activation`` as a module, for ``Sequential``.

    Args:
        kind: name of the activation; see ``tgl.grouped_activation``.
        interleaved: whether the gate and linear columns alternate instead of standing side by side.
    """

    def __init__(self, kind: str = "swiglu", *, interleaved: bool = False) -> None:
        super().__init__()
        activations.named(kind)
        check_flags(interleaved=interleaved)
        self.kind, self.interleaved = kind, interleaved

    def forward(self, inp: Tensor, m_splits: MSplits, probs: Tensor | None = None) -> Tensor:
        """Return the activation ``[T, I]`` of ``inp [T, 2 I]`` (gated) or ``[T, I]``, times ``probs [T]``.

        ``m_splits [G]``: rows of each group.
        """
        if not isinstance(inp, Tensor):
            not_a_tensor("`inp`", inp)
        return self.forward_offsets(inp, offsets_on(m_splits, _groups(m_splits), inp.device), probs)

    def forward_offsets(self, inp: Tensor, offs: Tensor, probs: Tensor | None = None) -> Tensor:
        """``forward`` for cumulative ends ``offs``, int32 ``[G]``."""
        return grouped_activation(inp, offs, probs, kind=self.kind, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        return f"{self.kind!r}, interleaved={self.interleaved}"


class Sequential(nn.Sequential):
    """Run modules one after the other; every module of tgl gets the groups of rows of the call.

    Hooks of the modules fire. A module with hooks, or a forward of its own, is called as ``module(inp, m_splits)``,
    with ``probs`` (``bias_scale`` for a ``GroupedLinear``), ``is_first_microbatch``, ``out`` and ``dgrad_out`` by name
    if they are given. The others check all arguments but their rows before any module runs.

    Args:
        *args: modules, or one ordered mapping of names to modules, as for ``torch.nn.Sequential``. Modules that are not
            tgl's get the rows alone.
    """

    def forward(  # type: ignore[override]
        self,
        inp: Tensor,
        m_splits: MSplits | None = None,
        probs: Tensor | None = None,
        *,
        is_first_microbatch: bool | Tensor | None = None,
        op_kwargs: OpKwargs | None = None,
    ) -> Tensor:
        """Run the modules.

        Args:
            inp: ``[T, K]`` rows grouped by expert.
            m_splits: ``[G]``, rows of each group; see ``GroupedLinear``. Needed by tgl's modules.
            probs: ``[T]``: multiplies the result of the (one) ``GroupedActivation`` or ``GroupedMLP``, and the bias of
                the ``GroupedLinear`` after it.
            is_first_microbatch: see ``GroupedLinear``.
            op_kwargs: buffers, as ``{module or index: {"output": buffer, "grad_input": buffer}}``; either buffer may be
                missing or None, and an index may count from the end. ``GroupedLinear`` and ``GroupedMLP`` can write
                into buffers; see ``out`` and ``dgrad_out`` of ``GroupedLinear``.

        Raises:
            KeyError: a key of ``op_kwargs`` is no module of this ``Sequential``, or no name of a buffer.
            ValueError, TypeError: a module cannot take a buffer, two keys name one module, one buffer is used twice, or
                another argument does not fit.
        """
        if not isinstance(inp, Tensor):
            not_a_tensor("`inp`", inp)
        offs = None
        if m_splits is not None:
            known = next((m.num_gemms for m in self.modules() if isinstance(m, GroupedLinear)), None)
            num_gemms = _groups(m_splits) if known is None else known
            offs = offsets_on(m_splits, num_gemms, inp.device)
        return self.forward_offsets(inp, offs, probs, is_first_microbatch=is_first_microbatch, op_kwargs=op_kwargs)

    def forward_offsets(
        self,
        inp: Tensor,
        offs: Tensor | None,
        probs: Tensor | None = None,
        *,
        is_first_microbatch: bool | Tensor | None = None,
        op_kwargs: OpKwargs | None = None,
    ) -> Tensor:
        """``forward`` for cumulative ends ``offs``, int32 ``[G]``."""
        if not isinstance(inp, Tensor):
            not_a_tensor("`inp`", inp)
        if op_kwargs is not None and not isinstance(op_kwargs, Mapping):
            fail(f"`op_kwargs` must be a mapping or None, but got {shown(op_kwargs)}", TypeError)
        modules = list(self)
        options = _options(modules, offs, probs, is_first_microbatch)
        if op_kwargs:
            buffers = _route(modules, op_kwargs)
            _check(modules, buffers, inp, probs)
            for own, buffer in zip(options, buffers):
                own.update({ARGUMENTS[name]: t for name, t in buffer.items()})
        for index, (module, own) in enumerate(zip(modules, options)):
            if isinstance(module, OURS) and _has_own_forward(module):
                check_takes(f"module {index}", module, own)
        self._check_call(is_first_microbatch)
        m_splits = None
        x = inp
        for module, own in zip(modules, options):
            if offs is None or not isinstance(module, OURS):
                x = module(x)
            elif not _is_called(module):
                x = module.forward_offsets(x, offs, **own)  # type: ignore[operator]
            else:
                m_splits = splits_of(offs) if m_splits is None else m_splits
                x = module(x, m_splits, **own)
        return x

    def _check_call(self, is_first_microbatch: bool | Tensor | None = None) -> None:
        """Call ``GroupedLinear._check_call`` of modules without hooks; a hook might still fix what would fail."""
        for module in self:
            if isinstance(module, (*LINEARS, GroupedMLP, Sequential)) and not _is_called(module):
                module._check_call(is_first_microbatch)

    def need_backward_dw(self) -> bool:
        """Return whether any module delays its weight gradients (``need_backward_dw``)."""
        return any(m.need_backward_dw() for m in self if isinstance(m, (GroupedLinear, GroupedMLP, Sequential)))

    def backward_dw(self) -> None:
        """Call ``backward_dw`` of every module that has it, last module first."""
        for module in reversed(list(self)):
            if isinstance(module, (GroupedLinear, GroupedMLP, Sequential)):
                module.backward_dw()


LINEARS = (GroupedLinear, GroupedLoRALinear)
OURS = (*LINEARS, GroupedMLP, GroupedActivation, Sequential)


def _groups(m_splits: MSplits) -> int:
    """Return the number of groups of ``m_splits``, for modules without a layer that knows it."""
    if isinstance(m_splits, Tensor):
        return m_splits.numel()
    return len(m_splits) if hasattr(m_splits, "__len__") else 0


def _has_own_forward(module: nn.Module) -> bool:
    return "forward" in module.__dict__ or all(type(module).forward is not kind.forward for kind in OURS)


def _is_called(module: nn.Module) -> bool:
    """Return whether ``module`` must be called as a module: it has hooks, or a forward of its own."""
    return hooked(module) or _has_own_forward(module)


def _options(
    modules: list[nn.Module], offs: Tensor | None, probs: Tensor | None, is_first_microbatch: bool | Tensor | None
) -> list[dict[str, Any]]:
    """Return the keyword arguments of every module's call that are not None, without buffers."""
    options: list[dict[str, Any]] = []
    scaled = False
    for module in modules:
        if not isinstance(module, OURS):
            options.append({})
            continue
        if offs is None:
            fail(f"`m_splits` must be given, as {type(module).__name__} works on groups of rows")
        if isinstance(module, GroupedActivation):
            options.append(given(probs=probs))
            scaled = probs is not None
        elif isinstance(module, LINEARS):
            bias_scale = probs if scaled and module.has_bias else None
            options.append(given(bias_scale=bias_scale, is_first_microbatch=is_first_microbatch))
            scaled = False
        else:
            options.append(given(probs=probs, is_first_microbatch=is_first_microbatch))
    return options


def _route(modules: list[nn.Module], op_kwargs: OpKwargs) -> list[Mapping[str, Tensor]]:
    """Return the buffers of every module, by position."""
    routed: list[Mapping[str, Tensor]] = [{} for _ in modules]
    for key, asked in op_kwargs.items():
        index = _index(modules, key)
        module = type(modules[index]).__name__
        if routed[index]:
            fail(f"`op_kwargs` must name every module once, but got module {index} ({module}) twice")
        for name in asked:
            if name not in ARGUMENTS:
                fail(f"`op_kwargs` must hold 'output' and 'grad_input', but got {name!r} for module {index}", KeyError)
            if name not in getattr(modules[index], "buffers_taken", ()):
                fail(f"`op_kwargs` must go to modules that can take {name!r}, but got module {index}, a {module}")
        routed[index] = {name: buffer for name, buffer in asked.items() if buffer is not None}
    return routed


def _check(modules: list[nn.Module], buffers: list[Mapping[str, Tensor]], inp: Tensor, probs: Tensor | None) -> None:
    """Check all buffers, and the modules' inputs as far as known, before the first module writes anything."""
    rows: tuple | None = tuple(inp.shape[:-1])
    dtype: torch.dtype | None = inp.dtype
    width: int | None = inp.shape[-1]
    named: dict[str, Tensor | None] = {}
    for i, (module, buffer) in enumerate(zip(modules, buffers)):
        computed = result_dtype(inp) if dtype is not None else None
        for key, t in buffer.items():
            name = f"op_kwargs[{i}]['{key}']"
            features = module.out_features if key == "output" else module.in_features
            shape = (*rows, features) if rows is not None else None
            check_buffer(name, t, shape, computed if key == "output" else dtype, inp.device)
            named[name] = t
        if isinstance(module, (GroupedLinear, GroupedMLP)) and not _is_called(module):
            first = module if isinstance(module, GroupedLinear) else module.fc1
            if isinstance(first, GroupedLinear) and not hooked(first):
                first._check_input(width, dtype, inp.device, f"`inp` of module {i}")
            width, dtype = module.out_features, computed
        elif isinstance(module, GroupedActivation) and not _is_called(module):
            width = None
            if rows is not None and probs is not None and probs.numel() != math.prod(rows):
                fail(f"`probs` must be of shape [T] = ({math.prod(rows)},), but got {tuple(probs.shape)}")
        else:
            # The result of another module or of a hook is not known; the next layer checks it.
            rows = dtype = width = None
    check_disjoint(named, {"inp": inp})


def _index(modules: list[nn.Module], key: nn.Module | int) -> int:
    if isinstance(key, nn.Module):
        places = [i for i, module in enumerate(modules) if module is key]
        if not places:
            fail(f"`op_kwargs` must name modules of this Sequential, but got another {type(key).__name__}", KeyError)
        if len(places) > 1:
            fail(f"`op_kwargs` must name a module that comes up several times by its index, one of {places}", KeyError)
        return places[0]
    if not isinstance(key, int) or isinstance(key, bool) or not -len(modules) <= key < len(modules):
        fail(
            f"`op_kwargs` must name modules, or indices from {-len(modules)} to {len(modules) - 1}, but got {key!r}",
            KeyError,
        )
    return key % len(modules)

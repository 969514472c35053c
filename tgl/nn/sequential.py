"""``Sequential``: modules one after the other on the same groups of rows, with buffers for any of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..meta.specs import ACTIVATIONS
from ..ops.grouped_activation import grouped_activation
from ._buffers import ARGUMENTS, check_buffer, check_disjoint
from ._errors import fail
from .grouped_linear import GroupedLinear, MSplits, offsets_on, result_dtype
from .grouped_mlp import GroupedMLP

OpKwargs = Mapping["nn.Module | int", Mapping[str, Tensor]]


class GroupedActivation(nn.Module):
    """``tgl.grouped_activation`` as a module, for ``Sequential``.

    Args:
        kind: ``"swiglu"``, ``"clamped_qgeglu"`` or ``"srelu"``.
        interleaved: whether the gate and linear columns alternate instead of standing side by side.
    """

    def __init__(self, kind: str = "swiglu", *, interleaved: bool = False) -> None:
        super().__init__()
        if kind not in ACTIVATIONS:
            raise ValueError(f"`kind` must be one of {', '.join(ACTIVATIONS)}, but got {kind!r}")
        self.kind, self.interleaved = kind, interleaved

    def forward_offsets(self, inp: Tensor, offs: Tensor, probs: Tensor | None = None) -> Tensor:
        """``[T, 2 I]`` (gated) or ``[T, I]`` to ``[T, I]``, times ``probs [T]``; ``offs`` int32 ``[G]``."""
        return grouped_activation(inp, offs, probs, kind=self.kind, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        return f"{self.kind!r}, interleaved={self.interleaved}"


class Sequential(nn.Sequential):
    """Run modules one after the other; those of tgl all get the same groups of rows.

    Args:
        *args: modules, or one ordered mapping of names to modules, as for ``torch.nn.Sequential``. Other modules than
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
            op_kwargs: buffers, as ``{module or index: {"output": buffer, "grad_input": buffer}}``, either or both, for
                modules that can write into them (``GroupedLinear``, ``GroupedMLP``); see ``GroupedLinear`` for what a
                buffer must be and what it then holds.

        Raises:
            KeyError: a key of ``op_kwargs`` is not a module here, or asks for something else than the two buffers.
            ValueError, TypeError: a module cannot take a buffer, two keys name one module, one buffer is used twice, or
                anything else does not fit.
        """
        offs = None
        if m_splits is not None:
            groups = m_splits.shape[0] if isinstance(m_splits, Tensor) and m_splits.dim() == 1 else len(m_splits)
            num_gemms = next((m.num_gemms for m in self.modules() if isinstance(m, GroupedLinear)), groups)
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
        """The same for cumulative ends ``offs``, int32 ``[G]``."""
        modules = list(self)
        buffers: list[Mapping[str, Tensor]] = [{} for _ in modules]
        if op_kwargs:
            buffers = _route(modules, op_kwargs)
            _check(modules, buffers, inp)
        scaled = False
        x = inp
        for module, given in zip(modules, buffers):
            if not isinstance(module, (GroupedLinear, GroupedMLP, GroupedActivation, Sequential)):
                x = module(x)
                continue
            if offs is None:
                fail(f"`m_splits` must be given, as {type(module).__name__} works on groups of rows")
            options: dict[str, Any] = {ARGUMENTS[k]: b for k, b in given.items()}
            if isinstance(module, GroupedActivation):
                x = module.forward_offsets(x, offs, probs)
                scaled = probs is not None
            elif isinstance(module, (GroupedMLP, Sequential)):
                x = module.forward_offsets(x, offs, probs, is_first_microbatch=is_first_microbatch, **options)
            else:
                bias_scale = probs if scaled and module.has_bias else None
                x = module.forward_offsets(x, offs, bias_scale, is_first_microbatch=is_first_microbatch, **options)
                scaled = False
        return x

    def backward_dw(self) -> None:
        """``backward_dw`` of every module that has it, last first."""
        for module in reversed(list(self)):
            if isinstance(module, (GroupedLinear, GroupedMLP, Sequential)):
                module.backward_dw()


def _route(modules: list[nn.Module], op_kwargs: OpKwargs) -> list[Mapping[str, Tensor]]:
    """The buffers of every module, by position."""
    routed: list[Mapping[str, Tensor]] = [{} for _ in modules]
    for key, given in op_kwargs.items():
        index = _index(modules, key)
        module = type(modules[index]).__name__
        if routed[index]:
            fail(f"`op_kwargs` must name every module once, but got module {index} ({module}) twice")
        for name in given:
            if name not in ARGUMENTS:
                fail(f"`op_kwargs` must hold 'output' and 'grad_input', but got {name!r} for module {index}", KeyError)
            if name not in getattr(modules[index], "buffers_taken", ()):
                fail(f"`op_kwargs` must go to modules that can take {name!r}, but got module {index}, a {module}")
        routed[index] = given
    return routed


def _check(modules: list[nn.Module], buffers: list[Mapping[str, Tensor]], inp: Tensor) -> None:
    """Check all buffers before the first module writes into one, as far as it is known what they must be."""
    rows: tuple | None = tuple(inp.shape[:-1])
    dtype: torch.dtype | None = inp.dtype
    named: dict[str, Tensor | None] = {}
    for i, (module, given) in enumerate(zip(modules, buffers)):
        computed = result_dtype(inp) if dtype is not None else None
        for key, buffer in given.items():
            name = f"op_kwargs[{i}]['{key}']"
            width = module.out_features if key == "output" else module.in_features
            shape = (*rows, width) if rows is not None else None
            check_buffer(name, buffer, shape, computed if key == "output" else dtype, inp.device)
            named[name] = buffer
        if isinstance(module, (GroupedLinear, GroupedMLP)):
            dtype = computed
        elif not isinstance(module, GroupedActivation):
            rows = dtype = None  # anything may come out of another module; the next layer checks for itself
    check_disjoint(named, {"inp": inp})


def _index(modules: list[nn.Module], key: nn.Module | int) -> int:
    if isinstance(key, nn.Module):
        places = [i for i, module in enumerate(modules) if module is key]
        if not places:
            fail(f"`op_kwargs` must name modules of this Sequential, but got another {type(key).__name__}", KeyError)
        if len(places) > 1:
            fail(f"`op_kwargs` must name a module that comes up several times by its index, one of {places}", KeyError)
        return places[0]
    if not isinstance(key, int) or isinstance(key, bool) or not 0 <= key < len(modules):
        fail(f"`op_kwargs` must name modules, or indices from 0 to {len(modules) - 1}, but got {key!r}", KeyError)
    return key

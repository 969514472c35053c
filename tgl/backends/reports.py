"""``explain`` and ``warmup``: reports on the implementations that a call would run, and their preparation."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .explanation import Explanation, qualified
from .implementation import Reason
from .layer_path import LayerPath
from .op_recorder import record, recorder
from .registry import described, explain_call
from .target import device_arch


def reason_against(op: str, device: torch.device, *args: Any, **kwargs: Any) -> Reason:
    """Return why ``run`` with these arguments would find no implementation, or None; for ops built of other ops."""
    explanation = explain_call(op, device, args, kwargs)
    return None if explanation.chosen is not None else explanation.reason()


def report(op: str, device: torch.device, *args: Any, **kwargs: Any) -> Explanation:
    """Return the ``explain`` report of ``run`` with these arguments."""
    found = explain_call(op, device, args, kwargs)
    chosen = found.chosen
    if chosen is None:
        return found
    kwargs = chosen.takes(kwargs)
    copies = () if chosen.copies is None else tuple(chosen.copies(*args, **kwargs).items())
    if chosen.parts is not None:
        parts = record(chosen.parts(*args, **kwargs), report)
        return replace(found, copies=copies, parts=parts, batch_invariant=all(p.batch_invariant for p in parts))
    promised = chosen.batch_invariant is not None and chosen.batch_invariant(*args, **kwargs)
    tiling = None if chosen.tiling is None else chosen.tiling(device_arch(found.device), *args, **kwargs)
    return replace(found, copies=copies, batch_invariant=promised, tiling=tiling)


def prepare(op: str, device: torch.device, *args: Any, **kwargs: Any) -> None:
    """Do everything that the first ``run`` with these arguments would do besides computing."""
    chosen = explain_call(op, device, args, kwargs).chosen
    if chosen is None:
        return
    kwargs = chosen.takes(kwargs)
    if chosen.prepare is not None:
        chosen.prepare(*args, **kwargs)
    elif chosen.parts is not None:
        record(chosen.parts(*args, **kwargs), _prepare_part)


def _prepare_part(op: str, _: torch.device, *args: Any, **kwargs: Any) -> None:
    """Prepare a recorded op; kernels prepare with uninitialised tensors on their device."""
    device = recorder.device
    assert device is not None

    def there(t: Tensor) -> Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)

    given, named = tree_map_only(Tensor, there, (args, kwargs))
    prepare(op, device, *given, **named)


@overload
def explain(
    op: str | torch._ops.OpOverload | torch._ops.OpOverloadPacket, *args: Any, **kwargs: Any
) -> Explanation: ...


@overload
def explain(op: torch.nn.Module, *args: Any, **kwargs: Any) -> LayerPath: ...


@overload
def explain(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...


def explain(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Report which implementation of ``op`` a call would run and why the others do not; nothing is computed.

    Args:
        op: ``torch.ops.tgl.grouped_gemm``, one of its overloads, ``tgl.grouped_gemm`` or the name ``"grouped_gemm"``.
            Or an expert layer, a ``tgl.MoE``, ``tgl.GroupedMLP`` or ``tgl.ExpertParallelMLP``, or ``tgl.moe``.
        *args, **kwargs: the arguments of the call; fake tensors will do.

    Returns:
        An ``Explanation``. For an expert layer a ``LayerPath``, which says whether it runs as one op, as one autograd
        function or layer by layer, and why.

    Raises:
        ValueError, TypeError: what the call itself would raise for bad arguments.
    """
    of_layer = getattr(op, "__explain__", None)
    if of_layer is not None:
        return of_layer(*args, **kwargs)
    return _explain_op(op, args, kwargs)


def _explain_op(op: Any, args: tuple, kwargs: dict) -> Explanation:
    if isinstance(op, torch._ops.OpOverload):
        op = op._schema.name
    elif isinstance(op, torch._ops.OpOverloadPacket):
        op = op._qualified_op_name
    name = op if isinstance(op, str) else getattr(op, "__name__", str(op))
    name = name.removeprefix("tgl::").split(".")[0]
    if name not in described:
        raise ValueError(f"`op` must be one of {', '.join(sorted(described))}, but got {name!r}")
    device, call_args, call_kwargs = _call_arguments(name, args, kwargs)
    return report(name, device, *call_args, **call_kwargs)


def _call_arguments(name: str, args: tuple, kwargs: dict) -> tuple[torch.device, tuple, dict]:
    """Check the arguments against the op's schema, and return the device, args and kwargs that implementations get."""
    describe = described[name]
    try:
        given = inspect.signature(describe).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{qualified(name)}: {error}") from None
    for argument in torch._C._get_schema(qualified(name), "").arguments:
        value = given.get(argument.name, argument)
        if isinstance(argument.type, torch.TensorType) and value is not argument and not isinstance(value, Tensor):
            shown = None if value is None else f"a {type(value).__name__}"
            raise TypeError(f"{qualified(name)}: `{argument.name}` must be a tensor, but got {shown}")
    return describe(*args, **kwargs)


def warmup(op: Any, *args: Any, **kwargs: Any) -> Explanation:
    """Compile and load what a call of ``op`` needs, without making the call: no argument is read or written.

    Later calls with equal dtypes, layouts, N and K, and about as many rows per group, then find their kernel ready.
    CUDA graph capture requires that. For an op composed of others, such as ``moe``, each of them is prepared in turn,
    so that memory is needed for one at a time. Arguments and result are those of ``explain`` for an op.
    ``python -m tgl.warmup`` compiles the kernels of whole steps, also where there is no GPU.

    Raises:
        ValueError, TypeError: what the call itself would raise for bad arguments.
    """
    explanation = _explain_op(op, args, kwargs)
    device, call_args, call_kwargs = _call_arguments(explanation.op, args, kwargs)
    prepare(explanation.op, device, *call_args, **call_kwargs)
    return explanation

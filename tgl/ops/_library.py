"""Registration of the ops of ``torch.ops.tgl``: schema, fake, kernel, autograd formula and autocast rule in one call.

``define`` + ``impl`` is used rather than ``custom_op`` because it costs half as much per call, compiled or not. The
autograd kernel is written here instead of using ``register_autograd`` for three reasons: forward-mode AD raises instead
of returning a silent zero, ``torch.func.grad`` works, and formulas see every argument (the dispatcher drops defaults).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad, profiler
from torch.overrides import has_torch_function

from .. import backends
from ..meta.memory import in_lines
from ._engine import TracedContext, in_dynamo, requested_grads
from ._inductor import lowering_aware

LIB = torch.library.Library("tgl", "DEF")

KERNELS: dict[torch._ops.OpOverload, Callable] = {}
"""The kernel of every op, for code that runs it on other kinds of tensors."""

DIRECT: dict[torch._ops.OpOverload, Callable] = {}
"""Eager kernels with autograd of ops with a formula, for an ``unobserved_call`` with all positional arguments.

The dispatcher converts every argument and result twice, and checks for modes and subclasses that observe the call.
"""

# Looked up once, because every eager call uses them, with cold processor caches.
_dispatch_keys, _modes = torch._C._dispatch_keys, torch._C._len_torch_dispatch_stack
_transforms_active, _is_tracing = torch._C._are_functorch_transforms_active, torch._C._is_tracing

# The dispatch keys (as ``raw_repr``) of calls on ordinary tensors of one device, with no mode or transform active.
_PLAIN: set[int] = set()
# The dispatch keys of ordinary tensors themselves.
_ORDINARY: set[int] = set()


class Formula(NamedTuple):
    """A first-order autograd formula; it is differentiable itself when it calls differentiable ops.

    Attributes:
        save: ``save(ctx, needs, *args, output=..., **kwargs)`` saves tensors for the backward.
        backward: ``backward(ctx, needs, *grads)`` returns one gradient or None per positional argument.
        only_with: a keyword, true by default, that must be true for a derivative to exist; None: it always exists.

    ``needs[i]`` is whether positional argument ``i`` of the schema requires a gradient, in the backward whether that
    gradient is requested; it always has full length.
    """

    save: Callable[..., None]
    backward: Callable[..., tuple[Tensor | None, ...]]
    only_with: str | None = None


def register(
    schema: str,
    kernel: Callable,
    fake: Callable,
    *,
    formula: Formula | None = None,
    autocast: Callable | None = None,
    factory: bool = False,
    no_derivative: str = "",
) -> torch._ops.OpOverload:
    """Register one op overload and return it.

    Args:
        schema: name, overload and signature, as in ``"f.out(Tensor x, *, Tensor(a!) out) -> ()"``.
        kernel: the real implementation for every device type that has an entry in ``backends``. With the attribute
            ``complains`` it raises itself for a tensor that is None.
        fake: the same signature on fake tensors; built from the output spec that ``kernel`` uses.
        formula: autograd formula. Without one the op raises for inputs that require grad if it mutates an argument.
        autocast: maps ``(dtype, *args, **kwargs)`` to the arguments the op runs with under autocast.
        factory: True for an op without tensor arguments, whose kernel supports every device.
        no_derivative: for an op without a formula: raise for inputs that require grad, with this advice.
    """
    # An out overload has no ``torch.Tag.out``: see compile_tests/test_out_overloads.py.
    LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.tgl, packet), overload or "default")
    KERNELS[op] = kernel
    torch.library.register_fake(f"tgl::{name}", lowering_aware(_guard(op, fake)), lib=LIB)
    if factory:
        LIB.impl(op, kernel, "CompositeExplicitAutograd")
        return op

    def serve(device_type: str) -> None:
        key = torch._C._dispatch_key_for_device(device_type)
        LIB.impl(op, kernel if _complains(kernel) else _guard(op, kernel), key)
        _PLAIN.add(_keys(key, f"Autograd{key}").raw_repr())
        _ORDINARY.add(_keys(key, f"Autograd{key}", "ADInplaceOrView", f"Autocast{key}").raw_repr())

    backends.on_device(serve)
    if op._schema.is_mutable or no_derivative:
        LIB.impl(op, _refuse_grad(op, kernel, no_derivative), "Autograd", with_keyset=True)
    elif formula is not None:
        dispatched, DIRECT[op] = _differentiate(op, kernel, formula)
        LIB.impl(op, dispatched, "Autograd", with_keyset=True)
    if autocast is not None:
        for device_type in ("cpu", "cuda"):
            LIB.impl(op, _autocast(op, autocast, device_type), f"Autocast{device_type.upper()}")
    return op


def unobserved(first: Tensor, *tensors: Tensor | None) -> bool:
    """Return whether a call below autograd can bypass the dispatcher: no mode, transform, subclass or autocast.

    A backward may then call the kernel itself. False for arguments that are no tensors, for which the dispatcher
    raises.
    """
    if in_dynamo():
        return False
    for t in (first, *tensors):
        if t is None:
            continue
        if not isinstance(t, Tensor) or _dispatch_keys(t).raw_repr() not in _ORDINARY:
            return False
    return not (_modes() or _transforms_active() or autocast_enabled(first.device.type))


def unobserved_call(first: Tensor, *tensors: Tensor | None) -> bool:
    """Return whether a forward can bypass the dispatcher: also no trace, tangent, function mode or profiler."""
    if in_dynamo() or has_torch_function((first, *tensors)) or forward_ad._current_level >= 0:
        return False
    if profiler._is_profiler_enabled or _is_tracing():
        return False
    for t in (first, *tensors):  # as in ``unobserved``, whose frame every block and layer would pay for
        if t is not None and (not isinstance(t, Tensor) or _dispatch_keys(t).raw_repr() not in _ORDINARY):
            return False
    if _modes() or _transforms_active():
        return False
    device_type = first.device.type
    return device_type == "meta" or not torch.is_autocast_enabled(device_type)


def _keys(*names: str) -> Any:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, names[0]))
    for name in names[1:]:
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return keys


def _below_autograd(op: torch._ops.OpOverload, keyset: Any, args: tuple, kwargs: dict) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)


class _Required(NamedTuple):
    """Check for None instead of a tensor that the schema requires, which torch does not detect.

    Every kernel checks the leading arguments in an inline loop, because a function call would cost as much as the loop.

    Attributes:
        leading: number of leading arguments that must be tensors.
        complain: raises for a call that has None for a required tensor.
        rest: checks the other required tensors; None if there are none.
    """

    leading: int
    complain: Callable[[tuple, dict], None]
    rest: Callable[[tuple, dict], None] | None


def _complains(kernel: Callable) -> bool:
    return getattr(kernel, "complains", False)


def _required(op: torch._ops.OpOverload) -> _Required:
    arguments = [(i, a) for i, a in enumerate(op._schema.arguments) if isinstance(a.type, torch.TensorType)]
    positions = [i for i, a in arguments if not a.kwarg_only]
    names = [a.name for _, a in arguments if a.kwarg_only]
    leading = next((n for n, i in enumerate(positions) if n != i), len(positions))
    behind = positions[leading:]

    def complain(args: tuple, kwargs: dict) -> None:
        for i, argument in arguments:
            if (kwargs[argument.name] if argument.kwarg_only else args[i]) is None:
                raise TypeError(f"{op.name()}: `{argument.name}` must be a tensor, but got None")

    def rest(args: tuple, kwargs: dict) -> None:
        if any(args[i] is None for i in behind) or any(kwargs[name] is None for name in names):
            complain(args, kwargs)

    return _Required(leading, complain, rest if behind or names else None)


def _guard(op: torch._ops.OpOverload, implementation: Callable) -> Callable:
    """Return ``implementation`` preceded by the check for tensors that are None."""
    leading, complain, rest = _required(op)

    @functools.wraps(implementation)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        for t in args[:leading]:
            if t is None:
                complain(args, kwargs)
        if rest is not None:
            rest(args, kwargs)
        return implementation(*args, **kwargs)

    return guarded


def _refuse_tangents(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> None:
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, Tensor) and forward_ad.unpack_dual(arg).tangent is not None:
            raise RuntimeError(f"{op.name()} has no forward-mode derivative (jvp); use reverse mode")


def _refuse_grad(op: torch._ops.OpOverload, kernel: Callable, advice: str) -> Callable:
    """Return the Autograd kernel of an op that writes into an argument, or has no derivative."""
    names = [a.name for a in op._schema.arguments]
    written = [i for i, a in enumerate(op._schema.arguments) if a.alias_info and a.alias_info.is_write]
    what = "has no derivative"
    if written:
        what = f"writes into `{', '.join(names[i] for i in written)}` and {what}"
    advice = advice or "detach it or use torch.no_grad()"
    leading, complain, rest = _required(op)
    complains = _complains(kernel)

    def autograd_kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        plain = keyset.raw_repr() in _PLAIN
        if not (plain and complains):
            for t in args[:leading]:
                if t is None:
                    complain(args, kwargs)
            if rest is not None:
                rest(args, kwargs)
        if forward_ad._current_level >= 0:
            _refuse_tangents(op, args, kwargs)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **kwargs):
            for name, value in (*zip(names, args), *kwargs.items()):  # the dispatcher drops trailing defaults
                if any(t.requires_grad for t in _tensors(value)):
                    raise RuntimeError(
                        f"{op.name()}: {what}, so no argument may require grad, but `{name}` does; {advice}"
                    )
        if plain:
            output = kernel(*args, **kwargs)
        else:
            output = _below_autograd(op, keyset, args, kwargs)
        if not written:
            return output
        # A kernel that stores through a pointer does not bump the version, and a backward would use overwritten values.
        given = [args[i] if i < len(args) else kwargs[names[i]] for i in written]
        # Inference tensors have no version.
        torch._C._increment_version([t for value in given for t in _tensors(value) if not t.is_inference()])
        return output

    return autograd_kernel


def _tensors(value: Any) -> Sequence[Tensor]:
    """Return the tensors of one argument: itself, those of a list, or none."""
    if isinstance(value, Tensor):
        return (value,)
    return [t for t in value if isinstance(t, Tensor)] if isinstance(value, list) else ()


def _differentiate(op: torch._ops.OpOverload, kernel: Callable, formula: Formula) -> tuple[Callable, Callable]:
    """Return the Autograd kernel of a functional op with a formula, and its form for plain tensors.

    On plain tensors it calls ``kernel`` itself: the dispatcher would do nothing else, and converting every argument
    twice costs as much as all the checks of an op.
    """
    positional = [a for a in op._schema.arguments if not a.kwarg_only]
    defaults = tuple(a.default_value for a in positional)
    keyword_defaults = {a.name: a.default_value for a in op._schema.arguments if a.kwarg_only}
    count = len(positional)

    def forward(ctx: Any, keyset: Any, kwargs: dict, *args: Any) -> Any:
        if formula.only_with is not None and not kwargs.get(formula.only_with, True):
            must = f"`{formula.only_with}` must be True where an argument requires grad"
            raise RuntimeError(f"{op.name()}: {must}, but got {kwargs[formula.only_with]}")
        if keyset is None:  # plain tensors
            with torch._C._AutoDispatchBelowAutograd():
                output = kernel(*args, **kwargs)
        elif torch._C._are_functorch_transforms_active():
            # Function.apply has disabled both grad modes, which is meant for this level only: an enclosing level (the
            # outer grad of grad(grad(f)), a jvp) receives the call next and must record it.
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                output = _below_autograd(op, keyset, args, kwargs)
        else:
            output = _below_autograd(op, keyset, args, kwargs)
        formula.save(ctx, ctx.needs_input_grad[2:], *args, output=output, **{**keyword_defaults, **kwargs})
        return output

    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        if in_dynamo():
            ctx = TracedContext(ctx)
        for grad in grads:
            if grad is not None and not grad.is_contiguous():
                grads = tuple([t if t is None else in_lines(t) for t in grads])
                break
        return (None, None, *formula.backward(ctx, requested_grads(ctx)[2:], *grads))

    # The apply of an autograd.Function would raise under functorch transforms; at this dispatch key the transform has
    # already been entered, for which torch has the single-level base class.
    node = type(
        f"tgl_{op._schema.name.removeprefix('tgl::')}",
        (torch.autograd.function._SingleLevelFunction,),
        {
            "forward": staticmethod(forward),
            "backward": staticmethod(backward),
            "_compiled_autograd_key": staticmethod(torch.autograd.Function._compiled_autograd_key),
        },
    )
    apply = node.apply  # type: ignore[attr-defined]
    leading, complain, rest = _required(op)
    complains = _complains(kernel)

    def autograd_kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        plain = keyset.raw_repr() in _PLAIN
        if not (plain and complains):
            for t in args[:leading]:
                if t is None:
                    complain(args, kwargs)
            if rest is not None:
                rest(args, kwargs)
        if forward_ad._current_level >= 0:
            _refuse_tangents(op, args, kwargs)
        if not torch.is_grad_enabled() or not torch._C._any_requires_grad(*args):
            return kernel(*args, **kwargs) if plain else _below_autograd(op, keyset, args, kwargs)
        if len(args) < count:
            args += defaults[len(args) :]
        if plain:
            return apply(None, kwargs, *args)
        if not torch._C._are_functorch_transforms_active():
            return apply(keyset, kwargs, *args)
        with enable_single_level_autograd_function():
            return apply(keyset, kwargs, *args)

    def direct(*args: Any, **kwargs: Any) -> Any:
        if not complains:
            for t in args[:leading]:
                if t is None:
                    complain(args, kwargs)
            if rest is not None:
                rest(args, kwargs)
        if not torch.is_grad_enabled() or not torch._C._any_requires_grad(*args):
            return kernel(*args, **kwargs)
        return apply(None, kwargs, *args)

    return autograd_kernel, direct


def _autocast(op: torch._ops.OpOverload, rule: Callable, device_type: str) -> Callable:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}"))
    leading, complain, rest = _required(op)

    def autocast_kernel(*args: Any, **kwargs: Any) -> Any:
        for t in args[:leading]:
            if t is None:
                complain(args, kwargs)
        if rest is not None:
            rest(args, kwargs)
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            args, kwargs = rule(dtype, *args, **kwargs)
            return op(*args, **kwargs)

    return autocast_kernel


CASTS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that autocast casts; float64 stays."""


def autocast_enabled(device_type: str) -> bool:
    """Return ``torch.is_autocast_enabled``, which does not support the meta device; False for it."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def autocast_operand(dtype: torch.dtype, t: Tensor) -> Tensor:
    """Return ``t`` in the autocast dtype, if it is a floating tensor that autocast may cast.

    A column-major tensor, such as a layer's transposed weight, is cast in its own memory order. Otherwise a compiler
    would cast it twice, once for each order, or copy it from one order to the other.
    """
    if t.dtype not in CASTS or t.dtype == dtype:
        return t
    if t.dim() >= 2 and t.stride(-2) == 1 and t.stride(-1) != 1:
        return t.transpose(-2, -1).to(dtype).transpose(-2, -1)
    return t.to(dtype)


def autocast_factor(rows: torch.dtype, t: Tensor) -> Tensor:
    """Return a row factor, such as routing probabilities, in its own dtype if that goes with ``rows``, else float32."""
    return t if t.dtype in (rows, torch.float32) else t.float()


def autocast_nothing(autocast_dtype: torch.dtype, /, *args: Any, **kwargs: Any) -> tuple[tuple, dict]:
    """Change no argument: the autocast rule of an op whose kernel must run with autocast disabled."""
    return args, kwargs

"""Compile the kernels of a training step for a chip that may not be there; see ``tgl.warmup``.

A step is run on the meta device, where ops have shapes and no values, and its calls are recorded. The calls are then
repeated, each by the op's own implementation, on fake tensors in compile-only mode for the chip: kernels are compiled
and stored on disk, and not launched.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .. import backends, recipes
from ..meta import activations
from ..nn import MoE
from ..ops._library import KERNELS


class RecordedCall(NamedTuple):
    """One call of an op, with tensors on the meta device, and the op's implementation."""

    op: torch._ops.OpOverload
    kernel: Callable[..., object]
    args: tuple
    kwargs: dict[str, Any]


class _Recording(TorchDispatchMode):
    """Collects calls of ops that have kernels, and of ATen's products where ``tgl.integrations.torch`` serves them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kernel = KERNELS.get(func) or _in_place_of_atens(func)
        if kernel is not None:
            self.calls.append(RecordedCall(func, kernel, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _in_place_of_atens(op: torch._ops.OpOverload) -> Callable[..., object] | None:
    """Return the implementation of one of ATen's products on CUDA, or None."""
    drop_in = sys.modules.get("tgl.integrations.torch")  # not imported: nothing is enabled
    return None if drop_in is None else drop_in.in_place_of(op, "cuda")


def recorded(step: Callable[[], object]) -> list[RecordedCall]:
    """Return the calls of served ops that ``step`` makes on the meta device."""
    with _Recording() as recording:
        step()
    return recording.calls


def store(calls: list[RecordedCall], chip: str) -> list[str]:
    """Store the kernels of all ``calls`` on disk, compiled for ``chip``, such as ``"sm_90"``.

    Returns:
        A sentence for each call that no kernel of this package serves without reading the device on the host.
    """
    left = []
    # Steps of torch may have constants, which are not fake.
    with FakeTensorMode(allow_non_fake_inputs=True), backends.compile_only(chip):
        for op, kernel, args, kwargs in calls:
            there, named = tree_map_only(Tensor, _on_chip, (args, kwargs))
            try:
                if kernel(*there, **named) is NotImplemented:
                    left.append(f"{op.name()} is served by ATen's own kernel on {chip}: nothing to compile")
            except DataDependentOutputException:
                left.append(f"{op.name()} reads the device on the host on {chip}: nothing to compile")
    return left


def _on_chip(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")


@dataclass(frozen=True)
class BlockStep:
    """A step of a ``tgl.MoE`` block: the forward and, for training, the backward.

    Attributes:
        experts, hidden, ffn: ``num_gemms``, ``hidden_size`` and ``ffn_hidden_size`` of the block.
        tokens, top_k: how many tokens a step has, and how many experts each of them chooses.
        activation: activation of the block.
        dtype: dtype of tokens and parameters.
        weights: dtype of the routing weights.
        recipe: name of a class of ``tgl.recipes``, with its defaults; none if empty.
        bias: whether the experts have biases.
        backward: whether there is a backward.
    """

    experts: int
    hidden: int
    ffn: int
    tokens: int
    top_k: int
    activation: str = "swiglu"
    dtype: str = "bfloat16"
    weights: str = "float32"
    recipe: str = ""
    bias: bool = False
    backward: bool = True

    def __call__(self) -> None:
        """Run the step on the meta device."""
        recipe = getattr(recipes, self.recipe)() if self.recipe else None
        dtype, weights = getattr(torch, self.dtype), getattr(torch, self.weights)
        with META, torch.set_grad_enabled(self.backward):
            layer = MoE(
                self.experts,
                self.hidden,
                self.ffn,
                activation=self.activation,
                bias=self.bias,
                params_dtype=dtype,
                recipe=recipe,
            )
            x = torch.empty(self.tokens, self.hidden, dtype=dtype, device=META, requires_grad=self.backward)
            picks = (self.tokens, self.top_k)
            chosen = torch.empty(picks, dtype=torch.int64, device=META)
            y = layer(x, chosen, torch.empty(picks, dtype=weights, device=META, requires_grad=self.backward))
            if self.backward:
                y.backward(torch.empty_like(y))


def named_step(text: str) -> Callable[[], object]:
    """Return the step that an argument of the command names.

    Args:
        text: fields of a ``BlockStep``, as in ``"experts=8,hidden=4096,ffn=14336,tokens=4096,top_k=2"``, or
            ``"module:function"``, a function that runs a step on the meta device.

    Raises:
        ValueError: it is neither, or a field is missing, unknown or of another type.
    """
    if "=" not in text:
        module, colon, function = text.partition(":")
        if not colon:
            raise ValueError(f"a step is `field=value,...` or `module:function`, but got {text!r}")
        return _imported(module, function)
    block = BlockStep(**dict(_read(text)))
    if block.top_k > block.experts:
        raise ValueError(f"`top_k` must be at most the {block.experts} experts, but got {block.top_k}")
    return block


def _imported(module: str, function: str) -> Callable[[], object]:
    """``function`` of ``module``, which is imported; an error inside the module keeps its traceback."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a package around it is none, or the name is
        found = None
    if found is None:
        raise ValueError(f"`{module}` must be a module that can be imported")
    step: Callable[[], object] | None = getattr(importlib.import_module(module), function, None)
    if not callable(step):
        raise ValueError(f"`{function}` must be a function of the module {module}")
    return step


def _read(text: str) -> Iterator[tuple[str, Any]]:
    """The fields of a block and their values."""
    known = {f.name: f for f in fields(BlockStep)}
    parts = [part.partition("=")[::2] for part in text.split(",")]
    given = dict(parts)
    if len(given) < len(parts):
        raise ValueError(f"fields must be given once each, but got {text!r}")
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"`{name}` must be one of {', '.join(known)}")
        yield name, _VALUES[str(known[name].type)](name, value)
    for name, f in known.items():
        if f.default is MISSING and name not in given:
            raise ValueError(f"`{name}` is missing in {text!r}")


def _positive(field: str, value: str) -> int:
    digits = value.isascii() and value.isdecimal() and len(value) <= len(str(_MOST))  # int() has a limit of its own
    if not digits or not 1 <= int(value) <= _MOST:
        raise ValueError(f"`{field}` must be an integer from 1 to 2^31 - 1, but got {value!r}")
    return int(value)


def _name(field: str, value: str) -> str:
    if value not in _NAMES[field]:
        raise ValueError(f"`{field}` must be one of {', '.join(_NAMES[field])}, but got {value!r}")
    return value


def _flag(field: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise ValueError(f"`{field}` must be true or false, but got {value!r}")
    return value == "true"


META = torch.device("meta")
_MOST = 2**31 - 1  # what int32 counts
_DTYPES = ("bfloat16", "float16", "float32")
_NAMES: dict[str, tuple[str, ...]] = {
    "activation": tuple(activations.TABLE),
    "dtype": _DTYPES,
    "weights": _DTYPES,
    "recipe": tuple(name for name in recipes.__all__ if name.endswith("Scaling")),
}
_VALUES: dict[str, Callable[[str, str], Any]] = {"int": _positive, "str": _name, "bool": _flag}

"""Helpers of the compile tests: captured graphs as text, backends that count, and tensors for the ops."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.partitioners import default_partition

import tgl

_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.bool: "b8",
}


class ExpertLayer(nn.Module):
    """A whole layer: router, route, dispatch, expert MLP with probabilities, combine."""

    def __init__(self, hidden: int = 8, ffn: int = 4, experts: int = 3, top_k: int = 2, bias: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = tgl.GroupedMLP(experts, hidden, ffn, bias=bias)
        self.top_k = top_k

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.top_k)
        routing = tgl.route(chosen, self.experts.num_gemms)
        y = self.experts.forward_offsets(tgl.dispatch(x, routing), routing.offs)
        return tgl.combine(y, routing, weights)


class Captured:
    """A backend that runs AOTAutograd's graphs as they are and keeps them.

    ``forward`` and ``backward`` are the graphs of the last compilation, ``compilations`` counts the forward ones.
    ``partition`` is what divides them: AOTAutograd's default saves what it meets, Inductor's cuts where least is saved.
    """

    def __init__(self, partition: Callable = default_partition) -> None:
        self.forward: fx.GraphModule | None = None
        self.backward: fx.GraphModule | None = None
        self.compilations = 0
        self._backend = aot_autograd(
            fw_compiler=self._keep_forward, bw_compiler=self._keep_backward, partition_fn=partition
        )

    def __call__(self, gm: fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Callable:
        return self._backend(gm, inputs, **kwargs)

    def _keep_forward(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable:
        self.forward = gm
        self.compilations += 1
        return make_boxed_func(gm.forward)

    def _keep_backward(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable:
        self.backward = gm
        return make_boxed_func(gm.forward)

    def text(self, only: str | None = None) -> str:
        """Return both graphs, one line per call, for an inline expectation.

        ``only`` keeps the calls of ops that start with it, without their arguments, where the rest of the graph is not
        what a test is about.
        """
        parts = ["forward", *lines(self.forward, only)]
        if self.backward is not None:
            parts += ["backward", *lines(self.backward, only)]
        return "\n".join(parts)

    def tgl_calls(self, which: str = "both") -> dict[str, int]:
        """Return the number of calls of each op of ``torch.ops.tgl`` in the forward, the backward or both graphs."""
        graphs = {"forward": [self.forward], "backward": [self.backward], "both": [self.forward, self.backward]}[which]
        return count_tgl_calls(graphs)


def count_tgl_calls(graphs: list[fx.GraphModule | None]) -> dict[str, int]:
    """Return the number of calls of each op of ``torch.ops.tgl`` in ``graphs``, by name without the namespace."""
    found: dict[str, int] = {}
    for gm in filter(None, graphs):
        for node in gm.graph.nodes:
            name = str(node.target)
            if node.op == "call_function" and name.startswith("tgl."):
                name = name.removeprefix("tgl.").removesuffix(".default")
                found[name] = found.get(name, 0) + 1
    return found


def lines(gm: fx.GraphModule | None, only: str | None = None) -> list[str]:
    """Return a line per call of a graph, ``name: dtype[shape] = op(arguments)``, and one for its results."""
    assert gm is not None
    shown = []
    for node in gm.graph.nodes:
        arguments = ", ".join([_show(a) for a in node.args] + [f"{k}={_show(v)}" for k, v in node.kwargs.items()])
        if node.op == "call_function":
            target = (
                str(node.target).removesuffix(".default") if hasattr(node.target, "_schema") else node.target.__name__
            )
            if only is None:
                shown += _wrap(f"  {node.name}{_type(node)} = {target}({arguments})")
            elif target.startswith(only):
                shown.append(f"  {node.name}{_type(node)} = {target}")
        elif node.op == "output" and only is None:
            shown += _wrap(f"  return {arguments}")
    return shown


def _wrap(line: str) -> list[str]:
    return textwrap.wrap(line, 110, subsequent_indent=" " * 6)


def _show(argument: Any) -> str:
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(map(_show, argument))}]"
    return str(argument)


def _type(node: fx.Node) -> str:
    value = node.meta.get("val")
    return f": {_SHORT[value.dtype]}{list(value.shape)}" if isinstance(value, Tensor) else ""


def graph_breaks() -> int:
    """Return the number of graph breaks that Dynamo has counted since the test began."""
    return sum(counters["graph_break"].values())


def leaf(t: Tensor) -> Tensor:
    """A copy of ``t`` that requires grad, with its strides."""
    return t.detach().clone().requires_grad_()


def ends(*sizes: int) -> Tensor:
    """int32 cumulative ends of groups of the given sizes."""
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    """The same bits, dtype, shape and strides, through nested tuples and lists."""
    if isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for i, (x, y) in enumerate(zip(actual, expected)):
            assert_same(x, y, f"{where}[{i}]")
    elif expected is None:
        assert actual is None, where
    else:
        assert (actual.dtype, actual.shape, actual.stride()) == (expected.dtype, expected.shape, expected.stride()), (
            where
        )
        assert torch.equal(actual, expected), f"{where}: differs by {(actual - expected).abs().max()}"

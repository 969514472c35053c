"""A barrier that Inductor's reductions over several loops lack, for graphs with an op of this package.

A reduction too wide for registers becomes two loops of one Triton kernel. The first sums, and stores what later kernels
need of its terms; the second loads those terms back. Triton lays out either loop on its own, so another warp may load a
value than has stored it. Without a barrier in between, the load may find what the memory held before
(pytorch/pytorch#190517, triton-lang/triton#10924). It takes a kernel that stores float32 and touches 16-bit tensors.
The backward of a norm ahead of an expert layer is one: the gradient of the layer's input is float32 under autocast,
the router's share of it is bfloat16. Gradients then are garbage, silently.

The barrier stands between the loops, once. It changes no value of a kernel that was right. PyTorch 2.15 has one itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

BARRIER = "tl.debug_barrier()"
_TRITON = "torch._inductor.codegen.triton"
_met: list[type] = []  # the classes that have the barrier now


def lowering_aware(fake: Callable) -> Callable:
    """``fake``, which Inductor calls when it lowers the op; by then it has loaded what generates kernels."""

    @functools.wraps(fake)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _met and _TRITON in sys.modules:
            order_loads(sys.modules[_TRITON].TritonKernel)
        return fake(*args, **kwargs)

    return call


def order_loads(kernel: type) -> None:
    """Let ``kernel.load`` put a barrier behind the loops that have ended if one of them stored what is loaded."""
    _met.append(kernel)
    load = kernel.load  # type: ignore[attr-defined]
    if "invalidated_stores" in load.__code__.co_names:
        return  # it looks for such loads itself

    @functools.wraps(load)
    def ordered(self: Any, name: str, index: Any) -> Any:
        stored = self.cse.invalidated_stores  # in loops that have ended
        ordered_before = self.__dict__.setdefault("_tgl_ordered", set())
        if name in stored and name not in ordered_before:
            ordered_before.update(stored)
            self.body.writeline(BARRIER)  # the loop being made is not in ``body`` yet
        return load(self, name, index)

    kernel.load = ordered  # type: ignore[attr-defined]

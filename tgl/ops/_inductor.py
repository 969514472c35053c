"""Adds a barrier that is missing in Inductor's multi-loop reductions, for graphs with an op of this package.

A reduction too wide for registers becomes two loops of one Triton kernel. The first sums, and stores terms that later
kernels need; the second loads those terms back. Triton chooses the layout of each loop separately, so the warp that
loads a value may not be the one that stored it. Without a barrier in between, the load may read stale memory
(pytorch/pytorch#190517, triton-lang/triton#10924). It happens in a kernel that stores float32 and touches 16-bit
tensors, such as the backward of a norm before an expert layer: the gradient of the layer's input is float32 under
autocast, the router's part of it is bfloat16. Gradients are then silently wrong.

One barrier is added between the loops. It changes no result of a correct kernel. PyTorch 2.15 adds one itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

BARRIER = "tl.debug_barrier()"
_TRITON = "torch._inductor.codegen.triton"
_met: list[type] = []  # kernel classes that have the barrier


def lowering_aware(fake: Callable) -> Callable:
    """Wrap ``fake`` to add the barrier: Inductor calls it when it lowers the op, with its code generator loaded."""

    @functools.wraps(fake)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _met and _TRITON in sys.modules:
            order_loads(sys.modules[_TRITON].TritonKernel)
        return fake(*args, **kwargs)

    return call


def order_loads(kernel: type) -> None:
    """Make ``kernel.load`` emit a barrier after the finished loops if one of them stored the loaded buffer."""
    _met.append(kernel)
    load = kernel.load  # type: ignore[attr-defined]
    if "invalidated_stores" in load.__code__.co_names:
        return  # this version of PyTorch handles such loads itself

    @functools.wraps(load)
    def ordered(self: Any, name: str, index: Any) -> Any:
        stored = self.cse.invalidated_stores  # stores of finished loops
        ordered_before = self.__dict__.setdefault("_tgl_ordered", set())
        if name in stored and name not in ordered_before:
            ordered_before.update(stored)
            self.body.writeline(BARRIER)  # the current loop is not in ``body`` yet
        return load(self, name, index)

    kernel.load = ordered  # type: ignore[attr-defined]

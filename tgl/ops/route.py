"""``tgl::route``: the choices of a router, grouped by expert; ``tgl.route`` puts its outputs in a ``tgl.Routing``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends, debug
from ..meta import specs
from ..meta.remembered import remembered
from ._library import define

NAME = "route"
_OUTPUTS = ("source", "position", "token", "offs")

_checked = remembered(specs.route, {"top_k_index": "tokens"})

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


def route(top_k_index: Tensor, num_experts: int, num_rows: int | None = None, *, sentinels: bool = False) -> Outputs:
    wanted = dict(zip(_OUTPUTS, _checked(top_k_index, num_experts, num_rows)))
    if debug.active:
        if not sentinels:
            debug.check_choices(NAME, top_k_index, num_experts)
        if num_rows is not None:
            debug.check_room(NAME, top_k_index, num_experts, num_rows)
    made = backends.produce(NAME, top_k_index.device, wanted, [top_k_index, num_experts])
    return made["source"], made["position"], made["token"], made["offs"]


def _fake(top_k_index: Tensor, num_experts: int, num_rows: int | None = None, *, sentinels: bool = False) -> Outputs:
    source, position, token, offs = specs.empty_all(specs.route(top_k_index, num_experts, num_rows))
    return source, position, token, offs


_op = define(
    "route(Tensor top_k_index, SymInt num_experts, SymInt? num_rows=None, *, bool sentinels=False) -> "
    "(Tensor source, Tensor position, Tensor token, Tensor offs)",
    route,
    _fake,
)


def _call(
    top_k_index: Tensor, num_experts: int, num_rows: int | None = None, *, sentinels: bool = False
) -> tuple[torch.device, tuple, dict[str, Any]]:
    made = {name: spec.meta() for name, spec in zip(_OUTPUTS, specs.route(top_k_index, num_experts, num_rows))}
    return top_k_index.device, (top_k_index, num_experts), made


backends.describe_op(NAME, _call)

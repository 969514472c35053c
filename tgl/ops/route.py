"""``tgl::route``: group a router's top-k slots by expert; ``tgl.route`` returns its outputs as a ``tgl.Routing``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import backends, debug
from ..meta import specs
from ..meta.remembered import remembered
from ._define import define

NAME = "route"
_OUTPUTS = ("source", "position", "token", "offs")
_checked = remembered(specs.route, {"top_k_index": "tokens"})


def _options(*, sentinels: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    return {}, {}


def route(
    top_k_index: Tensor, num_experts: int, num_rows: int | None = None, *, sentinels: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the kernel; an ``unobserved_call`` calls it without the dispatcher."""
    wanted = dict(zip(_OUTPUTS, _checked(top_k_index, num_experts, num_rows)))
    if debug.active:
        if not sentinels:
            debug.check_choices(NAME, top_k_index, num_experts)
        if num_rows is not None:
            debug.check_room(NAME, top_k_index, num_experts, num_rows)
    made = backends.produce(NAME, top_k_index.device, wanted, [top_k_index, num_experts])
    return made["source"], made["position"], made["token"], made["offs"]


define(
    "route(Tensor top_k_index, SymInt num_experts, SymInt? num_rows=None, *, bool sentinels=False) -> "
    "(Tensor source, Tensor position, Tensor token, Tensor offs)",
    specs.route,
    options=_options,
    unseen=("num_rows",),
    kernel=route,
)

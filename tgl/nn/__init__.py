"""Modules built from the ops: grouped linear layers, the expert MLP, and the routing around them.

Users import the names in ``__all__`` from ``tgl``. The private modules contain their autograd functions, for use by
this package, ``tgl.distributed`` and ``tgl.integrations``. They call ops, never implementations.
"""

from . import layouts
from .grouped_linear import GroupedLinear
from .grouped_lora_linear import GroupedLoRALinear
from .grouped_mlp import GroupedMLP
from .grouped_packed_linear import GroupedPackedLinear
from .moe import MoE, moe
from .router import RouterOutput, topk_router
from .routing import Routing, combine, dispatch, dispatch_weights, route
from .sequential import GroupedActivation, Sequential
from .token_rounding import round_tokens

__all__ = [
    "GroupedActivation",
    "GroupedLinear",
    "GroupedLoRALinear",
    "GroupedMLP",
    "GroupedPackedLinear",
    "MoE",
    "RouterOutput",
    "Routing",
    "Sequential",
    "combine",
    "dispatch",
    "dispatch_weights",
    "layouts",
    "moe",
    "round_tokens",
    "route",
    "topk_router",
]

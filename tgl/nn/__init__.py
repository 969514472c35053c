"""Modules built from the ops: grouped linear layers, the expert MLP, and the routing around them."""

from . import layouts
from .grouped_linear import GroupedLinear
from .grouped_mlp import GroupedMLP
from .routing import Routing, combine, dispatch, dispatch_weights, route

__all__ = ["GroupedLinear", "GroupedMLP", "Routing", "combine", "dispatch", "dispatch_weights", "layouts", "route"]

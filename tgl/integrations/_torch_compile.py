"""Replacement of ATen's grouped products in graphs that Dynamo traces: our ops where they are served, behind a guard.

Inductor would lower ``aten._grouped_mm`` to a Triton template or to a call of ATen's kernel, without the bias, and the
fake kernel rejects operands that ours takes. So the product is replaced when Dynamo traces it: graphs hold our ops, and
caches of compiled graphs, which are keyed by Dynamo's trace, distinguish both. The guard is on ``served()``, whether it
was true or not, like Dynamo's own guards on functions of global state.

``torch.compiler.substitute_in_graph`` would be the public way, but takes no function that Dynamo puts into graphs.

A subclass that is made of tensors, such as ``DTensor``, has rules for ATen's product and none for ours. It keeps the
product in the graph, as in eager code. It then calls ATen's products of plain tensors, which are served when they run;
only a template that Inductor has chosen for one under ``max_autotune`` is not.

In graphs whose weights are not bfloat16, transformers replaces ATen's product by an op of its own. That op is replaced
as well.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ..utils.post_import import after_import
from . import _torch_products as products
from . import _torch_scaled_products as scaled_products
from ._torch_products import Product

MODULE = "tgl.integrations.torch"


def install() -> None:
    """Replace the products in all later traces of Dynamo, once Dynamo is loaded."""
    _replace(products.PRODUCT, torch._grouped_mm, *_ops("_grouped_mm"))
    for product in scaled_products.PRODUCTS:
        name = product.name.removeprefix("aten::")
        _replace(product, getattr(torch, name), *_ops(name))
    after_import("transformers.integrations.moe", _install_for_transformers)


def _ops(name: str) -> tuple[Any, Any]:
    """Return the packet and the overload of one of ATen's ops."""
    packet = getattr(torch.ops.aten, name)
    return packet, packet.default


def _install_for_transformers(module: Any) -> None:
    fallback = getattr(torch.ops.transformers, "grouped_mm_fallback", None)  # not in every version
    if fallback is not None:
        _replace(products.PRODUCT, fallback, fallback.default)


def _replace(product: Product, *functions: Any) -> None:
    """Make Dynamo put our product into graphs that call one of ``functions``."""

    def work(module: Any) -> None:
        from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

        handlers = TorchInGraphFunctionVariable._get_handlers()
        handlers.update(dict.fromkeys(functions, functools.partial(_traced, product)))

    after_import("torch._dynamo.convert_frame", work)


def _traced(product: Product, variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Return Dynamo's variable for the result, or None where Dynamo traces as usual."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource
    from torch._dynamo.variables.base import VariableTracker

    from . import torch as integration

    source = CallFunctionNoArgsSource(AttrSource(tx.import_source(MODULE), integration.served.__name__))
    install_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))
    names = [argument.name for argument in _overload(product)._schema.arguments]
    given = {name: value.realize() for name, value in (*zip(names, args), *kwargs.items())}
    defaults = product.arguments._field_defaults
    ordered = dict(zip(product.arguments._fields, (given.get(name) for name in names), strict=True))
    values = {name: defaults.get(name) if v is None else _value(v) for name, v in ordered.items()}
    if not isinstance(values["mat_a"], torch.Tensor) or not isinstance(values["mat_b"], torch.Tensor):
        return None
    if values["mat_a"].device.type not in integration.served():
        return None
    if any(is_traceable_wrapper_subclass(t) for t in tree_leaves(values)):
        return None
    with tx.fake_mode:
        made = product.call(**values)
    if isinstance(made, str):
        return None
    composite = VariableTracker.build(tx, product.composites[made.form.letters])
    nothing = VariableTracker.build(tx, None)
    return tx.inline_user_function_return(composite, [_one(ordered[name]) or nothing for name in product.traced], {})


def _overload(product: Product) -> Any:
    return getattr(torch.ops.aten, product.name.removeprefix("aten::")).default


def _one(variable: Any) -> Any:
    """Return a variable, or the first of a list's."""
    items = _items(variable)
    return variable if items is None else items[0]


def _items(variable: Any) -> list | None:
    """Return the variables in a list, or None for any other variable."""
    from torch._dynamo.variables.lists import BaseListVariable

    return [item.realize() for item in variable.items] if isinstance(variable, BaseListVariable) else None


def _value(variable: Any) -> Any:
    """Return the fake tensor or the constant that a variable of Dynamo represents."""
    if variable is None:
        return None
    if variable.is_python_constant():
        return variable.as_python_constant()
    items = _items(variable)
    if items is not None:
        return [_value(item) for item in items]
    return variable.as_proxy().node.meta["example_value"]

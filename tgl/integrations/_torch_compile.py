"""ATen's grouped products in graphs that Dynamo traces: ops of ours where they are served, behind a guard.

Inductor would lower ``aten._grouped_mm`` to a Triton template or to a call of ATen's kernel, without the bias, and the
fake kernel refuses what ours takes. So the product is replaced where Dynamo meets it: graphs hold our ops, and caches
of compiled graphs, which are keyed by what Dynamo has traced, tell both sides apart. The guard is on ``served()``,
whichever way the answer was, as Dynamo's own guards on functions of global state are.

``torch.compiler.substitute_in_graph`` would be the public way, but takes no function that Dynamo puts into graphs.

transformers leaves ATen's product for an op of its own in graphs whose weights are not bfloat16. That op is replaced
as well.
"""

from __future__ import annotations

from typing import Any

import torch

from .._after_import import after_import
from . import _torch_products as products

MODULE = "tgl.integrations.torch"
NAMES = tuple(argument.name for argument in torch.ops.aten._grouped_mm.default._schema.arguments)


def install() -> None:
    """Replace the products in what Dynamo traces from now on, once Dynamo is loaded."""
    aten = torch.ops.aten._grouped_mm
    _replace(torch._grouped_mm, aten, aten.default)
    after_import("transformers.integrations.moe", _install_for_transformers)


def _install_for_transformers(module: Any) -> None:
    fallback = getattr(torch.ops.transformers, "grouped_mm_fallback", None)  # not in every version
    if fallback is not None:
        _replace(fallback, fallback.default)


def _replace(*functions: Any) -> None:
    """Have Dynamo put our product into graphs that call one of ``functions``."""

    def work(module: Any) -> None:
        from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

        handlers = TorchInGraphFunctionVariable._get_handlers()
        handlers.update(dict.fromkeys(functions, _grouped_mm))

    after_import("torch._dynamo.convert_frame", work)


def _grouped_mm(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Dynamo's variable for the result, or None where Dynamo does what it would without us."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource
    from torch._dynamo.variables.base import VariableTracker

    from . import torch as integration

    source = CallFunctionNoArgsSource(AttrSource(tx.import_source(MODULE), integration.served.__name__))
    install_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))
    given = {name: value.realize() for name, value in (*zip(NAMES, args), *kwargs.items())}
    ordered = [given.get(name) for name in NAMES]
    mat_a, mat_b, *_ = values = [_value(value) for value in ordered]
    if not isinstance(mat_a, torch.Tensor) or not isinstance(mat_b, torch.Tensor):
        return None
    if mat_a.device.type not in integration.served():
        return None
    with tx.fake_mode:
        made = products.call(*values)  # type: ignore[arg-type]
    if isinstance(made, str):
        return None
    composite = VariableTracker.build(tx, products.COMPOSITES[made.form.letters])
    nothing = VariableTracker.build(tx, None)
    return tx.inline_user_function_return(composite, [value or nothing for value in ordered], {})


def _value(variable: Any) -> Any:
    """The fake tensor or the constant that a variable of Dynamo's stands for."""
    if variable is None:
        return None
    if variable.is_python_constant():
        return variable.as_python_constant()
    return variable.as_proxy().node.meta["example_value"]

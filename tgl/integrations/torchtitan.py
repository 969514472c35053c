"""torchtitan: run the routed experts of a model on the grouped ops.

Either a converter chooses the implementation, where a model is registered::

    model_registry("30B-A3B", converters=[tgl.integrations.torchtitan.converter()])

or an override does, on the command line of a run::

    --override.imports tgl.integrations.torchtitan.grouped_experts

Parameters keep torchtitan's names and shapes, so that checkpoints, ``fully_shard`` and the token dispatchers of expert
parallelism work as before.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__ = ["converter", "grouped_experts"]


def converter(recipe: str | None = None, fqns: Sequence[str] = ()) -> Any:
    """Return the config of a converter, for the argument ``converters`` of torchtitan's ``model_registry``.

    It replaces the config of every ``GroupedExperts`` of the model.

    Args:
        recipe: ``"mxfp8"``, ``"fp8_block"`` or ``"fp8_current"``: the recipe of both layers of the experts; None for
            bfloat16.
        fqns: parts of the names of the modules to convert, as in torchtitan's own converters; empty for all.

    Raises:
        ImportError: torchtitan is not installed, or is a version without the classes that this needs.
    """
    return _experts().GroupedExpertsConverter.Config(recipe=recipe, fqns=list(fqns))


def grouped_experts(config: Any, recipe: str | None = None) -> Any:
    """Return the config of experts that run on the grouped ops; torchtitan calls this, as an override.

    Args:
        config: torchtitan's ``GroupedExperts.Config``.
        recipe: see ``converter``.

    Raises:
        ImportError: torchtitan is not installed, or is a version without the classes that this needs.
        ValueError: the recipe is not one of those that experts take.
        TypeError: the experts are of a subclass, whose parameters or arithmetic differ.
    """
    return _experts().convert(config, recipe)


def _experts() -> ModuleType:
    try:
        from . import _torchtitan_experts
    except ImportError as error:
        raise ImportError(
            f"tgl.integrations.torchtitan needs torchtitan 0.3 and what its models import, but: {error}"
        ) from error
    return _torchtitan_experts


def _register_override() -> None:
    """Make ``grouped_experts`` an override, which torchtitan looks up after it has imported this module."""
    from torchtitan.config import override

    target = _experts().moe.GroupedExperts.Config
    override(target=target, description="Routed experts on the grouped ops of tgl.")(grouped_experts)


if importlib.util.find_spec("torchtitan") is not None:
    _register_override()

"""``python -m tests.integrations.architectures``: writes the table of architectures in docs/transformers.md anew.

Every experts class of the installed transformers is imported, and made on the meta device with its default
configuration. The adapter then reports its implementation.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tgl.integrations.transformers import activation

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
HEAD = "| architecture | experts class | weights | implementation |"
DECORATOR = "use_experts_implementation"


class Row(NamedTuple):
    """A line of the table."""

    architecture: str
    experts: str
    weights: str
    served: str

    def __str__(self) -> str:
        return f"| {self.architecture} | `{self.experts}` | {self.weights} | {self.served} |"


def classes() -> Iterator[tuple[str, str, bool]]:
    """Architecture and name of every class of routed experts, and whether it looks an implementation up."""
    import transformers

    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        source = path.read_text()
        if "Experts" not in source:
            continue
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Experts"):
                asks = any(DECORATOR in ast.unparse(d) for d in node.decorator_list)
                if asks or not node.name.endswith("SharedExperts"):  # those get every token, and are no experts
                    yield path.parent.name, node.name, asks


def made(architecture: str, name: str) -> nn.Module:
    """A module of the class, on the meta device, with the first default configuration of the architecture that fits."""
    package = f"transformers.models.{architecture}"
    experts = getattr(importlib.import_module(f"{package}.modeling_{architecture}"), name)
    from transformers import PreTrainedConfig

    module = importlib.import_module(f"{package}.configuration_{architecture}")
    configs = [c for _, c in inspect.getmembers(module, inspect.isclass) if issubclass(c, PreTrainedConfig)]
    sizes = {"intermediate_size": 8} if "intermediate_size" in inspect.signature(experts).parameters else {}
    reasons = []
    for config in configs:
        if config.__module__ != module.__name__:
            continue
        given = config()
        for key, value in given.to_dict().items():  # sizes that only a checkpoint has
            if value is None and ("moe" in key or "experts" in key):
                setattr(given, key, 8)
        try:
            with torch.device("meta"):
                return experts(given, **sizes)
        except (AttributeError, TypeError, KeyError) as error:
            reasons.append(f"{config.__name__}: {error}")
    raise ValueError(f"no configuration of {architecture} makes {name}: {reasons}")


def row(architecture: str, name: str, asks: bool) -> Row:
    if not asks:
        return Row(architecture, name, "-", f"transformers: its class does not carry `{DECORATOR}`")
    experts: Any = made(architecture, name)
    weights = ["gated" if experts.has_gate else "plain"]
    weights += ["biases"] if experts.has_bias else []
    weights += ["transposed"] if experts.is_transposed else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = activation(experts)
    if found is None:
        return Row(architecture, name, ", ".join(weights), "grouped GEMMs, with the class's own gate between them")
    kind = f"`{found.kind}`" + (", interleaved" if found.interleaved else "")
    if experts.has_post_expert_norm:
        return Row(architecture, name, ", ".join(weights), f"grouped GEMMs with {kind}, and the class's own norm")
    return Row(architecture, name, ", ".join(weights), f"one op, {kind}")


def table() -> str:
    """Markdown of the table, with the release that it is of."""
    import transformers

    rows = [row(*found) for found in classes()]
    by_us = sum("transformers:" not in r.served for r in rows)
    own = sum("own gate" in r.served for r in rows)
    release = f"Of transformers {transformers.__version__}: {len(rows)} classes, {by_us} of them run by tgl, "
    release += f"{own} with a gate of its own."
    return "\n".join([release, "", HEAD, "|---|---|---|---|", *map(str, rows)])


def release_of_page() -> str:
    """The release of transformers that the table on the page is of."""
    found = re.search(r"^Of transformers (\S+):", PAGE.read_text(), re.MULTILINE)
    assert found
    return found[1]


def on_page() -> str:
    """The table as it stands on the page."""
    text = PAGE.read_text()
    return text[text.index("Of transformers ") :].split("\n\n##")[0].rstrip()


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().replace(on_page(), table()))

"""Names and signatures that other code relies on: a change must be deliberate."""

import inspect
from pathlib import Path

import pytest

import tgl
import tgl.testing

SNAPSHOT = Path(__file__).with_name("public_api.txt")


def parameters(function) -> str:
    """Names, kinds and defaults; annotations print differently from one Python version to the next."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(bare))


def describe(module) -> list[str]:
    lines = []
    for name in sorted(module.__all__):
        value = getattr(module, name)
        qualified = f"{module.__name__}.{name}"
        if inspect.ismodule(value):
            lines.append(f"{qualified}  (module)")
        elif inspect.isclass(value):
            lines.append(f"class {qualified}{'' if issubclass(value, BaseException) else parameters(value)}")
            own = [base for base in value.__mro__ if base.__module__.startswith("tgl")]
            methods = {n for base in own for n, m in vars(base).items() if inspect.isfunction(m) and n[0] != "_"}
            lines += [f"    {n}{parameters(getattr(value, n))}" for n in sorted(methods)]
        elif callable(value):
            lines.append(f"{qualified}{parameters(value)}")
        else:
            lines.append(f"{qualified}: {type(value).__name__}")
    return lines


def api() -> str:
    return "\n".join(describe(tgl) + describe(tgl.testing)) + "\n"


def test_public_api():
    """To change it on purpose: ``python -m tests.test_public_api``."""
    assert api() == SNAPSHOT.read_text()


def test_everything_public_has_a_docstring():
    for module in (tgl, tgl.testing):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                assert value.__doc__, name
                assert not value.__doc__.startswith(f"{name}("), f"{name} has only the docstring dataclass made"


def test_unknown_name_in_testing():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tgl.testing.nothing  # noqa: B018


if __name__ == "__main__":
    SNAPSHOT.write_text(api())

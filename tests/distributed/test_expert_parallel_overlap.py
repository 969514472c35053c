"""``benchmarks/expert_parallel_overlap.py`` on two emulated ranks, where what runs side by side runs in turns."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from .shared_memory import device

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STREAM: Any = SimpleNamespace(wait_stream=lambda stream: None)


@contextlib.contextmanager
def script() -> Iterator[tuple[Any, Any, Any, pytest.MonkeyPatch]]:
    """The script, a layer of a few tokens, its parts, and what changes both until the end."""
    with device(), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        module = importlib.import_module("expert_parallel_overlap")
        arms_of = importlib.import_module("harness.expert_parallel")
        patch.setattr(torch.cuda, "current_stream", lambda: STREAM)
        patch.setattr(torch.cuda, "stream", contextlib.nullcontext)
        patch.setattr(torch.cuda, "_sleep", lambda cycles: None)
        shape = arms_of.Shape(tokens=5, hidden=32, inner=32, experts=8, top_k=3)
        problem = arms_of.Problem(shape, (dist.group.WORLD,) * 2, (), device="cpu")
        yield module, problem, module.Layer(problem), patch


def check_all() -> None:
    """Every arm runs; parts are those of a layer; pieces cover all rows, each by one."""
    with script() as (module, _, layer, _):
        shares = module.TODAY, module.Share(1, 1), module.Share(3, 2)
        module.check(layer, shares, STREAM)
        reference = [t.clone() for name in ("FC1", "FC2") for t in layer.made(name)]
        calls = module.arms(layer, shares, STREAM)
        assert [name for name in calls if "beside" in name] == [
            f"{pair}: {share}" for pair in ("dispatch beside FC1", "combine beside FC2") for share in shares
        ]
        for call in calls.values():
            call()
        calls["FC1: 0 left"]()
        calls["FC2: 0 left"]()
        again = [t for name in ("FC1", "FC2") for t in layer.made(name)]
        assert all(torch.equal(a, b) for a, b in zip(again, reference, strict=True))
        there = layer.given.choices >= 0
        for name, masks in layer.pieces():
            assert torch.equal(sum(mask & there for mask in masks), there.long()), name
            if name in ("own first", "ranks"):
                first = layer.rank if name == "ranks" else 0
                assert masks[first][layer.rank * layer.sizes.pair_rows].all()


@pytest.mark.slow
def test_all_arms(ranks):
    ranks(check_all, limit=300)


def check_fault() -> None:
    """Rank 1's GEMM has other bits beside an exchange of another share than today's, and all ranks stop."""
    with script() as (module, _, layer, patch):
        start = layer.gemm

        def other(name: str, left: int, *given: Any) -> Any:
            call = start(name, left, *given)

            def added() -> None:
                call()
                if left and layer.rank:
                    layer.h[0, 0] += 1

            return added

        patch.setattr(layer, "gemm", other)
        said = r"^dispatch beside FC1: equal bits: WRONG: rank 1: 3, 1 differs$"
        with pytest.raises(SystemExit, match=said):
            module.check(layer, (module.TODAY, module.Share(3, 1)), STREAM)


def test_other_bits_are_found(ranks):
    ranks(check_fault, limit=180)


def check_forwards() -> None:
    """Whole forwards have the layer's bits, and not without the answers of own rows or with those of others late."""
    with script() as (module, problem, _, patch):
        share = module.Share(3, 1)
        patch.setattr(module, "OWN_FIRST", (share,))
        forwards = module.own_first(problem, STREAM)
        module.check_own_first(problem, forwards)
        (forward,) = forwards.values()
        add = forward.sum
        patch.setattr(forward, "sum", lambda rows, part, out: None if part == slice(None) else add(rows, part, out))
        with pytest.raises(SystemExit, match=r"^own first, 3, 1: equal bits: WRONG: rank 0: 5 tokens differ"):
            module.check_own_first(problem, forwards)


def test_own_rows_first(ranks):
    ranks(check_forwards, limit=240)

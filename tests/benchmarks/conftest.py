"""Modules of ``benchmarks``, which are scripts: their folder is on the path when they run."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from tests.benchmarks.stand_in import Clock, OnCpu, Replay
from tgl import backends

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def load():
    """Imports a module of ``benchmarks`` by its name."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def gpu(load, monkeypatch):
    """Something that passes for a GPU."""
    timing = load("harness.timing")
    for name in ("compared", "dense"):
        load(f"harness.{name}")
    monkeypatch.setattr(load("harness.dense"), "quack", lambda: None)
    monkeypatch.setattr(load("harness.command").gc, "collect", lambda: 0)  # it takes long in a process of many tests
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(backends.target, "cuda_arch", lambda device: "sm_90")
    monkeypatch.setattr(timing, "Replay", Replay)
    monkeypatch.setattr(timing, "DeviceClock", Clock)
    monkeypatch.setattr(timing, "L2", lambda clean: None)
    monkeypatch.setattr(timing, "warm_up", lambda call: call())
    swiglu = load("harness.swiglu")
    for name in ("", "_backward", "_backward_with_probs"):
        monkeypatch.setattr(swiglu, f"compiled{name}", getattr(swiglu, name.strip("_") or "forward"))

    def module(name):
        script = load(name)
        for shared in ("Replay", "DeviceClock", "L2", "warm_up"):
            if hasattr(script, shared):
                monkeypatch.setattr(script, shared, getattr(timing, shared))
        return script

    with OnCpu():
        yield module


@pytest.fixture
def uncompiled(monkeypatch):
    """Nothing is compiled, and no memory is taken."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 96 * 64 * 2)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)

"""The barrier between loops of a reduction, as far as no GPU is needed; ``tests/gpu/test_inductor.py`` runs kernels."""

import sys
from types import SimpleNamespace

import torch

import tgl
from tgl.ops import _inductor


class Kernel:
    """A stand-in for a generated kernel, as ``load`` sees it."""

    def __init__(self):
        self.lines = []
        self.cse = SimpleNamespace(invalidated_stores=set())
        self.body = SimpleNamespace(writeline=self.lines.append)

    def load(self, name, index):
        self.lines.append(f"load {name}")
        return name


def test_a_barrier_precedes_loads_of_earlier_loops_results(monkeypatch):
    monkeypatch.setattr(_inductor, "_met", [])
    kernel_type = type("Ordered", (Kernel,), {"load": Kernel.load})
    _inductor.order_loads(kernel_type)
    kernel = kernel_type()
    assert kernel.load("argument", 0) == "argument"
    kernel.cse.invalidated_stores |= {"first", "second"}  # a loop ends
    for name in ("argument", "first", "second", "first"):
        kernel.load(name, 0)
    kernel.cse.invalidated_stores |= {"third"}  # another
    for name in ("first", "third"):
        kernel.load(name, 0)
    expected = "load argument, load argument, {0}, load first, load second, load first, load first, {0}, load third"
    assert ", ".join(kernel.lines) == expected.format(_inductor.BARRIER)


def test_kernels_of_a_graph_with_an_op_have_the_barrier(fresh_compiler):
    torch.compile(lambda splits: tgl.splits_to_offsets(splits) + 1)(torch.tensor([3, 4]))
    generator = sys.modules["torch._inductor.codegen.triton"]
    assert _inductor._met == [generator.TritonKernel]
    assert "invalidated_stores" in generator.TritonKernel.load.__code__.co_names  # ours, or that of a later PyTorch


def test_a_load_that_checks_stores_itself_is_not_replaced(monkeypatch):
    monkeypatch.setattr(_inductor, "_met", [])

    class Later(Kernel):
        def load(self, name, index):
            return name in self.cse.invalidated_stores

    load = Later.load
    _inductor.order_loads(Later)
    assert Later.load is load

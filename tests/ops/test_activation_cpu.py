"""The CPU's activation: its steps through buffers are not seen in the results."""

import pytest
import torch

import tgl
from tgl.backends.cpu import activation as _activation_cpu
from tgl.meta.activations import TABLE


@pytest.mark.parametrize("kind", TABLE)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_change_nothing(monkeypatch, kind, interleaved, dtype):
    """Rows are taken in steps through buffers that every step, and the next call, uses again.

    Not bit by bit: where a vector of aten's ends, its sigmoid rounds otherwise.
    """
    x, dy, probs = torch.randn(41, 24).to(dtype), torch.randn(41, 24).to(dtype), torch.rand(41)
    dy = dy[:, :12].contiguous() if TABLE[kind].gated else dy
    offs, options = torch.tensor([5, 38], dtype=torch.int32), {"kind": kind, "interleaved": interleaved}

    def results():
        y = tgl.grouped_activation(x, offs, probs, **options)
        return y, *torch.ops.tgl.grouped_activation_backward(dy, x, offs, probs, **options)

    whole = results()
    for elements in (1, 300, 1000):  # one row and more at a time, and a rest
        monkeypatch.setattr(_activation_cpu, "_ELEMENTS", elements)
        for stepwise, at_once in zip(results(), whole, strict=True):
            torch.testing.assert_close(stepwise, at_once)

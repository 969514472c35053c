"""Offloading on a device: copies on a stream of their own that nothing may overtake."""

import pytest
import torch
from torch import nn

import tgl
from tgl.ops import offload as ops

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda", torch.cuda.current_device())
BIG = 1 << 24  # elements: 64 MiB of float32, some milliseconds of copying
LONG = 200_000_000  # cycles of a spinning kernel, a tenth of a second or more


def copies():
    return ops._copy_stream(DEVICE)


@pytest.fixture(autouse=True)
def quiet():
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


def test_round_trip_through_pinned_memory():
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.int32):
        x = torch.randint(0, 50, (300, 70), device=DEVICE).to(dtype)
        for view in (x, x.t(), x[:, :33], x[:0]):
            host = ops.offload(view)
            assert host.is_pinned() or host.numel() == 0
            back = ops.reload(host, DEVICE)
            assert (back.dtype, back.device, back.shape) == (dtype, DEVICE, view.shape)
            assert torch.equal(back.float(), view.float())


def test_neither_the_host_nor_the_current_stream_waits_for_the_copy():
    x = torch.randn(BIG, device=DEVICE)
    # The first round is for the driver, which may wait for the whole device when it loads a kernel or pins memory.
    for cycles in (1, 5 * LONG):
        torch.cuda.synchronize()
        with torch.cuda.stream(copies()):
            torch.cuda._sleep(cycles)
        ops.offload(x)
        x.mul_(2)
        torch.cuda.current_stream().synchronize()
    assert not copies().query()


def test_the_copy_waits_for_what_computes_its_source():
    x = torch.zeros(BIG, device=DEVICE)
    torch.cuda._sleep(LONG)
    x.fill_(3)
    host = ops.offload(x)
    copies().synchronize()
    assert (host == 3).all()


def test_writing_into_the_source_at_once():
    """Inductor does this when it reuses a buffer: no allocator, no version, nothing to wait for."""
    x = torch.ones(BIG, device=DEVICE)
    with torch.cuda.stream(copies()):
        torch.cuda._sleep(LONG)
    host = ops.offload(x)
    x.fill_(float("nan"))
    assert (ops.reload(host, DEVICE) == 1).all()


def test_freeing_the_source_at_once():
    with torch.cuda.stream(copies()):
        torch.cuda._sleep(LONG)
    hosts = []
    for i in range(8):
        x = torch.full((BIG,), float(i), device=DEVICE)
        hosts.append(ops.offload(x))
        del x
        torch.full((BIG,), float("nan"), device=DEVICE)
    for i, host in enumerate(hosts):
        assert (ops.reload(host, DEVICE) == i).all()


def test_reload_before_the_offload_has_ended():
    x = torch.ones(BIG, device=DEVICE)
    with torch.cuda.stream(copies()):
        torch.cuda._sleep(LONG)
    back = ops.reload(ops.offload(x), DEVICE)
    assert (back == 1).all()


def test_reloaded_memory_may_be_freed_while_it_is_used():
    """Its memory belongs to the copying stream, and is read by another that is slow."""
    host = ops.offload(torch.ones(BIG, device=DEVICE))
    total = torch.zeros((), device=DEVICE)
    for _ in range(4):
        back = ops.reload(host, DEVICE)
        torch.cuda._sleep(LONG // 4)
        total += back.sum()
        del back
        with torch.cuda.stream(copies()):
            torch.full((BIG,), float("nan"), device=DEVICE)
    assert total.item() == 4 * BIG


def test_pinned_memory_may_be_freed_while_it_is_copied():
    results = []
    for i in range(4):
        with torch.cuda.stream(copies()):
            torch.cuda._sleep(LONG // 4)
        host = ops.offload(torch.full((BIG,), float(i), device=DEVICE))
        results.append(ops.reload(host, DEVICE))
        del host
        torch.empty(BIG, pin_memory=True).fill_(float("nan"))
    for i, result in enumerate(results):
        assert (result == i).all()


def test_other_streams():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.zeros(BIG, device=DEVICE)
        torch.cuda._sleep(LONG)
        x.fill_(5)
        host = ops.offload(x)
    back = ops.reload(host, DEVICE)
    assert (back == 5).all()


class Stack(nn.Module):
    def __init__(self, layers, hidden, compiled):
        super().__init__()
        options = {"params_dtype": torch.bfloat16, "device": DEVICE}
        self.layers = nn.ModuleList(tgl.GroupedMLP(8, hidden, hidden, **options) for _ in range(layers))
        self.call = torch.compile(self.run, fullgraph=True) if compiled else self.run

    def run(self, x, splits):
        for layer in self.layers:
            x = x + layer(x, splits)
        return x


@pytest.mark.parametrize("compiled", [False, True])
def test_training_steps_are_the_same_and_memory_is_saved(compiled):
    hidden, rows = 512, 8192
    stack = Stack(6, hidden, compiled)
    splits = torch.tensor([rows // 8] * 7 + [rows // 8 - 100], device=DEVICE)
    x = torch.randn(rows, hidden, device=DEVICE, dtype=torch.bfloat16)
    held, grads = [], []
    for enabled in (False, True, True):
        stack.zero_grad()
        with tgl.cpu_offload(enabled) as context:
            y = stack.call(x, splits)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
        y.float().pow(2).sum().backward()
        grads.append([p.grad.clone() for p in stack.parameters()])
        assert (context.bytes_offloaded > 0) == enabled
        del y
    for mine, again, plain in zip(grads[1], grads[2], grads[0]):
        assert torch.equal(mine, again)
        assert torch.equal(mine, plain) or compiled
        torch.testing.assert_close(mine, plain)
    # Between forward and backward at least four fifths of what was moved is free.
    grads_held = sum(p.numel() * 2 for p in stack.parameters())
    assert held[0] - (held[1] - grads_held) > 0.8 * context.bytes_offloaded


def test_capture_is_refused():
    x = torch.ones(100, device=DEVICE)
    ops.offload(x)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(tgl.GraphCaptureError, match="tgl::offload copies on a stream of its own"),
        torch.cuda.graph(graph),
    ):
        ops.offload(x)
    torch.cuda.synchronize()
    assert torch.equal(ops.reload(ops.offload(x), DEVICE), x)

"""Matrices at slots of a packed tensor, on a device: exact, nothing else written, under graphs whose table changes."""

import copy

import pytest
import torch

import tgl
from tests.gpu.device import ARCH, DEVICE, TAIL, ends, integers, served
from tests.kernel_cases import CANARY, gradient
from tests.kernel_cases import poisoned as poisoned_behind
from tests.kernel_cases import product as product_of
from tests.memory import same_bytes
from tgl import recipes
from tgl.cutlass_kernels.config import GemmConfig

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SIZES = (300, 0, 3, 129, 64, 1, 517)
ROWS, GROUPS = sum(SIZES) + TAIL, len(SIZES)
LOW, HIGH = -(1 << 31), (1 << 31) - 1


def offs():
    return ends(SIZES)


def poisoned(t):
    return poisoned_behind(t, SIZES)


class Packed:
    """Matrices from the last to the first, at uneven distances in one buffer, as slots that begin every 16 bytes."""

    def __init__(self, matrices, fill=CANARY):
        groups, rows, columns = matrices.shape
        unit = 16 // matrices.element_size()
        size = rows * columns // unit
        assert size * unit == rows * columns
        starts = [1 + i * size + 3 * i * i for i in range(groups)][::-1]  # gaps that grow, of an odd number of units
        self.buffer = torch.full(((starts[0] + size + 3) * unit,), fill, dtype=matrices.dtype, device=DEVICE)
        self.view = self.buffer.as_strided((starts[0] + 1, rows, columns), (unit, columns, 1))
        self.slots = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        for g, start in enumerate(starts):
            self.view[start] = matrices[g]


def product(a, b, bias=None):
    return product_of(a, b, SIZES, bias)


def wgrads(a, b):
    return gradient(a, b, SIZES)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("absent", [(), (0, 3), tuple(range(GROUPS))], ids=["all", "some", "none"])
@pytest.mark.parametrize("number", [-1, LOW, HIGH, "first"])
def test_grouped_gemm(dtype, absent, number):
    a, b = poisoned(integers(ROWS, 264, dtype=dtype)), integers(GROUPS, 264, 328, dtype=dtype)
    packed = Packed(b, float("nan"))
    packed.slots[list(absent)] = packed.view.shape[0] if number == "first" else number
    b[list(absent)] = 0
    for bias in (None, integers(GROUPS, 328, dtype=F32)):
        got = served(tgl.grouped_gemm, a, packed.view, offs(), bias, slots=packed.slots)
        assert torch.equal(got, product(a, b, bias).to(dtype))
    dy, turned = poisoned(integers(ROWS, 328, dtype=dtype)), packed.view.transpose(1, 2)
    got = served(tgl.grouped_gemm, dy, turned, offs(), slots=packed.slots)
    assert torch.equal(got, product(dy, b.transpose(1, 2)).to(dtype))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("absent", [(), (0, 3), tuple(range(GROUPS))], ids=["all", "some", "none"])
@pytest.mark.parametrize("number", [-1, LOW, HIGH, "first"])
def test_wgrad(dtype, absent, number):
    a, dy = poisoned(integers(ROWS, 264)), poisoned(integers(ROWS, 328))
    packed, there = Packed(integers(GROUPS, 264, 328, dtype=dtype)), sorted(set(range(GROUPS)) - set(absent))
    before, starts = packed.buffer.clone(), packed.slots.clone()
    old = packed.view[starts.long()].double()
    packed.slots[list(absent)] = packed.view.shape[0] if number == "first" else number
    dw = wgrads(a, dy)
    for how in ("accumulate", "overwrite", "out"):
        expected = before.clone()
        view = expected.as_strided(packed.view.shape, packed.view.stride())
        for g in there:
            view[int(starts[g])] = (dw[g] + (old[g] if how == "accumulate" else 0)).to(dtype)
        packed.buffer.copy_(before)
        if how == "out":
            served(tgl.grouped_gemm_wgrad, a, dy, offs(), packed.slots, out=packed.view)
        else:
            arguments = (a, dy, offs(), packed.view, packed.slots)
            served(tgl.grouped_gemm_wgrad_accumulate_, *arguments, overwrite=how == "overwrite")
        assert torch.equal(packed.buffer, expected), how


SM90 = [GemmConfig(*t) for t in ((64, 64), (128, 128), (128, 256), (256, 128))]
SM90 += [GemmConfig(128, 256, cluster_n=2), GemmConfig(64, 128, pingpong=True)]
SM90 += [GemmConfig(128, 128, pingpong=True, cluster_n=2)]
SM100 = [GemmConfig(128, n) for n in (64, 256)] + [GemmConfig(256, n, two_cta=True) for n in (64, 256)]


@pytest.mark.parametrize("chosen", SM90 if ARCH == "sm_90" else SM100, ids=str)
def test_tilings(tiling, chosen):
    tiling(chosen)
    a, b, dy = poisoned(integers(ROWS, 264)), integers(GROUPS, 264, 328), poisoned(integers(ROWS, 328))
    packed, grad = Packed(b), Packed(torch.ones(GROUPS, 264, 328, device=DEVICE))
    assert torch.equal(served(tgl.grouped_gemm, a, packed.view, offs(), slots=packed.slots), product(a, b).to(BF16))
    served(tgl.grouped_gemm_wgrad_accumulate_, a, dy, offs(), grad.view, grad.slots)
    assert torch.equal(grad.buffer, Packed((wgrads(a, dy) + 1).float()).buffer)


def test_a_captured_graph_takes_a_new_table():
    a, b, dy = poisoned(integers(ROWS, 264)), integers(GROUPS, 264, 328), poisoned(integers(ROWS, 328))
    main_grad, slots = torch.zeros(GROUPS, 264, 328, device=DEVICE), torch.arange(GROUPS, device=DEVICE).int()

    def step():
        tgl.grouped_gemm_wgrad_accumulate_(a, dy, offs_, main_grad, slots)
        return tgl.grouped_gemm(a, b, offs_, slots=slots)

    offs_ = offs()
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    dw = wgrads(a, dy).float()
    for _ in range(3):
        order = torch.randperm(GROUPS, device=DEVICE)
        slots.copy_(order)
        main_grad.zero_()
        graph.replay()
        assert torch.equal(y, product(a, b[order]).to(BF16))
        assert torch.equal(main_grad[order], dw)


def test_layouts_without_a_tensor_map_are_copied():
    """A graph captures the copies: nothing reads a value on the host."""
    a, dy = poisoned(integers(ROWS, 264)), poisoned(integers(ROWS, 327))
    b, slots = integers(GROUPS, 264, 327), torch.arange(GROUPS - 1, -1, -1, device=DEVICE).int()
    slots[2] = HIGH
    kept, main_grad = b.flip(0), torch.full((GROUPS, 264, 327), CANARY, device=DEVICE)
    kept[2] = 0
    wanted = main_grad.clone()
    for g in set(range(GROUPS)) - {2}:
        wanted[GROUPS - 1 - g] += wgrads(a, dy)[g].float()

    def step():
        served(tgl.grouped_gemm_wgrad_accumulate_, a, dy, offs_, main_grad, slots)
        return served(tgl.grouped_gemm, a, b, offs_, slots=slots)

    offs_ = offs()
    assert torch.equal(step(), product(a, kept).to(BF16))
    assert torch.equal(main_grad, wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    main_grad.fill_(CANARY)
    graph.replay()
    assert torch.equal(y, product(a, kept).to(BF16))
    assert torch.equal(main_grad, wanted)


@pytest.mark.parametrize("format", ["fp8_tensor", "fp8_block", "mxfp8"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_scaled_wgrad(format, overwrite):
    if format == "mxfp8" and ARCH != "sm_100":
        pytest.skip("this device has no tensor cores for it")
    a, dy = poisoned(integers(ROWS, 256)), poisoned(integers(ROWS, 384))
    layout = "blocked" if format == "mxfp8" else "compact"
    how = {"format": format, "scale_layout": layout}
    exact = {"rowwise": False, "power_of_two": None if format == "mxfp8" else True}
    x, y = (tgl.group_quantize(t, offs(), **how, **exact) for t in (a, dy))
    grad = Packed(torch.ones(GROUPS, 256, 384, device=DEVICE))
    wanted = Packed((wgrads(a, dy) + (not overwrite)).float())
    arguments = (*x[3:5], *y[3:5], offs(), grad.view, None, None, grad.slots)
    served(tgl.grouped_gemm_scaled_wgrad_accumulate_, *arguments, **how, overwrite=overwrite)
    assert torch.equal(grad.buffer, wanted.buffer)


QUANTIZED = {
    "mxfp8": dict(format="mxfp8", scale_layout="blocked"),
    "mxfp8, compact": dict(format="mxfp8"),
    "nvfp4": dict(format="nvfp4", scale_layout="blocked"),
    "nvfp4, squares": dict(format="nvfp4", block_2d=True),
    "FP8 per group": dict(format="fp8_tensor"),
    "FP8 blocks": dict(format="fp8_block"),
    "FP8 squares": dict(format="fp8_block", block_2d=True),
}
ABSENT = {"all": (), "some": (0, 3), "none": tuple(range(GROUPS))}


def same_components(ours, theirs):
    return all(same_bytes(a.cpu(), b.cpu()) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("options", QUANTIZED.values(), ids=QUANTIZED)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("absent", ABSENT.values(), ids=ABSENT)
@pytest.mark.parametrize("number", [-1, LOW, HIGH, "first"])
def test_group_quantize(options, dtype, absent, number):
    w = torch.randn(GROUPS, 320, 264, device=DEVICE).to(dtype)
    packed = Packed(w, float("nan"))
    packed.slots[list(absent)] = packed.view.shape[0] if number == "first" else number
    w[list(absent)] = 0
    wanted = tgl.group_quantize(w.cpu(), None, **options)
    assert same_components(served(tgl.group_quantize, packed.view, None, slots=packed.slots, **options), wanted)
    assert same_components(served(tgl.group_quantize, w, None, **options), wanted)


@pytest.mark.parametrize("options", QUANTIZED.values(), ids=QUANTIZED)
def test_group_quantize_of_any_layout(options):
    """Transposed matrices of odd sizes at odd distances, which kernels reach by elements: none is copied."""
    w = torch.randn(GROUPS, 38, 58).bfloat16()
    buffer = torch.full((GROUPS * (38 * 58 + 1),), float("nan"), dtype=BF16, device=DEVICE)
    view = buffer.as_strided((GROUPS, 38, 58), (38 * 58 + 1, 1, 38))
    slots = torch.arange(GROUPS - 1, -1, -1, device=DEVICE).int()
    view.copy_(w.flip(0))
    slots[2], w[2] = HIGH, 0
    explained = tgl.explain("group_quantize", view, None, slots=slots, **options)
    assert explained.chosen.name == "tgl kernel, element by element"
    got = served(tgl.group_quantize, view, None, slots=slots, **options)
    assert same_components(got, tgl.group_quantize(w, None, **options))


@pytest.mark.parametrize("options", QUANTIZED.values(), ids=QUANTIZED)
def test_a_captured_group_quantize_takes_a_new_table(options):
    w, slots = torch.randn(GROUPS, 320, 264, device=DEVICE).bfloat16(), torch.arange(GROUPS, device=DEVICE).int()
    out = tgl.group_quantize(w, None, slots=slots, **options)
    graph = torch.cuda.CUDAGraph()
    tgl.group_quantize(w, None, slots=slots, out=out, **options)
    with torch.cuda.graph(graph):
        tgl.group_quantize(w, None, slots=slots, out=out, **options)
    for _ in range(3):
        order = torch.randperm(GROUPS, device=DEVICE)
        slots.copy_(order)
        graph.replay()
        assert same_components(out, tgl.group_quantize(w[order], None, **options))


@pytest.mark.parametrize("network", [tgl.GroupedLinear, tgl.GroupedMLP])
@pytest.mark.parametrize("recipe", [recipes.Float8CurrentScaling(), recipes.Float8BlockScaling()], ids=repr)
def test_a_layer_does_not_copy_its_weights(network, recipe):
    """Weights in a buffer in reverse order are not copied: a step takes the memory of a layer with weights in order."""
    options = {"bias": False, "params_dtype": BF16, "device": DEVICE, "single_grouped_weight": False}
    layer = network(GROUPS, 256, 384, recipe=recipe, **options)
    other = copy.deepcopy(layer)
    for linear in other.modules():
        if isinstance(linear, tgl.GroupedLinear):
            weights = linear.group_parameters("weight")
            packed = Packed(torch.stack([w.detach() for w in weights]), float("nan"))
            for weight, slot in zip(weights, packed.slots.tolist()):
                weight.data = packed.view[slot]
    x, sizes = integers(sum(SIZES), 256), torch.tensor(SIZES, device=DEVICE)
    peaks, results = [], []
    for network in (layer, other):
        with torch.no_grad():
            network(x, sizes)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            results.append(network(x, sizes))
            peaks.append(torch.cuda.max_memory_allocated() - before)
    assert torch.equal(*results)
    assert peaks[0] == peaks[1]


def test_nothing_is_read_on_the_host():
    """The table is read on the device alone: with synchronising calls forbidden, every op passes."""
    a, b, dy = integers(ROWS, 264), integers(GROUPS, 264, 328), integers(ROWS, 328)
    packed, grad, given = Packed(b), Packed(torch.ones(GROUPS, 264, 328, device=DEVICE)), offs()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tgl.grouped_gemm(a, packed.view, given, slots=packed.slots)
        for options in QUANTIZED.values():
            tgl.group_quantize(packed.view, None, slots=packed.slots, **options)
        tgl.grouped_gemm_wgrad_accumulate_(a, dy, given, grad.view, grad.slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")

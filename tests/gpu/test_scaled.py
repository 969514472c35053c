"""The kernels on quantised operands on a device: exact where sums are, canaries intact, one graph for every routing."""

import pytest
import torch

import tgl
from tests import chips
from tests.kernel_cases import ROUTINGS as ALL
from tests.kernel_cases import ends, exact, poisoned
from tests.memory import like, raw, same_bytes
from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.config import GemmConfig
from tgl.cutlass_kernels.gemm.operand_formats import OPERANDS
from tgl.cutlass_kernels.runtime import launcher

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
ARCH = chips.arch()
HERE = [name for name, form in OPERANDS.items() if ARCH in form.archs]
if not HERE:
    pytest.skip("needs a device that kernels are built for", allow_module_level=True)

BF16, F32 = torch.bfloat16, torch.float32
E5M2 = torch.float8_e5m2
TAIL = 77
ROUTINGS = {name: ALL[name] for name in ("edges", "forty", "one takes all", "all empty", "even")}


def quantized(x, offs, format, **options):
    """Components on the host. FP8 tensor-wise by a given power of two: 448 / amax would cost the sums seven bits."""
    if OPERANDS[format].vector:
        options["scale_layout"] = "blocked"
    if format == "fp8_tensor":
        options["scale"] = 2.0 ** torch.arange(len(x) if offs is None else len(offs)).remainder(4)
    if format == "fp8_block":
        options["block_2d"] = offs is None
    return tgl.group_quantize(x, offs, format=format, **options)


def layout(format):
    return {"format": format} | ({"scale_layout": "blocked"} if OPERANDS[format].vector else {})


class Gemm:
    """A call on the host and the same on the device."""

    def __init__(self, format, sizes, depth=320, columns=264, direction="rowwise"):
        self.offs = ends(sizes)
        x = poisoned(exact(sum(sizes) + TAIL, depth), sizes)
        w = exact(len(sizes), *((columns, depth) if direction == "rowwise" else (depth, columns)))
        q, p = quantized(x, self.offs, format), quantized(w, None, format)
        first = 0 if direction == "rowwise" else 3
        b, amax = p[first : first + 2], (q[2], p[first + 2])
        self.operands = [q[0], q[1], *b, self.offs, *(amax if format == "nvfp4" else (None, None))]
        self.options = {**layout(format), "b_direction": direction}

    def check(self, bias=None, scale=None, **options):
        here = [t.to(DEVICE) if t is not None else None for t in (*self.operands, bias, scale)]
        options |= self.options
        explained = str(tgl.explain(tgl.grouped_gemm_scaled, *here, **options))
        assert "runs tgl kernel" in explained, explained
        wanted = tgl.grouped_gemm_scaled(*self.operands, bias, scale, **options)
        assert torch.equal(tgl.grouped_gemm_scaled(*here, **options).cpu(), wanted)


class Wgrad:
    """The same for weight gradients."""

    def __init__(self, format, sizes, rows=320, columns=264, b_dtype=None):
        self.offs = ends(sizes)
        self.shape = (len(sizes), rows, columns)
        q, p = (poisoned(exact(sum(sizes) + TAIL, features), sizes) for features in (rows, columns))
        options = {"dtype": b_dtype} if b_dtype else {}
        q, p = quantized(q, self.offs, format), quantized(p, self.offs, format, **options)
        amax = (q[5], p[5]) if format == "nvfp4" else (None, None)
        self.operands = [*q[3:5], *p[3:5], self.offs, *amax]
        self.options = layout(format)

    def check(self):
        here = [t.to(DEVICE) if t is not None else None for t in self.operands]
        for dtype in (BF16, F32):
            wanted = tgl.grouped_gemm_scaled_wgrad(*self.operands, **self.options, out_dtype=dtype)
            assert torch.equal(tgl.grouped_gemm_scaled_wgrad(*here, **self.options, out_dtype=dtype).cpu(), wanted)
        for dtype in (BF16, F32):
            start = torch.randint(-3, 4, self.shape).to(dtype)
            main_grad = start.to(DEVICE, copy=True)
            tgl.grouped_gemm_scaled_wgrad_accumulate_(*here[:5], main_grad, *here[5:], **self.options)
            wanted = tgl.grouped_gemm_scaled_wgrad(*self.operands, **self.options, out_dtype=F32) + start.float()
            assert torch.equal(main_grad.cpu(), wanted.to(dtype))


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("format", HERE)
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_grouped_gemm(sizes, format, direction):
    torch.manual_seed(0)
    Gemm(format, sizes, direction=direction).check()


@pytest.mark.parametrize("format", HERE)
def test_epilogues(format):
    torch.manual_seed(0)
    gemm = Gemm(format, ROUTINGS["edges"])
    bias = torch.randint(-3, 4, (len(ROUTINGS["edges"]), 264))
    scale = torch.randint(-2, 3, (len(gemm.operands[0]),))
    gemm.check(bias.to(BF16))
    gemm.check(bias.float(), scale.to(BF16), out_dtype=F32)


def misaligned(t):
    room = like(torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:], t)
    raw(room).copy_(raw(t))
    return room


@pytest.mark.parametrize("format", HERE)
def test_layouts_without_a_tensor_map_are_copied(format):
    """Operands that no tensor map describes are copied without synchronising, in a CUDA graph as well."""
    torch.manual_seed(0)
    gemm = Gemm(format, ROUTINGS["edges"], depth=328, columns=262)
    gemm.check()
    operands = [misaligned(t.to(DEVICE)) if i < 4 else t.to(DEVICE) for i, t in enumerate(gemm.operands[:5])]
    operands += [None if t is None else t.to(DEVICE) for t in gemm.operands[5:]]
    explained = tgl.warmup(tgl.grouped_gemm_scaled, *operands, **gemm.options)
    assert explained.chosen.name == "tgl kernel between copies"
    assert not explained.syncs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = tgl.grouped_gemm_scaled(*operands, **gemm.options)
    graph.replay()
    assert torch.equal(y.cpu(), tgl.grouped_gemm_scaled(*gemm.operands, **gemm.options))
    Wgrad(format, ROUTINGS["edges"], rows=328, columns=262).check()


@pytest.mark.skipif("fp8_block" not in HERE, reason="needs a device with GEMMs on blocks of 128")
def test_torch_reads_blocked_scales():
    torch.manual_seed(0)
    gemm = Gemm("fp8_block", (384,), depth=512, columns=640)
    a, a_scale, b, b_scale, offs, *_ = (None if t is None else t.to(DEVICE) for t in gemm.operands)
    a, a_scale = a[:384], a_scale[:384].t().contiguous().t()  # without the tail, which torch would multiply
    y = torch._scaled_mm(a, b[0].t(), scale_a=a_scale, scale_b=b_scale[0].t(), out_dtype=BF16)
    assert torch.equal(y, tgl.grouped_gemm_scaled(a, a_scale, b, b_scale, offs, format="fp8_block"))


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("format", HERE)
def test_wgrad(sizes, format):
    torch.manual_seed(0)
    Wgrad(format, sizes).check()


@pytest.mark.parametrize("format", [f for f in HERE if f != "nvfp4"])
def test_mixed_element_types(format):
    torch.manual_seed(0)
    Wgrad(format, ROUTINGS["edges"], b_dtype=E5M2).check()


SM90 = [GemmConfig(m, n, 128, cluster_n=c) for m in (64, 128, 256) for n in (64, 128, 192) for c in (1, 2)]


@pytest.mark.skipif(ARCH != "sm_90", reason="tilings of sm_90")
@pytest.mark.parametrize("format", HERE)
@pytest.mark.parametrize("tiling", SM90, ids=str)
def test_every_tiling(format, tiling, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(tilings, "choose_scaled", lambda *_: tiling)
    monkeypatch.setattr(launcher, "warm_plans", {})
    sizes = (700, 0, 3, 1025, 64, 512)
    if tilings.reason("sm_90", "varlen_m", tiling, OPERANDS[format]) is None:
        Gemm(format, sizes, depth=1008, columns=776).check()
    if tilings.reason("sm_90", "varlen_k", tiling, OPERANDS[format]) is None:
        Wgrad(format, sizes, rows=1000, columns=776).check()


@pytest.mark.parametrize("format", HERE)
def test_one_graph_for_every_routing(format):
    torch.manual_seed(0)
    rows, groups = 1000, 6
    routings = [(1000, 0, 0, 0, 0, 0), (1, 31, 32, 33, 128, 129), (0, 0, 0, 0, 0, 0), (200, 0, 300, 7, 0, 493)]
    cases = []
    for sizes in routings:
        offs = ends(sizes)
        x, dy, w = exact(rows, 320), exact(rows, 264), exact(groups, 264, 320)
        cases.append((offs, quantized(x, offs, format), quantized(dy, offs, format), quantized(w, None, format)))
    offs, x, dy, w = ([t.to(DEVICE) for t in c] if isinstance(c, tuple) else c.to(DEVICE) for c in cases[0])
    names = layout(format)
    amax = (lambda p, q: (p, q)) if format == "nvfp4" else lambda p, q: (None, None)

    def step(offs, x, dy, w):
        y = tgl.grouped_gemm_scaled(x[0], x[1], w[0], w[1], offs, *amax(x[2], w[2]), **names)
        return y, tgl.grouped_gemm_scaled_wgrad(*dy[3:5], *x[3:5], offs, *amax(dy[5], x[5]), **names)

    step(offs, x, dy, w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(offs, x, dy, w)
    for new in (*cases, *cases):
        offs.copy_(new[0])
        for to, source in zip((x, dy, w), new[1:]):
            for t, s in zip(to, source):
                raw(t).copy_(raw(s))
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        for got, wanted in zip(results, step(*new)):
            assert torch.equal(got.cpu(), wanted)


@pytest.mark.parametrize("format", HERE)
def test_close_to_float32_and_the_same_bits(format):
    torch.manual_seed(0)
    sizes = (1000, 0, 37, 900, 128)
    offs = ends(sizes)
    x, w = torch.randn(sum(sizes), 1024).bfloat16(), torch.randn(len(sizes), 384, 1024).bfloat16()
    q, p = quantized(x, offs, format), quantized(w, None, format)
    amax = (q[2], p[2]) if format == "nvfp4" else (None, None)
    operands = (q[0], q[1], p[0], p[1], offs, *amax)
    here = [t.to(DEVICE) if t is not None else None for t in operands]
    wanted = tgl.grouped_gemm_scaled(*operands, **layout(format), out_dtype=F32)
    got = tgl.grouped_gemm_scaled(*here, **layout(format), out_dtype=F32)
    for _ in range(20):
        assert torch.equal(tgl.grouped_gemm_scaled(*here, **layout(format), out_dtype=F32), got)
    assert ((got.cpu() - wanted).norm() / wanted.norm()).item() < 2.0**-10


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("sizes", [ROUTINGS["edges"], ROUTINGS["even"], ROUTINGS["all empty"]], ids=str)
@pytest.mark.parametrize("format", HERE)
def test_a_product_with_its_activation_quantised_is_the_bytes_of_two_ops(format, sizes, interleaved):
    torch.manual_seed(0)
    op = tgl.grouped_gemm_scaled_activation_quantize
    gemm = Gemm(format, sizes, columns=512)
    here = [t.to(DEVICE) if t is not None else None for t in gemm.operands]
    rows, offs = here[0].shape[0], here[4]
    probs = torch.rand(rows, device=DEVICE)
    probs[sum(sizes) :] = float("nan")
    here = (*here, torch.randn(len(sizes), 512, device=DEVICE), probs)
    options = {**gemm.options, "interleaved": interleaved}
    explained = str(tgl.warmup(op, *here, **options))
    assert ("runs tgl kernel" if format == "mxfp8" else "runs GEMM, then activation and quantise") in explained
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        h, made = op(*here, **options)
    graph.replay()
    wanted_h = tgl.grouped_gemm_scaled(*here[:8], **gemm.options)
    wanted = tgl.grouped_activation_quantize(wanted_h, offs, probs, interleaved=interleaved, **layout(format))
    for got, two in zip((h, *made), (wanted_h, *wanted)):
        assert same_bytes(got, two)

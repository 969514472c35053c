"""The kernels on a device: exact on integers, canaries intact, the same bits every time, under graphs and streams."""

import pytest
import torch

import tgl
from tests.gpu.device import ARCH, DEVICE, TAIL, ends, integers, served
from tests.kernel_cases import CANARY, ROUTINGS, column_major, gradient, product, row_sums, spans
from tgl.cutlass_kernels.config import GemmConfig
from tgl.cutlass_kernels.launchers import reduce as calls
from tgl.cutlass_kernels.runtime import cache, launcher

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

# --- forward and input gradient ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("b_major", ["row", "column"])
def test_grouped_gemm(sizes, dtype, b_major):
    a, b = integers(sum(sizes) + TAIL, 200, dtype=dtype), integers(len(sizes), 200, 328, dtype=dtype)
    a[sum(sizes) :] = float("nan")
    expected = product(a, b, sizes)
    b = b if b_major == "row" else column_major(b)
    assert torch.equal(served(tgl.grouped_gemm, a, b, ends(sizes)), expected.to(dtype))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    "vectors", [("bias", None, None), ("bias32", F32, None), ("scaled", None, F32), ("both", F32, None)]
)
def test_epilogues(dtype, wide, vectors):
    name, bias_dtype, scale_dtype = vectors
    sizes = ROUTINGS["edges"]
    rows = sum(sizes) + TAIL
    a, b = integers(rows, 136, dtype=dtype), column_major(integers(len(sizes), 136, 264, dtype=dtype))
    bias = integers(len(sizes), 264, dtype=bias_dtype or dtype)
    scale = integers(rows, dtype=scale_dtype or dtype) if name in ("scaled", "both") else None
    a[sum(sizes) :] = float("nan")
    if scale is not None:
        scale[sum(sizes) :] = float("nan")
    out_dtype = F32 if wide else dtype
    got = served(tgl.grouped_gemm, a, b, ends(sizes), bias, scale, out_dtype=out_dtype)
    assert torch.equal(got, product(a, b, sizes, bias, scale).to(out_dtype))


def test_out_keeps_its_tail_and_its_surroundings():
    sizes = ROUTINGS["edges"]
    rows = sum(sizes) + TAIL
    a, b = integers(rows, 136), integers(len(sizes), 136, 200)
    buffer = torch.full((rows + 4, 216), CANARY, dtype=BF16, device=DEVICE)
    out = buffer[2:-2, 8:-8]
    tgl.grouped_gemm(a, b, ends(sizes), out=out)
    wanted = product(a, b, sizes).to(BF16)
    wanted[sum(sizes) :] = CANARY
    assert torch.equal(out, wanted)
    out.fill_(CANARY)
    assert buffer.eq(CANARY).all()


SM90 = [GemmConfig(*t) for t in ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 192), (128, 256))]
SM90 += [GemmConfig(*t) for t in ((256, 64), (256, 128))]
SM90 += [GemmConfig(*t, cluster_n=2) for t in ((128, 128), (128, 256), (256, 128))]
SM90 += [GemmConfig(*t, pingpong=True) for t in ((64, 128), (64, 256), (128, 64), (128, 128))]
SM90 += [GemmConfig(128, 128, pingpong=True, cluster_n=2)]
SM100 = [GemmConfig(128, n) for n in (64, 128, 256)] + [GemmConfig(256, n, two_cta=True) for n in (64, 128, 256)]


@pytest.mark.parametrize("chosen", SM90 if ARCH == "sm_90" else SM100, ids=str)
def test_every_tiling(tiling, chosen):
    tiling(chosen)
    sizes = (700, 0, 3, 1025, 64, 512)
    a, b, dy = integers(2400, 1000), integers(len(sizes), 1000, 776), integers(2400, 776)
    a[sum(sizes) :] = float("nan")
    dy[sum(sizes) :] = float("nan")
    offs = ends(sizes)
    assert torch.equal(served(tgl.grouped_gemm, a, b, offs), product(a, b, sizes).to(BF16))
    assert torch.equal(served(tgl.grouped_gemm_wgrad, a, dy, offs), gradient(a, dy, sizes).to(BF16))
    main_grad = integers(len(sizes), 1000, 776, dtype=F32)
    expected = gradient(a, dy, sizes) + main_grad.double()
    served(tgl.grouped_gemm_wgrad_accumulate_, a, dy, offs, main_grad)
    assert torch.equal(main_grad.double(), expected)


# --- weight gradient --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("wide", [False, True])
def test_wgrad(sizes, dtype, wide):
    rows = sum(sizes) + TAIL
    a, b = integers(rows, 136, dtype=dtype), integers(rows, 264, dtype=dtype)
    for t in (a, b):
        t[sum(sizes) :] = float("nan")
    out_dtype = F32 if wide else dtype
    got = served(tgl.grouped_gemm_wgrad, a, b, ends(sizes), out_dtype=out_dtype)
    assert torch.equal(got, gradient(a, b, sizes).to(out_dtype))


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_accumulate(sizes, dtype):
    rows = sum(sizes) + TAIL
    a, b = integers(rows, 136), integers(rows, 200)
    for t in (a, b):
        t[sum(sizes) :] = float("nan")
    main_grad = tgl.allocate_wgrad(len(sizes), (136, 200), dtype, DEVICE)
    main_grad.copy_(integers(*main_grad.shape, dtype=dtype))
    expected = gradient(a, b, sizes) + main_grad.double()
    empty = torch.tensor([g for g, n in enumerate(sizes) if not n], dtype=torch.long, device=DEVICE)
    main_grad[empty] = float("nan")  # an empty group's slot keeps its bytes
    served(tgl.grouped_gemm_wgrad_accumulate_, a, b, ends(sizes), main_grad)
    assert main_grad[empty].isnan().all()
    main_grad[empty] = expected[empty].to(dtype)
    assert torch.equal(main_grad, expected.to(dtype))


def test_layouts_without_a_tensor_map_are_copied():
    sizes = ROUTINGS["edges"]
    rows = sum(sizes) + TAIL
    a, b, dy = integers(rows, 136), integers(len(sizes), 136, 200), integers(rows, 200)
    for t in (a, dy):
        t[sum(sizes) :] = float("nan")
    offs, y, dw = ends(sizes), product(a, b, sizes).to(BF16), gradient(a, dy, sizes)
    shifted = torch.empty(b.numel() + 1, dtype=BF16, device=DEVICE)[1:].view(b.shape).copy_(b)

    def calls():
        yield served(tgl.grouped_gemm, column_major(a), b, offs), y
        yield served(tgl.grouped_gemm, a, shifted, offs), y
        yield served(tgl.grouped_gemm, a, b[..., :195].contiguous(), offs), y[:, :195]
        yield served(tgl.grouped_gemm_wgrad, column_major(a), column_major(dy), offs), dw.to(BF16)
        main_grad = torch.ones(len(sizes), 136, 195, device=DEVICE)
        served(tgl.grouped_gemm_wgrad_accumulate_, a, dy[:, :195], offs, main_grad)
        yield main_grad, (dw[..., :195] + 1).float()

    for got, wanted in calls():
        assert torch.equal(got, wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = list(calls())
    graph.replay()
    for got, wanted in results:
        assert torch.equal(got, wanted)


# --- reductions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes", [*ROUTINGS.values(), (2049, 0, 50_000, 3), (64,) * 64], ids=[*ROUTINGS, "long", "equal"]
)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("columns", [264, 136, 33])
def test_dbias(sizes, dtype, columns):
    dy = integers(sum(sizes) + TAIL, columns, dtype=dtype)
    bias, scale = integers(len(sizes), columns, dtype=F32), integers(len(dy), dtype=dtype)
    for t in (dy, scale):
        t[sum(sizes) :] = float("nan")
    offs = ends(sizes)
    sums = row_sums(dy, sizes)
    assert torch.equal(served(tgl.grouped_dbias, dy, offs).double(), sums)
    dbias, dscales = served(tgl.grouped_dbias_dscales, dy, bias, scale, offs)
    weighted = torch.stack([(dy[rows].double() * scale[rows, None].double()).sum(0) for _, rows in spans(sizes)])
    assert torch.equal(dbias.double(), weighted)
    expected = torch.zeros(len(dy), dtype=torch.float64, device=DEVICE)
    for g, rows in spans(sizes):
        expected[rows] = dy[rows].double() @ bias[g].double()
    assert torch.equal(dscales.double(), expected)


@pytest.mark.parametrize("dtype", list(calls.INTEGERS), ids=str)
def test_offsets(dtype):
    for groups in (1, 32, 257, 3000):
        sizes = torch.randint(0, 100, (groups,), device=DEVICE).to(dtype)
        assert torch.equal(served(tgl.splits_to_offsets, sizes), sizes.long().cumsum(0).int())


# --- whatever happens -------------------------------------------------------------------------------------------------


def test_bad_offsets_stay_in_bounds():
    a, b, dy = integers(300, 136), integers(4, 136, 200), integers(300, 200)
    low, high = -(1 << 31), (1 << 31) - 1
    for values in ((-5, 90, 40, 1 << 30), (high, low, high, 7), (-1, -2, -3, -4), (300, 301, high, high)):
        offs = torch.tensor(values, dtype=torch.int32, device=DEVICE)
        buffer = torch.full((304, 200), CANARY, dtype=BF16, device=DEVICE)
        grads = torch.full((6, 136, 200), CANARY, dtype=F32, device=DEVICE)
        tgl.grouped_gemm(a, b, offs, out=buffer[2:-2])
        tgl.grouped_gemm_wgrad(a, dy, offs, out=grads[1:-1])
        tgl.grouped_gemm_wgrad_accumulate_(a, dy, offs, grads[1:-1])
        tgl.grouped_dbias(dy, offs)
        torch.cuda.synchronize()
        assert torch.cat([buffer[:2], buffer[-2:]]).eq(CANARY).all()
        assert torch.cat([grads[:1], grads[-1:]]).eq(CANARY).all()


def test_the_same_bits_every_time_and_close_to_float32():
    sizes = (1000, 0, 37, 3000, 128)
    a = torch.randn(sum(sizes), 1024, device=DEVICE, dtype=BF16)
    dy = torch.randn(sum(sizes), 768, device=DEVICE, dtype=BF16)
    b = torch.randn(len(sizes), 1024, 768, device=DEVICE, dtype=BF16)
    offs = ends(sizes)
    ops = (
        lambda: tgl.grouped_gemm(a, b, offs),
        lambda: tgl.grouped_gemm_wgrad(a, dy, offs, out_dtype=F32),
        lambda: tgl.grouped_dbias(dy, offs),
    )
    for op in ops:
        first = op()
        for _ in range(20):
            assert torch.equal(op(), first)
    reference = product(a, b, sizes)
    error = (ops[0]().double() - reference).abs().max() / reference.abs().max()
    theirs = torch.cat([a[rows] @ b[g] for g, rows in spans(sizes)])
    assert error <= 2 * (theirs.double() - reference).abs().max() / reference.abs().max() + 1e-5


def test_one_graph_for_every_routing():
    groups, rows = 8, 2000
    a, b, dy = integers(rows, 264), integers(groups, 264, 328), integers(rows, 328)
    splits = torch.zeros(groups, dtype=torch.int64, device=DEVICE)
    main_grad = torch.zeros(groups, 264, 328, dtype=F32, device=DEVICE)

    def step():
        offs = tgl.splits_to_offsets(splits)
        y = tgl.grouped_gemm(a, b, offs)
        dx = tgl.grouped_gemm(dy, b.transpose(1, 2), offs)
        tgl.grouped_gemm_wgrad_accumulate_(a, dy, offs, main_grad)
        return y, dx, tgl.grouped_gemm_wgrad(a, dy, offs), tgl.grouped_dbias(dy, offs)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    generator = torch.Generator().manual_seed(1)
    for turn in range(20):
        weights = torch.rand(groups, generator=generator) ** 4
        weights[torch.randint(0, groups, (2,), generator=generator)] = 0
        sizes = (weights / weights.sum() * torch.randint(1, rows + 1, (1,), generator=generator)).long().tolist()
        splits.copy_(torch.tensor(sizes))
        a.copy_(integers(rows, 264))
        main_grad.zero_()
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        y, dx, dw, dbias = results
        assert torch.equal(y, product(a, b, sizes).to(BF16)), turn
        assert torch.equal(dx, product(dy, b.transpose(1, 2), sizes).to(BF16)), turn
        wanted = gradient(a, dy, sizes)
        assert torch.equal(dw, wanted.to(BF16)), turn
        assert torch.equal(main_grad.double(), wanted), turn
        assert torch.equal(dbias.double(), row_sums(dy, sizes)), turn


def test_two_streams_at_once():
    problems = []
    for sizes in (ROUTINGS["edges"], ROUTINGS["forty"]):
        rows = sum(sizes)
        a, b, dy = integers(rows, 520), integers(len(sizes), 520, 392), integers(rows, 392)
        expected = product(a, b, sizes).to(BF16), gradient(a, dy, sizes).to(BF16)
        problems.append((a, b, dy, ends(sizes), expected))
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    results = []
    for _ in range(50):
        for stream, (a, b, dy, offs, expected) in zip(streams, problems):
            with torch.cuda.stream(stream):
                results.append((tgl.grouped_gemm(a, b, offs), tgl.grouped_gemm_wgrad(a, dy, offs), expected))
    torch.cuda.synchronize()
    for y, dw, (y_expected, dw_expected) in results:
        assert torch.equal(y, y_expected)
        assert torch.equal(dw, dw_expected)


def test_capture_without_a_compiled_kernel_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "compiled_kernels", {})
    monkeypatch.setattr(launcher, "warm_plans", {})
    before = cache._directory
    cache.set_directory(tmp_path)
    try:
        a, b, offs = integers(64, 136), integers(2, 136, 200), ends((30, 34))
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(tgl.GraphCaptureError, match="warmup"), torch.cuda.graph(graph):
            tgl.grouped_gemm(a, b, offs)
        tgl.warmup(tgl.grouped_gemm, a, b, offs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = tgl.grouped_gemm(a, b, offs)
        graph.replay()
        assert torch.equal(out, product(a, b, (30, 34)).to(BF16))
    finally:
        cache.set_directory(before)

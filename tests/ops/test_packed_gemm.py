"""``grouped_gemm_packed``: the product with the decoded matrices, to the bit, without a decoded copy of all of them."""

import math
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tgl
from tests import scaled_oracle as oracle
from tests.covers import covering, form
from tests.peak_memory import peak_memory
from tgl import backends
from tgl.backends.composite import packed_gemm
from tgl.meta import packed
from tgl.meta.formats import FORMATS
from tgl.testing import sample_inputs

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
OFFS = torch.tensor([3, 3, 10, 12], dtype=torch.int32)
ROWS = 14


def matrices(format, shape=(4, 24, 64), seed=0, spread=3):
    """Components of matrices over some binades, and what ``group_dequantize`` makes of them."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-spread, spread, shape, generator=generator)
    form = FORMATS[format]
    made = tgl.group_quantize(w, None, format=format, columnwise=False, block_2d=form.square_scales)
    amax = made.amax if form.decodes_with_amax else None
    return made.data, made.scale, amax


def decoded(format, data, scale, amax, dtype):
    square = FORMATS[format].square_scales
    return tgl.group_dequantize(data, scale, None, amax, format=format, out_dtype=dtype, block_2d=square)


def rows(columns, dtype=BF16):
    x = torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[OFFS[-1] :] = math.nan
    return x


@pytest.mark.parametrize("over_rows", [False, True], ids=["columns", "rows"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32, torch.float64], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_the_product_with_decoded_matrices(format, dtype, over_rows):
    data, scale, amax = matrices(format)
    w = decoded(format, data, scale, amax, F32 if dtype == torch.float64 else dtype).to(dtype)
    right = w if over_rows else w.transpose(1, 2)
    a = rows(right.shape[1], dtype)
    bias, factor = torch.randn(4, right.shape[2], dtype=dtype), torch.rand(ROWS, dtype=dtype)
    wanted = torch.zeros(ROWS, right.shape[2], dtype=dtype)
    for g, (start, end) in enumerate(zip([0, *OFFS.tolist()], OFFS.tolist())):
        one = torch.tensor([end - start], dtype=torch.int32)
        wanted[start:end] = tgl.grouped_gemm(
            a[start:end], right[g : g + 1], one, bias[g : g + 1], factor[start:end], out_dtype=dtype
        )
    options = {"format": format, "over_rows": over_rows}
    assert torch.equal(tgl.grouped_gemm_packed(a, data, scale, OFFS, amax, bias, factor, **options), wanted)


@pytest.mark.parametrize("format", FORMATS)
def test_exact_by_the_oracle(format):
    """Integers and powers of two, in every routing, against plain loops over bytes."""
    for sample in sample_inputs("grouped_gemm_packed", dtypes=(F32,)):
        if sample.options["format"] != format or sample.layout != "row":
            continue
        tensors = sample.tensors()
        b, b_scale, b_amax = tensors["b"], tensors["b_scale"], tensors["b_amax"]
        w = oracle.matrices(format, "compact", "rowwise", b, b_scale, b_amax)  # [G, K, N]
        w = w.transpose(0, 2, 1) if sample.options["over_rows"] else w
        wanted = torch.zeros(tensors["a"].shape[0], w.shape[2], dtype=torch.float64)
        for g, start, end in oracle.groups(tensors["offs"]):
            wanted[start:end] = tensors["a"][start:end].double() @ torch.from_numpy(w[g])
            if tensors.get("bias") is not None:
                factor = tensors["bias_scale"]
                shift = tensors["bias"][g].double()[None]
                wanted[start:end] += shift if factor is None else factor[start:end, None].double() * shift
        found = tgl.grouped_gemm_packed(**tensors, **sample.options)
        assert torch.equal(found, wanted.float()), sample.name


def every_value(scales=range(256)):
    """MXFP4 matrices ``[scales, 16, 32]`` whose columns have the 16 codes, one scale each."""
    codes = torch.arange(16, dtype=torch.uint8)
    data = (codes | codes << 4)[None, :, None].expand(len(scales), 16, 16).contiguous()
    scale = torch.tensor(list(scales), dtype=torch.uint8)[:, None, None].expand(-1, 16, 1).contiguous()
    return data, scale


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_element_under_every_scale(dtype):
    """The nearest number of the dtype: infinite beyond its range, and NaN under the scale that is."""
    data, scale = every_value()
    offs = torch.arange(1, 257, dtype=torch.int32)
    a = torch.zeros(256, 32, dtype=dtype)
    a[:, 0] = 1.0
    exact = torch.from_numpy(oracle.E2M1_TABLE) * torch.from_numpy(oracle.E8M0_TABLE)[:, None]
    wanted = exact.to(dtype)  # one rounding: float64 holds the products
    # A product with zeros adds the zeros' own: NaN where the matrix is infinite or NaN in another column.
    broken = ~wanted.isfinite()
    found = tgl.grouped_gemm_packed(a, data, scale, offs, format="mxfp4", out_dtype=F32)
    assert torch.equal(found[~broken], wanted.float()[~broken])
    assert found[broken].isnan().all()
    largest = {BF16: 252, F16: 140}[dtype]
    assert not broken[:largest].any()
    assert broken[largest + 3].any()


def test_gradients():
    data, scale, _ = matrices("mxfp4")
    w = decoded("mxfp4", data, scale, None, BF16)
    a, bias, factor = rows(64).requires_grad_(), torch.randn(4, 24).requires_grad_(), torch.rand(ROWS).requires_grad_()
    dy = torch.randn(ROWS, 24).bfloat16()
    y = tgl.grouped_gemm_packed(a, data, scale, OFFS, None, bias, factor, format="mxfp4")
    z = tgl.grouped_gemm(a, w.transpose(1, 2), OFFS, bias, factor)
    saved = {t.data_ptr() for t in y.grad_fn.saved_tensors if t is not None}
    assert saved == {t.data_ptr() for t in (data, scale, OFFS, bias, factor)}
    leaves = (a, bias, factor)
    for found, wanted in zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(z, leaves, dy)):
        torch.testing.assert_close(found, wanted)


def test_packed_matrices_are_frozen():
    data, scale, amax = matrices("nvfp4")
    a = rows(64).requires_grad_()
    for name, operands in (("b_amax", (data, scale, OFFS, amax.requires_grad_())),):
        with pytest.raises(RuntimeError, match=f"`{name}` must not require grad: packed matrices are frozen"):
            tgl.grouped_gemm_packed(a, *operands, format="nvfp4")


BAD = {
    "a": (lambda c: {"a": c["a"][:, :62]}, ValueError, r"`b` must be \[G, N, K/2\] with K = 62 like `a`"),
    "a dtype": (lambda c: {"a": c["a"].long()}, TypeError, "`a` must be float64, float32, bfloat16 or float16"),
    "b": (lambda c: {"b": c["b"].float()}, TypeError, "`b` must be torch.uint8 for mxfp4"),
    "b layout": (lambda c: {"b": c["b"].mT.contiguous().mT}, ValueError, "`b` must be contiguous"),
    "scale": (
        lambda c: {"b_scale": c["b_scale"][:, 1:].contiguous()},
        ValueError,
        r"`b_scale` must be of shape \[G, N, ceil\(K/32\)\] \(compact\) = \(4, 24, 2\)",
    ),
    "offs": (lambda c: {"offs": c["offs"][1:]}, ValueError, "`offs` must"),
    "amax": (lambda c: {"b_amax": torch.ones(4)}, ValueError, "`b_amax` must be None for mxfp4"),
    "bias": (lambda c: {"bias": torch.ones(4, 64)}, ValueError, r"`bias` must be of shape \[G, N\] = \(4, 24\)"),
    "factor": (lambda c: {"bias_scale": torch.ones(ROWS)}, ValueError, "`bias_scale` must be None when there is no"),
    "format": (lambda c: {"format": "int4"}, ValueError, "`format` must be one of mxfp8, nvfp4, mxfp4"),
    "over_rows": (lambda c: {"over_rows": True}, ValueError, r"`b` must be \[G, N, K/2\] with N = 64 like `a`"),
    "out_dtype": (lambda c: {"out_dtype": torch.float64}, TypeError, "`out_dtype` must"),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("change, error, message", BAD.values(), ids=BAD)
def test_bad_input(change, error, message, device):
    data, scale, _ = matrices("mxfp4")
    call = {"a": rows(64), "b": data, "b_scale": scale, "offs": OFFS, "format": "mxfp4"}
    call |= change(call)
    call = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in call.items()}
    with pytest.raises(error, match=message):
        tgl.grouped_gemm_packed(**call)


@pytest.mark.parametrize("over_rows", [False, True], ids=["columns", "rows"])
def test_memory_of_one_matrix(over_rows):
    """Peak memory does not grow with the number of matrices."""
    peaks = []
    for count in (2, 16):
        data, scale, _ = matrices("mxfp4", (count, 256, 512))
        a = torch.randn(64, 256 if over_rows else 512).bfloat16()
        offs = torch.arange(1, count + 1, dtype=torch.int32) * (64 // count)
        peaks.append(
            peak_memory(lambda: tgl.grouped_gemm_packed(a, data, scale, offs, format="mxfp4", over_rows=over_rows))  # noqa: B023
        )
    matrix = 256 * 512 * 2
    assert abs(peaks[1] - peaks[0]) < matrix // 4
    assert peaks[1] < 16 * matrix // 2


# --- where no kernel is -----------------------------------------------------------------------------------------------


def arguments(format, **changes):
    for sample in sample_inputs("grouped_gemm_packed", dtypes=(F32, BF16)):
        if sample.options["format"] == format and sample.layout == "row" and not sample.widened:
            yield sample, *backends.registry.described["grouped_gemm_packed"](**sample.tensors(), **sample.options)


@pytest.mark.cover(1)
@pytest.mark.parametrize("budget", [1, 1 << 13, 1 << 27])
@pytest.mark.parametrize("format", FORMATS)
def test_pieces(format, budget, monkeypatch):
    """Pieces of one matrix, of some, and of all are exact, in every routing."""
    monkeypatch.setattr(packed, "BYTES", budget)
    for sample, _, args, options in arguments(format):
        out = torch.full(options["out"].shape, math.nan, dtype=options["out"].dtype)
        packed_gemm.run(*args, **{**options, "out": out})
        assert torch.equal(out, tgl.grouped_gemm_packed(**sample.tensors(), **sample.options)), sample.name


@pytest.mark.parametrize("ends", [(10**9, -5, 7), (-7, -7, -7), (9, 4, 2), (2**31 - 1,) * 3])
def test_bad_offsets_are_never_followed(ends, monkeypatch):
    monkeypatch.setattr(packed, "BYTES", 1)
    data, scale, _ = matrices("mxfp4", (3, 24, 64))
    offs = torch.tensor(ends, dtype=torch.int32)
    packed_gemm.run(rows(64), data, scale, offs, None, None, None, format="mxfp4", over_rows=False, out=rows(24))
    tgl.grouped_gemm_packed(rows(64), data, scale, offs, format="mxfp4")


def test_nothing_is_read_on_the_host(monkeypatch):
    monkeypatch.setattr(packed, "BYTES", 1)
    monkeypatch.setattr(backends, "run", lambda *args, **options: None)
    for _, _, args, options in covering(list(arguments("mxfp4")), lambda call: form(call[0]), 1):  # routings are values
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in args]
            out = torch.empty(options["out"].shape, dtype=options["out"].dtype)
            packed_gemm.run(*fakes, **{**options, "out": out})


def test_explain_reports_the_pieces():
    made = [backends.add(replace(i, priority=i.priority + 50)) for i in packed_gemm.implementations("cpu")]
    try:
        data, scale, _ = matrices("mxfp4")
        text = str(tgl.explain(tgl.grouped_gemm_packed, rows(64), data, scale, OFFS, format="mxfp4"))
    finally:
        for implementation in made:
            backends.remove(implementation)
    assert "runs decoded in pieces, dense GEMM (decodes one matrix, or 256 MiB of them, at a time" in text

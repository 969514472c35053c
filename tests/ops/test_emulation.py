"""Emulated GEMMs on formats that a chip lacks: beyond bfloat16's range, with bad offsets, without the host."""

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tgl
from tests import covers
from tests import scaled_oracle as oracle
from tests.without_kernels import emulated_formats
from tgl import backends
from tgl.backends.composite import decoded_gemm, decoded_wgrad
from tgl.cutlass_kernels.archs import chips, serving
from tgl.cutlass_kernels.gemm.operand_formats import OPERANDS
from tgl.cutlass_kernels.runtime import device
from tgl.meta.formats import FORMATS
from tgl.testing import SIGNATURES

MODULES = {
    "grouped_gemm_scaled": decoded_gemm,
    "grouped_gemm_scaled_wgrad": decoded_wgrad,
    "grouped_gemm_scaled_wgrad_accumulate_": decoded_wgrad,
}
BF16 = torch.bfloat16


def operands(name, form):
    """Calls of the op as its implementation gets them, on samples that hold every layout, bias and output."""
    samples = SIGNATURES[name][0].samples(routings=("ragged_tail",))
    for sample in covers.covering([sample for sample in samples if sample.options["format"] == form], covers.form, 1):
        yield backends.registry.described[name](**sample.tensors(), **sample.options)


@pytest.mark.parametrize("scale", [0, 1, 2, 3, 127, 246, 247, 254])
def test_powers_beyond_bfloat16(scale):
    """Rows and matrices of the largest and of the smallest scales that there are: one row of each in a product."""
    # Products are multiples of 2^-11 whose magnitudes add up to less than 2^13: a sum is exact in any order.
    depth, codes = 64, torch.tensor([1.0, -2.0, 2.0**-9, 3 * 2.0**-9, 0.5, -0.25, 1.75, 448.0])
    a = codes.repeat(3, depth // 8).to(torch.float8_e4m3fn)
    b = codes.flip(0).repeat(1, 8, depth // 8).to(torch.float8_e4m3fn)
    tensors = {
        "a": a,
        "a_scale": torch.tensor([[scale, scale], [127, 127], [127, 100]], dtype=torch.uint8),
        "b": b,
        "b_scale": torch.full((1, 8, 2), min(254 - scale, 240), dtype=torch.uint8),
        "offs": torch.tensor([3], dtype=torch.int32),
        "a_amax": None,
        "b_amax": None,
    }
    options = {"format": "mxfp8", "b_direction": "rowwise", "scale_layout": "compact"}
    want = torch.from_numpy(oracle.gemm({**tensors, "bias": None, "bias_scale": None}, options))
    out = torch.empty(3, 8)
    decoded_gemm.run(*tensors.values(), None, None, **options, out=out, zero_tail=True)
    inside = want.abs() < torch.finfo(torch.float32).max
    assert inside[1:].any()
    assert torch.equal(out[inside].double(), want.float().double()[inside])
    assert out[~inside].isinf().all()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("ends", [(10**9, -5, 7), (-7, -7, -7), (9, 4, 2), (2**31 - 1,) * 3])
def test_bad_offsets_are_never_followed(name, form, ends):
    """An index out of bounds is an error of the CPU's indexing, which makes none here."""
    for _, args, options in operands(name, form):
        offs = args[4].clone()
        offs[: len(ends)] = torch.tensor(ends, dtype=torch.int32)[: offs.shape[0]]
        given = {**options, "out": torch.zeros(options["out"].shape, dtype=options["out"].dtype)}
        MODULES[name].run(*args[:4], offs, *args[5:], **given)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", MODULES)
def test_nothing_is_read_on_the_host(name, form, monkeypatch):
    """Fake tensors have no values: reading one raises."""
    monkeypatch.setattr(decoded_gemm, "_dense", lambda left, right, groups: torch.empty(left.shape[0], right.shape[2]))
    monkeypatch.setattr(
        decoded_wgrad, "_dense", lambda left, right, ends: torch.empty(ends.shape[0], left.shape[1], right.shape[1])
    )
    for _, args, options in operands(name, form):
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in args]
            tables = {key: mode.from_tensor(t) for key, t in options.items() if key == "slots"}
            out = torch.empty(options["out"].shape, dtype=options["out"].dtype)
            MODULES[name].run(*fakes, **{**options, **tables, "out": out})


def test_it_warns_once():
    with emulated_formats():
        x, offs, w = torch.ones(4, 64), torch.tensor([4], dtype=torch.int32), torch.ones(1, 64, 64)
        a, b = tgl.group_quantize(x, offs, format="mxfp8"), tgl.group_quantize(w, None, format="mxfp8")
        call = (a.data, a.scale, b.data, b.scale, offs)
        explained = tgl.explain(tgl.grouped_gemm_scaled, *call, format="mxfp8")
        assert explained.emulates
        assert "an emulation: operands decoded to bfloat16" in str(explained)
        with pytest.warns(UserWarning, match="cpu has no kernel for GEMMs on mxfp8, which are emulated"):
            tgl.grouped_gemm_scaled(*call, format="mxfp8")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            tgl.grouped_gemm_scaled(*call, format="mxfp8")
        assert not said
    assert not tgl.explain(tgl.grouped_gemm_scaled, *call, format="mxfp8").emulates


@pytest.mark.cover(2)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("arch", chips())
@pytest.mark.parametrize("name", list(MODULES)[:2])
def test_every_format_is_served_and_never_emulated_beside_a_kernel(monkeypatch, name, arch, form):
    monkeypatch.setattr(device, "packages_reason", lambda: None)
    monkeypatch.setattr(backends.target, "cuda_arch", lambda device: arch)
    for _, args, options in operands(name, form):
        with FakeTensorMode(allow_non_fake_inputs=True):
            fakes = [torch.empty_like(t, device="cuda") if isinstance(t, torch.Tensor) else t for t in args]
            found = backends.report(name, torch.device("cuda", 0), *fakes, **options)
        assert found.chosen is not None, found
        entry = serving(arch)
        kernels = entry is not None and form in OPERANDS and entry.name in OPERANDS[form].archs
        assert found.emulates == (not kernels), found

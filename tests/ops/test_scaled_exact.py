"""The scaled GEMMs give exactly what decoding every element by hand gives, and round within a derived bound."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

import tgl
from tests import scaled_oracle as oracle
from tests.memory import new_memory_is_nan
from tests.without_kernels import emulated_formats
from tests.zero_tails import zero_tails_asked
from tgl.meta.formats import FORMATS
from tgl.testing import SIGNATURES, GroupSizes
from tgl.testing.scaled_samples import QuantizedSample

pytestmark = pytest.mark.filterwarnings("ignore:tgl. cpu has no kernel for GEMMs")

SMALL = ("ragged_tail", "even", "empty_first", "empty_middle", "empty_last", "all_empty", "no_rows", "no_groups")
LARGE = ("above_tile", GroupSizes("many", tuple((7 * g) % 4 for g in range(40)), 64))
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half an ulp, relative


@pytest.fixture(params=["loop", "emulation"], autouse=True)
def served_by(request):
    """The CPU's implementation, and what emulates formats on a GPU whose tensor cores lack them."""
    with {"loop": nullcontext, "emulation": emulated_formats}[request.param]():
        yield


def expected(sample, tensors):
    if sample.signature.wgrad:
        dimensions = sample.signature.dimensions
        return oracle.wgrad(tensors, sample.options, dimensions["M"], dimensions["N"])
    return oracle.gemm(tensors, sample.options)


def run(sample, tensors):
    op = tgl.grouped_gemm_scaled_wgrad if sample.signature.wgrad else tgl.grouped_gemm_scaled
    return op(**tensors, **sample.options)


def of_format(name, form, routings, full=False, **changes):
    signature = SIGNATURES[name][0]
    for sample in type(signature)(**{**vars(signature), **changes}).samples(routings=routings, full=full):
        if sample.options["format"] == form:
            yield sample


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["grouped_gemm_scaled", "grouped_gemm_scaled_wgrad"])
def test_exact(name, form):
    """Every element type, scale layout, direction, bias and output dtype; partial blocks in every dimension."""
    small = {"K": 18, "M": 18, "N": 10} if form != "mxfp8" else {"K": 35, "M": 5, "N": 7}
    count = 0
    for routings, full in ((SMALL[:1], True), (SMALL[1:], False)):
        for sample in of_format(name, form, routings, full, dimensions=small):
            tensors = sample.tensors()
            want = torch.from_numpy(expected(sample, sample.tensors(tail=0.0))).to(sample.dtype)
            assert torch.equal(run(sample, tensors), want), sample.name
            count += 1
    assert count > 12


@pytest.mark.parametrize("none", ["K", "M", "N"])
@pytest.mark.parametrize("form", FORMATS)
def test_no_features(form, none):
    """Blocked scales of an operand without features have no elements."""
    name = "grouped_gemm_scaled" if none == "K" else "grouped_gemm_scaled_wgrad"
    sizes = {"K": 18, "M": 18, "N": 10, none: 0}
    for sample in of_format(name, form, SMALL[:1], dimensions=sizes):
        tensors = sample.tensors()
        want = torch.from_numpy(expected(sample, sample.tensors(tail=0.0))).to(sample.dtype)
        assert torch.equal(run(sample, tensors), want), sample.name


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["grouped_gemm_scaled", "grouped_gemm_scaled_wgrad"])
def test_exact_over_several_tiles(name, form):
    """Groups larger than a tile, many groups, and more than 128 features."""
    for routing, sizes in zip(LARGE, ({"K": 6, "M": 6, "N": 4}, {"K": 6, "M": 6, "N": 4})):
        for sample in of_format(name, form, (routing,), dimensions=sizes):
            if sample.dtype == torch.float32 and sample.a_dtype == sample.b_dtype:
                want = torch.from_numpy(expected(sample, sample.tensors(tail=0.0))).float()
                assert torch.equal(run(sample, sample.tensors()), want), sample.name
    routing = GroupSizes("two", (3, 2), 6)
    for sample in of_format(name, form, (routing,), dimensions={"K": 262, "M": 150, "N": 134}):
        if sample.dtype == torch.float32 and sample.a_dtype == sample.b_dtype and sample.given == ():
            want = torch.from_numpy(expected(sample, sample.tensors(tail=0.0))).float()
            assert torch.equal(run(sample, sample.tensors()), want), sample.name


def random_bytes(sample: QuantizedSample) -> dict:
    """The sample's components with random elements and scales of a wide range in the routed part."""
    tensors = sample.tensors(tail=0.0)
    generator = torch.Generator().manual_seed(1)
    for name in ("a", "b"):
        raw = tensors[name].view(torch.uint8)
        used = raw != 0  # leave unused places alone
        limit = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}.get(tensors[name].dtype)
        if limit is None:
            raw.copy_(torch.where(used, torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8), raw))
        else:
            magnitude = torch.randint(0, limit + 1, raw.shape, generator=generator)
            sign = torch.randint(0, 2, raw.shape, generator=generator) * 128
            raw.copy_(torch.where(used, (magnitude + sign).to(torch.uint8), raw))
        scale = tensors[f"{name}_scale"]
        if scale.dtype == torch.float32:
            scale.mul_(torch.rand(scale.shape, generator=generator) + 0.5)
        elif sample.options["format"] == "nvfp4":
            scale.copy_(torch.where(scale != 0, torch.randint(1, 0x7F, scale.shape, generator=generator), 0))
        if tensors[f"{name}_amax"] is not None:
            tensors[f"{name}_amax"].mul_(torch.rand(tensors[f"{name}_amax"].shape, generator=generator) + 0.5)
    return tensors


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["grouped_gemm_scaled", "grouped_gemm_scaled_wgrad"])
def test_rounding_error(name, form):
    """Within the error bound of a float32 sum in any order, of factors rounded at most four times (Higham, 3.1)."""
    for sample in of_format(name, form, ("above_tile",), dimensions={"K": 34, "M": 10, "N": 6}):
        if sample.given and len(sample.given) < 2:
            continue
        tensors = random_bytes(sample)
        want = expected(sample, tensors)
        magnitude = expected(sample, absolute(tensors))
        depth = 160 if sample.signature.wgrad else sample.signature.dimensions["K"]
        u = UNIT[torch.float32]
        gamma = (depth + 8) * u / (1 - (depth + 8) * u)
        bound = gamma * magnitude
        bound = bound + UNIT[sample.dtype] * (np.abs(want) + bound)
        got = run(sample, tensors).double().numpy()
        if sample.dtype == torch.float16:
            inside = np.abs(want) + bound < 65504
            bound = bound + 2.0**-25  # half of the smallest subnormal
            got, want, bound = got[inside], want[inside], bound[inside]
        assert (np.abs(got - want) <= bound).all(), sample.name
        assert np.isfinite(got).all()


def absolute(tensors):
    """The operands' magnitudes: every sign bit cleared."""
    cleared = {}
    for name, t in tensors.items():
        if t is None or t.dtype == torch.int32:
            cleared[name] = t
        elif name in ("a", "b"):
            mask = 0x77 if t.dtype == torch.uint8 else 0x7F
            cleared[name] = (t.view(torch.uint8) & mask).view(t.dtype)
        else:
            cleared[name] = t if t.dtype == torch.uint8 else t.abs()
    return cleared


@pytest.mark.parametrize("form", FORMATS)
def test_accumulate_adds_once_rounded_and_overwrite_replaces(form):
    for sample in of_format("grouped_gemm_scaled_wgrad_accumulate_", form, ("ragged_tail",)):
        tensors = sample.tensors(layout="row")
        want = expected(sample, sample.tensors(tail=0.0))
        main = tensors["main_grad"].clone()
        tgl.grouped_gemm_scaled_wgrad_accumulate_(**tensors, **sample.options)
        exact = main.double() + torch.from_numpy(want)
        assert torch.equal(tensors["main_grad"], exact.to(sample.dtype)), sample.name
        tgl.grouped_gemm_scaled_wgrad_accumulate_(**tensors, **sample.options, overwrite=True)
        assert torch.equal(tensors["main_grad"], torch.from_numpy(want).to(sample.dtype)), sample.name


@pytest.mark.parametrize("form", FORMATS)
def test_a_block_that_is_not_finite_spoils_its_rows_alone(form):
    """The scale of row 1, block 0 is NaN: row 1 of the output, and nothing else."""
    for sample in of_format("grouped_gemm_scaled", form, ("even",)):
        if form == "fp8_tensor" or sample.options["scale_layout"] == "blocked":
            continue
        tensors = sample.tensors()
        clean = run(sample, tensors)
        tensors["a_scale"][1, 0] = {"mxfp8": 0xFF, "nvfp4": 0x7F, "mxfp4": 0xFF, "fp8_block": float("nan")}[form]
        got = run(sample, tensors)
        assert got[1].isnan().all()
        assert torch.equal(torch.cat([got[:1], got[2:]]), torch.cat([clean[:1], clean[2:]]))
    if form == "fp8_tensor":
        sample = next(of_format("grouped_gemm_scaled", form, ("even",)))
        tensors = sample.tensors()
        clean = run(sample, tensors)
        tensors["a_scale"][1] = float("nan")
        got = run(sample, tensors)
        assert got[4:8].isnan().all()
        assert torch.equal(torch.cat([got[:4], got[8:]]), torch.cat([clean[:4], clean[8:]]))


@pytest.mark.parametrize("form", FORMATS)
def test_unused_rows_left_alone(form):
    """With ``zero_tail=False`` the tail of new memory keeps its NaN; all other rows have their bits."""
    count = 0
    for depth in (18, 0):
        for sample in of_format("grouped_gemm_scaled", form, SMALL, dimensions={"K": depth, "M": 18, "N": 10}):
            tensors, end = sample.tensors(), sample.routing.routed
            want = run(sample, tensors)
            with new_memory_is_nan():
                found = tgl.grouped_gemm_scaled(**tensors, **sample.options, zero_tail=False)
            assert torch.equal(found[:end], want[:end]), sample.name
            assert found[end:].isnan().all(), sample.name
            count += end < sample.routing.rows
    assert count > 12


@pytest.mark.parametrize("form", FORMATS)
def test_unused_rows_left_alone_under_opcheck(form):
    """Every row belongs to a group, because ``opcheck`` also compares unwritten rows."""
    sample = next(of_format("grouped_gemm_scaled", form, ("even",)))
    given = {**sample.tensors(), **sample.options, "zero_tail": False}
    utils = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"  # what takes float8
    torch.library.opcheck(torch.ops.tgl.grouped_gemm_scaled.default, (), given, test_utils=utils)


def test_a_buffer_is_left_alone_in_any_case():
    sample = next(of_format("grouped_gemm_scaled", "fp8_block", SMALL))
    tensors = sample.tensors()
    options, end = {k: v for k, v in sample.options.items() if k != "out_dtype"}, sample.routing.routed
    buffers = [torch.full((sample.routing.rows, 24), 7.0) for _ in range(2)]
    for out, zero_tail in zip(buffers, (False, True)):
        assert tgl.grouped_gemm_scaled(**tensors, **options, out=out, zero_tail=zero_tail) is out
    assert torch.equal(*buffers)
    assert (buffers[0][end:] == 7).all()


@pytest.mark.parametrize("zero_tail", [True, False])
def test_explain_and_warmup_tell_implementations(zero_tail):
    sample = next(of_format("grouped_gemm_scaled", "fp8_block", SMALL))
    with zero_tails_asked() as found:
        for ask in (tgl.explain, tgl.warmup):
            ask(tgl.grouped_gemm_scaled, **sample.tensors(), **sample.options, zero_tail=zero_tail)
    assert found
    assert set(found) == {zero_tail}

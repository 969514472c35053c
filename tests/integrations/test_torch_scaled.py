"""ATen's scaled grouped products served by the ops of this package: recipes, forms, graphs, and who is served when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import ScalingType, SwizzleType, scaled_grouped_mm

import tgl
from tests.integrations.test_torch import GROUPS, PROBLEMS, ROWS, SIZES, TAIL, K, M, N, column_major, expected
from tests.integrations.test_torch_compile import Graphs
from tests.kernel_cases import ends, integers
from tgl import backends
from tgl.cutlass_kernels.runtime import device
from tgl.integrations import torch as integration

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
OP, OP_V2 = torch.ops.aten._scaled_grouped_mm, torch.ops.aten._scaled_grouped_mm_v2
ALL = slice(None)
MX_SIZES = (64, 0, 96, 32)  # ATen's kernel wants multiples of 32
ROW_WISE = {"scale_recipe_a": ScalingType.RowWise, "scale_recipe_b": ScalingType.RowWise}
BLOCKS = {
    "scale_recipe_a": ScalingType.BlockWise1x32,
    "scale_recipe_b": ScalingType.BlockWise1x32,
    "swizzle_a": SwizzleType.SWIZZLE_32_4_4,
    "swizzle_b": SwizzleType.SWIZZLE_32_4_4,
}


@pytest.fixture
def enabled() -> Iterator[None]:
    integration.enable(["cpu"])
    yield
    integration.disable()


class Scaled(NamedTuple):
    """Operands of a row-wise product, and what they stand for in float32."""

    mat_a: Tensor
    mat_b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    offs: Tensor | None
    wide_a: Tensor
    wide_b: Tensor

    @property
    def given(self) -> tuple[Tensor, ...]:
        return self[:4]


SCALES = {
    "2D x 3D": ((ROWS + TAIL,), (GROUPS, N)),
    "3D x 2D": ((GROUPS, M), (ROWS + TAIL,)),
    "2D x 2D": ((M * GROUPS,), (N * GROUPS,)),
    "3D x 3D": ((GROUPS, M), (GROUPS, N)),
}
BY_FORM = pytest.mark.parametrize("form", PROBLEMS)


def scaled(form: str, device: str | torch.device = "cpu") -> Scaled:
    """Integers times powers of two, whose products are exact; NaN past ``offs[-1]``, in operands and scales."""
    problem = PROBLEMS[form]
    codes = [integers(*shape, dtype=torch.float32) for shape in problem.shapes]
    factors = [torch.exp2(torch.randint(-2, 3, shape).float()) for shape in SCALES[form]]
    wide = [code.clone() for code in codes]
    for which, (code, factor, own) in enumerate(zip(codes, factors, wide)):
        tail = problem.tails[which]
        if form == "2D x 2D":  # a scale for each row of each group
            start, per_group = 0, factor.view(GROUPS, -1)
            for g, size in enumerate(SIZES):
                span = slice(start, start + size)
                of = (ALL, span) if which == 0 else (span, ALL)
                own[of] *= per_group[g][:, None] if which == 0 else per_group[g]
                start += size
        elif code.dim() == 2 and tail is not None:
            factor[ROWS:] = torch.nan
            own *= factor[:, None] if which == 0 else factor
        else:
            own *= factor.unsqueeze(-1) if which == 0 else factor.unsqueeze(-2)
        if tail is not None:
            code[tail] = torch.nan
    mat_a, mat_b = codes[0].to(E4M3).to(device), column_major(codes[1].to(E4M3)).to(device)
    scale_a, scale_b = (factor.to(device) for factor in factors)
    offs = None if problem.offs is None else problem.offs.to(device)
    return Scaled(mat_a, mat_b, scale_a, scale_b, offs, wide[0], wide[1])


WAYS = {
    "_scaled_grouped_mm": lambda a, b, sa, sb, offs: torch._scaled_grouped_mm(a, b, sa, sb, offs=offs),
    "functional": lambda a, b, sa, sb, offs: scaled_grouped_mm(
        a, b, sa, scale_b=sb, offs=offs, scale_recipe_a=ScalingType.RowWise, scale_recipe_b=ScalingType.RowWise
    ),
    "lists": lambda a, b, sa, sb, offs: scaled_grouped_mm(
        *(a, b, [sa], [ScalingType.RowWise], [sb], [ScalingType.RowWise]), offs=offs, swizzle_a=SwizzleType.NO_SWIZZLE
    ),
    "packet": lambda a, b, sa, sb, offs: OP(a, mat2=b, scale_a=sa, scale_b=sb, offs=offs),
    "overload, version 2": lambda a, b, sa, sb, offs: OP_V2.default(a, b, [sa], [1], [], [sb], [1], [], offs),
}
# Since torch 2.14, with a meta function of ATen's own.
SECOND_IS_STRUCTURED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
BY_WAY = pytest.mark.parametrize("way", WAYS)


def wanted(form: str, case: Scaled) -> Tensor:
    """Return the product rounded to bfloat16, as ATen rounds."""
    problem = PROBLEMS[form]
    return expected(problem, case.wide_a, case.wide_b).to(torch.bfloat16)


# --- row-wise scales --------------------------------------------------------------------------------------------------


@BY_FORM
@BY_WAY
def test_forms(enabled, form, way):
    case = scaled(form)
    out = WAYS[way](*case.given, case.offs)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, wanted(form, case))


@BY_FORM
def test_other_memory_orders(enabled, form):
    """ATen's kernel refuses them."""
    case = scaled(form)
    mat_a, mat_b = case.mat_a, case.mat_b.contiguous()
    out = WAYS["functional"](mat_a, mat_b, case.scale_a, case.scale_b, case.offs)
    assert torch.equal(out, wanted(form, case))


def test_other_dtypes(enabled):
    """E5M2 elements and float32 results, which ATen's kernel refuses."""
    case = scaled("2D x 3D")
    mat_a = case.mat_a.float().to(torch.float8_e5m2)
    out = torch._scaled_grouped_mm(mat_a, *case.given[1:], offs=case.offs, out_dtype=torch.float32)
    assert torch.equal(out.double(), expected(PROBLEMS["2D x 3D"], case.wide_a, case.wide_b))


@BY_FORM
def test_results_have_atens_strides(enabled, form, monkeypatch):
    """Results have the strides of its meta function in a torch for CUDA."""
    case = scaled(form)
    mat_a, mat_b, scale_a, scale_b, offs = *case.given, case.offs
    if form != "3D x 2D":  # rows of 26 bytes
        mat_b, scale_b = mat_b[..., :13], (scale_b[:, :13] if scale_b.dim() == 2 else scale_b[: 13 * GROUPS])
    ours = WAYS["_scaled_grouped_mm"](mat_a, mat_b, scale_a.contiguous(), scale_b.contiguous(), offs)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    like = torch._meta_registrations._create_grouped_mm_output_tensor(mat_a, mat_b, offs, torch.bfloat16)
    assert (ours.shape, ours.stride(), ours.dtype) == (like.shape, like.stride(), like.dtype)


@BY_FORM
def test_no_groups_and_no_rows(enabled, form):
    case = scaled(form)
    if case.offs is None:
        given = [t[:0] for t in case.given]
        assert WAYS["functional"](*given, None).shape == (0, M, N)
    else:
        assert not WAYS["functional"](*case.given, torch.zeros_like(case.offs)).any()


def test_debug_checks(enabled):
    case = scaled("2D x 2D")
    with tgl.debug_checks(), pytest.raises(ValueError, match="`offs` must not descend"):
        torch._scaled_grouped_mm(*case.given, offs=case.offs.flip(0))


# --- MXFP8 ------------------------------------------------------------------------------------------------------------


def mx_rows(device: str | torch.device = "cpu") -> tuple[dict[str, Any], tuple[Tensor, ...], Tensor]:
    """Keywords of ``grouped_gemm_scaled``, ATen's arguments, and groups' ends; NaN past these."""
    torch.manual_seed(0)
    offs = ends(MX_SIZES).to(device)
    x = torch.randn(sum(MX_SIZES) + 32, 160, dtype=torch.bfloat16, device=device)
    x[sum(MX_SIZES) :] = torch.nan
    w = torch.randn(len(MX_SIZES), 80, 160, dtype=torch.bfloat16, device=device)
    a = tgl.group_quantize(x, offs, format="mxfp8", columnwise=False)
    b = tgl.group_quantize(w, None, format="mxfp8", columnwise=False)
    scale_a = tgl.ops.to_torch_scale_layout(a.scale, offs, shape=x.shape, format="mxfp8").view(E8M0)
    scale_b = tgl.ops.to_torch_scale_layout(b.scale, None, shape=w.shape, format="mxfp8").view(E8M0)
    ours = {"a": a.data, "a_scale": a.scale, "b": b.data, "b_scale": b.scale, "offs": offs, "format": "mxfp8"}
    return ours, (a.data, b.data.transpose(1, 2), scale_a, scale_b), offs


def mx_columns(device: str | torch.device = "cpu") -> tuple[dict[str, Any], tuple[Tensor, ...], Tensor]:
    """The same of ``grouped_gemm_scaled_wgrad``."""
    torch.manual_seed(0)
    offs = ends(MX_SIZES).to(device)
    operands, atens = {}, []
    for name, width in (("a", 48), ("b", 80)):
        x = torch.randn(sum(MX_SIZES) + 32, width, dtype=torch.bfloat16, device=device)
        x[sum(MX_SIZES) :] = torch.nan
        q = tgl.group_quantize(x, offs, format="mxfp8", rowwise=False)
        layout = {"shape": x.shape, "format": "mxfp8", "columnwise": True}
        scale = tgl.ops.to_torch_scale_layout(q.columnwise_scale, offs, **layout).view(E8M0)
        operands |= {name: q.columnwise_data, f"{name}_scale": q.columnwise_scale}
        atens.append((q.columnwise_data.t().contiguous(), scale))
    (mat_a, scale_a), (mat_b, scale_b) = atens
    return operands | {"offs": offs, "format": "mxfp8"}, (mat_a, mat_b.t(), scale_a, scale_b), offs


MX = {"2D x 3D": (mx_rows, tgl.grouped_gemm_scaled), "2D x 2D": (mx_columns, tgl.grouped_gemm_scaled_wgrad)}


@pytest.mark.parametrize("form", MX)
@pytest.mark.parametrize("cut", [False, True])
def test_mxfp8(enabled, form, cut):
    """Scales with room for any sizes, and scales cut to these sizes, give the same result."""
    make, op = MX[form]
    ours, (mat_a, mat_b, scale_a, scale_b), offs = make()
    if cut and form == "2D x 3D":
        scale_a = scale_a[: sum(-(-size // 128) * 128 for size in MX_SIZES)]
    elif cut:
        columns = sum(-(-size // 128) * 4 for size in MX_SIZES)
        scale_a, scale_b = (s.view(-1)[: s.shape[0] * columns].view(-1, columns) for s in (scale_a, scale_b))
    want = op(**ours)
    assert torch.equal(torch._scaled_grouped_mm(mat_a, mat_b, scale_a, scale_b, offs=offs), want)
    again = scaled_grouped_mm(mat_a, mat_b, scale_a, scale_b=scale_b, offs=offs, **BLOCKS)
    assert torch.equal(again, want)


# --- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
@BY_WAY
def test_every_way_to_call_it_in_a_graph(enabled, way):
    case, graphs = scaled("2D x 3D"), Graphs()
    out = torch.compile(WAYS[way], backend=graphs, fullgraph=True)(*case.given, case.offs)
    assert graphs.ours == [True]
    assert torch.equal(out, wanted("2D x 3D", case))


@pytest.mark.usefixtures("fresh_compiler")
@BY_FORM
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_forms_in_graphs(enabled, form, backend):
    case = scaled(form)
    compiled = torch.compile(WAYS["functional"], backend=backend, fullgraph=True)
    out, eager = (f(*case.given, case.offs) for f in (compiled, WAYS["functional"]))
    assert torch.equal(out, wanted(form, case))
    assert out.stride() == eager.stride()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("form", MX)
def test_mxfp8_in_graphs(enabled, form):
    make, op = MX[form]
    ours, given, offs = make()

    def product(*given: Tensor) -> Tensor:
        mat_a, mat_b, scale_a, scale_b = given
        return scaled_grouped_mm(mat_a, mat_b, scale_a, scale_b=scale_b, offs=offs, **BLOCKS)

    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*given), op(**ours))


@pytest.mark.usefixtures("fresh_compiler")
def test_sizes_may_change(enabled):
    case, graphs = scaled("2D x 3D"), Graphs()
    compiled = torch.compile(WAYS["functional"], backend=graphs, fullgraph=True)
    for rows in (10, 11, 13, 16):
        mat_a, scale_a, offs = case.mat_a[:rows], case.scale_a[:rows], case.offs.clamp(max=rows)
        given = (mat_a, case.mat_b, scale_a, case.scale_b, offs)
        assert torch.equal(compiled(*given), WAYS["functional"](*given))
    assert graphs.ours == [True, True]


@pytest.mark.usefixtures("fresh_compiler")
def test_a_graph_is_recompiled_when_the_integration_is_enabled():
    case, graphs = scaled("2D x 3D"), Graphs()
    compiled = torch.compile(WAYS["_scaled_grouped_mm"], backend=graphs, fullgraph=True)
    with integration.enabled("cpu"):
        compiled(*case.given, case.offs)
    assert graphs.ours == [True]
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):  # says ATen's meta function
        compiled(*case.given, case.offs)
    with integration.enabled("cpu"):
        compiled(*case.given, case.offs)
    assert graphs.ours == [True]


@BY_FORM
@BY_WAY
def test_fake_tensors(enabled, form, way):
    """Version 2 has no meta function of ATen's."""
    case = scaled(form)
    with FakeTensorMode() as mode:
        fakes = [t if t is None else mode.from_tensor(t) for t in (*case.given, case.offs)]
        fake = WAYS[way](*fakes)
    real = WAYS[way](*case.given, case.offs)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_symbolic_traces(enabled):
    case = scaled("2D x 3D")
    given = (*case.given, case.offs)
    for way in ("_scaled_grouped_mm", "functional"):
        traced = make_fx(WAYS[way], tracing_mode="symbolic")(*given)
        assert torch.equal(traced(*given), WAYS[way](*given))


def test_disabled_traces_are_atens():
    case = scaled("2D x 3D")
    with integration.enabled("cpu"):
        pass
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (*case.given, case.offs)]
        with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
            WAYS["_scaled_grouped_mm"](*fakes)
        if SECOND_IS_STRUCTURED:  # its meta function in Python checks nothing, and pads no rows
            assert WAYS["functional"](*fakes).shape == (len(case.given[0]), N)
        else:
            with pytest.raises(NotImplementedError):
                WAYS["functional"](*fakes)


# --- who is served ----------------------------------------------------------------------------------------------------


def test_not_enabled():
    case = scaled("2D x 3D")
    explained = tgl.explain(OP, *case.given, offs=case.offs)
    assert explained.chosen.name == "ATen's own kernel"
    assert "tgl.integrations.torch is not enabled for cpu" in str(explained)
    for name, way in WAYS.items():
        second = name in ("functional", "lists", "overload, version 2")
        # A structured op checks its operands on any device: K is no multiple of 16 here.
        with pytest.raises(ValueError if second and SECOND_IS_STRUCTURED else NotImplementedError):
            way(*case.given, case.offs)
    with integration.enabled("cpu"):
        assert WAYS["functional"](*case.given, case.offs).any()


REFUSED: Sequence[tuple[dict[str, Any], str]] = (
    ({"offs": None}, "needs `offs` for a 2-D operand"),
    ({"bias": torch.ones(N)}, "has no `bias`"),
    ({"scale_result": torch.ones(1)}, "has no `scale_result`"),
    ({"scale_a": torch.ones(ROWS + TAIL).bfloat16()}, "both float32 (row-wise) or both float8_e8m0fnu (MXFP8)"),
    ({"scale_a": torch.ones(ROWS)}, "`a_scale` must be of shape [T]"),
    ({"scale_a": torch.ones(ROWS + TAIL, 1)}, "needs `scale_a` contiguous and 1-D"),
    ({"mat_a": torch.ones(ROWS + TAIL, K)}, "`a` must be float8_e4m3fn or float8_e5m2"),
    ({"mat_a": torch.ones(ROWS + TAIL, 4).to(E4M3)}, "K = 4 like `a`"),
    ({"mat_a": torch.ones(K).to(E4M3)}, "takes operands of row-wise scales that are 2-D x 3-D"),
    ({"offs": torch.zeros(GROUPS, dtype=torch.int64)}, "needs `offs` int32 [G]"),
    ({"out_dtype": torch.float64}, "`out_dtype` must be float32, bfloat16 or float16"),
)


@pytest.mark.parametrize(("change", "reason"), REFUSED, ids=[reason[:40] for _, reason in REFUSED])
def test_calls_that_tgl_rejects_run_atens_kernel(enabled, change, reason):
    case = scaled("2D x 3D")
    given = {name: getattr(case, name) for name in ("mat_a", "mat_b", "scale_a", "scale_b", "offs")} | change
    explained = tgl.explain(OP, **given)
    assert explained.chosen.name == "ATen's own kernel"
    assert reason in str(explained)
    mat_a, mat_b, scale_a, scale_b = (given.pop(name) for name in ("mat_a", "mat_b", "scale_a", "scale_b"))
    with pytest.raises(NotImplementedError, match="ATen has no kernel of its own"):
        torch._scaled_grouped_mm(mat_a, mat_b, scale_a, scale_b, **given)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"recipe_a": [ScalingType.TensorWise.value]}, "takes row-wise scales, and MXFP8's"),
        ({"swizzle_b": [SwizzleType.SWIZZLE_32_4_4.value]}, "takes row-wise scales, and MXFP8's"),
        ({"scale_a": [torch.ones(ROWS + TAIL), torch.ones(1)]}, "needs one tensor of scales for each operand"),
        ({"contraction_dim": [0, 1]}, "contracts dimensions -1 and -2, not [0, 1]"),
        ({"scale_a": [torch.ones(ROWS + TAIL).to(E8M0)]}, "needs row-wise scales of another dtype"),
    ],
    ids=str,
)
def test_calls_of_version_2_that_tgl_rejects(enabled, change, reason):
    case = scaled("2D x 3D")
    one: dict[str, Any] = {"recipe_a": [1], "swizzle_a": [], "recipe_b": [1], "swizzle_b": [], "offs": case.offs}
    one |= {"scale_a": [case.scale_a], "scale_b": [case.scale_b]} | change
    explained = tgl.explain(OP_V2, mat_a=case.mat_a, mat_b=case.mat_b, **one)
    assert explained.chosen.name == "ATen's own kernel"
    assert reason in str(explained)


@pytest.fixture
def atens() -> Iterator[list[tuple]]:
    """ATen has kernels on a CPU, which record their arguments."""
    called: list[tuple] = []

    def kernel(*args: Any) -> Tensor:
        called.append(args)
        return torch.zeros(1)

    library = torch.library.Library("aten", "IMPL")
    for name in ("_scaled_grouped_mm", "_scaled_grouped_mm_v2"):
        library.impl(name, kernel, "CPU")
    yield called
    library._destroy()


def test_rejected_calls_reach_atens_kernel(atens, enabled):
    case, bias = scaled("2D x 3D"), torch.ones(N)
    torch._scaled_grouped_mm(*case.given, offs=case.offs, bias=bias, use_fast_accum=True)
    WAYS["functional"](*case.given, case.offs)
    assert len(atens) == 1
    assert [type(t) for t in atens[0]] == [Tensor] * 6 + [type(None), type(None), bool]
    assert torch.equal(atens[0][5], bias)
    scaled_grouped_mm(
        *(case.mat_a, case.mat_b, [case.scale_a, bias], [ScalingType.BlockWise1x16, ScalingType.TensorWise]),
        *([case.scale_b], ScalingType.RowWise, SwizzleType.SWIZZLE_32_4_4),
        offs=case.offs,
    )
    _, _, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, offs, *rest = atens[1]
    assert torch.equal(scale_a[1], bias)
    assert torch.equal(scale_b[0], case.scale_b)
    assert (recipe_a, swizzle_a, recipe_b, swizzle_b) == ([2, 0], [1], [1], [])
    assert torch.equal(offs, case.offs)
    assert rest[:2] == [None, torch.bfloat16]


def test_four_bit_operands_run_atens_kernel(enabled):
    """NVFP4 and MXFP4, of elements that fill half a byte."""
    half = torch.zeros(32, 16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    scale = torch.ones(128, 4).to(E8M0)
    explained = tgl.explain(OP, half, half.t(), scale, scale, ends((32,)))
    assert "takes operands of 8 bits" in str(explained)


@pytest.mark.parametrize(
    ("make", "arch", "chosen", "reason"),
    [
        ("row-wise", "sm_90", "tgl::grouped_gemm_row_scaled", "lower priority"),
        ("row-wise", "sm_100", "tgl::grouped_gemm_row_scaled", "lower priority"),
        ("row-wise", "sm_89", "tgl::grouped_gemm_row_scaled", "lower priority"),
        ("MXFP8", "sm_90", "ATen's own kernel", "no kernel of tgl takes the call: tgl kernel: takes mxfp8 on sm_100"),
        ("MXFP8", "sm_100", "tgl::grouped_gemm_scaled", "lower priority"),
    ],
)
def test_explanations_of_a_device(monkeypatch, make, arch, chosen, reason):
    """Explanations for emulated devices."""
    monkeypatch.setattr(device, "packages_reason", lambda: None)
    monkeypatch.setattr(backends.target, "cuda_arch", lambda device: arch)
    monkeypatch.setattr(backends.registry, "_on_device", {})
    case = scaled("2D x 3D")
    given = (*case.given, case.offs) if make == "row-wise" else (*mx_rows()[1], ends(MX_SIZES))
    with FakeTensorMode(), integration.enabled():
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in given]
        explained = tgl.explain(OP, *fakes)
    assert explained.chosen.name == chosen
    assert reason in str(explained)
    assert not explained.syncs


def test_warmup(enabled):
    case = scaled("2D x 3D")
    assert tgl.warmup(OP, *case.given, case.offs).chosen.name == "tgl::grouped_gemm_row_scaled"
    _, given, offs = mx_rows()
    assert tgl.warmup(OP, *given, offs).chosen.name == "tgl::grouped_gemm_scaled"

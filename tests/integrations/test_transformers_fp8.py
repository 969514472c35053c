"""Experts of FP8 checkpoints: transformers' own forward and backward, with the formula of its GPU kernels for a CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import pytest
import torch
from torch import Tensor, nn

import tgl
from tests.nn.seen import Sizes
from tgl.integrations import transformers as integration

transformers = pytest.importorskip("transformers")

from transformers.integrations import finegrained_fp8  # noqa: E402
from transformers.integrations.moe import use_experts_implementation  # noqa: E402

EXPERTS, HIDDEN, INTER, TOP_K, TOKENS = 5, 256, 128, 2, 40
E4M3 = torch.float8_e4m3fn
# What a release has: one bundle of kernels, scales of powers of two, gates by attributes.
BUNDLED = hasattr(finegrained_fp8, "FineGrainedFP8")
PARAMETERS = inspect.signature(finegrained_fp8.FP8Experts).parameters
GATE_CODE = inspect.getsource(finegrained_fp8.FP8Experts._apply_gate)


# --- the formula of the kernels ---------------------------------------------------------------------------------------


class StraightThrough(torch.autograd.Function):
    """``values``, with the gradient for ``x``: transformers' backward has it, its releases without one get it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def tokens_as_quantised(x: Tensor, block: int, static: Tensor | None, power_of_two: bool) -> Tensor:
    """The values that ``x`` has after quantisation, in its dtype; scales are of float32, the rest is exact."""
    columns = x.shape[1]
    x32 = nn.functional.pad(x.detach().float(), (0, -columns % block)).unflatten(1, (-1, block))
    if static is not None:
        scale = static.float().reshape(1, 1, 1)
    else:
        scale = (x32.abs().amax(2, keepdim=True) / 448).clamp(min=1e-12)
        if power_of_two:
            mantissa, exponent = torch.frexp(scale)
            scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    codes = (x32 / scale).clamp(-448, 448).to(E4M3)
    return StraightThrough.apply(x, (codes.to(x.dtype) * scale.to(x.dtype)).flatten(1)[:, :columns])


def weight_values(weight: Tensor, scale: Tensor, block_size: Any, dtype: torch.dtype) -> Tensor:
    """A ``[N, K]`` matrix with a grid of scales over it, whose blocks may be cut off at the end."""
    rows, columns = block_size or weight.shape
    wide = scale.to(dtype).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return weight.to(dtype) * wide[: weight.shape[0], : weight.shape[1]]


def matmul(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    block_size: tuple[int, int] | None = None,
    output_dtype: torch.dtype | None = None,
    activation_scale: Tensor | None = None,
    **_: Any,
) -> Tensor:
    block = x.shape[1] if block_size is None else block_size[1]
    wide = x if x.dtype == torch.float64 else x.float()
    a = tokens_as_quantised(wide, block, activation_scale, power_of_two=block == 32)
    return (a @ weight_values(weight, scale, block_size, a.dtype).t()).to(output_dtype or x.dtype)


def grouped_matmul(x: Tensor, weight: Tensor, scale: Tensor, offsets: Tensor, block_size: Any, **_: Any) -> Tensor:
    starts = [0, *offsets.tolist()]
    parts = [matmul(x[a:b], w, s, block_size) for a, b, w, s in zip(starts, starts[1:], weight, scale)]
    return torch.cat([*parts, x.new_zeros(x.shape[0] - starts[-1], weight.shape[1])])


def linear(experts: Any, x: Tensor, weight: Tensor, scale: Tensor, activation_scale: Tensor | None = None) -> Tensor:
    """The function of releases that call their kernels one by one."""
    if weight.element_size() > 1:
        return nn.functional.linear(x, weight)
    return matmul(x, weight, scale, experts.block_size, activation_scale=activation_scale)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    integration.register()
    if BUNDLED:
        made = finegrained_fp8.FineGrainedFP8(matmul=matmul, batched_matmul=None, grouped_matmul=grouped_matmul)
        monkeypatch.setattr(finegrained_fp8, "_FINEGRAINED_FP8", made)
    else:
        monkeypatch.setattr(finegrained_fp8.FP8Experts, "linear", linear)


# --- experts ----------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A checkpoint's storage of experts, and the quantisation of their tokens."""

    block_size: tuple[int, int] | None
    scale_fmt: str = "float"
    scheme: str = "dynamic"


CASES = {
    "blocks": Case((128, 128)),
    "blocks, UE8M0": Case((128, 128), "ue8m0"),
    "blocks, static": Case((128, 128), scheme="static"),
    "blocks, UE8M0, static": Case((128, 128), "ue8m0", "static"),
    "tensor": Case(None),
    "tensor, static": Case(None, scheme="static"),
    "mxfp8": Case((1, 32), "ue8m0"),
}
CASES = {name: case for name, case in CASES.items() if case.scale_fmt == "float" or "scale_fmt" in PARAMETERS}
# The gates of FP8Experts by the attributes of a configuration, and their activations.
GATES: dict[str, tuple[dict[str, Any], str | None]] = {
    "silu": ({}, "swiglu"),
    "relu": ({"hidden_act": "relu"}, "reglu"),
    "clamped": ({"swiglu_limit": 0.5}, "clamped_qgeglu"),
    "clamped, with alpha": ({"swiglu_limit": 0.5, "swiglu_alpha": 1.3}, "clamped_qgeglu"),
    "clamped relu": ({"swiglu_limit": 0.5, "hidden_act": "relu"}, None),
    "softcap": ({"mlp_gate_softcap": 2.0, "mlp_up_softcap": 1.5}, None),
}
NAMES = {"swiglu_limit": "limit", "swiglu_alpha": "swiglu_alpha", "mlp_gate_softcap": "gate_softcap"}
GATES = {
    name: gate
    for name, gate in GATES.items()
    if all(f"self.{NAMES[key]}" in GATE_CODE for key in gate[0] if key in NAMES)
}


def decorated(has_gate: bool) -> type[nn.Module]:
    class Experts(finegrained_fp8.FP8Experts):
        pass

    interface = finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS
    return use_experts_implementation(Experts, experts_interface=interface, has_gate=has_gate)


GATED, PLAIN = decorated(True), decorated(False)


def fill(weight: nn.Parameter, scale: nn.Parameter, std: float = 0.3) -> None:
    """Random elements over the range of E4M3, and scales that make values of about ``std``."""
    with torch.no_grad():
        weight.copy_((torch.randn(weight.shape) * 60).to(E4M3))
        scale.copy_((torch.rand(scale.shape) + 0.5) * std / 60)


def make(case: Case, has_gate: bool = True, **changes: Any) -> nn.Module:
    torch.manual_seed(1)
    values = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "moe_intermediate_size": INTER, "hidden_act": "silu"}
    config = SimpleNamespace(**values | {"_experts_implementation": "tgl"} | changes)
    cls = GATED if has_gate else PLAIN
    options = {"activation_scheme": case.scheme, "has_gate": has_gate}
    if case.scale_fmt != "float":
        options["scale_fmt"] = case.scale_fmt
    experts = cls(config, case.block_size, **options)
    names = ("gate_up_proj" if has_gate else "up_proj", "down_proj")
    for name in names:
        fill(getattr(experts, name), getattr(experts, f"{name}_scale_inv"))
    if case.scheme == "static":
        with torch.no_grad():  # so low that some tokens saturate
            experts.gate_up_proj_activation_scale.copy_(torch.linspace(2, 4, EXPERTS) / 448)
            experts.down_proj_activation_scale.copy_(torch.linspace(4, 8, EXPERTS) / 448)
    return experts


Data = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(tokens: int = TOKENS, hidden: int = HIDDEN, dtype: torch.dtype = torch.float32) -> Data:
    """Hidden states, indices (expert 0 idle), weights and an output gradient."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype).requires_grad_()
    index = torch.rand(tokens, EXPERTS - 1, generator=generator).topk(TOP_K).indices + 1
    weights = torch.rand(tokens, TOP_K, generator=generator).to(dtype).requires_grad_()
    return x, index, weights, torch.randn(tokens, hidden, generator=generator).to(dtype)


def run(experts: nn.Module, how: str, data: Data, call: Callable | None = None) -> list[Tensor]:
    """Output, and gradients of the hidden states and the routing weights."""
    x, index, weights, dy = data
    experts.config._experts_implementation = how
    out = (call or experts)(x, index, weights)
    return [out.detach(), *torch.autograd.grad(out, (x, weights), dy)]


def exact(experts: nn.Module, data: Data) -> list[Tensor]:
    """transformers' own loop with its own backward, in float64."""
    x, index, weights, dy = data
    wide = (x.detach().double().requires_grad_(), index, weights.detach().double().requires_grad_(), dy.double())
    return run(experts, "eager", wide)


def assert_rounding(results: list[Tensor], references: list[Tensor], ulps: float = 64) -> None:
    """All tokens but one within ``ulps`` float32 roundings, in units of the largest entry.

    Between the projections, an activation that is rounded otherwise can become the next code of E4M3. That is 1/16 of
    one of a token's many addends, and rare.
    """
    for result, reference in zip(results, references, strict=True):
        assert result.dtype == torch.float32
        error = (result.double() - reference.double()).abs().amax(1) / reference.abs().max()
        apart = error > ulps * torch.finfo(torch.float32).eps
        assert apart.sum() <= 1
        assert not (error[apart] > 1 / 16).any()


@pytest.mark.parametrize("has_gate", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case: str, has_gate: bool) -> None:
    experts, data = make(CASES[case], has_gate, hidden_act="silu" if has_gate else "relu2"), inputs()
    if CASES[case].block_size is None and has_gate:
        # transformers allocates a scale for each half, and has no kernel for two.
        experts.gate_up_proj_scale_inv = nn.Parameter(experts.gate_up_proj_scale_inv[:, :1].detach())
    assert_rounding(run(experts, "tgl", data), exact(experts, data))


@pytest.mark.parametrize("name", GATES)
def test_gates(name: str) -> None:
    changes, kind = GATES[name]
    experts, data = make(CASES["blocks"], **changes), inputs()
    found = integration.activation(experts)
    assert (found and found.kind) == kind
    assert_rounding(run(experts, "tgl", data), exact(experts, data))


def test_equals_transformers_grouped_products() -> None:
    """The forward that transformers takes on a GPU, in releases whose kernels can be replaced there."""
    experts, data = make(CASES["blocks"]), inputs()
    assert_rounding(run(experts, "tgl", data), run(experts, "grouped_mm" if BUNDLED else "eager", data))


def test_widths_that_are_no_multiple_of_a_block() -> None:
    changes = {"hidden_size": 208, "moe_intermediate_size": 96}
    experts, data = make(CASES["blocks"], **changes), inputs(hidden=208)
    assert_rounding(run(experts, "tgl", data), exact(experts, data))


def test_a_scale_for_each_half() -> None:
    """Against the experts with one scale per matrix, whose halves stand in the elements: powers of two."""
    experts, data = make(CASES["tensor"]), inputs()
    experts.gate_up_proj_scale_inv = nn.Parameter(experts.gate_up_proj_scale_inv[:, :1].repeat(1, 2, 1).detach())
    with torch.no_grad():
        experts.gate_up_proj.copy_((torch.randn(experts.gate_up_proj.shape) * 10).to(E4M3))
    wanted = run(experts, "tgl", data)
    with torch.no_grad():
        experts.gate_up_proj_scale_inv[:, 1] *= 0.25
        up = experts.gate_up_proj[:, INTER:]
        up.copy_((up.float() * 4).to(E4M3))
    for result, reference in zip(run(experts, "tgl", data), wanted, strict=True):
        assert torch.equal(result, reference)


@pytest.mark.parametrize("case", CASES)
def test_half_precision(case: str) -> None:
    """Results in bfloat16 are as close to float64 as transformers' own forward, and its backward where it has one."""
    experts, data = make(CASES[case], has_gate=False, hidden_act="relu2"), inputs(dtype=torch.bfloat16)
    ours, theirs = run(experts, "tgl", data), run(experts, "eager", data)
    assert [t.dtype for t in ours] == [torch.bfloat16] * 3
    own = 3 if hasattr(finegrained_fp8, "FP8LinearFunction") else 1
    for result, other, reference in zip(ours[:own], theirs[:own], exact(experts, data)[:own], strict=True):
        assert (result.double() - reference).norm() <= 1.05 * (other.double() - reference).norm()


@pytest.mark.parametrize("case", CASES)
def test_dropped_slots_leak_no_values(case: str) -> None:
    experts = make(CASES[case], has_gate=False)
    x, index, weights, dy = inputs()
    skipped = torch.zeros_like(index, dtype=torch.bool)
    skipped[::3, 0] = True
    skipped[5] = True
    clean = (x, index, weights.detach().masked_fill(skipped, 0).requires_grad_(), dy)
    poisoned_x = x.detach().clone()
    poisoned_x[5] = float("nan")
    poisoned_weights = weights.detach().masked_fill(skipped, float("inf")).requires_grad_()
    poisoned = (poisoned_x.requires_grad_(), index.masked_fill(skipped, EXPERTS), poisoned_weights, dy)
    out, dx, dweights = run(experts, "tgl", poisoned)
    wanted, wanted_dx, wanted_dweights = exact(experts, clean)
    assert not out[5].any()
    assert not dx[5].any()
    assert_rounding([out, dx, dweights], [wanted, wanted_dx, wanted_dweights.masked_fill(skipped, 0)])


def test_no_tokens() -> None:
    out, dx, dweights = run(make(CASES["blocks"]), "tgl", inputs(tokens=0))
    assert (out.shape, dx.shape, dweights.shape) == ((0, HIDDEN), (0, HIDDEN), (0, TOP_K))


def test_weights_get_no_gradient_and_inputs_without_one_keep_nothing() -> None:
    experts, (x, index, weights, dy) = make(CASES["blocks"]), inputs()
    experts(x, index, weights).backward(dy)
    assert all(parameter.grad is None for parameter in experts.parameters())
    assert not experts(x.detach(), index, weights.detach()).requires_grad


def test_weights_that_a_checkpoint_leaves_alone() -> None:
    """FP8Experts multiplies weights of other dtypes as they are."""
    experts, data = make(CASES["blocks"]), inputs()
    for name in ("gate_up_proj", "down_proj"):
        setattr(experts, name, nn.Parameter(torch.randn(getattr(experts, name).shape) * 0.3))
    wide = make(CASES["blocks"])
    for name in ("gate_up_proj", "down_proj"):
        setattr(wide, name, nn.Parameter(getattr(experts, name).detach().double()))
    assert_rounding(run(experts, "tgl", data), exact(wide, data))


def test_a_model_whose_experts_transformers_has_replaced() -> None:
    """The model's own experts become FP8Experts, as for a checkpoint, and one call switches them all."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": EXPERTS}
    config = transformers.MixtralConfig(vocab_size=50, hidden_size=HIDDEN, intermediate_size=INTER, **sizes)
    torch.manual_seed(1)
    model = transformers.MixtralForCausalLM(config)
    dense = ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"]
    quantization = transformers.FineGrainedFP8Config(weight_block_size=(128, 128), modules_to_not_convert=dense)
    finegrained_fp8.replace_with_fp8_linear(model, modules_to_not_convert=dense, quantization_config=quantization)
    found = [module for module in model.modules() if isinstance(module, finegrained_fp8.FP8Experts)]
    assert len(found) == 2
    for experts in found:
        experts.to_empty(device="cpu")
        for name in ("gate_up_proj", "down_proj"):
            fill(getattr(experts, name), getattr(experts, f"{name}_scale_inv"))
    seen: list[tuple[nn.Module, tuple[Tensor, ...], Tensor]] = []
    for experts in found:
        experts.register_forward_hook(lambda module, given, out: seen.append((module, given, out)))
    tokens = torch.randint(50, (2, 12))
    model.set_experts_implementation("tgl")
    loss = model(tokens, labels=tokens).loss
    assert torch.autograd.grad(loss, model.model.embed_tokens.weight)[0].isfinite().all()
    ours = seen[:]
    assert [experts for experts, *_ in ours] == found
    model.set_experts_implementation("eager")
    for experts, given, out in ours:
        assert_rounding([out], [experts(*given)])


@pytest.fixture
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


COMPILED = [case if case in ("blocks", "mxfp8") else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("case", COMPILED)
def test_compiles_whole(case: str) -> None:
    experts, data = make(CASES[case]), inputs()
    compiled = torch.compile(lambda *args: experts(*args), fullgraph=True, backend="aot_eager", dynamic=True)
    for result, reference in zip(run(experts, "tgl", data, compiled), run(experts, "tgl", data), strict=True):
        torch.testing.assert_close(result, reference, rtol=0, atol=float(4e-6 * reference.abs().max()))
    more = inputs(tokens=TOKENS + 3)
    with torch._dynamo.config.patch(error_on_recompile=True):
        run(experts, "tgl", more, compiled)


# --- packed FP4 -------------------------------------------------------------------------------------------------------


def make_fp4(dtype: torch.dtype, has_gate: bool, scheme: str = "dynamic") -> nn.Module:
    """Experts with weights of E2M1, two per byte, of which a release has no more than the experts' class."""
    experts = make(CASES["blocks"]._replace(scheme=scheme), has_gate, hidden_act="silu" if has_gate else "relu2")
    generator = torch.Generator().manual_seed(3)
    for name in ("gate_up_proj" if has_gate else "up_proj", "down_proj"):
        groups, rows, columns = getattr(experts, name).shape
        data = torch.randint(0, 256, (groups, rows, columns // 2), dtype=torch.uint8, generator=generator)
        scale = torch.randint(121, 124, (groups, rows, columns // 32), dtype=torch.uint8, generator=generator)
        setattr(experts, name, nn.Parameter(data.view(dtype), requires_grad=False))
        setattr(experts, f"{name}_scale_inv", nn.Parameter(scale.view(torch.float8_e8m0fnu), requires_grad=False))
    return experts


def fp4_linear(
    experts: Any, x: Tensor, weight: Tensor, scale: Tensor, activation_scale: Tensor | None = None
) -> Tensor:
    """The product of ``x`` as it is with decoded values; the lower half of a byte comes first."""
    pairs = weight.view(torch.uint8)
    codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1)
    values = torch.from_numpy(codes.numpy().view(ml_dtypes.float4_e2m1fn).astype("float32")).to(x.dtype)
    return x @ (values * scale.to(x.dtype).repeat_interleave(32, 1)).t()


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float4_e2m1fn_x2], ids=str)
def test_packed_fp4(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, has_gate: bool) -> None:
    monkeypatch.setattr(finegrained_fp8.FP8Experts, "linear", fp4_linear)
    experts, data = make_fp4(dtype, has_gate), inputs()
    assert_rounding(run(experts, "tgl", data), exact(experts, data))


def test_packed_fp4_is_never_decoded_whole() -> None:
    experts, (x, index, weights, dy) = make_fp4(torch.int8, has_gate=True), inputs(dtype=torch.bfloat16)
    with Sizes() as seen:
        torch.autograd.grad(experts(x, index, weights), (x, weights), dy)
    assert 0 < seen.largest < 2 * 2 * INTER * HIDDEN


def test_packed_fp4_with_static_scales_is_refused() -> None:
    x, index, weights, _ = inputs()
    with pytest.raises(ValueError, match="`activation_scheme` must be 'dynamic' for packed FP4, but got 'static'"):
        make_fp4(torch.int8, has_gate=True, scheme="static")(x, index, weights)


# --- unsupported ------------------------------------------------------------------------------------------------------


def other_scale(experts: nn.Module, scale: Tensor) -> None:
    experts.down_proj_scale_inv = nn.Parameter(scale, requires_grad=False)


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], type[Exception], str]] = {
    "blocks": (lambda e: setattr(e, "block_size", (64, 64)), ValueError, r"`weight_block_size` must be .*\(64, 64\)"),
    "scheme": (
        lambda e: setattr(e, "activation_scheme", "other"),
        ValueError,
        "`activation_scheme` must be 'dynamic' or 'static' .* but got 'other'",
    ),
    "scale": (lambda e: other_scale(e, torch.ones(EXPERTS, 3, 1)), ValueError, "`down_proj_scale_inv` must have shape"),
    "dtype of scales": (
        lambda e: other_scale(e, torch.ones(EXPERTS, 2, 1).half()),
        TypeError,
        "`down_proj_scale_inv` must be torch.float8_e8m0fnu or torch.float32, but got torch.float16",
    ),
    "dtype of a weight": (
        lambda e: setattr(e, "down_proj", nn.Parameter(torch.zeros(EXPERTS, 8, 8, dtype=torch.uint8), False)),
        TypeError,
        "`down_proj` must be torch.float8_e4m3fn or torch.int8 or torch.float4_e2m1fn_x2, but got torch.uint8",
    ),
    "FP4 with scales of float32": (
        lambda e: setattr(e, "down_proj", nn.Parameter(torch.zeros(EXPERTS, 8, 8, dtype=torch.int8), False)),
        TypeError,
        "`down_proj_scale_inv` must be torch.float8_e8m0fnu, but got torch.float32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_checkpoints_are_named(name: str) -> None:
    experts, (x, index, weights, _) = make(CASES["blocks"]), inputs()
    change, error, message = REFUSED[name]
    change(experts)
    with pytest.raises(error, match=message):
        experts(x, index, weights)


def test_other_arguments_that_are_refused() -> None:
    experts, (x, index, weights, _) = make(CASES["blocks"]), inputs()
    with pytest.raises(TypeError, match=r"`hidden_states` must be .* but got torch\.float64"):
        experts(x.double(), index, weights)
    with pytest.raises(ValueError, match="`low_rank` must be None for FP8 experts, but got updates of down_proj"):
        integration.experts_forward(experts, x, index, weights, low_rank={"down_proj": ()})
    experts = make(CASES["blocks, static"])
    experts.block_size = (1, 32)
    with pytest.raises(ValueError, match=r"`activation_scheme` must be 'dynamic' for `weight_block_size` \(1, 32\)"):
        experts(x, index, weights)
    experts = make(CASES["tensor"], moe_intermediate_size=96)
    experts.gate_up_proj_scale_inv = nn.Parameter(torch.ones(EXPERTS, 2, 1))
    with pytest.raises(ValueError, match="`gate_up_proj` must have a multiple of 256 rows for 2 scales per expert"):
        experts(x, index, weights)


def test_codes_are_those_of_the_formula() -> None:
    """A quotient may be rounded otherwise than a product with the reciprocal, and a code then is next to the other."""
    x = torch.randn(64, HIDDEN)
    made = tgl.group_quantize(
        x, torch.tensor([64], dtype=torch.int32), format="fp8_block", columnwise=False, power_of_two=False
    )
    ours = made.data.float().unflatten(1, (-1, 128)) * made.scale[:, :, None]
    theirs = tokens_as_quantised(x, 128, None, power_of_two=False).unflatten(1, (-1, 128))
    apart = (ours - theirs).abs() > 1e-6 * theirs.abs()
    assert apart.sum() <= 2

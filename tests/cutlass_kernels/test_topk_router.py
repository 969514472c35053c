"""Routers by the kernels, on the emulator: the choices of the CPU, weights and gradients, under every schedule."""

import itertools

import pytest
import torch

import cute_emulator
import tgl
from tests.cutlass_kernels import sass
from tests.router_cases import CASES, Case, cotangents, operands, weighing
from tgl import backends
from tgl.cutlass_kernels.launchers import topk_router as calls
from tgl.cutlass_kernels.router.router_spec import MOST_CHOICES, MOST_GROUPS
from tgl.cutlass_kernels.runtime import device, launcher

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

ARCHS = ["sm_90a", "sm_80", pytest.param("sm_100a", marks=pytest.mark.slow)]  # sm_80 has no dependent launches
OP, BACKWARD = torch.ops.tgl.topk_router, torch.ops.tgl.topk_router_backward
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of a weight or a sum of positive numbers: exponentials of 2 ulp, a few roundings, and sums of up to 1,024 summands.
CLOSE = {"rtol": 4e-6, "atol": 1e-30}


@pytest.fixture(params=ARCHS, autouse=True)
def machine(request):
    with cute_emulator.emulate(request.param) as machine, backends.emulated_device(request.param.removesuffix("a")):
        yield machine


def every_two() -> list:
    """Architectures, cases and dtypes: any two of the usual ones meet, and the rest of what can is slow."""

    def marks(arch: str, case: int, dtype: int):
        return () if arch == ("sm_90a" if (case + dtype) % 3 else "sm_80") else pytest.mark.slow

    tried = itertools.product(("sm_90a", "sm_80", "sm_100a"), enumerate(CASES), enumerate(DTYPES))
    return [pytest.param(arch, name, dtype, marks=marks(arch, i, j)) for arch, (i, name), (j, dtype) in tried]


tried = pytest.mark.parametrize(("machine", "name", "dtype"), every_two(), indirect=["machine"], ids=str)


def on_cpu(op, *args, **options):
    """Return the result of the CPU's implementation, in float64."""
    with backends.emulated_device("none"):
        return op(
            *(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args), **options
        )


def check(case, logits, bias, seeds=(0,)):
    """The results, the same bits under every schedule."""
    wanted = on_cpu(OP, logits, case.top_k, bias, **case.options)
    for seed in seeds:
        cute_emulator.active().seed = seed
        made = OP(logits, case.top_k, bias, **case.options)
        if seed == seeds[0]:
            first = made
        assert torch.equal(made[1], wanted[1])
        assert torch.equal(made[2], wanted[2])
        for i in (0, 3, 4):
            torch.testing.assert_close(made[i].double(), wanted[i], **CLOSE)
        assert all(torch.equal(a, b) for a, b in zip(made, first, strict=True))
    return first


@pytest.mark.slices(2)
@pytest.mark.cover(1)
@tried
def test_forward(machine, name, dtype):
    case = CASES[name]
    if dtype == torch.float16 and case.experts > 64:
        dtype = torch.float32 if case.bias else torch.bfloat16  # sizes are the other dtypes' concern
    logits, bias = operands(case, 5, dtype)
    check(case, logits, bias)
    assert len(machine.launches) == (2 if case.options.get("sums") else 1)


@pytest.mark.parametrize("name", ["mixtral", "qwen3", "deepseek-v3, sums"])
def test_many_tokens(name):
    """More than a turn of all blocks, under several schedules."""
    case = CASES[name]
    logits, bias = operands(case, 200, torch.bfloat16)
    check(case, logits, bias, seeds=(0, 1, 2))


@pytest.mark.slices(2)
@pytest.mark.cover(1)
@tried
def test_backward(machine, name, dtype):
    """Within two roundings of the dtype, relative to the largest gradient of the token's."""
    case = CASES[name]
    logits, bias = operands(case, 5, dtype)
    index = on_cpu(OP, logits, case.top_k, bias, **case.options)[1]
    grad, *sums = cotangents(case, 5, torch.float32)
    wanted = on_cpu(BACKWARD, grad, logits, index, *sums, **weighing(case))
    made = BACKWARD(grad, logits, index, *sums, **weighing(case))
    assert made.dtype == dtype
    error = (made.double() - wanted).abs().amax(1) / wanted.abs().amax(1).clamp_min(1e-3)
    assert error.max() < (1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps)
    assert len(machine.launches) == 1


MASKED = ("olmoe", "deepseek-v3, sums", "deepseek-v4", "one expert")  # with a score of each kind, and with one expert


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MASKED)
def test_sums_of_some_tokens(name, dtype):
    """The rest is NaN, and nothing of it in a sum, nor a gradient of one in it."""
    case, mask = CASES[name], torch.arange(11) % 3 != 1
    logits, bias = operands(case, 11, dtype)
    logits[~mask] = float("nan")
    wanted = on_cpu(OP, logits, case.top_k, bias, mask, **case.options)
    wide = torch.zeros(11, 3, dtype=torch.bool)
    wide[:, 1] = mask
    for given in (mask, wide[:, 1]):
        made = OP(logits, case.top_k, bias, given, **case.options)
        assert torch.equal(made[2], wanted[2])
        for i in (0, 3, 4):
            torch.testing.assert_close(made[i].double(), wanted[i], equal_nan=True, **CLOSE)
    logits = operands(case, 11, dtype)[0]
    grad, *sums = cotangents(case, 11, torch.float32)
    index = on_cpu(OP, logits, case.top_k, bias, **case.options)[1]
    made = BACKWARD(grad, logits, index, *sums, mask, **weighing(case))
    wanted = on_cpu(BACKWARD, grad, logits, index, *sums, mask, **weighing(case))
    error = (made.double() - wanted).abs().amax(1) / wanted.abs().amax(1).clamp_min(1e-3)
    assert error.max() < (1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps)


def test_backward_of_many_tokens():
    case = CASES["mixtral"]
    logits, _ = operands(case, 300, torch.float32)
    index = OP(logits, case.top_k, **case.options)[1]
    grad = torch.randn(300, case.top_k)
    found = []
    for seed in (0, 1):
        cute_emulator.active().seed = seed
        found.append(BACKWARD(grad, logits, index, renormalize=True))
    assert torch.equal(*found)
    torch.testing.assert_close(
        found[0].double(), on_cpu(BACKWARD, grad, logits, index, renormalize=True), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_ties_infinities_and_nan(dtype, bias):
    inf, nan = float("inf"), float("nan")
    rows = torch.tensor(
        [[1.0, 3.0, -0.0, 3.0, 0.0, 1.0] * 7, [-inf] * 42, [0.0] * 42, [nan, 1.0, -inf] * 14, [inf] + [2.0] * 41]
    )
    logits = torch.cat([rows, -rows]).to(dtype)
    for options in ({"score_function": "sigmoid"}, {"renormalize": True}):
        args = (logits, 12, torch.zeros(42) if bias else None)
        if bias and options.get("renormalize"):
            args = (logits[[0, 2]], 12, torch.zeros(42))  # a softmax of NaN or infinity is NaN for all experts
        wanted, made = on_cpu(OP, *args, **options), OP(*args, **options)
        assert torch.equal(made[1], wanted[1])
        torch.testing.assert_close(made[0].double(), wanted[0], equal_nan=True, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group_score", ["max", "top2_sum"])
def test_ties_of_groups(dtype, group_score):
    """Groups that are left out stay out, even if all others are minus infinity."""
    logits = torch.randint(-1, 2, (12, 30)).to(dtype)
    logits[6:][logits[6:] == -1] = -float("inf")
    options = {"score_function": "sigmoid", "num_groups": 5, "topk_groups": 2, "group_score": group_score}
    assert torch.equal(OP(logits, 12, **options)[1], on_cpu(OP, logits, 12, **options)[1])


@pytest.mark.parametrize("layout", ["column-major", "sliced", "expanded", "misaligned", "odd pitch"])
def test_any_layout(layout):
    case = Case(24, 3, {"renormalize": False, "sums": True})
    logits = torch.randn(24, 24)
    logits = {
        "column-major": lambda: logits.t(),
        "sliced": lambda: torch.randn(5, 64)[:, 8:32],
        "expanded": lambda: logits[:1].expand(4, 24),
        "misaligned": lambda: torch.randn(24 * 5 + 1)[1:].view(5, 24),
        "odd pitch": lambda: torch.randn(5, 27)[:, :24],
    }[layout]()
    made = check(case, logits, None)
    # Sums over experts do not depend on how logits are accessed.
    assert all(torch.equal(a, b) for a, b in zip(made, check(case, logits.clone(), None), strict=True))
    grad, *sums = (t.expand(*t.shape) for t in cotangents(case, len(logits), torch.float32))
    ours = BACKWARD(grad[:1].expand_as(grad), logits, made[1], sums[0][:1].expand(24), sums[1])
    wanted = on_cpu(BACKWARD, grad[:1].expand_as(grad), logits, made[1], sums[0][:1].expand(24), sums[1])
    torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["olmoe", "deepseek-v3", "mixtral"])
def test_a_token_in_any_batch(name):
    """Its results and its gradient have the same bits."""
    case = CASES[name]
    options = {**case.options, "sums": False}
    logits, bias = operands(case, 37, torch.float32)
    made, grad = OP(logits, case.top_k, bias, **options), torch.randn(37, case.top_k)
    back = BACKWARD(grad, logits, made[1], **weighing(case))
    for rows in (slice(0, 1), slice(7, 8), slice(30, 37)):
        for ours, wanted in zip(OP(logits[rows], case.top_k, bias, **options)[:2], made):
            assert torch.equal(ours, wanted[rows])
        assert torch.equal(BACKWARD(grad[rows], logits[rows], made[1][rows], **weighing(case)), back[rows])


REPLAYED = [
    pytest.param(name, dtype, marks=() if dtype == torch.int32 or name == "mixtral" else pytest.mark.slow)
    for name in ("mixtral", "olmoe", "deepseek-v3, sums", "deepseek-v4", "llama4", "all experts of a warp and more")
    for dtype in (torch.int32, torch.int64)
]


def replayed(case, tokens, dtype):
    """Return experts in an order of their own, with dropped slots, and one token that has no expert at all."""
    index = torch.stack([torch.randperm(case.experts)[: case.top_k] for _ in range(tokens)]).to(dtype)
    index[torch.rand(index.shape) < 0.2] = -1
    index[1] = -1
    index[2, 0] = case.experts if dtype == torch.int32 else 1 << 32
    return index


@pytest.mark.cover(1)
@pytest.mark.parametrize(("name", "dtype"), REPLAYED, ids=str)
def test_replay(machine, name, dtype):
    """Forward and backward of given experts, against the CPU in float64; one launch each, two with sums."""
    case = CASES[name]
    logits, bias = operands(case, 7, torch.bfloat16)
    index = replayed(case, 7, dtype)
    mask = torch.arange(7) != 3 if case.options.get("sums") else None
    wide = index.t().contiguous().t()  # column-major
    wanted = on_cpu(OP, logits, case.top_k, bias, mask, index, **case.options)
    for seed in (0, 1):
        cute_emulator.active().seed = seed
        made = OP(logits, case.top_k, bias, mask, wide, **case.options)
        assert torch.equal(made[1], wanted[1])
        assert torch.equal(made[2], wanted[2])
        for i in (0, 3, 4):
            torch.testing.assert_close(made[i].double(), wanted[i], **CLOSE)
    assert len(machine.launches) == (4 if case.options.get("sums") else 2)
    grad, *sums = cotangents(case, 7, torch.float32)
    wanted = on_cpu(BACKWARD, grad, logits, made[1], *sums, mask, **weighing(case))
    ours = BACKWARD(grad, logits, made[1], *sums, mask, **weighing(case))
    error = (ours.double() - wanted).abs().amax(1) / wanted.abs().amax(1).clamp_min(1e-3)
    assert error.max() < torch.finfo(torch.bfloat16).eps


def test_replay_of_the_chosen_experts_has_their_bits():
    """A slot's lane does not depend on who chose its expert."""
    case = CASES["deepseek-v3, sums"]
    logits, bias = operands(case, 5, torch.float32)
    made = OP(logits, case.top_k, bias, **case.options)
    again = OP(logits, case.top_k, None, None, made[1], **case.options)
    assert all(torch.equal(a, b) for a, b in zip(made, again, strict=True))


def test_choices_of_no_expert_get_nothing():
    logits, grad = torch.randn(2, 40), torch.randn(2, 3)
    index = torch.tensor([[3, -1, 40], [1 << 30, 5, -(1 << 30)]], dtype=torch.int32)
    made = BACKWARD(grad, logits, index, score_function="sigmoid")
    assert made.nonzero().tolist() == [[0, 3], [1, 5]]


def test_no_tokens(machine):
    case = CASES["qwen3"]
    made = OP(torch.zeros(0, case.experts), case.top_k, **case.options)
    assert all(not t.any() for t in made)
    assert BACKWARD(made[0], torch.zeros(0, case.experts), made[1], *made[3:]).shape == (0, case.experts)
    assert not machine.launches


def test_one_kernel_serves_any_number_of_tokens(machine, monkeypatch):
    compile, made = launcher.compiled, []
    monkeypatch.setattr(launcher, "compiled_kernels", {})
    monkeypatch.setattr(launcher, "warm_plans", {})
    monkeypatch.setattr(launcher, "compiled", lambda *args: made.append(args[0]) or compile(*args))
    for tokens in (3, 40, 1):
        logits = torch.randn(tokens, 16, requires_grad=True)
        assert tgl.explain("topk_router", logits, 2, sums=True).chosen.name == "tgl kernel"
        weights, _, _, shares, z = OP(logits, 2, sums=True)
        (weights.sum() + shares.sum() + z).backward()
    assert made == ["topk_router", "topk_router_backward"]


def test_warmup_launches_on_tensors_of_its_own(machine):
    logits, bias = torch.randn(3, 12), torch.zeros(12)
    grad, index = torch.randn(3, 2), torch.zeros(3, 2, dtype=torch.int32)
    assert tgl.warmup("topk_router", logits, 2, bias, sums=True).chosen.name == "tgl kernel"
    assert (
        tgl.warmup("topk_router_backward", grad, logits, index, torch.ones(12), torch.ones(1)).chosen.name
        == "tgl kernel"
    )
    launches = len(machine.launches)
    OP(logits, 2, bias, sums=True)
    BACKWARD(grad, logits, index, torch.ones(12), torch.ones(1))
    assert launches == len(machine.launches) - launches == 3


def test_unsupported_calls(monkeypatch):
    def why(op, *args, **options):
        report = tgl.explain(op, *args, **options)
        assert report.chosen.name == "steps of aten"
        return {i.name: why for i, why in report.refused}["tgl kernel"]

    assert why("topk_router", torch.zeros(3, 1025), 2) == "takes up to 1024 experts, got 1025"
    assert why("topk_router", torch.zeros(3, 40), MOST_CHOICES + 1) == "takes up to 32 experts per token, got 33"
    assert "got torch.float64" in why("topk_router", torch.zeros(3, 40).double(), 2)
    groups = MOST_GROUPS + 1
    assert (
        why("topk_router", torch.zeros(3, groups), 2, num_groups=groups, topk_groups=2)
        == "takes up to 32 groups, got 33"
    )
    monkeypatch.setattr(device, "packages_reason", lambda: "needs the package nvidia-cutlass-dsl")
    assert why("topk_router", torch.zeros(3, 40), 2) == "needs the package nvidia-cutlass-dsl"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["mixtral", "deepseek-v3", "1024", "qwen3", "qwen3-next"],
)
def test_machine_code(machine, name):
    """Nothing in local memory, and registers for as many warps as hide a load."""
    case = CASES[name]
    arch = backends.device_arch(torch.device("cpu"))
    dtype = torch.float32 if case.bias else torch.bfloat16
    logits, bias = operands(case, 3, dtype)
    router = calls.Router(**case.options)
    made = OP(logits, case.top_k, bias, **case.options)
    forward = calls.RouterCall(logits, case.top_k, bias, None, None, router, *made)
    back = calls.BackwardCall(made[0], logits, made[1], None, None, None, calls.Weighing(**weighing(case)), logits)
    of_sums = torch.ones(case.experts), torch.ones(1), torch.ones(3, dtype=torch.bool)
    masked = back._replace(**dict(zip(("grad_prob_sum", "grad_z_sum", "mask"), of_sums)))
    built = [(calls.TOPK_ROUTER, forward), (calls.TOPK_ROUTER_BACKWARD, back)]
    if name == "qwen3":
        forward = forward._replace(mask=of_sums[2])
        built += [(calls.TOPK_ROUTER, forward), (calls.TOPK_ROUTER_BACKWARD, masked)]
    for launch, call in built:
        report = sass.inspect(launch.build(launch.key(call, arch)).artifacts.CUBIN)
        assert report.spills == report.frame == 0
        assert report.registers <= 128

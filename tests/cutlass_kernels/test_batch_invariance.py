"""A row has the same bits in any batch, by every kernel that promises it, on the emulator."""

import functools

import pytest
import torch

import cute_emulator
import tgl
from tgl import backends
from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import LINE, VARLEN_M
from tgl.cutlass_kernels.gemm.operand_formats import OPERANDS
from tgl.cutlass_kernels.launchers.gemm_launcher import OperandLauncher
from tgl.cutlass_kernels.register import LAUNCHERS
from tgl.cutlass_kernels.runtime import launcher
from tgl.cutlass_kernels.runtime.launcher import Launcher

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

G, K, N, TOP_K = 3, 160, 64, 3
# Rows ahead of the row in its group, rows behind it, and rows of each other group: other tilings, tiles and places.
BATCHES = [(0, 0, 0), (70, 100, 3), (5, 0, 130), (131, 300, 40)]


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# So that another order of sums has other bits, where products keep float32: 16 bits would hide it.
SPREAD = torch.logspace(-9, 9, K, base=2)
ROW, PROB, W, BIAS = normal(1, K) * SPREAD, 0.37, normal(G, K, N).bfloat16(), normal(G, N).bfloat16()


def dispatched(x, offs, probs):
    """Return the rows of tokens in reverse order, each with one top-k slot."""
    backwards = x.shape[0] - 1 - torch.arange(x.shape[0], dtype=torch.int32)
    return torch.ops.tgl.dispatch(x.flip(0).contiguous(), backwards, backwards, 1, probs.flip(0)[:, None].contiguous())


def combined(x, offs, probs):
    """Sums of three rows, which lie elsewhere in every batch."""
    rows = x.shape[0] * TOP_K
    position = torch.randperm(rows, generator=torch.Generator().manual_seed(rows), dtype=torch.int32)
    y = torch.empty(rows, K, dtype=x.dtype)
    y[position.long()] = (x[:, None] * torch.tensor([[1.0], [1 / 3], [-2 / 7]], dtype=x.dtype)).view(rows, K)
    token = torch.empty_like(position).scatter_(0, position.long(), torch.arange(rows, dtype=torch.int32) // TOP_K)
    return torch.ops.tgl.combine(y, token, position, TOP_K, probs[:, None].expand(-1, TOP_K).contiguous())


FORMATS = (
    {"format": "fp8_block"},
    {"format": "fp8_tensor"},
    {"format": "mxfp8", "scale_layout": "blocked"},
)


def formats_of(arch):
    """Return the formats with GEMMs on the architecture; every format if there are none, to test its quantisers."""
    return [options for options in FORMATS if arch in OPERANDS[options["format"]].archs] or FORMATS


def by_formats(make, only=None):
    """``make`` of formats whose scales are a row's, or given, side by side."""

    def every(x, offs, probs):
        results = []
        for options in formats_of(backends.cpu_target.arch):
            if only is not None and options["format"] != only:
                continue
            given = {"scale": torch.full((G,), 1 / 8)} if options["format"] == "fp8_tensor" else {}
            results.append(make(x, offs, probs, given, options))
        return torch.cat(results, 1)

    return every


def codes(x, offs, probs, given, options):
    made = tgl.group_quantize(x, offs, row_scale=probs, columnwise=False, **given, format=options["format"])
    return made.data.float()


def values(x, offs, probs, given, options):
    made = tgl.group_quantize(x, offs, columnwise=False, **given, **options)
    return tgl.group_dequantize(made.data, made.scale, offs, **options)


def activated_codes(x, offs, probs, given, options):
    made = tgl.grouped_activation_quantize(x, offs, probs, columnwise=False, **given, format=options["format"])
    return made.data.float()


def product(x, offs, probs, given, options):
    a = tgl.group_quantize(x, offs, columnwise=False, **given, **options)
    square = {"block_2d": True} if options["format"] == "fp8_block" else {}
    b = tgl.group_quantize(W.transpose(1, 2).contiguous(), None, columnwise=False, **given, **options, **square)
    return tgl.grouped_gemm_scaled(
        a.data, a.scale, b.data, b.scale, offs, bias=BIAS, bias_scale=probs, **options, out_dtype=torch.float32
    )


def product_codes(x, offs, probs, given, options):
    a = tgl.group_quantize(x, offs, columnwise=False, **given, **options)
    b = tgl.group_quantize(W.transpose(1, 2).contiguous(), None, columnwise=False, **given, **options)
    h, made = tgl.grouped_gemm_scaled_activation_quantize(
        a.data, a.scale, b.data, b.scale, offs, bias=BIAS, probs=probs, kind="srelu", columnwise=False, **options
    )
    return torch.cat([h, made.data.float()], 1)


def packed_product(x, offs, probs):
    results = []
    for over_rows in (False, True):
        b = tgl.group_quantize(W if over_rows else W.transpose(1, 2).contiguous(), None, format="mxfp4")
        options = {"format": "mxfp4", "over_rows": over_rows, "out_dtype": torch.float32}
        results.append(tgl.grouped_gemm_packed(x, b.data, b.scale, offs, None, BIAS, probs, **options))
    return torch.cat(results, 1)


def row_scaled_product(x, offs, probs):
    # PyTorch 2.11 makes NaN of what is beyond the largest, later ones do not.
    codes, w = x.clamp(-448, 448).to(torch.float8_e4m3fn), W.transpose(1, 2).contiguous().to(torch.float8_e4m3fn)
    return tgl.grouped_gemm_row_scaled(codes, probs, w, BIAS.float().abs(), offs, out_dtype=torch.float32)


def routed(x, offs, probs):
    made = tgl.topk_router(x, 4, renormalize=True)
    return torch.cat([made.weights, made.top_k_index.float()], 1)


ROWS_OF = {
    "grouped_gemm": lambda x, offs, probs: tgl.grouped_gemm(x, W, offs, BIAS, probs, out_dtype=torch.float32),
    "grouped_gemm_activation": lambda x, offs, probs: torch.cat(
        tgl.grouped_gemm_activation(x, W, offs, BIAS, probs, out_dtype=torch.float32), 1
    ),
    "grouped_activation": lambda x, offs, probs: tgl.grouped_activation(x, offs, probs),
    "dispatch": dispatched,
    "combine": combined,
    "group_quantize": by_formats(codes),
    "group_dequantize": by_formats(values),
    "grouped_activation_quantize": by_formats(activated_codes),
    "grouped_gemm_low_rank": lambda x, offs, probs: tgl.grouped_gemm_low_rank(
        x, W, x[:, :24].contiguous(), W[:, :24], offs, BIAS, probs
    ),
    "grouped_gemm_low_rank_activation": lambda x, offs, probs: torch.cat(
        tgl.grouped_gemm_low_rank_activation(
            x, W, x[:, :24].contiguous(), W[:, :24], offs, BIAS, probs, out_dtype=torch.float32
        ),
        1,
    ),
    "grouped_gemm_packed": packed_product,
    "grouped_gemm_row_scaled": row_scaled_product,
    "grouped_gemm_scaled": by_formats(product),
    "grouped_gemm_scaled_activation_quantize": by_formats(product_codes, only="mxfp8"),
    "topk_router": routed,
}


def promises(launcher: Launcher) -> bool:
    """Return whether a launcher promises it for some call."""
    method = type(launcher).batch_invariant
    if method is OperandLauncher.batch_invariant:  # which looks at the op's outputs, whatever the call
        return launcher.batch_invariant(None)
    return method is not Launcher.batch_invariant


def test_every_kernel_that_promises_it_is_here():
    assert {launcher.op for launcher in LAUNCHERS if promises(launcher)} == ROWS_OF.keys()


def block_operands(dtype):
    """Names, positional arguments and keywords of ``moe`` and ``grouped_mlp``. For few slots ``moe`` has no parts."""
    x, w1, w2 = (torch.zeros(size, dtype=dtype) for size in ((80, K), (G, K, 2 * N), (G, N, K)))
    routing = tgl.route(torch.arange(80)[:, None] % G, G)
    places = routing.source, routing.position, routing.token, routing.offs
    return {"moe": ((x, w1, w2, *places), {"top_k": 1}), "grouped_mlp": ((x, w1, w2, routing.offs), {})}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", ["moe", "grouped_mlp"])
def test_the_block_promises_what_its_parts_promise(op, arch):
    for dtype in (torch.bfloat16, torch.float16):
        args, options = block_operands(dtype)[op]
        with backends.compile_only(arch):
            explanation = tgl.explain(op, *args, **options)
        assert explanation.batch_invariant
        assert "batch-invariant" in str(explanation)
        assert {part.chosen.name for part in explanation.parts} == {"tgl kernel"}
        assert not tgl.explain(op, *args, **options).batch_invariant  # on the CPU
    args, options = block_operands(torch.float32)[op]  # whose products are ATen's
    with backends.compile_only(arch):
        assert not tgl.explain(op, *args, **options).batch_invariant


def test_gradients_of_weights_are_not_promised():
    """Gradients of tokens are batch invariant, given the gradient of the pre-activation; weight gradients are not."""
    (x, w1, w2, _, position, token, offs), options = block_operands(torch.bfloat16)["moe"]
    h = torch.zeros(80, 2 * N).bfloat16()
    with backends.compile_only("sm_90"):
        for wgrad in (False, True):
            mask = [True, wgrad, False]
            found = tgl.explain("moe_backward_input", h, x, w1, position, token, offs, output_mask=mask, **options)
            assert (found.parts[-1].op == "grouped_gemm_wgrad") == wgrad
            assert found.batch_invariant != wgrad
        mask = [False, True, False, False, False, False]
        expert = tgl.explain("grouped_mlp_backward", x, x, w1, w2, offs, h, None, output_mask=mask)
    assert expert.parts[-1].op == "grouped_gemm_wgrad"
    assert not expert.batch_invariant


@pytest.mark.parametrize("given", [False, True])
def test_two_ops_promise_what_their_scales_allow(given):
    """A scale of a tensor is one of the other rows, unless it is given."""
    x, offs, scale = torch.zeros(8, 2 * K).bfloat16(), torch.tensor([8], dtype=torch.int32), torch.ones(1)
    codes, w = (torch.zeros(size, dtype=torch.float8_e4m3fn) for size in ((8, K), (1, 2 * K, K)))
    options = {"format": "fp8_tensor", "columnwise": False}
    with backends.compile_only("sm_90"):
        found = tgl.explain(
            "grouped_gemm_scaled_activation_quantize",
            *(codes, scale, w, scale, offs),
            scale=scale if given else None,
            **options,
        )
        alone = tgl.explain("grouped_activation_quantize", x, offs, scale=scale if given else None, **options)
    assert [part.op for part in found.parts] == ["grouped_gemm_scaled", "grouped_activation_quantize"]
    assert [part.batch_invariant for part in found.parts] == [True, given]
    assert found.batch_invariant == alone.batch_invariant == given


def row_of(make, arch, batch):
    """Return the result of ``ROW`` in group 1 with such rows around it."""
    ahead, behind, others = batch
    sizes = torch.tensor([others, ahead + 1 + behind, others])
    x, place = normal(int(sizes.sum()), K, seed=sum(batch)) * SPREAD, others + ahead
    probs = normal(x.shape[0], seed=3).abs()
    x[place], probs[place] = ROW, PROB
    with cute_emulator.emulate(ARCHS[arch].target) as machine, backends.emulated_device(arch):
        result = make(x.bfloat16(), sizes.cumsum(0).int(), probs)
    assert machine.launches
    return result[place]


SERVED = {of.op: of.archs for of in LAUNCHERS}
CASES = [
    pytest.param(op, arch, batch, marks=() if (arch, batch) == ("sm_90", BATCHES[1]) else pytest.mark.slow)
    for op in ROWS_OF
    for arch in sorted(SERVED[op])
    for batch in BATCHES[1:]
]


@pytest.mark.slices(2)
@pytest.mark.parametrize(("op", "arch", "batch"), CASES)
def test_a_row_among_others(op, arch, batch):
    one, other = (row_of(ROWS_OF[op], arch, b) for b in (BATCHES[0], batch))
    assert one.abs().sum() > 0
    assert torch.equal(one, other)


def test_the_row_tells_orders_of_sums_apart():
    products = ROW.bfloat16().float().T * W[1].float()
    there, back = (functools.reduce(torch.add, t) for t in (products, products.flip(0)))
    assert not torch.equal(there, back)


# --- where a call takes another path ----------------------------------------------------------------------------------

WIDE, TOKENS, SIZES = 128, 40, (5, 0, 70)
INDEX = torch.randint(TOKENS, (sum(SIZES),), generator=torch.Generator().manual_seed(5), dtype=torch.int32)


def cancelling(seed):
    """Tokens and matrices of exponents far apart whose products are zero but for what sums round, in any order."""
    shuffled = torch.randperm(K, generator=torch.Generator().manual_seed(seed))
    x = (normal(TOKENS, K // 2, seed=seed) * SPREAD[: K // 2]).repeat(1, 2)
    far = torch.exp2(torch.randint(-9, 10, (G, K // 2, WIDE), generator=torch.Generator().manual_seed(seed)).float())
    w = normal(G, K // 2, WIDE, seed=seed + 1) * far
    return x[:, shuffled].bfloat16(), torch.cat([w, -w], 1)[:, shuffled].bfloat16()


# The only kind of MMA, by folder of kernels.
MMAS = {"sm90": "wgmma.mma_async.", "sm100": "tcgen05.mma.", "mma_sync": "mma.sync."}
PRODUCTS = {
    "grouped_gemm": lambda x, *operands, rows: tgl.grouped_gemm(x, *operands, rows=rows),
    "grouped_gemm_activation": lambda x, *operands, rows: torch.cat(
        tgl.grouped_gemm_activation(x, *operands, rows=rows), 1
    ),
}


def tiles(op, arch, gathering):
    """Return a tiling of every shape that exists, the smallest tile first."""
    able = tilings.candidates(arch, VARLEN_M, gathering)
    if op == "grouped_gemm_activation":  # halves of gate and linear half lie along the columns here
        able = [t for t in able if t.tile_n % (2 * LINE) == 0]
    found = {(t.tile_m, t.tile_n, t.two_cta, t.pingpong): t for t in able}
    return sorted(found.values(), key=lambda t: (t.tile_m * t.tile_n, t.tile_m, t.pingpong))


def product_by(op, arch, tiling, gathers, backwards=False):
    """The result on rows in order, or read by ``INDEX``, by the kernel of such tiles; ``backwards``: along K."""
    x, w = (t.flip(1) if backwards else t for t in cancelling(seed=7))
    bias, probs = torch.zeros(G, WIDE).bfloat16(), normal(sum(SIZES), seed=10).abs()
    offs, mean = torch.tensor(SIZES).cumsum(0).int(), launcher.power_of_two(sum(SIZES) // G)
    problem = arch, VARLEN_M, WIDE, K, mean
    launcher.forget()
    with (
        pytest.MonkeyPatch.context() as patched,
        cute_emulator.emulate(ARCHS[arch].target, detect_races=False) as machine,
    ):
        patched.setitem(tilings.tuned, (*problem, "a") if gathers else problem, tiling)
        rows = INDEX if gathers else None
        with backends.emulated_device(arch):
            made = PRODUCTS[op](x if gathers else x[INDEX.long()], w, offs, bias, probs, rows=rows)
    ran = machine.launches[-1].instructions
    assert {kind for kind in MMAS.values() if any(i.startswith(kind) for i in ran)} == {MMAS[ARCHS[arch].folder]}
    (plan,) = launcher.warm_plans.values()
    launcher.forget()
    assert (plan.key.config, plan.key.gathered) == (tiling, "a" if gathers else None)
    return made


PATHS = [
    pytest.param(op, arch, marks=() if (op, arch) in fast else pytest.mark.slow)
    for fast in [{("grouped_gemm", arch) for arch in ("sm_80", "sm_90", "sm_100")}]
    for op in PRODUCTS
    for arch in sorted(SERVED[op])
]


@pytest.mark.parametrize(("op", "arch"), PATHS)
def test_small_tiles_that_gather_and_large_ones_that_do_not(op, arch):
    """Few tokens take small tiles that gather, many tokens large tiles that do not."""
    few = tiles(op, arch, gathering=True)[0]
    many = next(t for t in tiles(op, arch, gathering=False) if t.tile_m > few.tile_m and t.tile_n > few.tile_n)
    gathered = product_by(op, arch, few, True)
    assert torch.equal(gathered, product_by(op, arch, many, False))
    assert (gathered != product_by(op, arch, few, True, backwards=True)).float().mean() > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize(("op", "arch"), [(op, arch) for op in PRODUCTS for arch in ("sm_80", "sm_90", "sm_100")])
def test_tiles_of_every_shape(op, arch, gathers):
    first, *others = tiles(op, arch, gathers)
    expected = product_by(op, arch, first, gathers)
    assert others
    for tiling in others:
        assert torch.equal(product_by(op, arch, tiling, gathers), expected), tiling

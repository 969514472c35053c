"""``MoE`` with a recipe, or with options of training, is one node of autograd from tokens to tokens.

It has the bits of dispatch, ``GroupedMLP`` and combine, and holds the tokens where these hold rows.
"""

import copy

import pytest
import torch

import tgl
from tests.memory import same_bytes
from tests.nn.seen import Ops, same
from tests.peak_memory import peak_memory
from tgl import recipes
from tgl.meta.formats import SCALE_LAYOUTS
from tgl.nn import _token_permutation
from tgl.nn._scaled_gemms import ScaledGemms
from tgl.nn._token_permutation import LocalPermutation

G, H, I, S = 5, 32, 48, 9
CHOSEN = {  # expert 1 has no token; token 4 has no expert
    1: torch.tensor([[0], [2], [3], [2], [-1], [3], [4], [0], [9]]),
    2: torch.tensor([[0, 2], [2, 3], [3, 0], [2, 2], [5, -1], [-1, 3], [3, 4], [0, 3], [4, 9]]),
    3: torch.tensor(
        [[0, 2, 4], [2, 3, 0], [3, 0, -1], [2, 2, 4], [5, 9, -1], [-1, 3, 3], [3, 4, 0], [0, 3, 2], [4, 9, 0]]
    ),
}
UNROUTED = 4
TOP_K = 2
T = S * TOP_K
RECIPES = {
    "none": None,
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(amax_history_len=3),
    "block": recipes.Float8BlockScaling(),
}
OPTIONS = {
    "plain": {},
    "recompute": {"recompute_activation": True},
    "original": {"save_original_input": True},
    "discrete": {"single_grouped_weight": False, "bias": True},
    "main_grad": {"fuse_wgrad_accumulation": True, "bias": True},
    "discrete main_grad": {"fuse_wgrad_accumulation": True, "single_grouped_weight": False},
    "delayed": {"delay_wgrad_compute": True, "bias": True},
    "delayed main_grad": {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True},
    "other activation": {"activation": "clamped_qgeglu", "interleaved": True, "bias": True},
}
ONE_OP = "plain", "recompute", "original", "other activation"  # without a recipe
IN_GRAPHS = {"none": "main_grad", "mxfp8": "delayed", "current": "discrete", "delayed": "main_grad", "nvfp4": "plain"}
EVERY = [(r, o) for r in RECIPES for o in OPTIONS if r != "none" or o not in ONE_OP]


def make(recipe="none", option="plain", dtype=torch.bfloat16, **further):
    """A block with buffers for the gradients that go to ``main_grad``."""
    torch.manual_seed(0)
    block = tgl.MoE(G, H, I, recipe=RECIPES[recipe], params_dtype=dtype, **OPTIONS[option], **further)
    for layer in (block.fc1, block.fc2):
        for weight in layer.group_parameters("weight") if layer.fuse_wgrad_accumulation else ():
            weight.main_grad = torch.ones(weight.shape, dtype=torch.promote_types(dtype, torch.float32))
    return block


def by_pieces(block, x, routing, weights):
    routing = tgl.route(routing, G) if isinstance(routing, torch.Tensor) else routing
    probs = None if weights is None else tgl.dispatch_weights(weights, routing)
    return tgl.combine(block.forward_offsets(tgl.dispatch(x, routing), routing.offs, probs), routing)


def inputs(seed=0, top_k=TOP_K, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(S, H, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(S, top_k, generator=generator, dtype=torch.promote_types(dtype, torch.float32))
    return x, weights.requires_grad_(), torch.randn(S, H, generator=generator).to(dtype)


def steps(function, block, count=2, **options):
    """Return the results of ``count`` steps of training, and the state that they leave in the block."""
    found = []
    for seed in range(count):
        x, weights, dy = inputs(seed, **options)
        y = function(x, weights)
        y.backward(dy)
        block.backward_dw()
        gradients = [p.grad for p in block.parameters() if p.grad is not None]
        found += [t.clone() for t in (y.detach(), x.grad, weights.grad, *gradients)]
    main_grads = [p.main_grad for p in block.parameters() if hasattr(p, "main_grad")]
    return found + [t.clone() for t in (*main_grads, *block.buffers())]


# --- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "option"), EVERY)
def test_bits_of_the_pieces(recipe, option):
    one, other = make(recipe, option), make(recipe, option)
    for top_k, chosen in CHOSEN.items():
        ours = steps(lambda x, w, c=chosen: one(x, c, w), one, top_k=top_k)
        assert same(ours, steps(lambda x, w, c=chosen: by_pieces(other, x, c, w), other, top_k=top_k))
        assert all(t.isfinite().all() for t in ours)


# --- tokens that are quantised once, as on a GPU ----------------------------------------------------------------------


@pytest.fixture
def once(monkeypatch):
    """Counts how often a block quantises tokens before they are copied to rows."""
    made, ours = [], ScaledGemms.input_of_tokens
    monkeypatch.setattr(LocalPermutation, "_quantises_once", lambda self, x, gemms: gemms.copies_codes)
    monkeypatch.setattr(ScaledGemms, "input_of_tokens", lambda *args: made.append(args) or ours(*args))
    return made


@pytest.mark.parametrize(("recipe", "option"), [*(("block", option) for option in OPTIONS), ("mxfp8", "plain")])
def test_tokens_quantised_once_have_the_bits_of_rows(recipe, option, once):
    one, other = make(recipe, option), make(recipe, option)
    for top_k, chosen in CHOSEN.items():
        ours = steps(lambda x, w, c=chosen: one(x, c, w), one, top_k=top_k)
        assert same(ours, steps(lambda x, w, c=chosen: by_pieces(other, x, c, w), other, top_k=top_k))
    assert len(once) == 2 * len(CHOSEN)


@pytest.mark.parametrize("recipe", ["nvfp4", "current", "delayed"])
def test_tokens_of_other_formats_are_quantised_by_rows(recipe, once):
    """Their scales belong to a group, or lie as no copy of rows puts them."""
    block = make(recipe)
    steps(lambda x, w: block(x, CHOSEN[2], w), block)
    assert not once


@pytest.mark.parametrize("recipe", ["block", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_operands_of_tokens_quantised_once(recipe, dtype):
    """The bytes and strides of rows that are quantised by an index; NaN of a token reaches its own rows alone."""
    routing, x = tgl.route(CHOSEN[3], G), torch.randn(S, 160).to(dtype)
    x[UNROUTED] = x[0, 0] = torch.nan
    layer = tgl.GroupedLinear(G, 160, I, recipe=RECIPES[recipe], params_dtype=dtype)
    gemms, places = layer.gemms, LocalPermutation.of(routing)
    found = gemms.input_of_tokens(x, routing.offs, routing.token, places.dispatched).fprop
    wanted = gemms.input(x, routing.offs, routing.token, fprop=True, wgrad=False).fprop
    end = int(routing.offs[-1])
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        rows = end if ours.dim() == 2 else ours.shape[0]  # blocked scales have zeros wherever there is no row
        assert same_bytes(ours[:rows], theirs[:rows])


@pytest.mark.parametrize("change", [{"CHOICES": 5}, {"ELEMENTS": 1 << 30}, {}], ids=str)
def test_which_tokens_are_quantised_once(change, monkeypatch):
    """Tokens are quantised once by top-k slots and by elements, on a device other than a CPU."""
    for name, value in {"CHOICES": 4, "ELEMENTS": S * H, **change}.items():
        monkeypatch.setattr(_token_permutation, name, value)
    x, none = torch.empty(S, H, device="meta"), torch.empty(0)
    gemms = {recipe: make(recipe).fc1.gemms for recipe in RECIPES if recipe != "none"}
    chosen = [recipe for recipe, of in gemms.items() if LocalPermutation(none, none, 4)._quantises_once(x, of)]
    assert chosen == ([] if change else ["mxfp8", "block"])
    assert not any(
        LocalPermutation(none, none, 4)._quantises_once(torch.empty(S, H), gemms[recipe]) for recipe in chosen
    )


def test_tokens_with_compact_scales_are_not_quantised_once():
    """Products that take compact scales get rows of bytes, so that tokens are not quantised once."""
    gemms = {layout: ScaledGemms(recipes.MXFP8BlockScaling(scale_layout=layout), G, H, I) for layout in SCALE_LAYOUTS}
    assert [layout for layout, of in gemms.items() if of.copies_codes] == ["blocked"]


@pytest.mark.parametrize("option", ["original", "discrete", "main_grad", "delayed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_bits_of_dense_blocks(dtype, option):
    one, other = make(option=option, dtype=dtype), make(option=option, dtype=dtype)
    ours = steps(lambda x, w: one(x, CHOSEN[2], w), one, dtype=dtype)
    assert same(ours, steps(lambda x, w: by_pieces(other, x, CHOSEN[2], w), other, dtype=dtype))


def test_gradients_in_float64():
    """Against finite differences: of the tokens, the routing weights and every parameter."""
    block = make(option="discrete", dtype=torch.float64)
    x, weights, _ = inputs(dtype=torch.float64)
    given = [x, weights, *block.parameters()]
    assert torch.autograd.gradcheck(lambda x, w, *_: block(x, CHOSEN[2], w), given, fast_mode=True)


@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_with_any_tensor_frozen(recipe, with_weights):
    """Every tensor alone, and every tensor but one, has the gradient that it has by the pieces."""
    for frozen_are_named in (False, True):
        for name in ("x", "weights", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"):
            results = []
            for pieces in (False, True):
                block = make(recipe, "discrete")
                x, weights, dy = inputs()
                named = {"x": x, "weights": weights, **dict(block.named_parameters())}
                for other, t in named.items():
                    t.requires_grad_(other.startswith(name) != frozen_are_named)
                given = weights if with_weights else None
                y = by_pieces(block, x, CHOSEN[2], given) if pieces else block(x, CHOSEN[2], given)
                if y.requires_grad:
                    y.backward(dy)
                results.append([y.detach(), *(t.grad for t in named.values() if t.grad is not None)])
            assert same(*results), (name, frozen_are_named)


@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_of_unrouted_tokens_and_unused_rows_is_read(recipe):
    block = make(recipe, "discrete")
    expected = None
    for value in (0.0, float("nan")):
        x, weights, dy = inputs()
        for t in (x, weights, dy):
            t.detach()[UNROUTED] = value
        block.zero_grad()
        torch.manual_seed(1)
        for layer in (block.fc1, block.fc2):
            layer.gemms.reset_state()
        y = block(x, tgl.route(CHOSEN[2], G, num_rows=40), weights)
        y.backward(dy)
        found = [y.detach(), x.grad, weights.grad, *(p.grad for p in block.parameters())]
        assert all(t.isfinite().all() for t in found)
        expected = expected or found
        assert same(found, expected)


@pytest.mark.parametrize(
    ("recipe", "option"), [pytest.param(*c, marks=() if c in IN_GRAPHS.items() else pytest.mark.slow) for c in EVERY]
)
def test_compiled(recipe, option):
    """The graph has no break and the bits of the pieces, and holds no matrix that eager code does not hold.

    Sums by token need float32 to have these bits in a graph. Without a recipe a graph for a CPU is that of the pieces.
    """
    one, other = make(recipe, option, torch.float32), make(recipe, option, torch.float32)
    if one.fc1.delay_wgrad_compute:
        one.reserve_delayed_wgrad(T, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: one(x, CHOSEN[2], w), fullgraph=True, backend="aot_eager")

    def pieces(x, w):
        return by_pieces(other, x, CHOSEN[2], w)

    if recipe == "none":
        pieces = torch.compile(pieces, fullgraph=True, backend="aot_eager")
        if other.fc1.delay_wgrad_compute:
            other.reserve_delayed_wgrad(T, dtype=torch.float32)
    else:
        x, weights, _ = inputs(dtype=torch.float32)
        _, own = held(one, lambda: compiled(x, weights))
        main_grads = [tuple(p.main_grad.shape) for p in one.parameters() if hasattr(p, "main_grad")]
        matrices = [found for found in own if len(found[0]) > 1 and found[0] not in main_grads]
        assert [found for found in matrices if found not in to_be_held(one)] == []
        assert matrices.count(((T, 2 * I), "torch.float32")) == 1
        pieces(x, weights)
    ours, theirs = (steps(call, block, dtype=torch.float32) for call, block in ((compiled, one), (pieces, other)))
    assert same(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mxfp8", "delayed"])
def test_inductor(recipe):
    """Two microbatches in one graph, of two numbers of tokens: each is quantised again as it was."""
    one, other = make(recipe, dtype=torch.float32), make(recipe, dtype=torch.float32)

    def twice(call):
        def both(x, w):
            return call(x, CHOSEN[2], w) + call(2 * x[:6], CHOSEN[2][:6], w[:6]).sum(0)

        return both

    torch._dynamo.reset()
    ours = steps(torch.compile(twice(one), fullgraph=True), one, dtype=torch.float32)
    want = steps(twice(lambda *given: by_pieces(other, *given)), other, dtype=torch.float32)
    for mine, theirs in zip(ours, want, strict=True):
        torch.testing.assert_close(mine, theirs)


# --- what is held -----------------------------------------------------------------------------------------------------


def held(block, function):
    """Return the tensors saved for the backward besides parameters, each once: shape and dtype."""
    found = {}

    def pack(t):
        found[t.data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = function()
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
    found = {at: t for at, t in found.items() if t.numel() and t.untyped_storage().data_ptr() not in parameters}
    return y, sorted((tuple(t.shape), str(t.dtype)) for t in found.values())


def to_be_held(block):
    """Tokens, the pre-activation, routing weights and integers; with a recipe the quantised weights."""
    dtype, integers = block.fc1.group_parameters("weight")[0].dtype, "torch.int32"
    own = [((S, H), str(dtype)), ((T, 2 * I), str(dtype)), ((T,), str(torch.promote_types(dtype, torch.float32)))]
    own += [((T,), integers), ((T,), integers), ((T,), integers), ((G,), integers)]  # source, token, position, ends
    for layer in (block.fc1, block.fc2) if block.fc1.gemms.fuses_activation else ():
        weight = layer.packed("weight", layer.group_parameters("weight")).detach()
        made = copy.deepcopy(layer.gemms).weight(weight, dgrad=True, is_first_microbatch=None).dgrad
        own += [(tuple(t.shape), str(t.dtype)) for t in made]
        own += [((G,), "torch.float32")] if layer.gemms.delayed else []
    return sorted(own)


@pytest.mark.parametrize(("recipe", "option"), EVERY)
def test_tensors_held_for_the_backward(recipe, option):
    block, (x, weights, dy) = make(recipe, option), inputs()
    expected = to_be_held(block)
    y, own = held(block, lambda: block(x, CHOSEN[2], weights))
    assert own == expected
    y.backward(dy)


@pytest.mark.parametrize("recipe", RECIPES)
def test_tokens_are_not_held_for_a_frozen_first_weight(recipe):
    block, (x, weights, _) = make(recipe, "main_grad"), inputs()
    block.fc1.weight.requires_grad_(False)
    _, own = held(block, lambda: block(x, CHOSEN[2], weights))
    assert ((S, H), "torch.bfloat16") not in own
    assert ((T, 2 * I), "torch.bfloat16") in own


BITS = {"none": 16, "nvfp4": 4}  # of an element of the operands that the pieces hold; 8 elsewhere


@pytest.mark.parametrize("recipe", RECIPES)
def test_memory_of_blocks_in_a_row(recipe):
    """Each block before the last holds tokens instead of two operands of rows, at the peak of the last backward."""
    tokens, top_k, groups, width, inner = 256, 4, 4, 64, 48
    options = {"params_dtype": torch.bfloat16, "single_grouped_weight": False}
    blocks = [tgl.MoE(groups, width, inner, recipe=RECIPES[recipe], **options) for _ in range(4)]
    x, weights = torch.randn(tokens, width).bfloat16(), torch.rand(tokens, top_k).requires_grad_()
    routing = tgl.route(torch.arange(tokens * top_k).view(tokens, top_k) % groups, groups)

    def step(call, count):
        y = x
        for block in blocks[:count]:
            y = call(block, y, routing, weights)
        y.square().sum().backward()
        weights.grad = None
        for block in blocks:
            block.zero_grad()

    peaks = [[peak_memory(lambda a=(call, n): step(*a)) for n in (2, 4)] for call in (tgl.MoE.__call__, by_pieces)]
    ours, pieces = (four - two for two, four in peaks)
    rows = tokens * top_k
    less = rows * (width + inner) * BITS.get(recipe, 8) // 8 - tokens * width * 2 - 8 * rows  # integers and weights
    assert ours <= pieces - 2 * less


# --- which ops --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "none"])
def test_recipes_read_tokens_by_an_index(recipe):
    """The block is one autograd node, and copies no token: only routing weights are dispatched."""
    block, (x, weights, dy) = make(recipe), inputs()
    with Ops() as seen:
        y = block(x, CHOSEN[2], weights)
        assert type(y.grad_fn).__name__ == "ExpertFunctionBackward"
        y.backward(dy)
    assert seen.names.count("dispatch") == 1
    assert seen.names.count("combine") == 3  # the result, and the gradients of tokens and weights


def test_plain_layers_with_computed_weights_keep_their_second_order():
    block, (x, weights, _) = make(dtype=torch.float64), inputs(dtype=torch.float64)
    torch.nn.utils.parametrize.register_parametrization(block.fc1, "weight", torch.nn.Identity())
    (dx,) = torch.autograd.grad(block(x, CHOSEN[2], weights).square().sum(), x, create_graph=True)
    assert torch.autograd.grad(dx.sum(), weights)[0].any()


def test_a_second_derivative_is_refused():
    block, (x, weights, _) = make("mxfp8", "discrete"), inputs()
    (dx,) = torch.autograd.grad(block(x, CHOSEN[2], weights).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gradients of a layer of this kind have no derivative"):
        dx.sum().backward()


@pytest.mark.parametrize("recipe", ["none", "delayed", "nvfp4"])
def test_transforms(recipe):
    """Under ``torch.func`` the layers run one by one."""
    block, (x, weights, _) = make(recipe, "discrete"), inputs()
    expected = torch.autograd.grad(copy.deepcopy(block)(x, CHOSEN[2], weights).sum(), x)[0]
    assert same([torch.func.grad(lambda x: block(x, CHOSEN[2], weights.detach()).sum())(x.detach())], [expected])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_input_of_another_dtype(recipe, autocast):
    """float32 tokens: under autocast in bfloat16, and with a recipe as they are."""
    option = "discrete" if autocast else "discrete main_grad"
    if recipe == "none" and not autocast:
        with pytest.raises(
            TypeError, match=r"`x` must be torch\.bfloat16 like the layer's weight, but got torch\.float32"
        ):
            make(option="discrete")(torch.randn(S, H), CHOSEN[2])
        return
    one, other = make(recipe, option), make(recipe, option)
    x, weights, dy = inputs(dtype=torch.float32)
    results = []
    for block, call in ((one, tgl.MoE.__call__), (other, by_pieces)):
        x.grad = weights.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = call(block, x, CHOSEN[2], weights)
        assert y.dtype == (torch.bfloat16 if autocast else torch.float32)
        y.backward(dy.to(y.dtype))
        gradients = [weights.grad, *(p.grad if autocast else p.main_grad for p in block.parameters())]
        results.append([t.clone() for t in (y.detach(), *gradients, *([] if recipe == "none" else [x.grad]))])
    assert same(*results)


@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
def test_bad_input(recipe):
    block, (x, weights, _) = make(recipe, "main_grad"), inputs()
    with pytest.raises(ValueError, match=r"`x` must be \[\.\.\., K\] with K = in_features = 32, but got K = 31"):
        block(x[:, 1:], CHOSEN[2], weights)
    block.fc2.weight.main_grad = None
    with Ops() as seen, pytest.raises(ValueError, match=r"`weight\.main_grad` must be a tensor"):
        block(x, CHOSEN[2], weights)
    assert "group_quantize" not in seen.names

"""Nothing is written outside: canaries around every output, workspace, operand and saved tensor of every op."""

import dataclasses

import pytest
import torch

import tgl
from tests import chips
from tests.canaries import MARGIN, Guard
from tests.journeys import RECIPES, WIDTHS, Case, batch, casts, forward_and_loss, layer
from tests.journeys import step as train_step
from tgl.testing import SIGNATURES
from tgl.testing.signatures import overload

ARCH = chips.arch()
needs_gpu = (pytest.mark.gpu, pytest.mark.skipif(ARCH is None, reason="needs a device that the kernels are built for"))
ON_GPU = chips.EVERY
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=needs_gpu)]

ROUTINGS = ("ragged_tail", "empty_middle", "all_empty", "no_rows", "one_token", "above_tile", "groups_300")
# Of the letters in the ops' signatures: around a tile, and off every boundary.
SHAPES = {"wide": {"K": 200, "M": 136, "N": 264, "I": 136}, "odd": {"K": 100, "M": 60, "N": 36, "I": 60}}


@pytest.fixture
def guard(request):
    return Guard(request.getfixturevalue("device"))


def test_canaries_detect_stray_writes():
    guard = Guard("cpu")
    with guard.allocations():
        t = torch.empty(3, 5, dtype=torch.bfloat16)
        made = tgl.splits_to_offsets(torch.tensor([3, 2]))
    assert made.tolist() == [3, 5]
    assert guard.check() > 1
    for step, message in ((15, "0 bytes before it and 2 behind it"), (-1, "2 bytes before it and 0 behind it")):
        with guard.allocations():
            t = torch.empty(3, 5, dtype=torch.bfloat16)
        t.as_strided((1,), (1,), t.storage_offset() + step).fill_(1)
        with pytest.raises(AssertionError, match=message):
            guard.check()
    t = guard.hold(torch.zeros(4), "x")
    t[2] = 1
    with pytest.raises(AssertionError, match="x: an operand was written"):
        guard.check()
    t = guard.hold(torch.zeros(4, 8)[:, :6], "out", written=True)
    t.fill_(1)
    assert guard.check() == 1
    t = guard.hold(torch.zeros(4, 8)[:, :6], "out", written=True)
    t.as_strided((1,), (1,), t.storage_offset() + 6).fill_(1)
    with pytest.raises(AssertionError, match="out: gaps between its rows were written"):
        guard.check()
    assert MARGIN % 512 == 0


def cases():
    """Every op with every signature; operands that are components have the sizes that their generator knows."""
    found = []
    for name, signatures in SIGNATURES.items():
        for i, signature in enumerate(signatures):
            of_letters = set(signature.dimensions) & {"M", "N", "I"}
            fixed = type(signature) is not tgl.testing.Signature or signature.derive is not None or not of_letters
            found += [pytest.param(name, i, shape, "cpu") for shape in (("own",) if fixed else ("own", "odd"))]
            for shape in ("own",) if fixed else ("own", *SHAPES):
                found.append(pytest.param(name, i, shape, "cuda", marks=needs_gpu))
    return found


def samples(name, which, shape, device):
    signature = SIGNATURES[name][which]
    if shape != "own":
        signature = dataclasses.replace(signature, dimensions={**signature.dimensions, **SHAPES[shape]})
    dtype = torch.bfloat16 if torch.bfloat16 in signature.dtypes else signature.dtypes[0]
    routings = ROUTINGS if device == "cuda" else ROUTINGS[:-2]
    for sample in signature.samples(dtypes=(dtype,), routings=routings, device=device):
        if sample.layout == "row" or (sample.routing.name == ROUTINGS[0] and sample.layout == "padded"):
            yield sample


@pytest.mark.cover(2)
@pytest.mark.parametrize("name, which, shape, device", cases())
def test_ops(name, which, shape, device, guard):
    op = overload(name)
    looked_at = 0
    for sample in samples(name, which, shape, device):
        written = {o.name for o in sample.signature.written}
        tensors = {
            n: guard.hold(t, f"{sample.name}: {n}", written=n in written) if t is not None else None
            for n, t in sample.tensors().items()
        }
        args, kwargs = sample.call(op, tensors)
        with guard.allocations():
            op(*args, **kwargs)
        looked_at += guard.check()
    assert looked_at


# --- quantisers on shapes of layers -----------------------------------------------------------------------------------

OPTIONS = [
    {"format": "mxfp8"},
    {"format": "mxfp8", "scale_layout": "blocked"},
    {"format": "nvfp4", "scale_layout": "blocked", "rht": True},
    {"format": "nvfp4", "block_2d": True},
    {"format": "fp8_tensor"},
    {"format": "fp8_block"},
    {"format": "fp8_block", "block_2d": True},
]
SIZES = {"ragged": (130, 0, 3, 65, 127), "many": tuple(i % 5 for i in range(300)), "long": (2500, 1, 700)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("columns", [40, 60, 264])
def test_quantisers(options, columns, device, guard):
    """Rows in groups with a tail, and matrices, in both directions and in each alone."""
    matrices = options.get("block_2d", False)
    shapes = [(3, 72, columns), (2, 100, columns)] if matrices else [(sum(s) + 9, columns) for s in SIZES.values()]
    for shape, sizes in zip(shapes, SIZES.values()):
        x = guard.hold(torch.randn(shape, device=device).bfloat16(), "x")
        offs = None if matrices else torch.tensor(sizes, device=device).cumsum(0).int()
        for rowwise, columnwise in ((True, True), (True, False), (False, True)):
            with guard.allocations():
                tgl.group_quantize(
                    x,
                    offs,
                    rowwise=rowwise,
                    columnwise=columnwise,
                    **{**options, "rht": options.get("rht", False) and columnwise},
                )
            assert guard.check()
            x = guard.hold(x, "x")


# --- layers -----------------------------------------------------------------------------------------------------------

LAYERS = [pytest.param(name, "cpu", "eager", id=f"cpu-{name}") for name in RECIPES] + [
    pytest.param(name, "cuda", how, id=f"cuda-{name}-{how}", marks=needs_gpu)
    for name in ON_GPU
    for how in ("eager", "compiled")
]


class Saved:
    """Tensors that autograd keeps between forward and backward, and a copy of each."""

    def __init__(self):
        self.kept = []

    def pack(self, t):
        self.kept.append((t.detach(), t.detach().clone()))
        return t

    def check(self):
        for t, before in self.kept:
            assert torch.equal(
                t.contiguous().view(-1).view(torch.uint8), before.contiguous().view(-1).view(torch.uint8)
            )


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("recipe, device, how", LAYERS)
@pytest.mark.parametrize("widths", WIDTHS)
def test_layers(recipe, widths, device, how, guard):
    """A step of training with NaN in all that is allocated; operands and saved tensors stay as they were."""
    case = Case(recipe, widths=widths)
    mlp = layer(case, device)
    call = forward_and_loss(mlp, case, casts(case))
    if how == "compiled":
        call = torch.compile(call, fullgraph=True)
        train_step(call, mlp, batch(case).to(device))
    for sizes in ((100, 0, 37, 1, 128), (0, 0, 300, 0, 0), (0, 0, 0, 0, 0), (1, 1, 1, 1, 296)):
        data = batch(case, sizes).to(device)
        held = type(data)(*(guard.hold(t, name) for name, t in data._asdict().items()))
        saved = Saved()
        with guard.allocations(), torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda t: t):
            results = train_step(call, mlp, held)
        if how == "eager":  # a graph gives the memory of what it saved to other tensors of its backward
            saved.check()
        assert all(bool(t.isfinite().all()) for name, t in results.items())
        assert guard.check()

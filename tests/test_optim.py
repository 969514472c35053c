"""Muon on stacks of matrices: the bits of ``torch.optim.Muon`` on each of them."""

import pytest
import torch
from torch import nn

import tgl
from tgl import optim

# Products of at most 16^3 multiplications are not computed by one code, batched and single.
SHAPES = {"square": (3, 24, 24), "wide": (5, 24, 40), "tall": (4, 40, 24), "one": (1, 32, 32)}
BF16, F32 = torch.bfloat16, torch.float32
OPTIONS = [
    (F32, {}),
    (BF16, {}),
    (F32, {"nesterov": False, "weight_decay": 0.0}),  # of bfloat16 torch's divides its momentum by the norm, in place
    (F32, {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}),
]


@pytest.mark.parametrize(("dtype", "options"), OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_bits_of_one_matrix_at_a_time(shape, options, dtype):
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(shape).to(dtype))
    matrices = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    ours, theirs = optim.Muon([stack], lr=0.1, **options), torch.optim.Muon(matrices, lr=0.1, **options)
    for _ in range(3):
        stack.grad = torch.randn(shape).to(dtype)
        for matrix, grad in zip(matrices, stack.grad):
            matrix.grad = grad.clone()
        ours.step()
        theirs.step()
    assert torch.equal(stack, torch.stack([m.detach() for m in matrices]))


def test_bfloat16_without_nesterov_keeps_its_momentum():
    stack = nn.Parameter(torch.randn(2, 8, 8).bfloat16())
    optimizer = optim.Muon([stack], momentum=0.5, nesterov=False)
    stack.grad = torch.ones_like(stack)
    optimizer.step()
    assert torch.equal(optimizer.state[stack]["momentum_buffer"], torch.full_like(stack, 0.5))


def test_singular_values_come_near_one():
    torch.manual_seed(0)
    stack = torch.randn(3, 32, 64)
    found = torch.linalg.svdvals(optim.orthogonalized(stack).float())
    assert 0.5 < float(found.min()) < float(found.max()) < 1.5


def test_a_layer_is_trained_and_resumed():
    torch.manual_seed(0)
    mlp, x, splits = tgl.GroupedMLP(3, 16, 16), torch.randn(12, 16), torch.tensor([5, 0, 7])
    optimizer = optim.Muon(mlp.parameters(), lr=0.02, weight_decay=0.0)
    empty = [p[1].clone() for p in mlp.parameters()]

    def loss():
        optimizer.zero_grad()
        found = (mlp(x, splits) - x).square().mean()
        found.backward()
        return found.detach()

    first = float(optimizer.step(loss))
    again = optim.Muon(mlp.parameters())
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["lr"] == 0.02
    for _ in range(20):
        last = float(again.step(loss))
    assert last < 0.7 * first
    # A matrix of no rows has a gradient of zeros, of which nothing becomes large.
    assert all(torch.equal(p[1], was) for p, was in zip(mlp.parameters(), empty))


@pytest.mark.parametrize(
    "make, error, message",
    [
        (
            lambda: optim.Muon([nn.Parameter(torch.ones(2, 3))]),
            ValueError,
            r"`params` must be 3-D \[G, M, N\], but got",
        ),
        (lambda: optim.Muon([torch.ones(1, 2, 3).int()]), TypeError, "`params` must be floating, but got torch.int32"),
        (lambda: optim.Muon([torch.ones(1, 2, 3)], lr=-1.0), ValueError, "`lr` must be at least 0, but got -1.0"),
        (
            lambda: optim.Muon([torch.ones(1, 2, 3)], adjust_lr_fn="other"),
            ValueError,
            "`adjust_lr_fn` must be one of original, match_rms_adamw, but got 'other'",
        ),
        (lambda: optim.Muon([torch.ones(1, 2, 3)], ns_step=3), TypeError, "`ns_step` must be one of ns_coefficients"),
    ],
)
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()

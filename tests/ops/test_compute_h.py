"""Forwards that return nothing for a backward: the ops with ``compute_h=False``, and their callers."""

import pytest
import torch

import tgl

G, H, I, S, K = 4, 32, 24, 40, 2
ROWS = S * K


def of_moe():
    x, w1, w2 = torch.randn(S, H), torch.randn(G, H, 2 * I), torch.randn(G, I, H)
    source, position, offs, top_k, token = tgl.route(torch.randint(-1, G + 1, (S, K)), G)
    return torch.ops.tgl.moe, (x, w1, w2, source, position, token, offs, torch.rand(S, K)), {"top_k": top_k}


def of_mlp():
    offs = torch.tensor([7, 7, 50, 71], dtype=torch.int32)
    return torch.ops.tgl.grouped_mlp, (torch.randn(ROWS, H), torch.randn(G, H, 2 * I), torch.randn(G, I, H), offs), {}


CALLS = {"moe": of_moe, "grouped_mlp": of_mlp}


@pytest.fixture(params=CALLS)
def call(request):
    torch.manual_seed(0)
    return CALLS[request.param]()


def test_without_compute_h_the_result_is_equal_and_saved_outputs_are_empty(call):
    op, operands, options = call
    y, *kept = op(*operands, **options)
    alone, *nothing = op(*operands, **options, compute_h=False)
    assert torch.equal(alone, y)
    assert [t.shape for t in kept] == [(ROWS, 2 * I), (ROWS, I)][: len(kept)]
    assert [t.shape for t in nothing] == [(0, 2 * I), (0, I)][: len(nothing)]


def test_opcheck(call):
    op, operands, options = call
    torch.library.opcheck(op.default, operands, {**options, "compute_h": False})


@pytest.mark.parametrize("of", range(3))
def test_a_derivative_is_refused(call, of):
    op, operands, options = call
    operands[of].requires_grad_()
    with pytest.raises(RuntimeError, match="`compute_h` must be True where an argument requires grad, but got False"):
        op(*operands, **options, compute_h=False)
    with torch.no_grad():
        op(*operands, **options, compute_h=False)


def asked(monkeypatch, run):
    """Return the outputs that ``run`` requested of the composition."""
    from tgl import backends

    found, produce = [], backends.produce

    def watched(op, device, specs, *args, **kwargs):
        if op == "grouped_gemm_activation":
            found.append(specs["h"] is not None)
        return produce(op, device, specs, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(backends, "produce", watched)
        run()
    return found


@pytest.mark.parametrize("needed", ["x", "w1", "w2", "weights", None])
def test_functions_request_what_a_backward_reads(needed, monkeypatch):
    torch.manual_seed(0)
    given = {"x": torch.randn(S, H), "w1": torch.randn(G, H, 2 * I), "w2": torch.randn(G, I, H)}
    given["weights"] = torch.rand(S, K)
    if needed is not None:
        given[needed].requires_grad_()
    chosen = torch.randint(0, G, (S, K))

    def moe():
        return tgl.moe(given["x"], chosen, given["weights"], given["w1"], given["w2"])

    assert asked(monkeypatch, moe) == [needed is not None]
    with torch.no_grad():
        assert asked(monkeypatch, moe) == [False]
        without = moe()
    assert torch.equal(moe(), without)

    def mlp():
        probs = given["weights"].reshape(-1)[:S]
        return tgl.grouped_mlp(given["x"], given["w1"], given["w2"], torch.tensor([9, 9, 20, S]).int(), probs)

    assert asked(monkeypatch, mlp) == [needed is not None]


def test_transforms_request_it(monkeypatch):
    """A derivative of any level requests ``h``."""
    x, w1, w2 = torch.randn(S, H), torch.randn(G, H, 2 * I), torch.randn(G, I, H)
    chosen = torch.randint(0, G, (S, K))
    loss = lambda t: tgl.moe(t, chosen, None, w1, w2).square().sum()  # noqa: E731
    assert all(asked(monkeypatch, lambda: torch.func.grad(loss)(x)))
    wanted = torch.autograd.grad(loss(x.requires_grad_()), x)[0]
    assert torch.allclose(torch.func.grad(loss)(x.detach()), wanted)

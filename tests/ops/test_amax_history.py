"""``update_amax_history_`` against the rule written out for one group at a time."""

import math

import pytest
import torch

import tgl

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
FP32_MAX = torch.finfo(torch.float32).max


def expected(amaxes, scale, length, dtype, margin, algo):
    """The scale of one group after all of ``amaxes``."""
    history = []
    for amax in amaxes:
        history = [amax, *history][:length]
        largest = (math.nan if any(math.isnan(h) for h in history) else max(history)) if algo == "max" else amax
        if largest > 0 and math.isfinite(largest):
            fresh = torch.tensor(LARGEST[dtype]) / torch.tensor(largest) * 0.5**margin
            scale = min(fresh.item(), FP32_MAX)
    return scale, history


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("margin", [0, 3])
def test_the_rule(dtype, algo, length, margin):
    nan, inf = math.nan, math.inf
    calls = [
        [1.0, 0.0, inf, 3.0, 1e-45],
        [0.5, 0.0, 2.0, nan, 0.0],
        [7.0, 1.0, 2.0, 1.0, 0.0],
        [0.0, 0.0, 1.0, 1.0, 1e38],
        [0.1, 0.0, 1.0, 1.0, 3.0],
    ]
    history, scale = torch.zeros(length, 5), torch.full((5,), 2.0)
    for done in range(1, len(calls) + 1):
        tgl.update_amax_history_(torch.tensor(calls[done - 1]), history, scale, dtype=dtype, margin=margin, algo=algo)
        for g in range(5):
            want, kept = expected([call[g] for call in calls[:done]], 2.0, length, dtype, margin, algo)
            assert scale[g].item() == want, (done, g)
            torch.testing.assert_close(history[: len(kept), g], torch.tensor(kept), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"amax": torch.ones(3, 1)}, ValueError, r"`amax` must be 1-D \[G\]"),
        ({"history": torch.zeros(4, 2)}, ValueError, r"`history` must be \[H, G\] with G = 3 like `amax`, but got shape"),
        ({"history": torch.zeros(0, 3)}, ValueError, r"`history` must be \[H, G\] with H at least 1, but got shape"),
        ({"history": torch.zeros(3)}, ValueError, r"`history` must be 2-D \[H, G\]"),
        ({"history": torch.zeros(4, 3, dtype=torch.float64)}, TypeError, "`history` must be torch.float32, but got"),
        ({"history": torch.zeros(3, 4).t()}, ValueError, "`history` must be contiguous"),
        ({"scale": torch.ones(4)}, ValueError, r"`scale` must be of shape \[G\] = \(3,\)"),
        ({"scale": torch.ones(3, device="meta")}, ValueError, "`scale` must be on cpu like `amax`"),
        ({"dtype": torch.float32}, TypeError, "`dtype` must be torch.float8_e4m3fn or torch.float8_e5m2, but got"),
        ({"algo": "mean"}, ValueError, "`algo` must be one of max, most_recent, but got 'mean'"),
    ],
)
def test_bad_arguments(change, error, message):
    arguments = {"amax": torch.ones(3), "history": torch.zeros(4, 3), "scale": torch.ones(3), "dtype": E4M3, **change}
    before = {name: t.clone() for name, t in arguments.items() if isinstance(t, torch.Tensor)}
    with pytest.raises(error, match=message):
        tgl.update_amax_history_(**arguments)
    assert all(arguments[name].device.type == "meta" or torch.equal(arguments[name], t) for name, t in before.items())


def test_opcheck():
    torch.library.opcheck(
        torch.ops.tgl.update_amax_history_.default,
        (torch.rand(3), torch.zeros(4, 3), torch.ones(3)),
        {"dtype": E4M3, "margin": 1},
    )

"""Tilings tried and kept: what is compared, what later calls use, what is left alone."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.kernel_cases import integers
from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.autotune import autotune
from tgl.cutlass_kernels.config import VARLEN_K, VARLEN_M, GemmConfig
from tgl.cutlass_kernels.runtime import launcher
from tgl.testing import emulate

BF16 = torch.bfloat16
WIDE, NARROW = GemmConfig(128, 128), GemmConfig(128, 64)


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(tilings, "tuned", {})
    with emulate("sm_100a", detect_races=False) as machine:
        launcher.forget()
        yield machine
        launcher.forget()


def operands(sizes=(3, 0, 130, 1), columns=40):
    offs = torch.tensor(sizes).cumsum(0).int()
    return integers(sum(sizes), 72, dtype=BF16), integers(len(sizes), 72, columns, dtype=BF16), offs


def tilings_in_use():
    return {
        key.config for (_, key, _), plan in launcher.compiled_kernels.items() if plan in launcher.warm_plans.values()
    }


@pytest.mark.parametrize("order", [(WIDE, NARROW), (NARROW, WIDE)], ids=["best last", "best first"])
def test_the_best_tiling_serves_calls_like_it(machine, order):
    a, b, offs = operands()

    def instructions(call):
        call()
        return machine.launches[-1].warp_instructions

    found = autotune(tgl.grouped_gemm, a, b, offs, tilings=order, measure=instructions)
    assert list(found) == [NARROW, WIDE]
    assert list(found.values()) == sorted(found.values())
    other = operands((60, 20, 0, 54))
    expected = torch.cat([x.double() @ w.double() for x, w in zip(other[0].split([60, 20, 0, 54]), other[1])])
    assert torch.equal(tgl.grouped_gemm(*other), expected.to(BF16))
    assert tilings_in_use() == {NARROW}


def test_arguments_are_not_written_to(machine):
    a, b, offs = operands()
    dy, main_grad = integers(len(a), 40, dtype=BF16), torch.full((4, 72, 40), 7.0)
    calls = []
    for call in (
        lambda **k: autotune("grouped_gemm", a, b, offs, out=main_grad[0, :, :].new_full((len(a), 40), 7.0), **k),
        lambda **k: autotune("grouped_gemm_wgrad_accumulate_", a, dy, offs, main_grad, **k),
    ):
        call(tilings=[NARROW], measure=lambda run: calls.append(run()) or 0.0)
    assert len(calls) == 2
    assert main_grad.eq(7).all()


def test_a_failure_keeps_what_was_found_before(machine):
    a, b, offs = operands()
    autotune(tgl.grouped_gemm, a, b, offs, tilings=[WIDE], measure=lambda call: 0.0)
    with pytest.raises(ValueError, match=r"`tilings` must exist, but .*ping-pong"):
        autotune(tgl.grouped_gemm, a, b, offs, tilings=[GemmConfig(pingpong=True)], measure=lambda call: 0.0)
    assert list(tilings.tuned.values()) == [WIDE]


def test_what_has_no_tiling(machine):
    a, b, offs = operands()
    with pytest.raises(ValueError, match="with a tiling, but: tgl::grouped_dbias"):
        autotune(tgl.grouped_dbias, a, offs)
    with pytest.raises(ValueError, match="runs tgl kernel between copies"):
        autotune(tgl.grouped_gemm, a.t().contiguous().t(), b, offs)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", [VARLEN_M, VARLEN_K])
def test_candidates_hold_what_is_chosen(arch, kind):
    every = tilings.candidates(arch, kind)
    assert len(set(every)) == len(every)
    for columns in (8, 64, 128, 4096):
        for rows in (1, 64, 128, 8192):
            assert tilings.choose(arch, kind, columns, 4096, rows) in every

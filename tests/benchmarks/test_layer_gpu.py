"""``benchmarks/layer_gpu.py`` without a GPU: its arms and gates on a small layer, its table, its arguments."""

import pytest
import torch

from tgl import backends


@pytest.fixture(scope="module")
def bench(load):
    return load("layer_gpu")


@pytest.fixture(scope="module")
def gated(bench):
    """A problem, its arms and why others are left out; compiled arms run as they are."""
    torch.manual_seed(0)
    problem = bench.Problem(bench.Expert(3, 96, 64, 48), [40, 0, 56], device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **options: function)
        patch.setattr(bench, "compiled_gated", bench.gated)
        yield problem, *bench.gated_arms(problem, bench.ARMS, replays=False)


def test_every_arm_passes_its_gates_on_the_cpu(bench, gated):
    problem, arms, reasons = gated
    assert not reasons
    assert tuple(arms) == bench.ARMS
    assert problem.sizes == [40, 0, 56]
    assert problem.offs.tolist() == [40, 40, 96]


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("arm", ["bf16", "fp8_block"])
def test_a_gate_names_the_result_that_is_wrong(bench, gated, arm, which):
    problem, arms, _ = gated
    wanted = problem.oracle()
    errors = [bench.relative_error(*pair) for pair in zip(arms["torch"].results(), wanted)]
    assert bench.wrong(arms[arm], wanted, errors) is None
    wanted[which] = wanted[which].roll(1, 0)
    assert bench.wrong(arms[arm], wanted, errors).startswith(f"{bench.RESULTS[which]}: error ")


def test_a_recipe_starts_from_the_same_state_each_time(bench, gated):
    _, arms, _ = gated
    for name in ("fp8_delayed", "nvfp4"):
        assert bench.same(arms[name].results(), arms[name].results())


def test_formats_without_kernels_are_named_with_the_reason(bench, monkeypatch):
    monkeypatch.setattr(backends.target, "cuda_arch", lambda device: "sm_90")
    reasons = {name: bench.unserved(recipe, "cuda") for name, recipe in bench.RECIPES.items()}
    served = [name for name, reason in reasons.items() if reason is None]
    assert served == ["fp8_current", "fp8_delayed", "fp8_block"]
    assert "takes mxfp8 on sm_100, sm_120, sm_121, not on sm_90, which takes fp8_tensor, fp8_block" in reasons["mxfp8"]


def test_a_shape_is_a_layer(bench):
    assert bench.MODELS["mixtral"] == (8, 16384, 4096, 14336)
    assert bench.flops(bench.MODELS["mixtral"]) == 18 * 16384 * 4096 * 14336
    assert set(bench.QUICK) < set(bench.MODELS)


def result(shape, torch_ms, **times):
    timed = {name: {"median": ms} for name, ms in {"torch": torch_ms, **times}.items()}
    return {"shape": shape, "routing": "zipf", "flops": 8e9, "times": timed, "left out": {"mxfp8": "no such kernel"}}


def test_table_and_report(bench):
    names = ("bf16", "fp8_block", "mxfp8")
    results = [result("one", 8.0, bf16=4.0, fp8_block=2.0), result("two", 8.0, bf16=16.0)]
    assert bench.line(results[0], names).split() == ["one", "zipf", "8.000", "1", "2.000", "4.000", "-"]
    assert bench.line(results[1], names).split() == ["two", "zipf", "8.000", "1", "0.500", "-", "-"]
    assert len(bench.header(names)) == len(bench.line(results[0], names))
    lines = [" ".join(text.split()) for text in bench.report(results, names).splitlines()]
    assert "bf16 1.000 (0.500, two zipf, of 2)" in lines
    assert "fp8_block 4.000 (4.000, one zipf, of 1)" in lines
    assert lines[-1] == "mxfp8 not in all: no such kernel"


def test_without_a_baseline_there_are_no_ratios(bench):
    alone = result("one", 8.0, bf16=4.0)
    del alone["times"]["torch"]
    assert bench.line(alone, ("bf16",)).split() == ["one", "zipf", "-", "-", "-"]
    assert "bf16" not in bench.report([alone], ("bf16",))


def test_arguments(bench):
    everything = bench.arguments([])
    assert everything.shapes == list(bench.MODELS)
    assert everything.arms == list(bench.ARMS[1:])
    quick = bench.arguments(["--quick", "--routings", "balanced", "--arms", "bf16", "nvfp4"])
    assert (quick.shapes, quick.routings, quick.arms) == (list(bench.QUICK), ["balanced"], ["bf16", "nvfp4"])
    with pytest.raises(SystemExit):
        bench.arguments(["--shapes", "no such model"])

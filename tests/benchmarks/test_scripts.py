"""Every script of ``benchmarks``: it is imported, its arguments are parsed, and it runs at toy sizes on a CPU.

Those of blocks, layers and models on a GPU are in ``test_scripts_of_layers``, ``layer_gpu`` in ``test_layer_gpu``; the
gates and arms of ``expert_parallel_gpu`` run in tests/distributed.
"""

import argparse
import ast
import inspect
from pathlib import Path

import pytest
import torch

from tests.benchmarks.stand_in import ran
from tgl.meta.formats import FORMATS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
NEEDS = {"expert_layer": "transformers", "quantize": "torchao"}
GPU = (
    "decode",
    "expert_parallel_gpu",
    "grouped_gemm",
    "grouped_gemm_scaled",
    "layer_gpu",
    "moe_block",
    "ops_gpu",
    "packed_gpu",
    "peers",
    "quantize_gpu",
    "transformers_models",
)
CPU = ("block_host", "expert_layer", "frames", "memory", "op_overhead", "quantize", "recompiles")


def test_every_script_is_named():
    assert {*GPU, *CPU, "render"} == set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(load, name, capsys):
    """Its docstring says how to call it, and its options are those it parses."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    script = load(name)
    with pytest.raises(SystemExit) as stopped:
        script.arguments(["--help"])
    assert stopped.value.code == 0
    assert script.__doc__.splitlines()[0] in capsys.readouterr().out
    assert isinstance(script.arguments([]), argparse.Namespace)
    with pytest.raises(SystemExit):
        script.arguments(["--no-such-option"])


def options_read(code, seen):
    """Attributes of ``args`` that a module or function reads, and those that what it hands ``args`` to reads."""
    names = vars(code) if inspect.ismodule(code) else code.__globals__
    for node in ast.walk(ast.parse(inspect.getsource(code))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args":
            yield node.attr
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        function = names.get(node.func.id)
        handed = "args" in [value.id for value in given if isinstance(value, ast.Name)]
        if handed and inspect.isfunction(function) and function not in seen:
            seen.add(function)
            yield from options_read(function, seen)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_option_that_is_read_is_parsed(load, name):
    """Options that only a shared module reads are parsed, too."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    script = load(name)
    assert {*options_read(script, set())} <= {*vars(script.arguments([]))}


def test_options_of_shared_code_are_found(load):
    """Options of a function in another script are found, and of the functions that it calls."""
    assert {"samples", "clean_l2", "busy"} <= {*options_read(load("packed_gpu"), set())}


@pytest.mark.parametrize("name", GPU)
def test_it_says_that_it_needs_a_device(load, name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        load(name).main([])


@pytest.mark.parametrize("name", GPU)
def test_shared_options(load, name):
    args = load(name).arguments(["--samples", "7", "--clean-l2", "--out", "results.json"])
    assert (args.samples, args.clean_l2, args.out) == (7, True, Path("results.json"))
    assert load(name).arguments([]).samples == 50


def test_grouped_gemm(gpu, load, monkeypatch, tmp_path, capsys):
    script, shapes = gpu("grouped_gemm"), load("harness.shapes")
    monkeypatch.setattr(script, "host_time", lambda: 1.0)
    monkeypatch.setitem(shapes.SHAPES, "four", shapes.Shape(4, 96, 64, 48))
    lines, found = ran(script, tmp_path, capsys, "--shapes", "four", "--routings", "zipf", "quarter empty")
    assert set(found) == {"device", "torch", "results"}
    assert [(r["shape"], r["op"], r["routing"]) for r in found["results"]] == [
        ("four", op, routing) for op in script.OPS for routing in ("zipf", "quarter empty")
    ]
    for result in found["results"]:
        assert not result["failed"]
        assert set(result["times"]) == {"tgl", "loop"} | ({"copy"} if result["op"] == "dbias" else {"torch", "dense"})
        assert result["times"]["tgl"] == {"median": 1.0, "p10": 1.0, "p90": 1.0}
        assert (result["groups"], result["rows"], result["depth"], result["columns"]) == (4, 96, 64, 48)
    header = ["shape", "op", "routing", "tgl", "ms", "rate", *script.RIVALS]
    assert header in lines
    assert ["four", "fprop", "zipf", "1.000", "0", "TF/s", "1.000", "1.000", "1.000", "-", "-", "-"] in lines
    assert ["four", "dbias", "zipf", "1.000", "0.00", "TB/s", "-", "1.000", "-", "-", "-", "1.000"] in lines
    assert ["fprop", "/", "torch", "1.000", "(1.000,", "four", "zipf,", "of", "2)"] in lines


def test_a_wrong_result_is_not_timed(gpu, load, monkeypatch, tmp_path, capsys):
    script, shapes, dense = gpu("grouped_gemm"), load("harness.shapes"), load("harness.dense")
    monkeypatch.setattr(script, "host_time", lambda: 1.0)
    monkeypatch.setitem(shapes.SHAPES, "four", shapes.Shape(4, 96, 64, 48))
    monkeypatch.setattr(dense.Forward, "tgl", lambda self: self.out.zero_())
    options = ("--shapes", "four", "--routings", "zipf", "--ops", "fprop", "dgrad")
    lines, found = ran(script, tmp_path, capsys, *options)
    assert ["four", "fprop", "zipf", "WRONG:", "error", "1.00e+00,"] in [line[:6] for line in lines]
    assert all("times" not in result for result in found["results"])


def test_grouped_gemm_scaled(gpu, load, monkeypatch, tmp_path, capsys):
    script, shapes = gpu("grouped_gemm_scaled"), load("harness.shapes")
    monkeypatch.setitem(shapes.SHAPES, "four", shapes.Shape(4, 512, 256, 128))
    lines, found = ran(script, tmp_path, capsys, "--shapes", "four", "--routings", "zipf")
    assert [r["op"] for r in found["results"]] == list(script.OPS)
    for result in found["results"]:
        assert {"fp8_tensor", "fp8_block", "bf16"} <= set(result["times"]), result["wrong"]
        assert set(result["wrong"]) <= {"torch", "dense"}
    assert ["fprop", "bf16", "/", "fp8_block", "1.000", "(1.000,", "four", "zipf,", "of", "1)"] in lines


def test_layer(gpu, load, monkeypatch, tmp_path, capsys):
    script, shapes = gpu("layer_gpu"), load("harness.shapes")
    monkeypatch.setattr(script, "compiled_gated", script.gated)
    monkeypatch.setitem(shapes.MODELS, "mixtral", shapes.Expert(3, 96, 64, 48))
    monkeypatch.setattr(script, "unserved", lambda recipe, device: "no kernel" if recipe is mxfp8 else None)
    mxfp8 = script.RECIPES["mxfp8"]
    options = ("--shapes", "mixtral", "--routings", "zipf", "--arms", "called", "eager", "bf16", "fp8_block", "mxfp8")
    lines, found = ran(script, tmp_path, capsys, *options)
    (result,) = found["results"]
    assert set(result["times"]) == {"torch", "called", "eager", "bf16", "fp8_block"}, result["left out"]
    assert result["left out"] == {"mxfp8": "no kernel"}
    assert ["mixtral", "zipf", "1.000", "0", "1.000", "1.000", "1.000", "1.000", "-"] in lines
    assert ["mxfp8", "not", "in", "all:", "no", "kernel"] in lines


@pytest.mark.parametrize("way", [(), ("--dequantize",)], ids=["quantize", "dequantize"])
def test_quantize(gpu, load, monkeypatch, tmp_path, capsys, way):
    script, shapes = gpu("quantize_gpu"), load("harness.shapes")
    monkeypatch.setitem(script.MATRICES, "mixtral-fc1", shapes.Shape(4, 512, 256, 128))
    options = ("--shapes", "mixtral-fc1", "--formats", "mxfp8", "fp8_tensor")
    lines, found = ran(script, tmp_path, capsys, *options, *way)
    arms = [f"{f} {d}" for f in ("mxfp8", "fp8_tensor") for d in ("both", "rowwise", "columnwise")[len(way) :]]
    assert [(r["routing"], r["arm"]) for r in found["results"]] == [
        (routing, arm) for routing in ("balanced", "zipf") for arm in ("copy", *arms)
    ]
    for result in found["results"]:
        assert (result["ms"], result["shape"]) == (1.0, "mixtral-fc1")
        more = result["arm"].startswith("fp8_tensor") and not way
        assert (result["read_twice"] > result["of_copy"]) == more
    assert ["shape", "routing", "arm", "ms", "TB/s", "of", "copy", "all", "reads"] in lines
    assert ["mixtral-fc1", "zipf", "copy", "1.0000", "0.00", "1.00", "1.00"] in lines


def test_bytes_that_differ_from_the_cpu_stop_quantisation(gpu, monkeypatch):
    script = gpu("quantize_gpu")
    quantize, calls = script.tgl.group_quantize, []

    def faulty(*args, **options):
        made = quantize(*args, **options)
        calls.append(options)
        if len(calls) % 2 == 0:
            made.data.view(torch.uint8)[0, 0] += 1
        return made

    monkeypatch.setattr(script.tgl, "group_quantize", faulty)
    with pytest.raises(AssertionError, match="data differs from that of the CPU"):
        script.Quantize.check("mxfp8", "cpu")


@pytest.fixture
def ops(gpu, load, monkeypatch):
    """The script of ops with one small layer, few rows and small routers."""
    script, shapes = gpu("ops_gpu"), load("harness.shapes")
    monkeypatch.setattr(script, "compiled", lambda call: call)
    monkeypatch.setattr(script, "ROWS", 128)
    monkeypatch.setitem(script.EXPERTS, "small", shapes.Expert(4, 300, 64, 128))
    deepseek = script.routers.SHAPES["deepseek"]._replace(tokens=9)
    monkeypatch.setitem(script.routers.SHAPES, "deepseek", deepseek)
    return script


ARMS = {
    "activation": {"copy", "torch", "compiled"},
    "activation_backward": {"copy", "torch", "compiled"},
    "activation_quantize": {"copy", "apart"},
    "gemm_activation": {"apart", "compiled", "gemm"},
    "dactivation": {"apart", "compiled", "gemm"},
    "dispatch": {"copy", "torch"},
    "combine": {"copy", "torch"},
    "combine_backward": {"copy"},
    "route": {"torch", "compiled"},
    "topk_router": {"torch", "compiled"},
}


@pytest.mark.parametrize(("case", "count"), [("small", 7), ("2 of 1536", 3), ("64 tokens", 4), ("deepseek both", 1)])
def test_ops(ops, tmp_path, capsys, case, count):
    lines, found = ran(ops, tmp_path, capsys, "--case", case, *(["--ops", *ARMS] if case == "64 tokens" else []))
    assert len(found["results"]) == count
    for result in found["results"]:
        assert set(result["ms"]) == {"tgl", *ARMS[result["op"]]}, result
    rate = "TFLOP/s" if result["flops"] else "TB/s"
    assert any(rate in line and "1.000" in line for line in lines)


def test_bytes_and_flops_of_ops(ops):
    layer = ops.EXPERTS["small"]
    assert ops.activation(layer).bytes == 300 * 3 * 128 * 2
    assert ops.activation_backward(layer).bytes == 300 * 5 * 128 * 2
    assert ops.gemm_activation(layer).flops == 2 * ops.dactivation(layer).flops == 4 * 300 * 64 * 128
    assert ops.dispatch(2, 1536).bytes == ops.combine(2, 1536).bytes == 2 * 1536 * (64 + 128)
    assert ops.combine_backward(2, 1536).bytes == 2 * 1536 * (64 + 2 * 128)


def spoiled(made):
    first = made[0] if isinstance(made, tuple | list) else made
    first.view(torch.uint8)[0].sub_(1)
    return made


GATED = (
    "activation small",
    "activation_quantize small mxfp8",
    "gemm_activation small",
    "dactivation small",
    "dispatch 2 of 1536",
    "combine_backward 2 of 1536",
    "route one token",
    "topk_router 64 tokens losses",
)


@pytest.mark.parametrize("name", GATED)
def test_wrong_ops_are_not_timed(ops, monkeypatch, tmp_path, capsys, name):
    op, _, case = name.partition(" ")
    right = ops.CASES[op][case]

    def wrong():
        made = right()
        return made._replace(arms={**made.arms, "tgl": lambda: spoiled(made.arms["tgl"]())})

    monkeypatch.setitem(ops.CASES, op, {case: wrong})
    lines, found = ran(ops, tmp_path, capsys, "--ops", op)
    (result,) = found["results"]
    assert any("WRONG:" in line for line in lines)
    assert "ms" not in result


def test_packed(gpu, monkeypatch, tmp_path, capsys):
    script = gpu("packed_gpu")
    monkeypatch.setitem(script.WEIGHTS, "down", (64, 96))
    lines, found = ran(script, tmp_path, capsys, "--weights", "down", "--tokens", "16")
    assert [(r["format"], r["op"]) for r in found["results"]] == [(form, op) for op in script.OPS for form in FORMATS]
    assert all(set(result["ms"]) == {"tgl", "decoded", "dequantised"} for result in found["results"])
    assert any(
        line[:4] == ["forward", "down", "mxfp4", "16"] and line[-3:] == ["1.000", "1.000", "-"] for line in lines
    )
    monkeypatch.setattr(script.Problem, "tgl", lambda self: torch.zeros_like(self.out))
    lines, _ = ran(script, tmp_path, capsys, "--weights", "down", "--tokens", "1", "--formats", "mxfp4")
    assert any("WRONG:" in line for line in lines)


# --- on a CPU ---------------------------------------------------------------------------------------------------------


def printed(script, capsys, *options):
    script.main(list(options))
    return [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def experts(load, monkeypatch):
    pytest.importorskip("transformers")
    script = load("expert_layer")
    monkeypatch.setattr(script, "QUICK", (script.Case(4, 16, 32, 24, 2, "skewed"),))
    return script


def test_expert_layer(experts, capsys):
    options = ("--quick", "--dtype", "float32", "--mode", "eager", "--seconds", "0")
    header, line, mean = printed(experts, capsys, *options)
    assert header[:3] == ["mode", "dtype", "case"]
    assert line[:8] == ["eager", "float32", "G4", "H16", "I32", "S24", "k2", "skewed"]
    assert mean[:2] == ["geometric", "mean"]


def test_memory(experts, load, capsys):
    _, *lines, worst = printed(load("memory"), capsys, "--quick")
    assert [line[0] for line in lines] == ["float32", "bfloat16"]
    assert float(worst[-1]) == max(float(line[-1]) for line in lines)


def test_memory_of_recipes(load, monkeypatch, capsys):
    script = load("memory")
    monkeypatch.setattr(script, "RECIPES", (None, script.tgl.recipes.Float8BlockScaling()))
    _, _, none, recipe = printed(script, capsys, "--quick", "--recipes")
    assert none[:3] == ["none", "1.00", "100.0%"]
    assert none[6] == "100.0%"
    assert recipe[0] == "Float8BlockScaling"
    assert 50 <= float(recipe[2][:-1]) <= 60  # percent of bfloat16's input: bytes, and scales beside them
    assert all(20 < float(decibels) < 40 for decibels in recipe[-3:])


def test_quantize_on_a_cpu(load, monkeypatch, capsys):
    pytest.importorskip("torchao")
    script = load("quantize")
    small = script.Case("fp8_block", {}, torch.bfloat16, 256, 256, 3)
    monkeypatch.setattr(script, "cases", lambda quick, groups: [small])
    monkeypatch.setattr(script, "FORMATS", script.FORMATS[-1:])
    lines = printed(script, capsys, "--seconds", "0")
    assert [line[5] for line in lines[1:4]] == list(script.DIRECTIONS)
    *_, out, peak, _, out_4, peak_4 = map(int, lines[-1][-5:])
    assert out_4 > 3.8 * out
    assert peak_4 - peak < (out_4 - out) / 100  # quantising into buffers takes no more for more rows


def test_recompiles(load, capsys):
    (line,) = printed(load("recompiles"), capsys, "--routings", "2", "--backend", "eager")
    assert line[-1] == "1"


def test_frames_and_their_functions(load, capsys):
    script = load("frames")
    lines = printed(script, capsys, "--functions")
    assert {"moe", "MLP,", "MXFP8"} <= {line[0] for line in lines}


def test_op_overhead(load, monkeypatch, capsys):
    """A line for each way to serve an op and each of its modes, and none of remembered calls grows."""
    script = load("op_overhead")
    monkeypatch.setattr(script, "ROWS", 100)
    monkeypatch.setattr(script, "SEEN", {*range(64, 256, 64), *(1 << n for n in range(6))})
    lines = printed(script, capsys, "--rounds", "2", "--calls", "1", "--ops", "grouped_gemm", "group_quantize")
    served = [(line[0], line[1]) for line in lines[2:]]
    gemm, quantize = ("grouped_gemm", 4), ("group_quantize", 2)  # no grad, two with, and "other T"
    wanted = [(op, way) for way in ("nothing", "kernel") for op, count in (gemm, quantize) for _ in range(count)]
    assert served == wanted


def test_caches_of_calls_are_counted(load, monkeypatch, capsys):
    script = load("op_overhead")
    monkeypatch.setattr(script, "ROWS", 100)
    monkeypatch.setattr(script, "SEEN", {*range(64, 256, 64), *(1 << n for n in range(6))})
    seen = {}
    monkeypatch.setattr(script.tgl, "SEEN", seen, raising=False)
    monkeypatch.setattr(script.torch.ops.tgl.grouped_dbias, "default", lambda dy, offs: seen.setdefault(len(dy)))
    with pytest.raises(RuntimeError, match=r"there grew tgl\.SEEN"):
        script.measure_rows("grouped_dbias", "nothing", torch.float32)

"""Every script of ``benchmarks``: it is imported, its arguments are parsed, and those for a GPU run on the CPU.

Those of blocks, layers and models are in ``test_scripts_of_layers``.
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
NEEDS = {
    "blackwell_economy": "cutlass",
    "blackwell_economy_scaled": "cutlass",
    "blackwell_gather": "cutlass",
    "blackwell_times": "cutlass",
    "warp_economy": "cutlass",
    "warp_economy_scaled": "cutlass",
    "expert_layer": "transformers",
    "memory": "transformers",
    "plots": "matplotlib",
    "quantize": "torchao",
}
GPU = ("grouped_gemm", "grouped_gemm_scaled", "layer_gpu", "quantize_gpu", "activation", "dactivation")
GPU += (
    "gemm_activation",
    "gather_gpu",
    "packed_gpu",
    "route_gpu",
    "router_gpu",
    "routing_gpu",
    "moe_block",
    "decode",
    "drop_in",
    "quantize_tokens",
    "transformers_models",
    "expert_parallel_gpu",
    "expert_parallel_overlap",
    "warp_gpu",
)


def test_every_script_is_named():
    assert set(GPU) | set(NEEDS) < set(SCRIPTS)


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
    """Also by what a script shares with others."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    script = load(name)
    assert {*options_read(script, set())} <= {*vars(script.arguments([]))}


def test_options_of_shared_code_are_found(load):
    """Those of a function of another script, and of what that one calls."""
    assert {"device", "samples", "clean_l2", "busy"} <= {*options_read(load("qlora").measured, set())}
    assert "busy" in {*options_read(load("packed_gpu"), set())}


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
    pytest.importorskip("matplotlib")
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
    header = ["shape", "op", "routing", "tgl", "ms", "rate", "torch", "loop", "dense", "quack", "copy"]
    assert header in lines
    assert ["four", "fprop", "zipf", "1.000", "0", "TF/s", "1.000", "1.000", "1.000", "-", "-"] in lines
    assert ["four", "dbias", "zipf", "1.000", "0.00", "TB/s", "-", "1.000", "-", "-", "1.000"] in lines
    assert ["fprop", "/", "torch", "1.000", "(1.000,", "four", "zipf,", "of", "2)"] in lines
    assert (tmp_path / "results.png").exists()


def test_a_wrong_result_is_not_timed(gpu, load, monkeypatch, tmp_path, capsys):
    script, shapes, dense = gpu("grouped_gemm"), load("harness.shapes"), load("harness.dense")
    monkeypatch.setattr(script, "host_time", lambda: 1.0)
    monkeypatch.setitem(shapes.SHAPES, "four", shapes.Shape(4, 96, 64, 48))
    monkeypatch.setattr(dense.Forward, "tgl", lambda self: self.out.zero_())
    options = ("--shapes", "four", "--routings", "zipf", "--ops", "fprop", "dgrad")
    lines, found = ran(script, tmp_path, capsys, *options)
    assert ["four", "fprop", "zipf", "WRONG:", "error", "1.00e+00,"] in [line[:6] for line in lines]
    assert all("times" not in result for result in found["results"])


def test_sweep_of_tilings(gpu, load, monkeypatch, tmp_path, capsys):
    script, shapes = gpu("grouped_gemm"), load("harness.shapes")
    monkeypatch.setitem(shapes.SHAPES, "four", shapes.Shape(4, 96, 64, 48))
    options = ("--sweep-configs", "--shapes", "four", "--tiles", "64x64", "128x128x2", "128x128pp")
    lines, found = ran(script, tmp_path, capsys, *options)
    assert [r["op"] for r in found["results"]] == ["fprop", "dgrad", "wgrad", "accumulate"]
    for result in found["results"]:
        assert set(result["times"]) == {"64x64", "128x128x2", "128x128pp"}
        assert result["wrong"] == dict.fromkeys(result["times"])
    assert lines[1][:4] == ["four", "fprop", "balanced", "TF/s:"]


def test_grouped_gemm_scaled(gpu, load, monkeypatch, tmp_path, capsys):
    script, shapes = gpu("grouped_gemm_scaled"), load("harness.shapes")
    monkeypatch.setitem(shapes.SHAPES, "four", shapes.Shape(4, 512, 256, 128))
    lines, found = ran(script, tmp_path, capsys, "--shapes", "four", "--routings", "zipf")
    assert [r["op"] for r in found["results"]] == list(script.OPS)
    for result in found["results"]:
        assert {"fp8_tensor", "fp8_block", "bf16"} <= set(result["times"]), result["wrong"]
        assert set(result["wrong"]) <= {"torch", "dense"}
    assert ["fprop", "bf16", "/", "fp8_block", "1.000", "(1.000,", "four", "zipf,", "of", "1)"] in lines


def test_sweep_of_scaled_tilings(gpu, load, monkeypatch, tmp_path, capsys):
    script, shapes = gpu("grouped_gemm_scaled"), load("harness.shapes")
    monkeypatch.setitem(shapes.SHAPES, "four", shapes.Shape(4, 512, 256, 128))
    _, found = ran(script, tmp_path, capsys, "--sweep", "--shapes", "four", "--ops", "fprop", "--arms", "fp8_block")
    (result,) = found["results"]
    names = [script.tiled.named(tiling) for tiling in script.existing("fp8_block", "varlen_m")]
    assert set(result["times"]) == {f"fp8_block {name}" for name in names}
    assert not result["wrong"]


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


def test_tokens_that_are_quantised_once(gpu, monkeypatch, tmp_path, capsys):
    script = gpu("quantize_tokens")
    monkeypatch.setitem(script.SHAPES, "qwen3", script.Block(70, 256, 8, 3))
    lines, found = ran(script, tmp_path, capsys, "--shapes", "qwen3")
    assert [result["format"] for result in found] == list(script.FORMATS)
    for result in found:
        assert set(result["ms"]) == {"tgl", "once", "tokens", "codes", "scales", "copy"}, result
    scales = {"fp8_block": 210 * 2 * 4, "mxfp8": (2 + 7) * 128 * 8}  # blocked rows: every group begins on a tile
    assert [result["bytes"] for result in found] == [70 * 512 + 210 * 256 + scales[f] for f in script.FORMATS]
    assert ["fp8_block", "qwen3", "1.0000", "0.00", *["1.000"] * 5] in lines


@pytest.mark.parametrize("component", ["data", "scale"])
def test_other_bytes_than_those_of_copied_rows_are_not_timed(gpu, monkeypatch, tmp_path, capsys, component):
    script = gpu("quantize_tokens")
    monkeypatch.setitem(script.SHAPES, "qwen3", script.Block(70, 256, 8, 3))
    ours = script.Problem.once

    def faulty(self):
        made = ours(self)
        made[["data", "scale"].index(component)].flatten()[:1].view(torch.uint8).add_(1)
        return made

    monkeypatch.setattr(script.Problem, "once", faulty)
    lines, _ = ran(script, tmp_path, capsys, "--shapes", "qwen3", "--formats", "mxfp8")
    assert any("WRONG:" in line and component in line for line in lines)


def test_activation(gpu, load, monkeypatch, tmp_path, capsys):
    script, shapes = gpu("activation"), load("harness.shapes")
    monkeypatch.setitem(script.LAYERS, "small", shapes.Expert(16, 300, 64, 128))
    lines, found = ran(script, tmp_path, capsys, "--shapes", "small")
    rivals = {"forward": {"eager", "compiled"}, "backward": {"eager", "compiled"}}
    rivals |= {format: {"apart"} for format in script.QUANTIZED}
    for result in found:
        assert set(result["ms"]) == {"tgl", "copy"} | rivals.get(result["op"], set()), result
        assert set(result["ms"].values()) == {1.0}
    assert [result["op"] for result in found] == list(script.OPS)
    assert ["shape", "op", "tgl", "ms", "TB/s", "copy", "eager", "compiled", "apart"] in lines
    assert ["small", "forward", "1.0000", "0.00", "1.000", "1.000", "1.000", "-"] in lines
    assert ["apart:", "geometric", "mean", "1.000,", "worst", "1.000"] in lines


def test_route(gpu, monkeypatch, tmp_path, capsys):
    script = gpu("route_gpu")
    monkeypatch.setattr(script, "compiled", script.sort)
    lines, found = ran(script, tmp_path, capsys, "--shapes", "one token", "64 tokens")
    assert [(result["choices"], result["experts"]) for result in found] == [(8, 128), (512, 128)]
    assert all(set(result["ms"]) == {"tgl", "sort", "compiled"} for result in found)
    assert ["64", "tokens", "1.0000", "0.5", "1.000", "1.000"] in lines


@pytest.mark.parametrize("name", ["forward", "both", "losses"])
def test_router(gpu, monkeypatch, tmp_path, capsys, name):
    script = gpu("router_gpu")
    monkeypatch.setattr(script, "compiled", lambda call: call)
    grouped = script.SHAPES["deepseek"]._replace(tokens=9)
    monkeypatch.setitem(script.SHAPES, "deepseek", grouped)
    shapes = ("one token", "64 tokens", "deepseek")
    lines, found = ran(script, tmp_path, capsys, "--passes", name, "--shapes", *shapes)
    assert [result["shape"] for result in found] == list(shapes)
    for result in found:
        assert set(result["ms"]) == {"tgl", "eager", "compiled"}, result
    assert ["compiled:", "geometric", "mean", "1.000,", "worst", "1.000"] in lines
    ours = script.calls

    def coarse(shape, kind):
        call = ours(shape, kind)["tgl"]
        exact = {torch.float64: lambda t: t, torch.float32: lambda t: t.bfloat16().float()}
        return {"tgl": lambda logits, bias, grad: call(exact[logits.dtype](logits), bias, grad)}

    monkeypatch.setattr(script, "calls", coarse)
    lines, _ = ran(script, tmp_path, capsys, "--passes", name, "--shapes", "deepseek")
    assert any("WRONG:" in line for line in lines)


def test_routing(gpu, monkeypatch, tmp_path, capsys):
    script = gpu("routing_gpu")
    monkeypatch.setattr(script, "ROWS", 128)
    lines, found = ran(script, tmp_path, capsys, "--choices", "2", "--widths", "1536")
    arms = {"dispatch": {"tgl", "copy", "aten"}, "combine": {"tgl", "copy", "aten"}}
    for result in found:
        assert set(result["ms"]) == arms.get(result["op"], {"tgl", "copy"}), result
    assert [result["bytes"] for result in found] == [3072 * (64 + 128)] * 3 + [3072 * (64 + 2 * 128)]
    assert ["dispatch", "2", "1536", "1.0000", "0.00", "1.000", "1.000"] in lines
    monkeypatch.setattr(script.Combine, "tgl", lambda self: torch.zeros_like(self.x))
    lines, _ = ran(script, tmp_path, capsys, "--choices", "2", "--widths", "1536", "--ops", "combine")
    assert any("WRONG:" in line for line in lines)


def test_gathers(gpu, monkeypatch, tmp_path, capsys):
    script = gpu("gather_gpu")
    monkeypatch.setitem(script.SHAPES, "small", script.Shape(40, 2, 64, 128, 4))
    lines, found = ran(script, tmp_path, capsys, "--shapes", "small")
    assert [result["op"] for result in found] == list(script.PROBLEMS)
    assert all(set(result["ms"]) == {"tgl", "copied", "in order"} for result in found)
    assert ["grouped_gemm", "small", "1.0000", "0", "1.000", "1.000"] in lines
    with monkeypatch.context() as patch:
        patch.setattr(script.backends, "device_arch", lambda _: "sm_90")
        _, found = ran(script, tmp_path, capsys, "--shapes", "small", "--tiles", "128x192pp", "256x128")
    assert all(set(result["ms"]) == {"tgl", "copied", "in order", "128x192pp", "256x128"} for result in found)
    monkeypatch.setattr(script.Forward, "tgl", lambda self: torch.zeros_like(self.hidden))
    lines, _ = ran(script, tmp_path, capsys, "--shapes", "small", "--ops", "grouped_gemm")
    assert any("WRONG:" in line for line in lines)


def test_packed(gpu, monkeypatch, tmp_path, capsys):
    script = gpu("packed_gpu")
    monkeypatch.setitem(script.WEIGHTS, "down", (64, 96))
    lines, found = ran(script, tmp_path, capsys, "--weights", "down", "--tokens", "16")
    assert [(r["format"], r["op"]) for r in found] == [(form, op) for op in script.OPS for form in FORMATS]
    assert all(set(result["ms"]) == {"tgl", "decoded", "dequantised"} for result in found)
    assert any(line[:4] == ["forward", "down", "mxfp4", "16"] and line[-2:] == ["1.000"] * 2 for line in lines)
    one = ("--weights", "down", "--tokens", "1", "--formats", "mxfp4")
    every = (*script.TILINGS, *script.FEW)
    for arch, op, tilings in (("sm_80", "forward", ()), ("sm_90", "forward", every), ("sm_90", "gradient", every[:4])):
        with monkeypatch.context() as patch:
            patch.setattr(script.backends, "device_arch", lambda _, arch=arch: arch)
            _, found = ran(script, tmp_path, capsys, *one, "--sweep-configs", "--ops", op)
        assert set(found[0]["ms"]) == {"tgl", "decoded", script.WARPS, *tilings}
    monkeypatch.setattr(script.Problem, "tgl", lambda self: torch.zeros_like(self.out))
    lines, _ = ran(script, tmp_path, capsys, *one)
    assert any("WRONG:" in line for line in lines)


@pytest.mark.parametrize("name", ["dactivation", "gemm_activation"])
def test_gemms_with_activations(gpu, load, monkeypatch, tmp_path, capsys, name):
    script, shapes = gpu(name), load("harness.shapes")
    monkeypatch.setitem(script.LAYERS, "small", shapes.Expert(4, 300, 64, 128))
    lines, found = ran(script, tmp_path, capsys, "--shapes", "small")
    assert set(found[0]["ms"]) == {"tgl", "apart", "torch", "gemm"}, found
    assert (found[0]["groups"], found[0]["rows"], found[0]["depth"], found[0]["columns"]) == (4, 300, 64, 128)
    assert lines[2][-3:] == ["1.000"] * 3
    assert ["gemm:", "geometric", "mean", "1.000,", "worst", "1.000"] in lines


@pytest.mark.parametrize("name", ["dactivation", "gemm_activation", "activation"])
def test_wrong_activations_are_not_timed(gpu, load, monkeypatch, tmp_path, capsys, name):
    script, shapes = gpu(name), load("harness.shapes")
    monkeypatch.setitem(script.LAYERS, "small", shapes.Expert(4, 300, 64, 128))
    faulty = script.Forward if name == "activation" else script.Problem
    right = faulty.tgl

    def wrong(self):
        made = right(self)
        (made[0] if isinstance(made, tuple) else made)[0].add_(1)
        return made

    monkeypatch.setattr(faulty, "tgl", wrong)
    lines, found = ran(script, tmp_path, capsys, "--shapes", "small")
    assert any("WRONG:" in line for line in lines)
    assert "ms" not in found[0]

"""The arms of DeepGEMM and triton_kernels, whose calls stand-ins compute, and the table beside them."""

import json
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.benchmarks.stand_in import ran

UNIT = 128
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def module(name, **members):
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(members)
    return made


def rows_times(a, b, out, index):
    """Every row by the matrix of its group; nothing is written where there is no row."""
    for g in range(len(b)):
        out[index == g] = (a[index == g].float() @ b[g].float().t()).to(out.dtype)


def decoded(codes, scales, *units):
    for dim, unit in enumerate(units):
        scales = scales.repeat_interleave(unit, dim - len(units))
    return codes.float() * scales


def scaled_rows_times(a, b, out, index):
    rows_times(decoded(*a, 1, UNIT), decoded(*b, UNIT, UNIT), out, index)


def gradient(a, b, out, sizes, counts, added_to):
    assert out is added_to
    assert counts.tolist() == sizes
    for g, (x, y) in enumerate(zip(a.split(sizes), b.split(sizes))):
        out[g] += x.float().t() @ y.float()


def scaled_gradient(a, b, out, sizes, counts, added_to):
    """Operands with one block ``[features, rows]`` per group, and scales ``[features, blocks]``."""

    def rows(codes, scales):
        features = len(scales)
        blocks = codes.split([features * size for size in sizes])
        return decoded(torch.cat([block.view(features, -1) for block in blocks], 1), scales, 1, UNIT).t()

    gradient(rows(*a), rows(*b), out, sizes, counts, added_to)


@pytest.fixture
def deep_gemm(monkeypatch):
    members = {
        "get_mn_major_tma_aligned_tensor": torch.clone,
        "m_grouped_bf16_gemm_nt_contiguous": rows_times,
        "m_grouped_fp8_gemm_nt_contiguous": scaled_rows_times,
        "k_grouped_bf16_gemm_tn_contiguous": gradient,
        "k_grouped_fp8_gemm_nt_contiguous": scaled_gradient,
    }
    made = module("deep_gemm", **members)
    monkeypatch.setitem(sys.modules, "deep_gemm", made)
    return made


def matmul(a, matrices, bias, *, a_ragged_metadata, precision_config, c):
    assert bias is None
    codes, scales = matrices.transpose(1, 2), precision_config.b_mx_scale.transpose(1, 2)
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    values = E2M1[nibbles & 7] * torch.where(nibbles > 7, -1, 1)
    w = values * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
    for rows, own, out in zip(a.split(a_ragged_metadata), w, c.split(a_ragged_metadata)):
        out.copy_(rows.float() @ own.t())


@pytest.fixture
def triton_kernels(monkeypatch):
    layout = SimpleNamespace(
        make_default_matmul_mxfp4_w_layout=lambda mx_axis: "values",
        make_default_matmul_mxfp4_w_scale_layout=lambda mx_axis, num_warps: num_warps,
    )
    members = {
        "": {},
        ".matmul": {"FlexCtx": SimpleNamespace, "PrecisionConfig": SimpleNamespace, "matmul": matmul},
        ".numerics": {"InFlexData": SimpleNamespace},
        ".tensor": {
            "FP4": "fp4",
            "convert_layout": lambda t, form: t,
            "make_ragged_tensor_metadata": lambda counts, rows: counts.tolist(),
            "wrap_torch_tensor": lambda t, dtype=None: t,
        },
        ".tensor_details": {"layout": layout},
    }
    for name, own in members.items():
        monkeypatch.setitem(sys.modules, f"triton_kernels{name}", module(f"triton_kernels{name}", **own))


def test_bfloat16(gpu, load, monkeypatch, tmp_path, capsys, deep_gemm):
    script, shapes = gpu("grouped_gemm"), load("harness.shapes")
    monkeypatch.setattr(script, "host_time", lambda: 1.0)
    monkeypatch.setitem(shapes.SHAPES, "four", shapes.Shape(4, 300, 64, 48))
    options = ("--shapes", "four", "--routings", "zipf", "--arms", "deepgemm")
    _, found = ran(script, tmp_path, capsys, *options)
    timed = {r["op"]: set(r["times"]) for r in found["results"] if not r["failed"]}
    both = {"tgl", "deepgemm"}
    assert timed == {"fprop": both, "dgrad": both, "wgrad": {"tgl"}, "accumulate": both, "dbias": {"tgl"}}


def test_blocks(gpu, load, monkeypatch, tmp_path, capsys, deep_gemm):
    script, shapes = gpu("grouped_gemm_scaled"), load("harness.shapes")
    monkeypatch.setitem(shapes.SHAPES, "four", shapes.Shape(4, 700, 256, 128))
    options = ("--shapes", "four", "--routings", "zipf", "--arms", "fp8_block", "deepgemm")
    _, found = ran(script, tmp_path, capsys, *options)
    timed = {r["op"]: set(r["times"]) for r in found["results"] if not r["wrong"]}
    both = {"fp8_block", "deepgemm"}
    assert timed == {"fprop": both, "dgrad": both, "wgrad": {"fp8_block"}, "accumulate": both}


def test_a_peer_whose_result_is_wrong_is_not_timed(gpu, load, monkeypatch, tmp_path, capsys, deep_gemm):
    script, shapes = gpu("grouped_gemm_scaled"), load("harness.shapes")
    monkeypatch.setitem(shapes.SHAPES, "four", shapes.Shape(4, 700, 256, 128))
    monkeypatch.setattr(deep_gemm, "m_grouped_fp8_gemm_nt_contiguous", lambda a, b, out, index: out.zero_())
    options = ("--shapes", "four", "--routings", "zipf", "--ops", "fprop", "--arms", "fp8_block", "deepgemm")
    _, found = ran(script, tmp_path, capsys, *options)
    (result,) = found["results"]
    assert result["wrong"] == {"deepgemm": "ValueError: a relative error of 1.0e+00"}
    assert set(result["times"]) == {"fp8_block"}


def test_packed(gpu, monkeypatch, tmp_path, capsys, triton_kernels):
    script = gpu("packed_gpu")
    monkeypatch.setattr(script, "EXPERTS", 6)
    monkeypatch.setitem(script.WEIGHTS, "down", (96, 64))
    options = ("--weights", "down", "--tokens", "16", "--formats", "mxfp4", "mxfp8")
    _, found = ran(script, tmp_path, capsys, *options)
    timed = {(r["op"], r["format"]) for r in found["results"] if "triton_kernels" in r["times"]}
    assert timed == {("forward", "mxfp4")}


def times(**own):
    return {arm: {"median": float(value)} for arm, value in own.items()}


def test_the_table(gpu, monkeypatch, tmp_path, capsys):
    """Means over the cases of a row; a peer without times has no row, and what has run so far is in the file."""
    script = gpu("peers")
    monkeypatch.setattr(script, "needs_device", lambda: "NVIDIA H200")
    results = {
        "grouped_gemm.py": [
            {"op": "fprop", "shape": "a", "routing": "zipf", "times": times(tgl=1, torch=2, deepgemm=1)},
            {"op": "fprop", "shape": "b", "routing": "zipf", "times": times(tgl=2, torch=1, deepgemm=8)},
            {"op": "dgrad", "shape": "b", "routing": "zipf", "wrong": "poison is left in the output"},
        ],
        "moe_block.py": [
            {
                "shape": "mixtral",
                "routing": "balanced",
                "forward": times(captured=2, **{"sonic captured": 3}),
                "step": times(captured=4, **{"sonic captured": 5}),
            }
        ],
    }
    seen = []

    def run(command, **options):
        if command[0] == "git":
            return SimpleNamespace(stdout="0123456789ab\n")
        path = script.Path(command[1])
        seen.append(command[2:-2])
        script.Path(command[-1]).write_text(json.dumps({"results": results[path.name]}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(script.subprocess, "run", run)
    out = tmp_path / "peers.json"
    script.main(["--parts", "bf16", "block", "--samples", "7", "--clean-l2", "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["command"] == "python benchmarks/peers.py --parts bf16 block --samples 7 --clean-l2"
    assert found["versions"]["quack"] == version("quack-kernels")
    assert found["recorded_in"] == "0123456789ab"
    assert found["tables"]["peers"]["rows"] == [
        ["bfloat16, forward", "DeepGEMM", 2.0, 1.0, "a zipf", 2],
        ["bfloat16, forward", "torch", 1.0, 0.5, "b zipf", 2],
        ["block, forward", "SonicMoE", 1.5, 1.5, "mixtral balanced", 1],
        ["block, step", "SonicMoE", 1.25, 1.25, "mixtral balanced", 1],
    ]
    assert [options[-3:] for options in seen] == [["--samples", "7", "--clean-l2"]] * 2
    assert "bfloat16, forward                DeepGEMM                   2.000   1.000 a zipf" in capsys.readouterr().out


def test_a_part_that_fails_stops_the_table(gpu, monkeypatch):
    script = gpu("peers")
    monkeypatch.setattr(script.subprocess, "run", lambda command, **options: SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit, match=r"grouped_gemm\.py failed"):
        script.measured(script.PARTS["bf16"], [])


@pytest.mark.parametrize("part", ["bf16", "fp8", "packed", "block"])
def test_every_part_parses_its_options(gpu, part):
    script = gpu("peers")
    assert set(script.PARTS) == {"bf16", "fp8", "packed", "block"}
    own = script.PARTS[part]
    args = gpu(own.script.removesuffix(".py")).arguments([*own.options, "--samples", "7", "--clean-l2"])
    assert args.samples == 7

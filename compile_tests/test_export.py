"""torch.export with a dynamic number of tokens, and a packaged AOTInductor library that is loaded and run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from _compiling import ExpertLayer, count_tgl_calls
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

import tgl

G, K, N = 4, 8, 16
COUNTS = (2, 7, 64, 129)


class Experts(nn.Module):
    """The expert MLP with biases and probabilities, called with group sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = tgl.GroupedMLP(G, K, N, bias=True, activation="clamped_qgeglu", interleaved=True)

    def forward(self, x: Tensor, splits: Tensor, probs: Tensor) -> Tensor:
        return self.mlp(x, splits, probs)


def expert_inputs(rows: int) -> tuple[Tensor, ...]:
    """``rows`` rows, of which the last quarter is a tail."""
    splits = torch.tensor([rows // 2, 0, rows // 4, 0])
    return torch.randn(rows, K), splits, torch.rand(rows)


def exported_experts(module: nn.Module) -> ExportedProgram:
    tokens = Dim("tokens")
    shapes = ({0: tokens}, None, {0: tokens})
    return export(module, expert_inputs(6), dynamic_shapes=shapes)


def test_export_of_the_experts_has_dynamic_tokens() -> None:
    module = Experts()
    program = exported_experts(module)
    assert count_tgl_calls([program.graph_module]) == {
        "splits_to_offsets": 1,
        "grouped_gemm": 2,
        "grouped_activation": 1,
    }
    run = program.module()
    for rows in COUNTS:
        inputs = expert_inputs(rows)
        assert torch.equal(run(*inputs), module(*inputs))


def test_export_survives_decompositions_and_a_round_trip(tmp_path: Path) -> None:
    module = Experts()
    program = exported_experts(module).run_decompositions()
    torch.export.save(program, tmp_path / "experts.pt2")
    run = torch.export.load(tmp_path / "experts.pt2").module()
    inputs = expert_inputs(33)
    assert torch.equal(run(*inputs), module(*inputs))


def test_export_of_the_whole_layer() -> None:
    layer = ExpertLayer(K, N, G).double()
    program = export(layer, (torch.randn(6, K).double(),), dynamic_shapes=({0: Dim("tokens")},))
    run = program.module()
    for rows in COUNTS:
        x = torch.randn(rows, K).double()
        torch.testing.assert_close(run(x), layer(x))


def test_export_of_every_other_op() -> None:
    class Rest(nn.Module):
        def forward(self, x: Tensor, dy: Tensor, offs: Tensor, scale: Tensor, bias: Tensor) -> list[Tensor]:
            return [
                tgl.grouped_gemm_wgrad(x, dy, offs, out_dtype=torch.bfloat16),
                tgl.grouped_dbias(dy, offs),
                *tgl.grouped_dbias_dscales(dy, bias, scale, offs),
                *torch.ops.tgl.grouped_activation_backward(dy[:, : K // 2], x, offs, scale),
                *tgl.grouped_gemm_activation(dy, bias.t()[None].expand(3, N, 3), offs, kind="srelu"),
                *tgl.grouped_gemm_dactivation(dy, dy.new_ones(3, N, K // 2), x, offs, scale),
            ]

    def inputs(rows: int) -> tuple[Tensor, ...]:
        offs = torch.tensor([rows // 2, rows // 2, rows - 1], dtype=torch.int32)
        return torch.randn(rows, K), torch.randn(rows, N), offs, torch.rand(rows), torch.randn(3, N)

    tokens = Dim("tokens")
    shapes = ({0: tokens}, {0: tokens}, None, {0: tokens}, None)
    run = export(Rest(), inputs(6), dynamic_shapes=shapes).module()
    for rows in COUNTS:
        args = inputs(rows)
        for actual, expected in zip(run(*args), Rest()(*args)):
            assert torch.equal(actual, expected)


def test_export_checks_arguments() -> None:
    class Bad(nn.Module):
        def forward(self, x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
            return tgl.grouped_gemm(x, w, offs)

    with pytest.raises(Exception, match=r"tgl::grouped_gemm: `offs` must be int32 \(cumulative group ends\)"):
        export(Bad(), (torch.randn(4, K), torch.randn(2, K, N), torch.tensor([2, 4])))


def test_aot_inductor_package(tmp_path: Path) -> None:
    module = Experts()
    package = torch._inductor.aoti_compile_and_package(
        exported_experts(module),
        package_path=str(tmp_path / "experts.pt2"),
        # The wrapper only calls the ops, and is the only one to read the headers.
        inductor_configs={
            "aot_inductor.compile_wrapper_opt_level": "O0",
            "aot_inductor.precompile_headers": False,
        },
    )
    run = torch._inductor.aoti_load_package(package)
    for rows in COUNTS:
        inputs = expert_inputs(rows)
        assert torch.equal(run(*inputs), module(*inputs))


FORMS = {
    "discrete": {"single_grouped_weight": False},
    "recompute": {"recompute_activation": True},
    "mxfp8": {"recipe": tgl.recipes.MXFP8BlockScaling()},
    "fp8 delayed": {"recipe": tgl.recipes.DelayedScaling()},
    "fp8 discrete": {"recipe": tgl.recipes.Float8CurrentScaling(), "single_grouped_weight": False},
    "nvfp4": {"recipe": tgl.recipes.NVFP4BlockScaling()},
    "nvfp4 discrete": {"recipe": tgl.recipes.NVFP4BlockScaling(), "single_grouped_weight": False},
    "fp8 blocks": {"recipe": tgl.recipes.Float8BlockScaling()},
    "fp8 blocks discrete": {"recipe": tgl.recipes.Float8BlockScaling(), "single_grouped_weight": False},
}


class Buffered(nn.Module):
    """A layer that writes into a buffer, if given one."""

    def __init__(self, kind: type[nn.Module], **options) -> None:
        super().__init__()
        self.layer = kind(3, 32, 32, **options)

    def forward(self, x: Tensor, splits: Tensor, out: Tensor | None = None) -> Tensor:
        return self.layer(x, splits, out=out)


@pytest.mark.cover(1)
@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("kind", [tgl.GroupedLinear, tgl.GroupedMLP])
@pytest.mark.parametrize("form", FORMS)
def test_saved_and_loaded(form: str, kind: type[nn.Module], out: bool, tmp_path: Path) -> None:
    if kind is tgl.GroupedLinear and "recompute_activation" in FORMS[form]:
        return  # an option of the MLP

    def inputs(rows: int) -> tuple[Tensor, ...]:
        args = torch.randn(rows, 32), torch.tensor([rows // 2, 0, rows // 4])
        return (*args, torch.full((rows, 32), 7.0)) if out else args

    module = Buffered(kind, **FORMS[form]).eval()
    tokens = Dim("tokens")
    shapes = ({0: tokens}, None, {0: tokens})
    program = export(module, inputs(8), dynamic_shapes=shapes if out else shapes[:2])
    for saved in (program, program.run_decompositions()):
        torch.export.save(saved, tmp_path / "mlp.pt2")
        run = torch.export.load(tmp_path / "mlp.pt2").module()
        args = inputs(33)
        with torch.no_grad():
            actual = run(*args).clone()
            assert torch.equal(actual, module(*args))
        if out:
            assert (args[2][24:] == 7).all()


RECIPES = {
    "none": lambda: None,
    "mxfp8": tgl.recipes.MXFP8BlockScaling,
    "nvfp4": tgl.recipes.NVFP4BlockScaling,
    "fp8_current": tgl.recipes.Float8CurrentScaling,
    "fp8_delayed": tgl.recipes.DelayedScaling,
    "fp8_block": tgl.recipes.Float8BlockScaling,
}


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_export_of_recipes_has_any_number_of_rows(recipe: str, strict: bool) -> None:
    """A name for the rows, without bounds: no size that is a ceiling of another one is guarded."""
    layer = tgl.GroupedLinear(3, 64, 64, recipe=RECIPES[recipe]())
    args = torch.randn(40, 64), torch.tensor([10, 20, 5])
    program = export(layer, args, dynamic_shapes=({0: Dim("rows")}, None), strict=strict)
    graphs = [m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    assert count_tgl_calls(graphs)["grouped_gemm" if recipe == "none" else "grouped_gemm_scaled"] >= 1

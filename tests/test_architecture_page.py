"""docs/architecture.md cites files and names that exist, draws the imports as they are, and answers what it asks."""

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

from tools import import_graph

ROOT = Path(__file__).parents[1]
PAGES = ("docs/architecture.md", "docs/adding_an_op.md")
TEXT = {page: (ROOT / page).read_text() for page in PAGES}
CITATION = re.compile(r"`([\w/]+\.py): ([\w.]+)`")
CITED = sorted({found for page in PAGES for found in CITATION.findall(TEXT[page])})
# The questions of the section "Where do I find ...": a name that the answer cites, and what its source says.
ANSWERS = {
    "where the tail is zeroed": [
        ("tgl/backends/portable/loops.py: gemm", "if call.zero_tail"),
        ("tgl/cutlass_kernels/scheduler/problem.py: VarlenM.grid", "tail and self.has_tail"),
        ("tgl/cutlass_kernels/gemm/sm90/mma.py: consume_tiles", "the tail's included"),
        ("tgl/cutlass_kernels/launchers/gemm_launcher.py: OperandLauncher.zero_outputs", "t.zero_()"),
    ],
    "where a tiling of sm_90 is chosen": [
        ("tgl/cutlass_kernels/gemm/sm90/tilings.py: choose", "COSTS"),
        ("tgl/cutlass_kernels/tilings.py: choose", "arch_of(arch).tilings.choose"),
    ],
    "where `main_grad` is added": [
        ("tgl/nn/_parameter_gradients.py: ParameterGradients.form", "self._into_main_grad("),
        ("tgl/nn/_main_grad.py: MainGrad.add", "gemms.wgrad_into("),
        ("tgl/nn/_gemms.py: DenseGemms.wgrad_into", "grouped_gemm_wgrad_accumulate_("),
    ],
    "how a rank's rows reach another one": [
        ("tgl/distributed/_exchange.py: Exchange.arrive", "ep_dispatch("),
        ("tgl/distributed/_exchange.py: Exchange.answer", "ep_combine("),
        ("tgl/cutlass_kernels/expert_parallel/exchange.py: ExchangeKernel.push", "self.send("),
        ("tgl/backends/composite/expert_parallel.py: dispatch", "_exchange("),
    ],
    "what a recipe saves for the backward": [
        ("tgl/nn/_expert_function.py: ExpertFunction.forward", "save("),
        ("tgl/nn/_saving.py: save", "ctx.save_for_backward("),
        ("tgl/nn/_scaled_gemms.py: ScaledGemms.input", "columnwise=wgrad"),
    ],
    "why a call was copied": [
        ("tgl/cutlass_kernels/runtime/reach.py: Reach.reason", "return reason"),
        ("tgl/cutlass_kernels/runtime/reach.py: Reach.copied", "t.copy_("),
        ("tgl/cutlass_kernels/runtime/launcher.py: Launcher.copying", "copies=self._taking(self.copies)"),
    ],
}


@lru_cache
def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def defined(body: list[ast.stmt], name: str) -> ast.stmt | None:
    """Return the statement that defines ``name``, a function or class or what is assigned to."""
    for statement in body:
        if getattr(statement, "name", None) == name:
            return statement
        targets = [statement.target] if isinstance(statement, ast.AnnAssign) else getattr(statement, "targets", [])
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return statement
    return None


def source_of(path: str, name: str) -> str:
    """Return the source of ``name``, ``Class.method`` or a name of the module, in the file ``path``."""
    found: ast.stmt | None = None
    body = tree(path).body
    for part in name.split("."):
        found = defined(body, part)
        assert found is not None, f"{path} has no {name}"
        body = getattr(found, "body", [])
    return ast.get_source_segment((ROOT / path).read_text(), found) or ""


def test_citations_are_found():
    assert ("tgl/nn/moe.py", "MoE.forward") in CITED
    assert len(CITED) > 50
    with pytest.raises(AssertionError, match=r"has no MoE\.backward"):
        source_of("tgl/nn/moe.py", "MoE.backward")


@pytest.mark.parametrize("path, name", CITED, ids=lambda v: v)
def test_what_the_pages_cite_exists(path, name):
    assert source_of(path, name)


@pytest.mark.parametrize("page", PAGES)
def test_the_paths_that_the_pages_name_exist(page):
    paths = re.findall(r"`((?:tgl|tests|tools|emulator|docs|compile_tests)/[\w/.]*)[`:]", TEXT[page])
    assert paths
    example = "tgl/ops/grouped_scale.py"  # what the page of this name adds
    assert [path for path in paths if not (ROOT / path).exists() and path != example] == []


@pytest.mark.parametrize("question", ANSWERS)
def test_answers(question):
    _, heading, rest = TEXT[PAGES[0]].partition(f"### {question}\n")
    assert heading
    answer = re.split(r"^##", rest, maxsplit=1, flags=re.MULTILINE)[0]
    for citation, says in ANSWERS[question]:
        assert f"`{citation}`" in answer
        assert says in source_of(*citation.split(": "))


def test_the_table_of_rooms():
    """The table has every room, with the rooms that it imports."""
    rows = re.findall(r"^\| `([\w.]+)` \| [^|]+ \|([^|]*)\|$", TEXT[PAGES[0]], re.MULTILINE)
    assert {room: set(re.findall(r"`([\w.]+)`", imports)) for room, imports in rows} == import_graph.room_graph()


def test_the_picture_is_what_the_command_draws():
    """To draw it again: ``python -m tools.import_graph``."""
    assert import_graph.PICTURE.read_text() == import_graph.picture()

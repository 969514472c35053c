"""Runs PyTorch's own tests of its grouped products under ``tgl.integrations.torch.enable()``::

    python -m tools.torch_tests PYTORCH/test/test_matmul_cuda.py [--device cpu] [-k 2d_3d]

The files are those of a checkout of PyTorch, ``test_matmul_cuda.py`` and ``test_scaled_matmul_cuda.py``, of the release
that is installed: its wheel has no tests. Tests whose name says ``grouped`` are run, and a table says which passed, and
why others did not. On a CPU the device that they name is replaced, and what skips them there is left out.
"""

from __future__ import annotations

import argparse
import ast
import sys
import types
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

from tgl.integrations import torch as drop_in

WORD = "grouped"  # in the name of a test of the products
SKIPPING = {"onlyCUDA", "skipIf", "skipUnless", "skipCUDAIf", "skipCUDAIfNotRocm", "skipIfRocm", "serialTest"}


class Grouped(ast.NodeTransformer):
    """Leaves tests of grouped products alone, and has them run on another device than CUDA."""

    def __init__(self, device: str) -> None:
        self.device = device

    def visit_FunctionDef(self, function: ast.FunctionDef) -> ast.AST | None:
        if function.name.startswith("test_") and WORD not in function.name:
            return None
        if self.device != "cuda":
            function.decorator_list = [d for d in function.decorator_list if _name(d) not in SKIPPING]
        return self.generic_visit(function)

    def visit_Constant(self, constant: ast.Constant) -> ast.AST:
        return ast.copy_location(ast.Constant(self.device), constant) if constant.value == "cuda" else constant

    def visit_Call(self, call: ast.Call) -> ast.AST:
        self.generic_visit(call)
        if _name(call) == "instantiate_device_type_tests":
            call.keywords = [ast.keyword("only_for", ast.Constant(self.device))]
        if isinstance(call.func, ast.Attribute) and call.func.attr == "cuda" and not call.args:
            call.func.attr, call.args = "to", [ast.Constant(self.device)]  # of a tensor
        return call

    def visit_If(self, block: ast.If) -> ast.AST | None:
        return None if "__main__" in ast.unparse(block.test) else self.generic_visit(block)


def _name(node: ast.expr) -> str:
    """The last part of what is called, or used as a decorator."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def load(path: Path, device: str) -> types.ModuleType:
    """The module at ``path`` with its grouped tests alone, for ``device``."""
    tree = ast.fix_missing_locations(Grouped(device).visit(ast.parse(path.read_text(), str(path))))
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module  # where PyTorch looks for the module of a test
    exec(compile(tree, str(path), "exec"), module.__dict__)
    return module


class Result(unittest.TestResult):
    """The result of a test run, with the first line of each failure; PyTorch's tests add how to run one to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.raised: list[tuple[str, str]] = []

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self._note(test, err)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._note(test, err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        super().addSubTest(test, subtest, err)  # to the lists of failures and errors, past the two above
        if err is not None:
            self._note(subtest, err)

    def _note(self, test: unittest.TestCase, err: Any) -> None:
        kind, error, _ = err
        self.raised.append((test.id(), f"{kind.__name__}: {str(error).strip().partition(chr(10))[0]}"))


def run(path: Path, device: str, only: str = "") -> Result:
    """Run the grouped tests whose name holds ``only``, served by tgl."""
    suite = unittest.TestSuite()
    for case in vars(load(path, device)).values():
        if isinstance(case, type) and issubclass(case, unittest.TestCase):
            names = unittest.defaultTestLoader.getTestCaseNames(case)
            suite.addTests(case(name) for name in names if WORD in name and only in name)
    result = Result()
    with drop_in.enabled(device):
        suite.run(result)
    return result


def table(result: Result) -> list[str]:
    """Return the number of passed tests, and every reason why others did not pass, with their number."""
    failed, skipped = result.raised, [reason for _, reason in result.skipped]
    passed = result.testsRun - len(failed) - len(skipped) - len(result.expectedFailures)
    lines = [f"{result.testsRun} tests: {passed} passed, {len(failed)} failed, {len(skipped)} skipped"]
    for what, reasons in (("skipped", skipped), ("failed", [reason for _, reason in failed])):
        lines.extend(f"  {count} {what}: {reason}" for reason, count in Counter(reasons).most_common())
    lines.extend(f"  failed: {name}" for name, _ in failed)
    return lines


def main(arguments: list[str]) -> int:
    """The command; 1 if a test failed or none was found."""
    parser = argparse.ArgumentParser(prog="python -m tools.torch_tests", description=(__doc__ or "").partition("::")[0])
    parser.add_argument("path", type=Path, nargs="+", help="test files of a checkout of PyTorch")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("-k", default="", metavar="TEXT", dest="only", help="only tests whose name holds it")
    given = parser.parse_args(arguments)
    good = True
    for path in given.path:
        result = run(path, given.device, given.only)
        print("\n".join((f"{path.name} on {given.device}:", *table(result))))
        good &= result.wasSuccessful() and result.testsRun > 0
    return not good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

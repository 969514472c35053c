"""The runner of PyTorch's own tests, on a file that is written as they are."""

from __future__ import annotations

import pytest

from tools import torch_tests

FILE = """
import unittest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_device_type import dtypes, instantiate_device_type_tests, onlyCUDA
from torch.testing._internal.common_utils import TestCase, parametrize, run_tests


class TestProducts(TestCase):
    @onlyCUDA
    def test_of_something_else(self, device):
        raise AssertionError

    @unittest.skipIf(not torch.cuda.is_available(), "needs CUDA")
    @parametrize("tail", [0, 3])
    @dtypes(torch.bfloat16, torch.float32)
    def test_grouped_product(self, tail, dtype):
        a = torch.ones(8 + tail, 8, device="cuda", dtype=dtype)
        a[8:] = torch.nan
        offs = torch.tensor([3, 8], dtype=torch.int32).cuda()
        y = F.grouped_mm(a, torch.ones(2, 8, 16, device="cuda", dtype=dtype), offs=offs)
        self.assertEqual(y[:8], torch.full_like(y[:8], 8.0))
        self.assertFalse(y[8:].any())

    def test_grouped_wrong(self, device):
        self.assertEqual(device, "elsewhere")

    def test_grouped_skipped(self, device):
        self.skipTest("for a reason")


instantiate_device_type_tests(TestProducts, globals(), except_for="cpu")

if __name__ == "__main__":
    run_tests()
"""


def test_what_it_runs_and_says(tmp_path, capsys):
    path = tmp_path / "test_products_of_torch.py"
    path.write_text(FILE)
    assert torch_tests.main([str(path), "--device", "cpu"]) == 1
    first, counts, skipped, reason, name = capsys.readouterr().out.splitlines()
    assert first == "test_products_of_torch.py on cpu:"
    assert counts == "6 tests: 4 passed, 1 failed, 1 skipped"
    assert skipped == "  1 skipped: for a reason"
    assert reason == "  1 failed: AssertionError: String comparison failed: 'cpu' != 'elsewhere'"
    assert name == "  failed: test_products_of_torch.TestProductsCPU.test_grouped_wrong_cpu"
    assert torch_tests.main([str(path), "--device", "cpu", "-k", "product_tail_3"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "2 tests: 2 passed, 0 failed, 0 skipped"


PARTS = """
import unittest


class TestParts(unittest.TestCase):
    def test_grouped_parts(self):
        for number in range(3):
            with self.subTest(number=number):
                self.assertEqual(number, 1)
"""


def test_failing_subtests_are_reported(tmp_path, capsys):
    path = tmp_path / "test_parts_of_torch.py"
    path.write_text(PARTS)
    assert torch_tests.main([str(path), "--device", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "2 failed" in lines[1]
    assert lines[2:4] == ["  1 failed: AssertionError: 0 != 1", "  1 failed: AssertionError: 2 != 1"]
    assert [line.rpartition(" ")[2] for line in lines[4:]] == ["(number=0)", "(number=2)"]


def test_no_found_test_is_reported(tmp_path, capsys):
    path = tmp_path / "test_nothing_of_torch.py"
    path.write_text("")
    assert torch_tests.main([str(path), "--device", "cpu"]) == 1
    assert "0 tests" in capsys.readouterr().out


def test_an_unknown_device():
    with pytest.raises(SystemExit):
        torch_tests.main(["test_matmul_cuda.py", "--device", "mps"])

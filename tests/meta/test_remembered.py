"""Remembered calls: which calls count as the same whatever their number of rows, and how many are kept."""

import inspect

import pytest
import torch
from torch import Tensor

from tgl.meta import remembered as module
from tgl.meta import specs
from tgl.meta.remembered import remembered
from tgl.meta.specs import RowsSpec, TensorSpec

CPU = torch.device("cpu")


def counted(function, kinds=None):
    """``remembered`` with the calls of ``function`` that it makes."""
    calls = []

    def check(*args, **options):
        calls.append(1)
        return function(*args, **options)

    check.__signature__ = inspect.signature(function)
    return remembered(check, kinds), calls


@pytest.fixture
def check():
    """A check that refuses three rows, and its calls."""

    def check(x: Tensor, y: Tensor | None = None, *, option="first"):
        if x.shape[0] == 3:
            raise ValueError("three rows")
        return x.shape, option

    return counted(check)


def test_values_and_addresses_are_not_in_the_key(check):
    check, calls = check
    for x in (torch.zeros(2, 4), torch.ones(2, 4), torch.zeros(9)[1:].view(2, 4), torch.zeros(2, 4).requires_grad_()):
        assert check(x) == ((2, 4), "first")
    assert len(calls) == 1


def test_everything_else_is_in_the_key(check):
    check, made = check
    x, y = torch.zeros(4, 4), torch.zeros(4)
    calls = (
        ((x,), {}),
        ((x, y), {}),
        ((x, y), {"option": "second"}),
        ((x[:2], y), {}),
        ((x.t(), y), {}),
        ((x[:, :2], y), {}),
        ((x.half(), y), {}),
        ((x, y.half()), {}),
        ((x, y[::2]), {}),
        ((x, y[:2]), {}),
        ((x.to("meta"), y), {}),
    )
    for count, (args, options) in enumerate(calls, 1):
        for _ in range(2):
            assert check(*args, **options) == (args[0].shape, options.get("option", "first"))
            assert len(made) == count
    assert check(x, None) == check(x) == check(x, option="first")


def test_a_check_without_a_result():
    def function(x: Tensor) -> None: ...

    check, calls = counted(function)
    for _ in range(2):
        assert check(torch.zeros(2)) is None
    assert len(calls) == 1


def test_several_destinations_count_one_by_one():
    def function(x: Tensor, *out: Tensor, option: str) -> None: ...

    check, calls = counted(function)
    x, y = torch.zeros(2), torch.zeros(3)
    variants = ((x, y, "first"), (y, x, "first"), (x, y, "second"), (x, y[:1], "first"))
    for count, (*out, option) in enumerate(variants, 1):
        for _ in range(2):
            assert check(x, *out, option=option) is None
            assert len(calls) == count


def test_another_number_of_rows_is_the_same_call():
    check, calls = counted(specs.grouped_gemm, {"a": "rows", "bias_scale": "vector"})
    b, bias, offs = torch.zeros(2, 4, 6), torch.zeros(2, 6), torch.zeros(2, dtype=torch.int32)
    for rows in (5, 5, 7, 0, 1, 4, 6, 5):
        for a in (torch.zeros(rows, 4), torch.zeros(4, rows).t()):
            for args in ((), (bias, torch.zeros(rows))):
                spec = check(a, b, offs, *args)
                assert type(spec) is RowsSpec
                assert spec == specs.grouped_gemm(a, b, offs, *args)
    assert len(calls) == 2
    assert len(check.passed) == 2


def test_rows_that_differ_are_refused_like_before():
    check, _ = counted(specs.grouped_gemm, {"a": "rows", "bias_scale": "vector"})
    a, b, bias, offs = torch.zeros(5, 4), torch.zeros(2, 4, 6), torch.zeros(2, 6), torch.zeros(2, dtype=torch.int32)
    check(a, b, offs, bias, torch.zeros(5))
    for bad in (torch.zeros(4), torch.zeros(()), torch.zeros(5, 1)):
        with pytest.raises(ValueError, match="`bias_scale` must be of shape"):
            check(a, b, offs, bias, bad)
    for bad in (a[0], a[0, 0], a[None]):
        with pytest.raises(ValueError, match="`a` must be 2-D"):
            check(bad, b, offs, bias, torch.zeros(5))


def test_results_of_several_sizes_follow_the_rows():
    check, calls = counted(specs.grouped_activation_backward, {"dy": "rows", "x": "rows", "probs": "vector"})
    offs = torch.zeros(2, dtype=torch.int32)
    for rows in (3, 9, 0, 3):
        dy, x, probs = torch.zeros(rows, 4), torch.zeros(rows, 8), torch.zeros(rows)
        for given in (None, probs):
            assert check(dy, x, offs, given) == specs.grouped_activation_backward(dy, x, offs, given)
    assert len(calls) == 2


def test_the_pitch_of_a_single_row_says_nothing_about_more():
    check, _ = counted(specs.grouped_gemm_out, {"a": "rows", "bias_scale": "vector", "out": "destination"})
    b, offs = torch.zeros(2, 4, 6), torch.zeros(2, dtype=torch.int32)

    def out(rows):
        return torch.zeros(40).as_strided((rows, 6), (5, 1))  # rows that overlap, if there are several

    for _ in range(2):
        check(torch.zeros(1, 4), b, offs, out=out(1))
        with pytest.raises(ValueError, match="overlapping rows"):
            check(torch.zeros(3, 4), b, offs, out=out(3))


def test_sizes_that_follow_from_the_rows_are_checked_again():
    def function(x: Tensor, padded: Tensor) -> None:
        if padded.shape[0] != 2 * x.shape[0] or padded.stride(0) != 1:
            raise ValueError("not padded")

    check, calls = counted(function, {"x": "contiguous rows", "padded": "tokens"})
    for count, rows in enumerate((2, 3, 2), 1):
        for _ in range(2):
            check(torch.zeros(rows, 4), torch.zeros(2 * rows))
            assert len(calls) == count
    assert len(check.passed) == 1
    for bad in (torch.zeros(5), torch.zeros(8)[::2]):
        with pytest.raises(ValueError, match="not padded"):
            check(torch.zeros(2, 4), bad)


def test_column_major_matrices_by_rows():
    t = torch.empty(5, 4, 3).transpose(1, 2)
    spec = TensorSpec(tuple(t.shape), t.dtype, t.device, t.stride())
    assert spec.by_rows.empty().transpose(1, 2).stride() == spec.empty().stride() == t.stride()


def test_a_call_that_raises_is_checked_again(check):
    check, calls = check
    for _ in range(2):
        with pytest.raises(ValueError, match="three rows"):
            check(torch.zeros(3))
    assert len(calls) == 2


def test_the_cache_is_bounded(check, monkeypatch):
    check, calls = check
    monkeypatch.setattr(module, "LIMIT", 4)
    for rows in (5, 6, 7, 8, 9, 9, 5):
        check(torch.zeros(rows, 1))
    assert len(calls) == 6
    assert len(check.passed) == 2

"""What counts as the same call, and how many are kept."""

import pytest
import torch

from tgl.meta import remembered as module
from tgl.meta.remembered import remembered, remembered_out
from tgl.meta.specs import TensorSpec


@pytest.fixture
def check():
    """A check that counts its calls and refuses three rows."""

    @remembered
    def check(x, y=None, *, option="first"):
        check.calls += 1
        if x.shape[0] == 3:
            raise ValueError("three rows")
        return x.shape, option

    check.calls = 0
    return check


def test_values_and_addresses_are_not_looked_at(check):
    for x in (torch.zeros(2, 4), torch.ones(2, 4), torch.zeros(9)[1:].view(2, 4), torch.zeros(2, 4).requires_grad_()):
        assert check(x) == ((2, 4), "first")
    assert check.calls == 1


def test_all_else_is(check):
    x, y = torch.zeros(4, 4), torch.zeros(4)
    calls = (
        ((x,), {}),
        ((x, None), {}),
        ((x, y), {}),
        ((x, y), {"option": "first"}),
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
            assert check(*args, **options)[0] == args[0].shape
            assert check.calls == count


def test_a_check_without_a_result():
    calls = []
    check = remembered(lambda x: calls.append(x))
    for _ in range(2):
        assert check(torch.zeros(2)) is None
    assert len(calls) == 1


def test_a_destination_counts_like_an_operand():
    calls = []
    check = remembered_out(lambda x, *, out, option: calls.append((x.shape, out.shape, option)))
    x, y = torch.zeros(2), torch.zeros(3)
    for args in ((x, y, "first"), (y, x, "first"), (x, y, "second"), (x, torch.zeros(4), "first")):
        for _ in range(2):
            assert check(args[0], out=args[1].clone(), option=args[2]) is None
            assert calls[-1] == (args[0].shape, args[1].shape, args[2])
    assert len(calls) == 4


def test_specs_remember():
    """Each is the same object for calls alike, alone or one of several, and another one for another call."""
    specs = (
        TensorSpec((2, 3), torch.float32, torch.device("cpu")),
        TensorSpec((4, 3), torch.float32, torch.device("cpu")),
    )
    for result, parts in ((specs[0], lambda spec: [spec]), (specs, list)):
        check = remembered(lambda x, result=result: result)
        first, again, other = (parts(check(torch.zeros(n))) for n in (2, 2, 3))
        for spec in first:
            assert spec.kept is None
            spec.kept, spec.by_rows.kept = "this", "that"
        assert first == other == parts(result)
        assert [(spec.kept, spec.by_rows.kept) for spec in again] == [("this", "that")] * len(again)
        assert [(spec.kept, spec.by_rows.kept) for spec in other] == [(None, None)] * len(other)


def test_column_major_matrices_by_rows():
    t = torch.empty(5, 4, 3).transpose(1, 2)
    spec = TensorSpec(tuple(t.shape), t.dtype, t.device, t.stride())
    assert spec.by_rows.empty().transpose(1, 2).stride() == spec.empty().stride() == t.stride()


def test_what_raises_raises_again(check):
    for _ in range(2):
        with pytest.raises(ValueError, match="three rows"):
            check(torch.zeros(3))
    assert check.calls == 2


def test_it_forgets_before_it_grows_for_ever(check, monkeypatch):
    monkeypatch.setattr(module, "LIMIT", 4)
    for rows in (5, 6, 7, 8, 9, 9, 5):
        check(torch.zeros(rows, 1))
    assert check.calls == 6

"""Checks that a grouped op keeps its contracts: ``torch.library.opcheck``, and what opcheck does not know about.

``check_op(op, samples)`` is the whole interface. Each contract is one function below, which raises ``ContractError``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._comparison import default_tolerances

from ..meta.checks import FLOATS
from .samples import NAN, SampleInput

Tensors = dict[str, Tensor | None]
GARBAGE = 77.0  # a tail value besides NaN: an op that masks NaN but reads the tail gives itself away


class ContractError(AssertionError):
    """A contract does not hold; the message names the op, the sample and the contract."""


def check_op(
    op: Any,
    samples: Iterable[SampleInput],
    *,
    reference: Callable[..., Any] | None = None,
    empty_groups_zero: bool = True,
    opcheck: str = "varied",
    test_utils: str | Sequence[str] = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    ),
) -> int:
    """Check every contract of ``op`` on every sample.

    For each sample:

    - the fake implementation predicts the real outputs' shape, dtype, stride and device;
    - inputs are not written, nor is the memory around a written argument and its tail;
    - a repeated call is equal to the bit;
    - rows past the last group come out as zeros;
    - no result or gradient depends on the tail of the inputs or of a gradient (NaN is tried);
    - results do not depend on the layout of the arguments, nor on whether a gradient is dense or has stride 0;
    - an empty group's results are zero (unchanged when accumulating).

    Args:
        op: an ``OpOverload``, for example ``torch.ops.mylib.f.default``.
        samples: from ``sample_inputs`` or ``Signature.samples``.
        reference: called like ``op`` on contiguous float64 arguments (without written ones) whose tail is zero; its
            results, rounded, must equal those of ``op``: exactly if the signature says so, else within the dtype's
            usual tolerance (``torch.testing.assert_close``), and float32's of the largest of them.
        empty_groups_zero: whether outputs that lead with G are zero for empty groups.
        opcheck: ``"all"`` runs ``torch.library.opcheck`` on every sample, ``"varied"`` once for each combination of
            optional arguments, options, layout and dtype kind (it is by far the slowest part), ``"none"`` never.
        test_utils: passed to ``torch.library.opcheck``; without ``test_schema`` where an argument is float8.

    Returns:
        The number of samples checked; at least one.

    Raises:
        ContractError: naming the sample and the contract.
    """
    seen: set[tuple] = set()
    count = 0
    for sample in samples:
        count += 1
        try:
            _check_sample(op, sample, reference, empty_groups_zero)
            key = (sample.signature.text, sample.given, tuple(sample.options.items()), sample.layout, sample.widened)
            if opcheck == "all" or (opcheck == "varied" and key not in seen and sample.routing.routed):
                seen.add(key)
                _run_opcheck(op, sample, test_utils)
        except ContractError as error:
            raise ContractError(f"{op.name()} on {sample.name}: {error}") from None
        except Exception as error:
            raise ContractError(f"{op.name()} on {sample.name}: {type(error).__name__}: {error}") from error
    if not count:
        raise ValueError("`samples` must not be empty")
    return count


def _check_sample(op: Any, sample: SampleInput, reference: Callable | None, empty_groups_zero: bool) -> None:
    results = _forward_contracts(op, sample)
    _zero_rows(sample, results, empty_groups_zero)
    if reference is not None:
        _matches_reference(op, sample, results, reference)
    if sample.signature.differentiable and not sample.signature.written:
        _gradient_contracts(op, sample)


def _run(op: Any, sample: SampleInput, tensors: Tensors) -> Tensors:
    """Return outputs and written arguments by name."""
    args, kwargs = sample.call(op, tensors)
    returned = op(*args, **kwargs)
    outputs = () if returned is None else returned if isinstance(returned, (tuple, list)) else (returned,)
    names = [o.name for o in sample.signature.outputs]
    _require(len(names) == len(outputs), f"the signature names {len(names)} outputs, the op returns {len(outputs)}")
    return {**dict(zip(names, outputs)), **{o.name: tensors[o.name] for o in sample.signature.written}}


def _forward_contracts(op: Any, sample: SampleInput) -> Tensors:
    tensors = sample.tensors()
    memory = {name: _memory(t).clone() for name, t in tensors.items() if t is not None}
    results = _run(op, sample, tensors)
    written = {o.name for o in sample.signature.written}
    for name, before in memory.items():
        if name not in written:
            _require(torch.equal(_bits(_memory(tensors[name])), _bits(before)), f"modified its argument `{name}`")
    fresh = sample.tensors()
    for operand in sample.signature.written:
        _kept_outside(sample, operand, tensors[operand.name], fresh[operand.name])
    for name, t in results.items():
        if name not in written:
            for argument, given in tensors.items():
                aliased = given is not None and t is not None and _same_storage(t, given)
                _require(not aliased, f"output `{name}` aliases argument `{argument}`")

    again = _run(op, sample, sample.tensors())
    _require_equal(results, again, "a second call returned different bits")
    garbage = _run(op, sample, sample.tensors(tail=GARBAGE))
    _require_equal(results, garbage, "depends on the inputs' tail")
    dense = _run(op, sample, sample.tensors(layout="row"))
    _require_equal(results, dense, "another layout of the same values gave a different result", sample.signature.exact)
    _fake_agrees(op, sample, results)
    return results


def _kept_outside(sample: SampleInput, operand: Any, buffer: Tensor | None, untouched: Tensor | None) -> None:
    """Check that the padding around a written argument, its tail, and the values kept by accumulation are unchanged."""
    assert buffer is not None
    assert untouched is not None
    keep = torch.ones_like(_memory(buffer), dtype=torch.bool)
    inside = keep.as_strided(buffer.shape, buffer.stride(), buffer.storage_offset())
    inside.fill_(False)
    if operand.by_row:
        inside[sample.routing.routed :] = True
    elif sample.signature.accumulates and operand.dims[0] == "G":
        for group, size in enumerate(sample.routing.sizes):
            inside[group] = not size
    changed = (_bits(_memory(buffer)) != _bits(_memory(untouched))).view(-1, buffer.element_size())
    _require(not changed[keep].any(), f"wrote outside the part of `{operand.name}` that it may write")


def _zero_rows(sample: SampleInput, results: Tensors, empty_groups_zero: bool) -> None:
    for operand in (*sample.signature.outputs, *sample.signature.written):
        t = results[operand.name]
        if t is None:
            continue
        if operand.dims[0] == "T" and not operand.written and t.shape[0]:
            _require(_all_zero(t[sample.routing.routed :]), f"the tail of `{operand.name}` is not zero")
        if operand.dims[0] == "G" and t.is_floating_point() and empty_groups_zero and not sample.signature.accumulates:
            empty = torch.tensor([not size for size in sample.routing.sizes], dtype=torch.bool, device=t.device)
            _require(_all_zero(t[empty]), f"`{operand.name}` is not zero for an empty group")


def _fake_agrees(op: Any, sample: SampleInput, results: Tensors) -> None:
    tensors = sample.tensors()
    with FakeTensorMode() as mode:
        fake = _run(op, sample, {name: mode.from_tensor(t) if t is not None else None for name, t in tensors.items()})
    for name, t in results.items():
        real, predicted = _metadata(t), _metadata(fake[name])
        _require(real == predicted, f"the fake predicts {predicted} for `{name}`, the real op returned {real}")


def _matches_reference(op: Any, sample: SampleInput, results: Tensors, reference: Callable) -> None:
    wide = {
        name: t.to(torch.float64).contiguous() if t is not None and t.is_floating_point() else t
        for name, t in sample.tensors(tail=0.0).items()
    }
    expected = reference(
        *(t for o, t in zip(sample.signature.operands, wide.values()) if not o.written), **sample.options
    )
    values = expected if isinstance(expected, (tuple, list)) else (expected,)
    for operand, value in zip(sample.signature.outputs or sample.signature.written, values):
        result = results[operand.name]
        assert result is not None
        if operand.written and operand.by_row:
            result, value = result[: sample.routing.routed], value[: sample.routing.routed]
        elif sample.signature.accumulates:
            value = value + wide[operand.name]
        message = f"`{operand.name}` differs from the reference"
        _require_equal({"": result}, {"": value.to(result.dtype)}, message, sample.signature.exact)


# --- gradients --------------------------------------------------------------------------------------------------------


def _gradients(op: Any, sample: SampleInput, tensors: Tensors, cotangents: Callable[[Any, Tensor], Tensor]) -> Tensors:
    leaves = {n: t.detach().requires_grad_() for n, t in tensors.items() if t is not None and t.is_floating_point()}
    results = _run(op, sample, {**tensors, **leaves})
    outputs = {o.name: (o, results[o.name]) for o in sample.signature.outputs}
    used = [(o, t) for o, t in outputs.values() if t is not None and t.requires_grad]
    _require(
        bool(used), "no output requires grad though the inputs do (differentiable=False for an op without formula)"
    )
    grads = torch.autograd.grad(
        [t for _, t in used], list(leaves.values()), [cotangents(o, t) for o, t in used], allow_unused=True
    )
    reached = any(grad is not None for grad in grads)
    _require(reached, "no gradient reaches any argument (pass differentiable=False if there is no formula)")
    return dict(zip(leaves, grads))


def _gradient_contracts(op: Any, sample: SampleInput) -> None:
    exact = sample.signature.exact

    def cotangent(tail: float) -> Callable[[Any, Tensor], Tensor]:
        return lambda operand, output: sample.cotangent(output, operand, tail=tail)

    grads = _gradients(op, sample, sample.tensors(), cotangent(NAN))
    again = _gradients(op, sample, sample.tensors(), cotangent(NAN))
    _require_equal(grads, again, "a second backward returned different bits")
    garbage = _gradients(op, sample, sample.tensors(tail=GARBAGE), cotangent(GARBAGE))
    _require_equal(grads, garbage, "a gradient depends on the tail of the inputs or of the incoming gradient")
    dense = _gradients(op, sample, sample.tensors(layout="row"), cotangent(NAN))
    _require_equal(grads, dense, "another layout of the same values gave a different gradient", exact)
    for operand in sample.signature.operands:
        grad = grads.get(operand.name)
        if grad is None:
            continue
        if operand.by_row:
            _require(
                _all_zero(grad[sample.routing.routed :]), f"the tail of the gradient of `{operand.name}` is not zero"
            )
        elif operand.dims[0] == "G":
            empty = torch.tensor([not size for size in sample.routing.sizes], dtype=torch.bool, device=grad.device)
            _require(_all_zero(grad[empty]), f"the gradient of `{operand.name}` is not zero for an empty group")
    expanded = _gradients(op, sample, sample.tensors(), lambda _, output: output.new_ones(()).expand(output.shape))
    ones = _gradients(op, sample, sample.tensors(), lambda _, output: output.new_ones(output.shape))
    _require_equal(expanded, ones, "a stride-0 gradient gave a different result than a dense one", exact)


def _run_opcheck(op: Any, sample: SampleInput, test_utils: str | Sequence[str]) -> None:
    tensors = sample.tensors()
    if sample.signature.differentiable and not sample.signature.written:
        tensors = {
            n: t.detach().requires_grad_() if t is not None and t.is_floating_point() else t for n, t in tensors.items()
        }
    args, kwargs = sample.call(op, tensors)
    if any(t is not None and t.is_floating_point() and t.element_size() == 1 for t in tensors.values()):
        # It compares arguments before and after with arithmetic that float8 lacks; _forward_contracts does with bytes.
        every = (test_utils,) if isinstance(test_utils, str) else test_utils
        test_utils = [util for util in every if util != "test_schema"]
    torch.library.opcheck(op, args, kwargs, test_utils=test_utils)


# --- comparisons ------------------------------------------------------------------------------------------------------


def _require(condition: bool | Tensor, message: str) -> None:
    if not condition:
        raise ContractError(message)


def _require_equal(have: Tensors, want: Tensors, message: str, exact: bool = True) -> None:
    slack = 0.0 if exact else _slack(want)
    for name, t in have.items():
        other = want[name]
        if t is None or other is None:
            _require(t is other, f"{message} (`{name}` is None in one of the two)")
        elif exact:
            same = t.dtype == other.dtype and torch.equal(_bits(_unsigned_zero(t)), _bits(_unsigned_zero(other)))
            _require(same, f"{message} (`{name}`)" if name else message)
        else:
            rtol, atol = default_tolerances(t, other)
            try:
                torch.testing.assert_close(t, other, rtol=rtol, atol=max(atol, slack))
            except AssertionError as error:
                raise ContractError(f"{message} (`{name}`): {error}") from None


def _slack(results: Tensors) -> float:
    """Return the tolerance of sums: the results of a call have common terms, which may cancel in some of them."""
    floats = [t.double() for t in results.values() if t is not None and t.numel() and t.dtype in FLOATS]
    wide = torch.float64 if any(t is not None and t.dtype == torch.float64 for t in results.values()) else torch.float32
    largest = max((t.nan_to_num(0, 0, 0).abs().max().item() for t in floats), default=0.0)
    return default_tolerances(wide)[0] * largest


def _unsigned_zero(t: Tensor) -> Tensor:
    """Return ``t`` with 0.0 for -0.0; float8, which has no arithmetic, as it is."""
    return t + 0 if t.element_size() > 1 else t


def _all_zero(t: Tensor) -> bool:
    return not torch.count_nonzero(t if t.element_size() > 1 else t.view(torch.uint8))  # NaN counts as non-zero


def _bits(t: Tensor) -> Tensor:
    """Return the bytes of ``t``, so that NaN equals itself."""
    return t.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _memory(t: Tensor | None) -> Tensor:
    """Return the whole storage of ``t`` as a vector of its dtype."""
    assert t is not None
    return t.detach().as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)


def _same_storage(x: Tensor, y: Tensor) -> bool:
    return x.numel() > 0 and y.numel() > 0 and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def _metadata(t: Tensor | None) -> tuple | None:
    return None if t is None else (tuple(t.shape), t.dtype, t.stride(), t.storage_offset(), t.device)

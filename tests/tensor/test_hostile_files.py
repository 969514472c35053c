"""Files that ``torch.load(weights_only=True)`` must refuse: every field of a GroupedTensor changed in every way."""

import io
import re
from dataclasses import fields

import pytest
import torch
from torch import nn

import tgl
from tests.tensor.cases import CASES, arguments, assert_same_bytes, rows
from tests.tensor.test_storage import MAKERS, PAIRS
from tgl.meta.quantized import Options

NAMES = ("format", "shape", "dtype", "options", "shapes", "parts", "requires_grad", "state")
TAKEN = ("shape", "static", "shapes", "offs", "format", "dequantize", "_read", "__class__", "data", "grad")
DIRECTIONS = ("rowwise", "columnwise")


class Forged:
    """Pickles as a call of what builds a GroupedTensor, with arguments of one's choice."""

    def __init__(self, build, arguments):
        self.build, self.arguments = build, arguments

    def __reduce__(self):
        return self.build, tuple(self.arguments.values())


def saved(t):
    """Return what ``t`` is saved as: a function and its arguments by name."""
    build, values = t.__reduce_ex__(2)
    return build, dict(zip(NAMES, values))


def load(build, arguments):
    file = io.BytesIO()
    torch.save(Forged(build, arguments), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def hostile(arguments):
    """``(what was changed, changed arguments)`` of every mutation."""
    shape, parts, options = (arguments[name] for name in ("shape", "parts", "options"))
    wrong = {
        "format": ["int8", None, 3, ["mxfp8"], *({"dense", "mxfp8", "nvfp4", "fp8_tensor"} - {arguments["format"]})],
        "shape": [None, (), 3, shape[0], list(shape), (*shape, 1), shape[:-1], (-1, *shape[1:]), (2.0, *shape[1:])],
        "dtype": [None, "bfloat16", torch.float64, torch.int32, torch.float8_e4m3fn, torch.complex64],
        "options": [None, [], {}, {**options, "unknown": 1}, {**options, "dbias": True}],
        "shapes": [(), 3, "ab", ((2, 2),), ((4, 32), (6, 17)), ((4,), (6, 16)), [(4, 32), (6, 16)]],
        "parts": [None, [], {}, {name: part[0] for name, part in parts.items()}],
        "requires_grad": [None, 1, "yes"],
        "state": [None, [], {1: 2}],
    }
    others = ((i, size + step) for i, size in enumerate(shape) for step in (1, -1, 64))
    wrong["shape"] += [(*shape[:i], other, *shape[i + 1 :]) for i, other in others]
    for field in fields(Options):
        for value in (None, 1, "a", 0.5, not options[field.name], torch.uint8):
            # Of these alone several values make a tensor that fits together, or compare equal.
            if value != options[field.name] and field.name not in ("scaling", "power_of_two", "eps", "rht"):
                wrong["options"].append({**options, field.name: value})
    wrong["state"] += [{name: torch.ones(1)} for name in (*parts, *TAKEN)]
    for name, (t, dtype) in parts.items():
        others = [None, 1, [t], t.to_sparse() if t.dim() and t.dtype.is_floating_point else "text"]
        others += [torch.cat([t.reshape(-1), t.reshape(-1)]), t.reshape(-1)[:-1], t[None], t.to("meta")]
        others += [t.double(), t.to(torch.int64)]
        if t.numel() > 1:
            others += [t.reshape(-1)[:1].expand(t.numel()).view(t.shape), t.flatten()]
        wrong["parts"] += [{**parts, name: (other, dtype)} for other in others if not _equal(other, t)]
        wrong["parts"] += [{**parts, name: (t, other)} for other in (None, "uint8", torch.float64, torch.bool)]
        wrong["parts"] += [{key: part for key, part in parts.items() if key != name}, {**parts, "other": (t, dtype)}]
        wrong["parts"] += [{**parts, name: (t,)}, {**parts, name: (t, dtype, 0)}]
    if "offs" in parts:
        ends = parts["offs"][0]
        for other in (ends.flip(0), ends - 100, ends + 1000, ends.long(), ends[None], ends[0]):
            wrong["parts"].append({**parts, "offs": (other, other.dtype)})
    for name, values in wrong.items():
        for value in values:
            if not _equal(value, arguments[name]):
                yield name, {**arguments, name: value}


def _equal(value, other):
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        same = isinstance(value, torch.Tensor) and (value.shape, value.stride()) == (other.shape, other.stride())
        return same and (value.dtype, value.device) == (other.dtype, other.device)
    return type(value) is type(other) and not isinstance(value, dict) and value == other


@pytest.mark.parametrize("kind, case", PAIRS)
def test_a_changed_field_is_refused_or_fits(kind, case):
    """A changed field is refused, or the tensor has values of its own shape and dtype in both directions."""
    build, whole = saved(MAKERS[kind](case))
    refused, taken = [], []
    for name, changed in hostile(whole):
        try:
            made = build(*changed.values())
        except (TypeError, ValueError) as error:
            refused.append(str(error))
            continue
        taken.append(name)
        for columnwise in (direction for direction in (False, True) if getattr(made.options, DIRECTIONS[direction])):
            values = made.dequantize(columnwise=columnwise)
            assert (values.shape, values.dtype) == (made.shape, made.dtype), (name, changed[name])
    assert [text for text in refused if not re.match(r"tgl::rebuild: `\w+` must be ", text)] == []
    assert len(refused) > 80
    assert len(taken) < 5, taken


@pytest.mark.parametrize("case", CASES)
def test_groups_of_rows_are_taken(case):
    """One group has the shape of a matrix, and components in the order that they had among the other groups."""
    if "2d" in case:
        t = tgl.quantize(torch.randn(2, 32, 48), None, **arguments(case))
        groups = t.split()
    else:
        groups = rows(case)[2].split_host()
    for group in groups:
        assert_same_bytes(load(*saved(group)), group)


def test_attributes_of_a_user_are_kept_and_those_of_the_class_are_not_replaced():
    p = nn.Parameter(tgl.quantize(torch.randn(2, 16, 32), None, "nvfp4"), requires_grad=False)
    p.tensor_model_parallel = True
    build, arguments = saved(p)
    loaded = load(build, arguments)
    assert isinstance(loaded, nn.Parameter)
    assert loaded.tensor_model_parallel is True
    arguments["state"] = {**arguments["state"], "rowwise_scale": torch.ones(3)}
    message = "tgl::rebuild: `state` must be free of names that the class uses, but got rowwise_scale"
    with pytest.raises(ValueError, match=re.escape(message)):
        load(build, arguments)

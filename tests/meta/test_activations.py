"""The table of activations: what follows from an entry, and that no layer takes an unknown one for another."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tgl
from tests import oracle
from tests.processes import run_script
from tgl import backends
from tgl.meta.activations import IDENTITY, TABLE, Activation, Gate, named
from tgl.nn._activation import activate
from tgl.ops.grouped_activation import Params
from tgl.testing import SIGNATURES, sample_inputs

OFFS = torch.tensor([2, 2, 5], dtype=torch.int32)
CUBE = Gate("cube", lambda _, g: g**3, lambda _, g: (g**3, 3 * g**2))
PLANTED = Activation("planted", CUBE, IDENTITY)
OPS = sorted(name for name in SIGNATURES if any("kind" in s.options for s in SIGNATURES[name]))


@pytest.fixture
def planted(monkeypatch):
    """A name that the table has, and nothing else: as if it had been left out where the layers were written."""
    if importlib.util.find_spec("cutlass") is not None:
        importlib.import_module("tgl.cutlass_kernels.activation.functions")
    monkeypatch.setitem(TABLE, "planted", PLANTED)


def test_every_op_with_an_activation_has_samples_of_it():
    names = {n.removeprefix("tgl::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("tgl::")}
    takes = {n for n in names if "." not in n and "str kind" in str(getattr(torch.ops.tgl, n).default._schema)}
    assert takes
    assert {n for n in takes if "quantize" not in n} == set(OPS)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_an_unknown_name_is_refused_by_every_op(op, fake):
    sample = next(iter(sample_inputs(op, routings=["ragged_tail"])))
    overload = getattr(torch.ops.tgl, op).default
    args, keywords = sample.call(overload, sample.tensors())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        stand_ins = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
    with pytest.raises(ValueError, match=r"tgl::\w+: `kind` must be one of .*, but got 'no_such'"):
        if fake:
            with mode:
                overload(*stand_ins, **{**keywords, "kind": "no_such"})
        else:
            overload(*args, **{**keywords, "kind": "no_such"})


def test_an_unknown_name_is_refused_where_no_op_checks_it():
    for refused in (
        lambda: named("no_such"),
        lambda: Params("no_such").gated,
        lambda: tgl.GroupedActivation("no_such"),
        lambda: tgl.GroupedMLP(1, 2, 2, activation="no_such"),
        lambda: activate(torch.ones(5, 4), OFFS, None, kind="no_such"),
    ):
        with pytest.raises(ValueError, match=r"must be one of .*, but got 'no_such'"):
            refused()


@pytest.mark.usefixtures("planted")
def test_what_follows_from_an_entry_computes_that_entry():
    """Never another activation: eagerly, masked as on a GPU without kernels, compiled, and the derivatives."""
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    wanted = (x[:, :3] ** 3 * x[:, 3:])[:5]
    (gradient,) = torch.autograd.grad(wanted.sum(), x)
    with backends.emulated_device("no such device"):
        masked = tgl.grouped_activation(x, OFFS, kind="planted")
    torch._dynamo.reset()
    compiled = torch.compile(activate, backend="aot_eager", fullgraph=True)(x, OFFS, None, kind="planted")
    for y in (tgl.grouped_activation(x, OFFS, kind="planted"), masked, compiled):
        torch.testing.assert_close(y[:5], wanted)
        torch.testing.assert_close(torch.autograd.grad(y[:5].sum(), x)[0], gradient)
    assert torch.autograd.gradgradcheck(lambda x: tgl.grouped_activation(x, OFFS, kind="planted"), x)


@pytest.mark.usefixtures("planted")
def test_a_name_in_the_table_alone_is_refused_by_the_oracle_of_the_tests():
    with pytest.raises(ValueError, match=r"oracle.py must have an entry for 'planted'"):
        oracle.activation(torch.ones(5, 4), OFFS, kind="planted")


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize("op", ["grouped_activation", "grouped_gemm_activation", "grouped_activation_quantize"])
def test_a_name_in_the_table_alone_is_refused_by_the_kernels(op):
    """The kernels raise at first use, in a process that has imported them already."""
    pytest.importorskip("cutlass")
    pytest.importorskip("tvm_ffi")
    from tgl.testing import emulate

    x, b = torch.randn(16, 64).bfloat16(), torch.randn(3, 64, 64).bfloat16().transpose(1, 2)
    operands = (x, b) if op == "grouped_gemm_activation" else (x,)
    options = {"format": "mxfp8"} if op == "grouped_activation_quantize" else {}
    with emulate("sm_90a"), pytest.raises(Exception, match=r"functions.py must have an entry for 'planted'"):
        getattr(tgl, op)(*operands, OFFS, kind="planted", **options)


LAYERS = {
    "kernels": ("tgl.cutlass_kernels.activation.functions", "cutlass", "functions.py must have an entry for 'planted'"),
    "oracle": ("tests.oracle", "numpy", "oracle.py must have an entry for 'planted'"),
    "transformers": ("tgl.integrations.transformers", "torch", "_transformers_gates.py must have an entry for 'cube'"),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_name_in_the_table_alone_stops_the_import_of_every_other_layer(layer, tmp_path):
    module, package, message = LAYERS[layer]
    pytest.importorskip(package)
    script = tmp_path / "script.py"
    script.write_text(f"""
from tgl.meta import activations
gate = activations.Gate("cube", lambda _, g: g**3, lambda _, g: (g**3, 3 * g**2))
activations.TABLE["planted"] = activations.Activation("planted", gate, activations.IDENTITY)
import {module}
""")
    status, printed = run_script(script, {}, timeout=300)
    assert status == 1, printed
    assert message in printed


def test_an_entry_without_a_formula_cannot_be_made():
    with pytest.raises(TypeError, match="gate"):
        Activation("planted")


@pytest.mark.parametrize("kind", TABLE)
def test_constants_are_those_that_the_formula_reads(kind):
    """Other values of a constant change the result exactly if it is named."""
    x = torch.linspace(-9, 9, 40, dtype=torch.float64).view(5, 8)
    x = x[:, torch.randperm(8)]
    usual = tgl.grouped_activation(x, OFFS, kind=kind)
    for name, value in (("limit", 2.5), ("alpha", 0.5), ("offset", 0.25)):
        changed = tgl.grouped_activation(x, OFFS, kind=kind, **{name: value})
        assert torch.equal(changed, usual) == (name not in TABLE[kind].constants)


@pytest.mark.parametrize("kind", [a.name for a in TABLE.values() if a.exact])
def test_exact_ones_take_integers_to_integers(kind):
    x = torch.randint(-5, 6, (5, TABLE[kind].width(8))).double()
    y = tgl.grouped_activation(x, OFFS, kind=kind)
    assert torch.equal(y, y.round())
    (gradient,) = torch.autograd.grad(tgl.grouped_activation(x.requires_grad_(), OFFS, kind=kind).sum(), x)
    assert torch.equal(gradient, gradient.round())


def test_entries_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TABLE["swiglu"].name = "other"

"""A format that only the table has: every other layer raises an error that names it, and none returns a result."""

import dataclasses
import sys

import pytest
import torch

import tgl
from tests import interpreters, scaled_oracle
from tests.quantize import comparing
from tgl.backends.cpu import quantize as cpu
from tgl.cutlass_kernels.gemm import operand_formats
from tgl.cutlass_kernels.launchers import gemm_scaled
from tgl.meta.formats import FORMATS
from tgl.meta.table import OnePerName
from tgl.recipes import MXFP8BlockScaling, Operands, QuantizeSpec
from tgl.testing.signatures import SIGNATURES

X, W = torch.randn(4, 64), torch.randn(2, 64, 64)
OFFS = torch.tensor([1, 4], dtype=torch.int32)
MISSING = "must have an entry for 'planted', but has only mxfp8, nvfp4, mxfp4, fp8_tensor, fp8_block"


@pytest.fixture
def planted(monkeypatch):
    """A copy of a format that works, under another name."""
    monkeypatch.setitem(FORMATS, "planted", dataclasses.replace(FORMATS["mxfp8"], name="planted"))


def tables():
    """Every table of entries by format in what is loaded."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(("tgl.", "tests.")):
            of_module = (value for value in vars(module).values() if isinstance(value, OnePerName))
            found |= {id(table): table for table in of_module if set(table) == set(FORMATS)}
    return list(found.values())


ON_IMPORT = """
import dataclasses, importlib.machinery, sys

class Plant:
    def find_spec(self, name, path=None, target=None):
        if name != "tgl.meta.formats":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            module.FORMATS["planted"] = dataclasses.replace(module.FORMATS["mxfp8"], name="planted")
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Plant())
import tgl
"""


def test_the_import_fails_and_names_the_place():
    done = interpreters.run(ON_IMPORT)
    assert done.returncode == 1
    assert f"ValueError: tgl: QUANTIZE in tgl/backends/cpu/quantize/__init__.py {MISSING}" in done.stderr


def test_every_table_beside_the_table_is_held_against_it(planted):
    del FORMATS["planted"]
    found = tables()
    assert {table.what.partition(" ")[0] for table in found} >= {
        *("QUANTIZE", "DEQUANTIZE", "GROUP_FACTORS"),
        *("KERNELS", "NO_EPILOGUE", "QUANTIZERS", "DECODINGS"),
        *("SAMPLES", "OPERANDS", "REFERENCES"),
    }
    FORMATS["planted"] = dataclasses.replace(FORMATS["mxfp8"], name="planted")
    for table in found:
        with pytest.raises(ValueError, match=MISSING):
            table["planted"]
        with pytest.raises(ValueError, match=MISSING):
            OnePerName(FORMATS, table.what, dict(table))


def weight_gradient():
    made = tgl.group_quantize(X, OFFS, format="mxfp8", rowwise=False)
    operands = made.columnwise_data, made.columnwise_scale, made.columnwise_data, made.columnwise_scale, OFFS
    return tgl.grouped_gemm_scaled_wgrad(*operands, format="planted")


def product():
    a, b = tgl.group_quantize(X, OFFS, format="mxfp8"), tgl.group_quantize(W, None, format="mxfp8")
    return tgl.grouped_gemm_scaled(a.data, a.scale, b.data, b.scale, OFFS, format="planted")


def values():
    made = tgl.group_quantize(X, OFFS, format="mxfp8")
    return tgl.group_dequantize(made.data, made.scale, OFFS, format="planted")


class PlantedRecipe(MXFP8BlockScaling):
    @property
    def operands(self):
        return Operands(*[QuantizeSpec("planted")] * 3)


def layer():
    return tgl.GroupedLinear(2, 64, 64, recipe=PlantedRecipe())(X, torch.tensor([1, 3]))


def sample():
    signature = SIGNATURES["grouped_gemm_scaled"]
    signature = signature[0] if isinstance(signature, tuple) else signature
    return [s.tensors() for s in signature.samples(routings=["even"])]


CALLS = {
    "group_quantize": lambda: tgl.group_quantize(X, OFFS, format="planted"),
    "group_dequantize": values,
    "grouped_gemm_scaled": product,
    "grouped_gemm_scaled_wgrad": weight_gradient,
    "quantize": lambda: tgl.quantize(X, OFFS, "planted"),
    "GroupedTensor": lambda: tgl.GroupedTensor.empty((2, 64, 64), "planted"),
    "layer": layer,
    "sample inputs": sample,
    "oracle of bytes": lambda: comparing.expected(X, OFFS, "planted"),
    "oracle of values": lambda: scaled_oracle.rowwise("planted", "compact", *quantized(), OFFS, None),
}


def quantized():
    made = tgl.group_quantize(X, OFFS, format="mxfp8")
    return made.data, made.scale


@pytest.mark.parametrize("call", CALLS)
def test_no_layer_has_a_result(planted, call):
    with pytest.raises(ValueError, match="planted"):
        CALLS[call]()


UNKNOWN = {
    "group_quantize": lambda x, offs: tgl.group_quantize(x, offs, format="int8"),
    "quantize": lambda x, offs: tgl.quantize(x, offs, "int8"),
    "recipe": lambda x, offs: QuantizeSpec("int8"),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("call", UNKNOWN)
def test_a_name_in_no_table(call, device):
    with pytest.raises(ValueError, match=r"`format` must be one of .*mxfp8, nvfp4, mxfp4, fp8_tensor, .*'int8'"):
        UNKNOWN[call](X.to(device), OFFS.to(device))


def test_cpu_names_the_place(planted):
    with pytest.raises(ValueError, match=f"QUANTIZE in tgl/backends/cpu/quantize/__init__.py {MISSING}"):
        cpu.group_quantize(X, OFFS, None, None, None, None, options=tgl.meta.quantized.Options("planted"), out=None)


def test_a_format_that_is_named_as_without_a_kernel(monkeypatch):
    sentence = "has no kernel for fp8_block, whose scales no tensor core reads"
    monkeypatch.delitem(operand_formats.OPERANDS, "fp8_block")
    monkeypatch.setitem(operand_formats.NO_KERNEL, "fp8_block", sentence)
    monkeypatch.setattr(gemm_scaled.device, "packages_reason", lambda: None)
    assert gemm_scaled.scaled_reason("fp8_block", X, X) == sentence

"""Parameters that other code makes again by their class, as ``type(parameter)(value, requires_grad=...)``."""

import io

import pytest
import torch
from torch import nn

import tgl
from tgl.tensor.formats import MXFP8GroupedTensor, NVFP4GroupedTensor

BF16 = torch.bfloat16


def quantized(format="mxfp8"):
    torch.manual_seed(0)
    return tgl.quantize(torch.randn(3, 32, 64, dtype=BF16), None, format=format, scale_layout="compact")


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "fp8_block"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_parameter_from_its_class(format, requires_grad):
    parameter = nn.Parameter(quantized(format), requires_grad=False)
    again = type(parameter)(parameter.to("cpu"), requires_grad=requires_grad)
    assert type(again) is type(parameter)
    assert isinstance(again, nn.Parameter)
    assert again.requires_grad is requires_grad
    assert again.is_leaf
    assert all(a is b for a, b in zip(again.parts().values(), parameter.parts().values()))


def test_parameters_require_grad_as_those_of_torch_do():
    assert MXFP8GroupedTensor(quantized()).requires_grad


def test_attributes_of_another_parameter_are_taken_over():
    """``init_empty_weights`` of accelerate passes on everything that is in the parameter's dict."""
    parameter = nn.Parameter(quantized(), requires_grad=False)
    parameter.tag = "expert"
    attributes = vars(parameter) | {"requires_grad": parameter.requires_grad}
    again = type(parameter)(parameter.to("meta"), **attributes)
    assert again.device.type == "meta"
    assert {part.device.type for part in again.parts().values()} == {"meta"}
    assert again.tag == "expert"
    assert not again.requires_grad
    file = io.BytesIO()
    torch.save(type(parameter)(quantized(), **attributes), file)
    file.seek(0)
    assert torch.load(file, weights_only=True).tag == "expert"


@pytest.mark.parametrize("value", [torch.zeros(3, 32, 64), quantized("nvfp4")], ids=["dense", "nvfp4"])
def test_values_of_another_class_are_refused(value):
    with pytest.raises(TypeError, match=r"`value` must be a MXFP8GroupedTensor, but got (Tensor|NVFP4GroupedTensor)"):
        MXFP8GroupedTensor(value, requires_grad=False)


def test_the_abstract_class_takes_any_format():
    assert type(tgl.GroupedTensor(quantized("nvfp4"), requires_grad=False)) is NVFP4GroupedTensor


def test_pinned_memory_is_asked_of_the_components():
    assert not quantized().is_pinned()
    assert not nn.Parameter(quantized()).is_pinned()


@pytest.mark.parametrize("swap", [False, True])
def test_modules_with_quantised_weights_move_and_load(swap):
    layer, other = (tgl.GroupedPackedLinear(3, 64, 32, format="mxfp8") for _ in range(2))
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        expected = other.weight.dequantize()
        layer.to("meta").to_empty(device="cpu")
        layer.load_state_dict(other.state_dict())
        assert isinstance(layer.weight, nn.Parameter)
        assert torch.equal(layer.weight.dequantize(), expected)
        layer.load_state_dict(other.state_dict(), assign=True)
        layer.half()
        assert layer.weight.dtype == torch.float16
        assert torch.equal(layer.weight.dequantize(BF16), expected)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)

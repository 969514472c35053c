"""A tensor that the schema requires and a call gives as None: one error that names it, and nothing is written."""

import pytest
import torch

import tgl
from tests.memory import same_bytes
from tgl.testing import SIGNATURES
from tgl.testing.signatures import overload


def required(op):
    return [a.name for a in op._schema.arguments if isinstance(a.type, torch.TensorType)]


def refuse(op, call, argument):
    contexts = [torch.enable_grad, torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
    for context in contexts:
        with context(), pytest.raises(TypeError, match=rf"{op.name()}: `{argument}` must be a tensor, but got None"):
            call()


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_op(name):
    op = overload(name)
    for signature in SIGNATURES[name]:
        sample = next(signature.samples(routings=("ragged_tail",)))
        for argument in required(op):
            tensors = sample.tensors()
            if len([t for n, t in tensors.items() if t is not None and n != argument]) == 0:
                continue  # nothing that says where to run: torch's own error
            before = {n: t.clone() for n, t in tensors.items() if t is not None}
            args, kwargs = sample.call(op, {**tensors, argument: None})
            refuse(op, lambda a=args, k=kwargs: op(*a, **k), argument)
            assert all(same_bytes(tensors[n], t) for n, t in before.items())


def test_ops_without_signatures():
    x, offs = torch.ones(4, 32), torch.tensor([4], dtype=torch.int32)
    ops = torch.ops.tgl
    quantized = tgl.group_quantize(x, offs, format="mxfp8")
    for op, argument, call in (
        (ops.after.default, "dependency", lambda: ops.after(x, None)),
        (
            ops.grouped_activation_quantize.default,
            "offs",
            lambda: ops.grouped_activation_quantize(x, None, format="mxfp8"),
        ),
        (
            ops.grouped_gemm_scaled_activation_quantize.default,
            "b",
            lambda: ops.grouped_gemm_scaled_activation_quantize(
                quantized.data, quantized.scale, None, quantized.scale, offs, format="mxfp8", kind="swiglu"
            ),
        ),
        (ops.wgrad_stash_.default, "state", lambda: ops.wgrad_stash_([x], None, [x[None]])),
    ):
        refuse(op, call, argument)


def test_explain_and_fake_tensors():
    x, w = torch.ones(4, 8), torch.ones(1, 8, 8)
    message = "tgl::grouped_gemm: `offs` must be a tensor, but got None"
    with pytest.raises(TypeError, match=message):
        tgl.grouped_gemm(x, w, None)
    with pytest.raises(TypeError, match=message):
        tgl.explain(tgl.grouped_gemm, x, w, None)
    with pytest.raises(TypeError, match=message):
        tgl.grouped_gemm(x.to("meta"), w.to("meta"), None)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=message):
        torch.compile(tgl.grouped_gemm, backend="eager", fullgraph=True)(x, w, None)
    with pytest.raises(TypeError, match="tgl::grouped_gemm: missing a required argument: 'b'"):
        tgl.explain(tgl.grouped_gemm, x)
    with pytest.raises(TypeError, match="tgl::grouped_gemm: got an unexpected keyword argument 'foo'"):
        tgl.explain("grouped_gemm", x, w, torch.tensor([4], dtype=torch.int32), foo=1)

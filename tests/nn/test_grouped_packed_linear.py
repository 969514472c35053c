"""``GroupedPackedLinear`` against a layer with the decoded weight, what it allocates, and where it stands."""

import copy
import io

import pytest
import torch

import tgl
from tests.nn.seen import Sizes
from tests.peak_memory import peak_memory
from tgl.meta.formats import FORMATS

G, K, N, T = 3, 64, 48, 11
SPLITS = torch.tensor([4, 0, 5])
BF16 = torch.bfloat16


def pair(format="mxfp4", bias=True, dtype=BF16):
    """A packed layer, and a dense one with its weight."""
    torch.manual_seed(0)
    layer = tgl.GroupedPackedLinear(G, K, N, bias, format=format, params_dtype=dtype)
    dense = tgl.GroupedLinear(G, K, N, bias, params_dtype=dtype).requires_grad_(False)
    dense.weight.copy_(layer.weight.dequantize())
    if bias:
        dense.bias.copy_(layer.bias)
    return layer, dense


def rows(dtype=BF16, leading=(T,)):
    return torch.randn(*leading, K, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_values_and_input_gradient(format, dtype, bias):
    layer, dense = pair(format, bias, dtype)
    x, scale = rows(dtype), torch.rand(T, dtype=dtype).requires_grad_() if bias else None
    y, z = layer(x, SPLITS, bias_scale=scale), dense(x, SPLITS, bias_scale=scale)
    torch.testing.assert_close(y, z)
    dy = torch.randn(T, N).to(dtype)
    leaves = (x, scale) if bias else (x,)
    for found, wanted in zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(z, leaves, dy)):
        torch.testing.assert_close(found, wanted)


def test_leading_dimensions_autocast_and_a_trained_bias():
    layer, dense = pair(dtype=torch.float32)
    for module in (layer, dense):
        module.bias.requires_grad_()
    x = rows(torch.float32, (1, T))
    with torch.autocast("cpu", BF16):
        y, z = layer(x, SPLITS), dense(x, SPLITS)
    assert (y.shape, y.dtype) == ((1, T, N), BF16)
    torch.testing.assert_close(y, z)
    y.sum().backward()
    z.sum().backward()
    torch.testing.assert_close(layer.bias.grad, dense.bias.grad)


def test_low_rank_update():
    """In float32: in 16 bits a dense weight's update is rounded with its product, and a packed one's by itself."""
    layer, dense = pair(dtype=torch.float32)
    tuned, other = (tgl.GroupedLoRALinear(base, 4) for base in (layer, dense))
    torch.nn.init.normal_(tuned.lora_B, std=0.1)
    other.load_state_dict({n: t for n, t in tuned.state_dict().items() if "lora" in n}, strict=False)
    x = rows(torch.float32)
    grads = []
    for module in (tuned, other):
        y = module(x, SPLITS)
        grads.append((y, *torch.autograd.grad(y.square().sum(), (x, module.lora_A, module.lora_B))))
    for found, wanted in zip(*grads):
        torch.testing.assert_close(found, wanted)
    with pytest.raises(ValueError, match="must have a weight of plain parameters to merge into"):
        tuned.merge()


def test_no_decoded_weight_of_all_experts():
    """Peak memory of a step does not grow with the experts, and no tensor has the size of the weight."""
    peaks = []
    for count in (2, 16):
        layer = tgl.GroupedPackedLinear(count, 512, 256, device="cpu")
        tuned = tgl.GroupedLoRALinear(layer, 1)
        x, splits = torch.randn(32, 512, dtype=BF16, requires_grad=True), torch.full((count,), 32 // count)

        def step(tuned=tuned, x=x, splits=splits):
            return torch.autograd.grad(tuned(x, splits).sum(), (x, tuned.lora_B))

        peaks.append(peak_memory(step))
    matrix = 512 * 256 * 2
    assert peaks[1] - peaks[0] < matrix // 2
    with Sizes() as seen:
        step()
    assert seen.largest < 512 * 256


@pytest.mark.parametrize("kind", ["mlp", "lora"])
def test_as_a_layer_of_an_expert_mlp(kind):
    """A layer of an expert MLP whose other layer is dense."""
    mlp = tgl.GroupedMLP(G, K, 2 * N // 3, params_dtype=BF16, bias=True).requires_grad_(False)
    packed = tgl.GroupedPackedLinear(G, mlp.fc1.in_features, mlp.fc1.out_features)
    plain = copy.deepcopy(mlp)
    plain.fc1.weight.copy_(packed.weight.dequantize())
    plain.fc1.bias.copy_(packed.bias)
    mlp.fc1 = packed if kind == "mlp" else tgl.GroupedLoRALinear(packed, 2)
    x = rows()
    y, z = mlp(x, SPLITS), plain(x, SPLITS)
    torch.testing.assert_close(y, z)
    torch.testing.assert_close(*(torch.autograd.grad(out.float().sum(), x)[0] for out in (y, z)))


def test_gpt_oss_in_place():
    blocks = torch.randint(0, 256, (G, N, K // 32, 16), dtype=torch.uint8)
    scales, bias = torch.randint(110, 130, (G, N, K // 32), dtype=torch.uint8), torch.randn(G, N).bfloat16()
    layer = tgl.GroupedPackedLinear.from_gpt_oss(blocks, scales, bias)
    assert layer.weight.rowwise_data.data_ptr() == blocks.data_ptr()
    assert layer.weight.rowwise_scale.data_ptr() == scales.data_ptr()
    w = tgl.group_dequantize(blocks.flatten(2), scales, format="mxfp4")
    wanted = tgl.grouped_gemm(rows(), w.transpose(1, 2), tgl.splits_to_offsets(SPLITS), bias)
    torch.testing.assert_close(layer(rows(), SPLITS), wanted)
    assert not any(p.requires_grad for p in layer.parameters())
    assert "format='mxfp4'" in repr(layer)


def test_saved_and_loaded():
    layer, _ = pair()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = tgl.GroupedPackedLinear(G, K, N)
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(rows(), SPLITS), layer(rows(), SPLITS))
    assert torch.equal(copy.deepcopy(layer)(rows(), SPLITS), layer(rows(), SPLITS))


def test_compiled(fresh_compiler):
    layer, _ = pair()
    x = rows()
    y = torch.compile(layer, backend="aot_eager", fullgraph=True)(x, SPLITS)
    assert torch.equal(y, layer(x, SPLITS))
    assert torch.equal(*(torch.autograd.grad(out.float().sum(), x)[0] for out in (y, layer(x, SPLITS))))


COMPONENTS = torch.zeros(G, N, K // 2, dtype=torch.uint8), torch.zeros(G, N, K // 32, dtype=torch.uint8)
BAD = {
    "format": (lambda: tgl.GroupedPackedLinear(G, K, N, format="int4"), ValueError, "`format` must be one of"),
    "dtype": (
        lambda: tgl.GroupedPackedLinear(G, K, N, params_dtype=torch.float64),
        TypeError,
        "`params_dtype` must be bfloat16, float16 or float32",
    ),
    "scale": (
        lambda: tgl.GroupedPackedLinear.from_components(COMPONENTS[0], COMPONENTS[1][:1], format="mxfp4"),
        ValueError,
        r"`scale` must be \(3, 48, 2\) of torch.uint8, but got \(1, 48, 2\)",
    ),
    "amax": (
        lambda: tgl.GroupedPackedLinear.from_components(
            COMPONENTS[0], torch.zeros(G, N, K // 16, dtype=torch.uint8), format="nvfp4"
        ),
        ValueError,
        r"`amax` must be \(3,\) of torch.float32, but got None",
    ),
    "bias": (
        lambda: tgl.GroupedPackedLinear.from_components(*COMPONENTS, None, torch.zeros(G, K), format="mxfp4"),
        ValueError,
        "`bias` must be",
    ),
    "out": (
        lambda: pair()[0](rows(), SPLITS, out=torch.empty(T, N, dtype=BF16)),
        ValueError,
        "`out` must be None for a packed weight",
    ),
    "rows": (lambda: pair()[0](rows()[:, 1:], SPLITS), ValueError, "K = in_features = 64, but got K = 63"),
    "rows' dtype": (lambda: pair()[0](rows(torch.float32), SPLITS), TypeError, "`inp` must be"),
}


@pytest.mark.parametrize("call, error, message", BAD.values(), ids=BAD)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()

"""State dicts on a device, and layers that accelerate keeps on the host between calls."""

import gc

import pytest
import torch

import tgl

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

G, K, N, T = 4, 64, 128, 40
SPLITS = (7, 0, 20, 10)


def make(seed=0, **options):
    torch.manual_seed(seed)
    options = {"params_dtype": torch.bfloat16, "single_grouped_weight": False, **options}
    return tgl.GroupedLinear(G, K, N, device="cuda", **options)


def batch():
    torch.manual_seed(1)
    return torch.randn(T, K, dtype=torch.bfloat16, device="cuda"), torch.tensor(SPLITS, device="cuda")


def test_entries_are_the_memory_of_the_parameters(tmp_path):
    files = pytest.importorskip("safetensors.torch")
    layer, other = make(), make(seed=5)
    state = layer.state_dict()
    assert {state[f"weight{i}"].untyped_storage().nbytes() for i in range(G)} == {2 * N * K}
    assert all(state[name].data_ptr() == p.data_ptr() for name, p in layer.named_parameters())
    files.save_model(layer, str(tmp_path / "model.safetensors"))
    files.load_model(other, tmp_path / "model.safetensors")
    assert torch.equal(layer(*batch()), other(*batch()))
    expected = layer.weight1.detach().clone()
    del layer
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.equal(state["weight1"], expected)


def test_writes_through_entries_reach_a_captured_graph():
    layer, (x, splits) = make(), batch()
    with torch.no_grad():
        layer(x, splits)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x, splits)
        for name, entry in layer.state_dict().items():
            entry.copy_(make(seed=5).state_dict()[name])
        graph.replay()
        assert torch.equal(y, make(seed=5)(x, splits))


@pytest.mark.parametrize("quantized", [False, True])
def test_offloaded_to_the_host(quantized):
    accelerate = pytest.importorskip("accelerate")
    net = torch.nn.ModuleDict({"layer": make()})
    if quantized:
        net["layer"] = make(single_grouped_weight=True, recipe=tgl.recipes.Float8BlockScaling())
        net["layer"].quantize_weight()
    layer = net["layer"]
    with torch.no_grad():
        expected = layer(*batch())
        accelerate.cpu_offload(net, execution_device=torch.device("cuda", 0))
        assert next(layer.parameters()).device.type == "meta"
        for _ in range(2):
            assert torch.equal(layer(*batch()), expected)

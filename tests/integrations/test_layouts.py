"""Experts of transformers models as ``GroupedMLP``s on the same memory, against the models' own forward."""

import pytest
import torch
from torch import nn

import tgl
from tests.integrations.test_transformers import EXPERTS, HIDDEN, INTER, config, experts_class
from tgl.nn import layouts

CASES = {
    "gated": ("mixtral.MixtralExperts", {}, False),
    "transposed, interleaved, with biases": (
        "gpt_oss.GptOssExperts",
        {"activation": "clamped_qgeglu", "interleaved": True, "bias": True},
        True,
    ),
    "no gate": ("nemotron_h.NemotronHExperts", {"activation": "srelu"}, False),
}
CASES = {name: case for name, case in CASES.items() if experts_class(case[0]) is not None}  # older versions lack some


@pytest.mark.parametrize("case", CASES)
def test_loaded_without_a_copy(case):
    path, options, transposed = CASES[case]
    experts = experts_class(path)(config(swiglu_limit=7.0))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    mlp = tgl.GroupedMLP(EXPERTS, HIDDEN, INTER, device="meta", **options)
    mlp.load_state_dict(layouts.from_transformers(experts.state_dict(), transposed=transposed), assign=True)
    assert {p.data_ptr() for p in mlp.parameters()} == {p.data_ptr() for p in experts.parameters()}

    x, index, weights = torch.randn(20, HIDDEN), torch.randint(0, EXPERTS, (20, 2)), torch.rand(20, 2)
    routing = tgl.route(index, EXPERTS)
    rows = mlp.forward_offsets(tgl.dispatch(x, routing), routing.offs, tgl.dispatch_weights(weights, routing))
    torch.testing.assert_close(tgl.combine(rows, routing), experts(x, index, weights))
    ours = layouts.to_transformers(mlp.state_dict(), gated=options.get("activation") != "srelu", transposed=transposed)
    for name, value in experts.state_dict().items():
        assert ours[name].data_ptr() == value.data_ptr()
        assert ours[name].shape == value.shape

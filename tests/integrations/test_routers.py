"""Routers of transformers' models: choices, weights, losses and gradients are those of ``tgl.topk_router``."""

import importlib
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import tgl

pytest.importorskip("transformers")

TOKENS, EXPERTS, TOP_K = 50, 32, 4


class Form(NamedTuple):
    """A model's router: its class, what its config says besides sizes, and the options that mean it."""

    router: str
    config: dict
    options: dict


GROUPS = {"num_groups": 8, "topk_groups": 4}
OF_GROUPS = {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
V3 = {"score_function": "sigmoid", "scale": 2.5, "group_score": "top2_sum", **GROUPS}
V4 = {"score_function": "sqrtsoftplus", "renormalize": True, "scale": 1.5}
FORMS = {
    "mixtral": Form("MixtralTopKRouter", {}, {"renormalize": True}),
    "qwen3_moe": Form("Qwen3MoeTopKRouter", {"norm_topk_prob": False}, {}),
    "qwen3_next": Form("Qwen3NextTopKRouter", {"norm_topk_prob": True}, {"renormalize": True}),
    "gpt_oss": Form("GptOssTopKRouter", {}, {"renormalize": True}),
    "ernie4_5_moe": Form("Ernie4_5_MoeTopKRouter", {"moe_norm_min": 1e-12}, {"renormalize": True}),
    "longcat_flash": Form("LongcatFlashTopkRouter", {"routed_scaling_factor": 6.0}, {"scale": 6.0}),
    "minimax_m2": Form("MiniMaxM2TopKRouter", {}, {"score_function": "sigmoid", "renormalize": True}),
    "deepseek_v2": Form(
        "DeepseekV2TopkRouter", {"topk_method": "group_limited_greedy", **OF_GROUPS}, {"scale": 2.5, **GROUPS}
    ),
    "deepseek_v3": Form("DeepseekV3TopkRouter", {"norm_topk_prob": True, **OF_GROUPS}, {"renormalize": True, **V3}),
    "glm4_moe": Form("Glm4MoeTopkRouter", {"norm_topk_prob": False, **OF_GROUPS}, V3),
    "deepseek_v4": Form("DeepseekV4TopKRouter", {"scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5}, V4),
}


def made(model):
    """The router with an identity for a weight, so that tokens are logits, and its bias, if it has one."""
    form = FORMS[model]
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    names = ("num_experts", "num_local_experts", "n_routed_experts", "hidden_size")
    sizes = {"num_experts_per_tok": TOP_K, "zero_expert_num": 0, "moe_num_experts": EXPERTS}
    config = SimpleNamespace(**dict.fromkeys(names, EXPERTS), **sizes, **form.config)
    router = getattr(module, form.router)(config)
    for name, t in (*router.named_parameters(), *router.named_buffers()):
        if name.rpartition(".")[2] == "weight":
            t.data.copy_(torch.eye(EXPERTS))
    bias = next(
        (t for name, t in (*router.named_buffers(), *router.named_parameters()) if "correction_bias" in name), None
    )
    if bias is None:
        bias = torch.rand(EXPERTS) if model == "minimax_m2" else None
    else:
        bias.data.copy_(torch.rand(EXPERTS).expand_as(bias))
        bias = bias.detach().flatten()
    return router, bias


@pytest.mark.parametrize("model", FORMS)
def test_routers(model):
    router, bias = made(model)
    tokens = 2 * torch.randn(TOKENS, EXPERTS)
    results = []
    for call in ("theirs", "ours"):
        logits = tokens.clone().requires_grad_()
        if call == "ours":
            weights, index, *_ = tgl.topk_router(logits, TOP_K, bias, **FORMS[model].options)
        else:
            _, weights, index = router(logits, bias) if model == "minimax_m2" else router(logits)
        order = index.long().argsort(1)  # some leave the order open
        weights, index = weights.gather(1, order), index.long().gather(1, order)
        (grad,) = torch.autograd.grad((weights * torch.arange(1, TOP_K + 1)).sin().sum(), logits)
        results.append((index, weights, grad))
    (index, *theirs), (ours_index, *ours) = results
    assert torch.equal(index, ours_index)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("padded", [False, True])
def test_load_balancing_loss(padded):
    """An attention mask, where the last tokens of each sequence do not count."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    losses, grads = [], []
    tokens = torch.randn(TOKENS, EXPERTS)
    attention = (torch.arange(TOKENS // 2) < torch.tensor([[TOKENS // 2], [TOKENS // 3]])).long() if padded else None
    options = {"mask": attention.bool().view(-1)} if padded else {}
    for call in (
        lambda logits: load_balancing_loss_func((logits,), EXPERTS, TOP_K, attention),
        lambda logits: tgl.topk_router(logits, TOP_K, renormalize=True, losses=True, **options).load_balancing_loss,
    ):
        logits = tokens.clone().requires_grad_()
        losses.append(call(logits))
        grads.append(torch.autograd.grad(losses[-1], logits)[0])
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*grads)

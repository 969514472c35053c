"""Ranks that differ in what an exchange or the arithmetic depends on: an error on every rank, before any exchange."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tgl
from tgl.distributed import ExpertParallelMLP, expert_parallel_host

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E, H, I, TOP_K, MOST = 4, 32, 64, 2, 4
SIZES = {"num_experts": E, "hidden_size": H, "ffn_hidden_size": I, "top_k": TOP_K, "max_tokens": MOST}
MXFP8, BLOCKS = tgl.recipes.MXFP8BlockScaling(), tgl.recipes.Float8BlockScaling()
DIFFER: dict[str, tuple[Any, Any]] = {
    "num_experts": (4, 8),
    "hidden_size": (32, 64),
    "ffn_hidden_size": (64, 32),
    "top_k": (2, 0),
    "max_tokens": (4, 5),
    "capacity_factor": (2.0, None),
    "pair_capacity_factor": (None, 1.0),
    "invariant": (False, True),
    "wire": ("dense", "quantized"),
    "wire_dtype": (None, F32),
    "recompute_dispatch": (False, True),
    "engine": ("all_to_all", "symmetric_memory"),
    "params_dtype": (F16, BF16),
    "activation": ("swiglu", "geglu"),
    "interleaved": (False, True),
    "bias": (True, False),
    "recompute_activation": (False, True),
    "single_grouped_weight": (True, False),
    "fuse_wgrad_accumulation": (False, True),
    "delay_wgrad_compute": (True, False),
    "save_original_input": (False, True),
    "recipe": (MXFP8, BLOCKS),
}


def layer(**changes: Any) -> ExpertParallelMLP:
    return ExpertParallelMLP(**{"group": dist.group.WORLD, **SIZES, **changes})


def check_arguments() -> None:
    me = dist.get_rank()
    for argument, values in DIFFER.items():
        given: dict[str, Any] = {argument: values[me]}
        with pytest.raises(
            ValueError, match=rf"`{argument}` must be equal on all ranks of `group`, but got \[.*, .*\]"
        ):
            layer(**given)
    # A default that is given is the default, and one rank's own affairs may differ.
    layer(**[{}, {"activation": "swiglu", "params_dtype": torch.get_default_dtype()}][me])
    layer(**[{"name": "a", "state_dict_format": "discrete"}, {"name": "b", "init_method": torch.nn.init.zeros_}][me])
    with pytest.raises(ValueError, match="`num_gemms` must be equal on all ranks"):
        layer(**[{}, {"num_gemms": 4}][me])


WRONG: dict[str, Any] = {
    "num_experts": 4.0,
    "hidden_size": 8 / 3 * H,
    "ffn_hidden_size": "64",
    "top_k": True,
    "max_tokens": [4],
    "capacity_factor": "2",
    "pair_capacity_factor": [1.0],
    "invariant": 1,
    "recompute_dispatch": None,
    "group": "ep",
}


def check_types() -> None:
    for argument, value in WRONG.items():
        given: dict[str, Any] = {argument: value}
        with pytest.raises(TypeError, match=f"`{argument}` must be "):
            layer(**given)
    experts, (x, index, _) = layer(), call((F32, F32))
    for name, arguments in {"x": ([1.0], index), "top_k_index": (x, None), "weights": (x, index, [1.0])}.items():
        with pytest.raises(TypeError, match=f"ExpertParallelMLP: `{name}` must be a tensor, but got "):
            experts(*arguments)


def test_arguments_of_the_wrong_type(ranks):
    ranks(check_types)


def test_arguments(ranks):
    ranks(check_arguments)


# --- dtypes of calls --------------------------------------------------------------------------------------------------

Dtypes = tuple[torch.dtype, torch.dtype | None]
CALLS: dict[str, tuple[tuple[Dtypes, Dtypes], str]] = {
    "tokens of one size": (((F16, F32), (BF16, F32)), r"`x.dtype` .* \[torch.float16, torch.bfloat16\]"),
    "tokens of two sizes": (((F32, F32), (BF16, F32)), r"`x.dtype` .* \[torch.float32, torch.bfloat16\]"),
    "weights": (((BF16, F32), (BF16, BF16)), r"`weights.dtype` .* \[torch.float32, torch.bfloat16\]"),
    "no weights": (((BF16, F32), (BF16, None)), r"`weights.dtype` .* \[torch.float32, None\]"),
}
FORMS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "a recipe": {"recipe": MXFP8},
    "quantised": {"recipe": MXFP8, "wire": "quantized"},
    "sent again": {"recompute_dispatch": True},
}


def call(dtypes: Dtypes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    x, weights = dtypes
    index = torch.rand(MOST, E).topk(TOP_K).indices
    return torch.randn(MOST, H).to(x), index, None if weights is None else torch.rand(MOST, TOP_K).to(weights)


def check_calls(form: str, backend: str | None) -> None:
    me = dist.get_rank()
    experts = layer(params_dtype=BF16, **FORMS[form])
    run = experts if backend is None else torch.compile(experts, backend=backend, fullgraph=True)
    error = ValueError if backend is None else torch._dynamo.exc.Unsupported
    for dtypes, message in CALLS.values():
        with pytest.raises(error, match=f"(?s)ExpertParallelMLP: {message}"):
            run(*call(dtypes[me]))
    if backend is None:
        with torch.autocast("cpu", [F16, BF16][me]), pytest.raises(ValueError, match=r"`x\.dtype` must be equal"):
            run(*call((F32, F32)))
    assert run(*call((BF16, F32))).isfinite().all()
    experts.check()


@pytest.mark.parametrize("form", FORMS)
def test_dtypes_of_calls(ranks, form):
    ranks(check_calls, form, None)


@pytest.mark.parametrize("form", ["as they are", pytest.param("quantised", marks=pytest.mark.slow)])
def test_dtypes_of_compiled_calls(ranks, form):
    ranks(check_calls, form, "aot_eager")


def check_one_rank_changes() -> None:
    """A rank that has agreed on its dtypes does not look again, so the other waits no longer than its group allows."""
    me, group = dist.get_rank(), dist.new_group(timeout=timedelta(seconds=2), backend="gloo")
    experts = layer(group=group, recipe=MXFP8)
    experts(*call((BF16, F32)))
    message = ["tgl::ep_route: the exchange among ranks", r"rank 0 of `group` must make the first call with x.dtype "]
    with pytest.raises(RuntimeError, match=message[me]):
        experts(*call(((BF16, F16)[me], F32)))
    dist.barrier()


def test_one_rank_changes(ranks):
    ranks(check_one_rank_changes)


# --- choices out of range ---------------------------------------------------------------------------------------------


def check_choices(backend: str | None) -> None:
    x, index, weights = call((F32, F32))
    index[1, 1] = E
    experts = layer()
    run = experts if backend is None else torch.compile(experts, backend=backend, fullgraph=True)

    def host(**options: Any) -> torch.Tensor:
        return expert_parallel_host(lambda rows, offs: rows, x, index, weights, E, dist.group.WORLD, **options)

    expected = run(x, index, weights)
    with tgl.debug_checks():
        with pytest.raises(ValueError, match=r"ep_route: `top_k_index` must be .* top_k_index\[1, 1\] = 4"):
            run(x, index, weights)
        with pytest.raises(ValueError, match=r"route: `top_k_index` must be .* top_k_index\[1, 1\] = 4"):
            host()
        assert torch.equal(run(x, index, weights, sentinels=True), expected)
        assert torch.equal(host(sentinels=True), host(sentinels=True))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_choices_out_of_range(ranks, backend):
    ranks(check_choices, backend)


# --- expert_parallel_host ---------------------------------------------------------------------------------------------


def check_host() -> None:
    me, group = dist.get_rank(), dist.new_group(backend="gloo")
    x, index, weights = call((F32, F32))

    def run(x: torch.Tensor, num_experts: int = E) -> torch.Tensor:
        return expert_parallel_host(lambda rows, offs: rows, x, index, weights, num_experts, group)

    with pytest.raises(ValueError, match=r"`num_experts` must be equal on all ranks of `group`, but got \[4, 8\]"):
        run(x, (4, 8)[me])
    for dtypes in ((F16, BF16), (F32, BF16)):
        with pytest.raises(ValueError, match=r"expert_parallel_host: `x\.dtype` must be equal on all ranks"):
            run(x.to(dtypes[me]))
    with pytest.raises(ValueError, match=r"`hidden_size` must be equal on all ranks of `group`, but got \[32, 16\]"):
        run(x[:, : (H, 16)[me]])
    with pytest.raises(ValueError, match=r"`x` must be \[S, H\], but got shape \(4,\)"):
        run(x[:, 0])
    torch.testing.assert_close(run(x), x * weights.sum(1, keepdim=True))


def test_the_time_out_of_a_missing_host(ranks):
    ranks(check_host)

"""Models whose experts are spread over ranks, on one GPU for each rank: the demo's, and one of transformers.

    torchrun --nproc-per-node 4 -m tests.gpu.expert_parallel_ranks [--cases demo] [--device cpu]

``demo``: steps of ``examples.train_moe``, by both engines, eager and compiled with ``fullgraph=True``.
``transformers`` (5.23 or later): a Qwen3-MoE with ``DistributedConfig(ep_implementation="tgl")`` over symmetric memory,
loaded by ``from_pretrained`` and trained for a step in bfloat16: sharded by FSDP in eager mode; and on a batch that all
ranks share, eager and compiled with ``fullgraph=True``.

Each is compared with the whole model on this rank's device. In float64 updates and losses have to agree to 1e-12. In
another dtype the distance from the whole model in float64 may be twice that which the whole model has in that dtype: an
answer is rounded once more for every rank. On a CPU, over gloo, collectives stand for both engines.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from examples.train_moe.model import Config, Transformer
from examples.train_moe.parallel import OneRank, Ranks, started
from examples.train_moe.train import BALANCE, autocast
from tgl.meta.expert_parallel import ALL_TO_ALL, SYMMETRIC_MEMORY

BF16 = torch.bfloat16
EXACT = 1e-12  # relative, for sums in another order in float64
STEPS, RATE = 3, 0.5
DEMO = Config(dim=128, layers=2, experts=16, top_k=4, context=64)
WINDOWS = 8
SEQUENCE, VOCABULARY = 128, 256


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def spelt(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def engine_on(device: torch.device, engine: str) -> str:
    """There is no symmetric memory on a CPU."""
    return ALL_TO_ALL if device.type == "cpu" else engine


class Update(NamedTuple):
    """The changes of training, by name, and the losses on the way; float64 on the CPU."""

    parameters: dict[str, Tensor]
    losses: Tensor

    def error(self, right: Update) -> float:
        """The larger one of the relative errors, of all parameters together and of the losses."""
        assert self.parameters.keys() == right.parameters.keys()
        apart = [t - right.parameters[name] for name, t in self.parameters.items()]
        ours, theirs = (torch.cat([t.flatten() for t in ts]).norm() for ts in (apart, right.parameters.values()))
        losses = (self.losses - right.losses).norm() / right.losses.norm()
        return torch.stack([ours / theirs, losses]).max().item()  # NaN if one of them is


def whole(parameter: Tensor) -> Tensor:
    full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return full.detach().to("cpu", torch.float64, copy=True)


def check(what: str, ours: Update, right: Update, bound: float) -> None:
    """Check a condition on every rank; all stop if one of them has found an error."""
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, ours.error(right))
    said = f"{what}: error {max(errors):.1e}, bound {bound:.1e}"
    if not all(error <= bound for error in errors):  # NaN is not
        raise SystemExit(f"{said}: WRONG")
    say(f"  {said}: passed")


# --- the demo ---------------------------------------------------------------------------------------------------------


def demo_update(
    ranks: OneRank, device: torch.device, dtype: torch.dtype, engine: str = ALL_TO_ALL, compiled: bool = False
) -> Update:
    """Run steps of SGD, whose updates show a wrong factor of a gradient, which Adam would hide."""
    torch.manual_seed(1)
    windows = torch.randint(256, (STEPS, WINDOWS, DEMO.context + 1))
    model = Transformer(DEMO).to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    before = {name: whole(p) for name, p in model.named_parameters()}
    model = ranks.shared(model, WINDOWS * DEMO.context, engine)
    call = torch.compile(model, fullgraph=True) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    losses = []
    for batch in windows:
        with autocast(device, dtype):
            nats, balance, _ = call(ranks.windows(batch).to(device))
        (nats + BALANCE * balance).backward()
        losses.append(ranks.finish_backward(model, nats))
        optimizer.step()
        optimizer.zero_grad()
    after = ranks.whole(model).named_parameters()
    return Update({name: whole(p) - before[name] for name, p in after}, torch.tensor(losses).double())


DEMO_RUNS = (
    (torch.float64, ALL_TO_ALL, "called"),
    (torch.float32, SYMMETRIC_MEMORY, "called"),
    (BF16, SYMMETRIC_MEMORY, "called"),
    (torch.float64, ALL_TO_ALL, "compiled"),
    (BF16, SYMMETRIC_MEMORY, "compiled"),
)
"""Symmetric memory takes no float64."""


def demo(ranks: Ranks, device: torch.device) -> None:
    one = {dtype: demo_update(OneRank(), device, dtype) for dtype in (torch.float64, torch.float32, BF16)}
    right = one[torch.float64]
    for dtype, wanted, how in DEMO_RUNS:
        torch.compiler.reset()
        engine = engine_on(device, wanted)
        ours = demo_update(ranks, device, dtype, engine, how == "compiled")
        bound = EXACT if dtype == torch.float64 else 2 * one[dtype].error(right)
        check(f"demo, {spelt(dtype)}, {engine}, {how}", ours, right, bound)


# --- transformers -----------------------------------------------------------------------------------------------------


def saved(folder: str) -> None:
    """A Qwen3-MoE with random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def update_of(model: nn.Module, call: Callable[..., Any], batches: list[Tensor]) -> Update:
    """A step of SGD on the mean loss of the batches."""
    before = {name: whole(p) for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), RATE, foreach=False)
    losses = [call(input_ids=batch, labels=batch).loss for batch in batches]
    torch.stack(losses).mean().backward()
    optimizer.step()
    after = {name: whole(p) - before[name] for name, p in model.named_parameters()}
    return Update(after, torch.stack(losses).detach().double().cpu())


FSDP, TENSOR = "FSDP", "tensor parallel"
TRANSFORMERS_RUNS = (
    (torch.float32, FSDP, "called"),
    (BF16, FSDP, "called"),
    (torch.float32, TENSOR, "called"),
    (BF16, TENSOR, "called"),
    (torch.float32, TENSOR, "compiled"),
    (BF16, TENSOR, "compiled"),
)
"""No graph holds the hooks of FSDP."""


def transformers(ranks: Ranks, device: torch.device) -> None:
    from tgl.integrations import transformers_parallel

    engine = engine_on(device, SYMMETRIC_MEMORY)
    transformers_parallel.register(max_tokens=SEQUENCE, engine=engine)
    torch.manual_seed(2)
    batches = list(torch.randint(VOCABULARY, (ranks.size, 1, SEQUENCE)).to(device))
    # Under FSDP every rank has a batch; those that split a dense layer have one batch together.
    of_all = {FSDP: batches, TENSOR: batches[:1]}
    of_rank = {FSDP: batches[ranks.rank : ranks.rank + 1], TENSOR: batches[:1]}
    with shared_folder() as folder:
        if ranks.rank == 0:
            saved(folder)
        dist.barrier()
        dtypes = torch.float64, torch.float32, BF16
        one = {(dtype, way): on_one_rank(folder, device, dtype, of) for way, of in of_all.items() for dtype in dtypes}
        for dtype, way, how in TRANSFORMERS_RUNS:
            torch.compiler.reset()
            ours = over_ranks(folder, device, dtype, SIZES[way](ranks.size), of_rank[way], how == "compiled")
            if way == FSDP:
                losses: list[Any] = [None] * ranks.size
                dist.all_gather_object(losses, ours.losses)
                ours = ours._replace(losses=torch.cat(losses))
            right, rival = one[torch.float64, way], one[dtype, way]
            check(f"transformers, {spelt(dtype)}, {engine}, {way}, {how}", ours, right, 2 * rival.error(right))


SIZES: dict[str, Callable[[int], dict[str, Any]]] = {
    FSDP: lambda count: {"fsdp_size": count},
    TENSOR: lambda count: {"tp_size": count, "tp_plan": "auto"},
}
"""By way of sharding, the arguments of ``DistributedConfig`` for a number of ranks."""


def on_one_rank(folder: str, device: torch.device, dtype: torch.dtype, batches: list[Tensor]) -> Update:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").to(device)
    return update_of(model, model, batches)


def over_ranks(
    folder: str, device: torch.device, dtype: torch.dtype, sizes: dict[str, Any], batches: list[Tensor], compiled: bool
) -> Update:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(**sizes, ep_size=dist.get_world_size(), ep_implementation="tgl")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, distributed_config=config)
    assert all(p.device == device for p in model.parameters())
    made = update_of(model, torch.compile(model, fullgraph=True) if compiled else model, batches)
    for layer in model.model.layers:
        assert layer.mlp.experts.exchange.engine == engine_on(device, SYMMETRIC_MEMORY)
        layer.mlp.experts.exchange.check()
    return made


@contextmanager
def shared_folder() -> Iterator[str]:
    """Return a folder that all ranks of this host share."""
    with tempfile.TemporaryDirectory() as own:
        said = [own]
        dist.broadcast_object_list(said)
        yield said[0]
        dist.barrier()


CASES: dict[str, Callable[[Ranks, torch.device], None]] = {"demo": demo, "transformers": transformers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args()
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count < 2:
        parser.error("torchrun has to start two ranks or more")
    device, ranks = started(count, torch.device(args.device))
    assert isinstance(ranks, Ranks)
    say(f"{count} ranks, {device.type}, torch {torch.__version__}")
    for name in args.cases:
        CASES[name](ranks, device)
    ranks.leave()


if __name__ == "__main__":
    main()

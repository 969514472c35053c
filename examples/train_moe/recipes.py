"""``python -m examples.train_moe.recipes``: train the same model in every recipe and compare the losses.

Weights, batches and their order are the same in every run; the attention layers run in bfloat16 autocast throughout, so
that the recipe of the experts is all that differs. A run passes if its final held-out loss is within ``LIMITS`` of that
without a recipe.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

import tgl

from . import data
from .model import Config, Transformer
from .train import fit

RECIPES: dict[str, tgl.recipes.Recipe | None] = {
    "none": None,
    "mxfp8": tgl.recipes.MXFP8BlockScaling(),
    "current": tgl.recipes.Float8CurrentScaling(),
    "delayed": tgl.recipes.DelayedScaling(),
    "block": tgl.recipes.Float8BlockScaling(),
    "nvfp4": tgl.recipes.NVFP4BlockScaling(),
}
LIMITS = {"mxfp8": 0.02, "current": 0.02, "delayed": 0.02, "block": 0.02, "nvfp4": 0.05}


def final_loss(name: str, config: Config, *, steps: int, batch: int, seed: int, compiled: bool) -> float:
    """Held-out loss in nats per byte after training in the recipe called ``name``."""
    torch.manual_seed(seed)
    corpus = data.load(config.context)
    model = Transformer(Config(**{**vars(config), "recipe": RECIPES[name]}))
    step = torch.compile(model, fullgraph=True) if compiled else model
    history = fit(model, step, corpus, steps=steps, batch=batch, dtype=torch.bfloat16, seed=seed)
    return history.held_out[-1][1]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="train_moe.recipes", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for name, default, text in (
        ("steps", 200, "training steps"),
        ("dim", 64, "width of the model"),
        ("layers", 2, "transformer blocks"),
        ("experts", 8, "experts per block"),
        ("top-k", 2, "experts that every byte goes to"),
        ("context", 128, "bytes per window"),
        ("batch", 8, "windows per step"),
        ("seed", 0, "seed of weights and batches"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    parser.add_argument("--no-compile", action="store_true", help="train in eager mode")
    parser.add_argument("--only", nargs="+", choices=LIMITS, default=list(LIMITS), help="recipes to run")
    chosen = parser.parse_args(arguments)
    config = Config(chosen.dim, chosen.layers, chosen.experts, chosen.top_k, chosen.context)
    losses: dict[str, float] = {}
    print(f"{'recipe':10}{'held-out loss':>15}{'to none':>10}{'limit':>8}{'seconds':>9}", flush=True)
    for name in ("none", *chosen.only):
        torch.compiler.reset()
        start = time.perf_counter()
        losses[name] = final_loss(
            name, config, steps=chosen.steps, batch=chosen.batch, seed=chosen.seed, compiled=not chosen.no_compile
        )
        change = losses[name] / losses["none"] - 1
        limit = f"{LIMITS[name]:8.0%}" if name in LIMITS else f"{'':8}"
        print(f"{name:10}{losses[name]:15.4f}{change:+10.2%}{limit}{time.perf_counter() - start:9.0f}", flush=True)
    missed = [name for name in chosen.only if abs(losses[name] / losses["none"] - 1) > LIMITS[name]]
    if missed:
        print(f"train_moe.recipes: beyond the limit: {', '.join(missed)}", file=sys.stderr)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())

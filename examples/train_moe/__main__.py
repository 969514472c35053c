"""``python -m examples.train_moe``: train, sample, compare, draw."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
from pathlib import Path

import torch

try:
    import matplotlib  # noqa: F401
    import tqdm  # noqa: F401
except ModuleNotFoundError as error:
    sys.exit(f"train_moe needs {error.name}: pip install 'torch-grouped-linear[demo]'")

import tgl
from tgl.meta.expert_parallel import ALL_TO_ALL, ENGINES

from . import data, report
from .compare import compare
from .model import HEAD, Config, Transformer
from .parallel import started
from .recipes import RECIPES
from .train import fit, sample

PROMPT = b"\ndef read"
SAMPLE_BYTES = 400
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def options(arguments: list[str] | None) -> argparse.Namespace:
    """Parse and check the command line; a bad value ends the program with one line that names it."""
    parser = argparse.ArgumentParser(
        prog="train_moe", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for name, default, text in (
        ("steps", 600, "training steps"),
        ("dim", 128, f"width of the model, a multiple of {HEAD}"),
        ("layers", 4, "transformer blocks"),
        ("experts", 32, "experts per block"),
        ("top-k", 4, "experts that every byte goes to"),
        ("context", 256, "bytes per window"),
        ("batch", 8, "windows per step"),
        ("ep", 1, "ranks that share experts and windows, as many as torchrun has started"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of weights, batches and sample")
    parser.add_argument("--device", default="cpu", help="where to train: cpu, cuda, cuda:1")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="bfloat16 is autocast over float32 weights")
    parser.add_argument("--engine", choices=ENGINES, default=ALL_TO_ALL, help="what moves bytes between ranks")
    parser.add_argument("--recipe", choices=RECIPES, default="none", help="how the experts' GEMMs are quantised")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), metavar="DIR", help="folder for the results")
    parser.add_argument("--no-compile", action="store_true", help="train in eager mode")
    chosen = parser.parse_args(arguments)

    for name in ("steps", "dim", "layers", "experts", "top_k", "context", "batch", "ep"):
        if (value := getattr(chosen, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, but got {value}")
    if chosen.dim % HEAD:
        parser.error(f"--dim must be a multiple of {HEAD}, but got {chosen.dim}")
    if chosen.recipe != "none" and chosen.dtype == "float64":
        parser.error(f"--dtype must be float32 or bfloat16 with --recipe {chosen.recipe}, but got float64")
    if chosen.top_k > chosen.experts:
        parser.error(f"--top-k must be at most --experts ({chosen.experts}), but got {chosen.top_k}")
    for name in ("experts", "batch"):
        if getattr(chosen, name) % chosen.ep:
            parser.error(f"--{name} must be a multiple of --ep ({chosen.ep}), but got {getattr(chosen, name)}")
    if chosen.out.exists() and not chosen.out.is_dir():
        parser.error(f"--out must be a folder, but {chosen.out} is a file")
    try:
        chosen.device, chosen.ranks = started(chosen.ep, torch.device(chosen.device))
        torch.empty(1, device=chosen.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(
            f"--device must be a device of this machine, but got {chosen.device}: {str(error).splitlines()[0]}"
        )
    except ValueError as error:
        parser.error(str(error))
    compilers = [os.environ.get("CXX", "g++"), "clang++"]
    if chosen.device.type == "cpu" and not chosen.no_compile and not any(map(shutil.which, compilers)):
        parser.error("torch.compile needs a C++ compiler such as g++ on the PATH; --no-compile trains without one")
    return chosen


def describe(chosen: argparse.Namespace, model: Transformer, corpus: data.Corpus) -> list[str]:
    """Return a description of the run."""
    total, active = model.parameter_counts()
    experts = model.blocks[0].moe.experts
    rows = torch.empty(1, chosen.dim, dtype=DTYPES[chosen.dtype], device=chosen.device)
    offs = torch.zeros(chosen.experts, dtype=torch.int32, device=chosen.device)
    served = tgl.explain("grouped_gemm", rows, experts.fc1.weight.detach().to(rows.dtype).transpose(1, 2), offs).chosen
    mode = "eager" if chosen.no_compile else "torch.compile(fullgraph=True)"
    threads = torch.get_num_threads()
    where = str(chosen.device)
    if chosen.device.type == "cpu":
        where += f" ({threads} thread{'s' if threads > 1 else ''})"
    recipe = model.config.recipe
    if recipe is None:
        how = f"tgl.grouped_gemm runs {served.name if served else 'nothing'}"
    else:
        how = str(recipe).replace("\n", "\n" + 12 * " ")
    return [
        f"tgl {tgl.__version__}, torch {torch.__version__}, {where}, {chosen.dtype}, {mode}",
        f"  text      {corpus.train.shape[0] / 1e6:.1f} MB of Python {platform.python_version()}'s standard library: "
        f"{corpus.files[0]} files to train on, {corpus.files[1]} held out",
        f"  model     {chosen.layers} blocks of width {chosen.dim}; in each {chosen.experts} experts of "
        f"{experts.fc2.in_features} units, {chosen.top_k} per byte; "
        f"{report.count(total)} parameters, {report.count(active)} active",
        f"  experts   {how}",
        f"  training  {chosen.steps} steps of {chosen.batch} windows of {chosen.context} bytes",
        f"  to beat   {corpus.unigram:.3f} nats per byte ({report.bits(corpus.unigram):.3f} bits), a unigram model's",
    ]


def main(arguments: list[str] | None = None) -> int:
    chosen = options(arguments)
    dtype = DTYPES[chosen.dtype]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal without the bars' characters is no reason to stop
    ranks = chosen.ranks
    torch.manual_seed(chosen.seed)
    try:
        corpus = data.load(chosen.context)
    except FileNotFoundError as error:
        sys.exit(f"train_moe: {error}")
    recipe = RECIPES[chosen.recipe]
    model = Transformer(Config(chosen.dim, chosen.layers, chosen.experts, chosen.top_k, chosen.context, recipe))
    model = model.to(chosen.device, torch.float64 if dtype == torch.float64 else torch.float32)
    parallel = ranks.shared(model, chosen.batch * chosen.context, chosen.engine)
    compiled = None if chosen.no_compile else torch.compile(parallel, fullgraph=True)
    trained = parallel if compiled is None else compiled
    if not ranks.rank:
        print("\n".join(describe(chosen, model, corpus)), flush=True)

    start = time.perf_counter()
    steps = {"steps": chosen.steps, "batch": chosen.batch, "dtype": dtype, "seed": chosen.seed}
    history = fit(parallel, trained, corpus, **steps, ranks=ranks)
    if parallel is not model:
        model, compiled = ranks.whole(parallel), None  # what follows is about one rank with all experts
    ranks.leave()
    if ranks.rank:
        return 0
    took = time.perf_counter() - start
    tokens = chosen.batch * chosen.context
    print("\nsample, continuing " + repr(PROMPT.decode().strip()), flush=True)
    text = sample(model, PROMPT, SAMPLE_BYTES, dtype=dtype, seed=chosen.seed).decode("utf-8", "replace")
    print("\n".join("  | " + "".join(c if c.isprintable() else "·" for c in line) for line in text.strip().split("\n")))

    print("\nexperts' shares of the held-out bytes")
    print("\n".join(report.usage_lines(history.usage)))

    windows = corpus.batch(chosen.batch, torch.Generator().manual_seed(chosen.seed + 1)).to(chosen.device)
    comparison = compare(model, compiled, windows, dtype)
    print("\nresult")
    print("\n".join(report.loss_table(corpus.unigram, history)))
    print()
    print("\n".join(report.rate_table(comparison)))
    rate = f", {(chosen.steps - 1) * tokens / history.stepping:,.0f} tokens per s" if chosen.steps > 1 else ""
    print(
        f"\n  training took {report.clock(took)}: first step {report.clock(history.first_step)}"
        f"{'' if chosen.no_compile else ' (compiles)'}, the others {report.clock(history.stepping)}{rate}, "
        f"evaluations {report.clock(took - history.first_step - history.stepping)}"
    )

    chosen.out.mkdir(parents=True, exist_ok=True)
    total, active = model.parameter_counts()
    title = f"A byte-level Mixture of Experts, {report.count(total)} parameters ({report.count(active)} active)"
    report.plot(chosen.out / "loss.png", title, corpus.unigram, history, comparison)
    results = {
        "unigram": corpus.unigram,
        "train": history.train,
        "held_out": history.held_out,
        "usage": history.usage.tolist(),
        "tokens_per_second": comparison.rates,
        "losses": comparison.losses,
        "loss_gap": comparison.loss_gap,
        "gradient_gap": comparison.gradient_gap,
        "training_seconds": took,
        "sample": text,
    }
    (chosen.out / "results.json").write_text(json.dumps(results, indent=1))
    print(f"  wrote {chosen.out / 'loss.png'} and {chosen.out / 'results.json'}")
    if not comparison.agree:
        print("train_moe: the loop and the grouped GEMMs do not agree", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Plots of the benchmark pages, drawn from the result files; each states the digests of the files it was drawn from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from harness import pages

PLOTS = pages.ROOT / "docs" / "benchmarks" / "plots"

INK, MUTED, RULE = "#1f2933", "#52606d", "#cbd2d9"
COLOURS = ("#3d5a98", "#e08e45", "#5b9279", "#a05195", "#8d99ae", "#c44536", "#2f4858")
STYLE = {
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "tgl",
}
OPS = pages.OPS | {"accumulate": "accumulation"}


def digest(name: str) -> str:
    return hashlib.sha256(pages.load(name).path.read_bytes()).hexdigest()[:16]


class Results:
    """Result files by name; it remembers which ones were read."""

    def __init__(self) -> None:
        self.read: dict[str, str] = {}

    def rows(self, name: str, table: str) -> list[dict[str, Any]]:
        self.read[name] = digest(name)
        return pages.load(name).rows(table)

    def source(self) -> str:
        return ", ".join(f"benchmarks/results/{name}.json {digest}" for name, digest in sorted(self.read.items()))


def bars(
    axes: plt.Axes,
    groups: Sequence[str],
    series: dict[str, Sequence[float | None]],
    *,
    worst: dict[str, Sequence[float | None]] | None = None,
    digits: int = 2,
) -> None:
    """Bars side by side, one colour a series, each with its figure; a tick marks the worst case."""
    width = 0.8 / len(series)
    for k, (name, heights) in enumerate(series.items()):
        places = [i + (k - (len(series) - 1) / 2) * width for i in range(len(groups))]
        there = [(x, h, i) for i, (x, h) in enumerate(zip(places, heights, strict=True)) if h is not None]
        axes.bar([x for x, _, _ in there], [h for _, h, _ in there], 0.92 * width, label=name, color=COLOURS[k])
        for x, h, i in there:
            axes.annotate(f"{h:.{digits}f}", (x, h), (0, 2), textcoords="offset points", ha="center", fontsize=7.5)
            if worst and (low := worst[name][i]) is not None:
                axes.plot([x - 0.3 * width, x + 0.3 * width], [low, low], color="white", linewidth=1.6)
    axes.set_xticks(range(len(groups)), groups)
    axes.tick_params(axis="x", length=0)


def line_at(axes: plt.Axes, value: float, text: str) -> None:
    axes.axhline(value, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.annotate(text, (1, value), (2, 0), xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=8)


def legend_below(axes: plt.Axes, columns: int) -> None:
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=columns, fontsize=8.5)


def bars_across(
    axes: plt.Axes, rows: Sequence[str], series: Mapping[str, Sequence[float | None]], *, digits: int = 2
) -> None:
    """Horizontal bars, one colour a series, each with its figure: a phone shows them at a readable size."""
    height = 0.8 / len(series)
    for k, (name, lengths) in enumerate(series.items()):
        places = [i + (k - (len(series) - 1) / 2) * height for i in range(len(rows))]
        there = [(y, length) for y, length in zip(places, lengths, strict=True) if length is not None]
        axes.barh([y for y, _ in there], [length for _, length in there], 0.9 * height, label=name, color=COLOURS[k])
        for y, length in there:
            axes.annotate(
                f"{length:.{digits}f}", (length, y), (3, 0), textcoords="offset points", va="center", fontsize=8
            )
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()


def legend_under(figure: plt.Figure, axes: plt.Axes) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8.5)


def speed(results: Results) -> plt.Figure:
    columns = pages.against_torch(results.rows)
    series = {name: [mean for mean, _ in cells] for name, cells in columns.items()}
    figure, axes = plt.subplots(figsize=(5, 4.4), layout="constrained")
    bars_across(axes, [*pages.OPS.values(), "expert layer\n(with backward)"], series)
    axes.axvline(1, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_xlabel("torch's time / tgl's time")
    axes.set_title("One H200, means over shapes and routings")
    legend_under(figure, axes)
    return figure


def peers(results: Results) -> plt.Figure:
    rows = results.rows("peers_h200", "peers")
    names = [f"{r['what']}\n{r['peer']}" for r in rows]
    figure, axes = plt.subplots(figsize=(5, 0.42 * len(rows) + 1), layout="constrained")
    bars_across(axes, names, {"mean": [r["ratio"] for r in rows]})
    axes.axvline(1, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.tick_params(axis="y", labelsize=7.5)
    axes.set_xlabel("the peer's time / tgl's time")
    axes.set_title("One H200: right of the line tgl is faster")
    return figure


def decode(results: Results) -> plt.Figure:
    cases = results.rows("decode_h200", "cases")
    shapes = list(dict.fromkeys(r["shape"] for r in cases))
    figure, panels = plt.subplots(len(shapes), 1, figsize=(5, 2 * len(shapes) + 0.6), sharex=True, layout="constrained")
    for axes, shape in zip(panels, shapes, strict=True):
        rows = [r for r in cases if r["shape"] == shape]
        for k, (arm, label) in enumerate({"block": "tgl.moe", "torch": "torch, compiled"}.items()):
            timed = [(r["tokens"], r[arm]) for r in rows if isinstance(r[arm], float)]
            axes.plot(*zip(*timed), marker="o", markersize=4, color=COLOURS[k], label=label)
        axes.axhline(1, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_xscale("log", base=2)
        axes.set_xticks([r["tokens"] for r in rows], [str(r["tokens"]) for r in rows])
        axes.set_ylim(0, None)
        axes.set_title(shape)
    figure.supylabel("time / time in which the weights are read", fontsize=9, color=MUTED)
    panels[-1].set_xlabel("tokens")
    legend_under(figure, panels[0])
    return figure


def expert_parallel(results: Results) -> plt.Figure:
    rows = results.rows("expert_parallel_h200", "layers")
    own = {r["shape"]: r for r in rows if r["arm"] == "symmetric_memory"}
    other = {r["shape"]: r for r in rows if r["arm"] == "all_to_all"}
    figure, panels = plt.subplots(2, 1, figsize=(5, 4.6), sharex=True, layout="constrained")
    for axes, (column, title) in zip(panels, {"forward_tflops": "forward", "backward_tflops": "backward"}.items()):
        found = {"kernels over symmetric memory": own, "NCCL's all-to-all": other}
        bars_across(axes, list(own), {name: [of[s][column] for s in own] for name, of in found.items()}, digits=0)
        axes.set_title(title)
    panels[-1].set_xlabel("TFLOP/s a GPU, four H200 of one host")
    legend_under(figure, panels[0])
    return figure


def grouped_gemm(results: Results) -> plt.Figure:
    cases = results.rows("grouped_gemm_h200", "cases")
    figure, panels = plt.subplots(1, 4, figsize=(10, 4.4), sharey=True, layout="constrained")
    for axes, (op, title) in zip(panels, OPS.items(), strict=True):
        rows = [r for r in cases if r["op"] == op][::-1]
        for k, arm in enumerate(("torch", "loop", "dense", "quack")):
            timed = [(r[arm], y) for y, r in enumerate(rows) if r[arm] is not None]
            if timed:
                axes.scatter(*zip(*timed), s=22, color=COLOURS[k], label=arm, zorder=3)
        axes.axvline(1, color=INK, linewidth=0.8)
        axes.grid(axis="y", color=RULE, linewidth=0.5)
        axes.set_yticks(range(len(rows)), [f"{r['shape']}, {r['routing']}" for r in rows])
        axes.set_title(title)
    panels[0].legend(loc="lower right", fontsize=8)
    figure.supxlabel("the other's time / tgl's time (above 1 tgl is faster)", fontsize=9, color=MUTED)
    return figure


def fusion(results: Results) -> plt.Figure:
    figure, panels = plt.subplots(1, 2, figsize=(9.4, 3.8), sharey=True, layout="constrained")
    titles = {"gemm_activation_h200": "FC1 and its activation", "dactivation_h200": "back through the activation"}
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        rows = [r for r in results.rows(name, "cases") if r["ms"] is not None]
        arms = {"two kernels of tgl": "apart", "torch, compiled": "compiled", "tgl's GEMM alone": "gemm"}
        bars(axes, [r["shape"] for r in rows], {label: [r[a] for r in rows] for label, a in arms.items()})
        axes.axhline(1, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.tick_params(axis="x", labelrotation=20)
        axes.set_title(title)
    panels[0].set_ylabel("the other's time / tgl's time")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8.5)
    return figure


def expert_layer(results: Results) -> plt.Figure:
    rows = results.rows("layer_h200", "cases")
    arms = ("eager", "compiled", "bf16", "fp8_current", "fp8_delayed", "fp8_block")
    figure, axes = plt.subplots(figsize=(10, 3.9), layout="constrained")
    bars(axes, [f"{r['layer']},\n{r['routing']}" for r in rows], {arm: [r[arm] for r in rows] for arm in arms})
    for text in axes.texts:
        text.set(rotation=90, fontsize=6.5)
    line_at(axes, 1, "torch")
    axes.set_ylim(0, 1.75)
    axes.set_ylabel("torch's time / the arm's time")
    axes.set_title(
        "One H200: GroupedMLP forward and backward; eager and compiled are calls, the others captured graphs"
    )
    legend_below(axes, 6)
    return figure


def memory(results: Results) -> plt.Figure:
    rows = results.rows("recipes_cpu", "recipes")
    columns = {"a layer's input": "input_percent", "weight": "weight_percent", "MLP in all": "mlp_percent"}
    figure, axes = plt.subplots(figsize=(5, 0.72 * len(rows) + 1.2), layout="constrained")
    names = [r["recipe"].replace("Scaling", "\nScaling") for r in rows]
    bars_across(axes, names, {label: [r[c] for r in rows] for label, c in columns.items()}, digits=1)
    axes.axvline(100, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_xlabel("percent of bfloat16's bytes")
    axes.set_title("8 groups of 1024 tokens, 512 features")
    legend_under(figure, axes)
    return figure


FIGURES: dict[str, Callable[[Results], plt.Figure]] = {
    "speed": speed,
    "peers": peers,
    "decode": decode,
    "expert_parallel": expert_parallel,
    "grouped_gemm": grouped_gemm,
    "fusion": fusion,
    "expert_layer": expert_layer,
    "memory": memory,
}


def draw(out: Path, names: Iterable[str] = tuple(FIGURES)) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        figure_of = FIGURES[name]
        results = Results()
        with plt.rc_context(STYLE):
            figure = figure_of(results)
            figure.savefig(out / f"{name}.svg", metadata={"Date": None, "Source": results.source()}, facecolor="white")
            plt.close(figure)

"""Report of the run: lines for the terminal, and the picture."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import pyplot as plt
from torch import Tensor

from .compare import Comparison
from .train import History

INK, MUTED, RULE = "#1f2933", "#7b8794", "#d9dee4"
DEEP, PALE, WARM = "#1d5fa8", "#a9cbee", "#c8553d"
LEVELS = "▁▂▃▄▅▆▇█"


def bits(nats: float) -> float:
    return nats / math.log(2)


def clock(seconds: float) -> str:
    """Minutes and seconds, ``2:05``."""
    return f"{int(seconds + 0.5) // 60}:{int(seconds + 0.5) % 60:02d}"


def count(number: int) -> str:
    """``3478656`` as ``3.48 M``."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def usage_lines(usage: Tensor) -> list[str]:
    """A bar per expert for every block; a bar of half the height is an even share."""
    lines = [f"  an even share is {1 / usage.shape[1]:.1%}, half a bar"]
    for block, shares in enumerate(usage.tolist(), start=1):
        heights = [min(len(LEVELS) - 1, int(share * len(shares) * len(LEVELS) / 2)) for share in shares]
        bars = "".join(LEVELS[h] for h in heights)
        lines.append(f"  block {block}   {bars}   {min(shares):.1%} to {max(shares):.1%}")
    return lines


def loss_table(unigram: float, history: History) -> list[str]:
    rows = [
        ("unigram model", unigram),
        ("before training", history.held_out[0][1]),
        ("after training", history.held_out[-1][1]),
    ]
    lines = [f"  {'held-out loss':<22}{'nats per byte':>15}{'bits per byte':>15}"]
    return lines + [f"  {name:<22}{nats:>15.3f}{bits(nats):>15.3f}" for name, nats in rows]


def rate_table(comparison: Comparison) -> list[str]:
    base = next(iter(comparison.rates.values()))
    lines = [f"  {'forward and backward':<22}{'tokens per s':>15}{'ratio':>15}{'loss':>12}"]
    for name, rate in comparison.rates.items():
        lines.append(f"  {name:<22}{rate:>15,.0f}{rate / base:>14.2f}x{comparison.losses[name]:>12.6f}")
    verdict = "agree" if comparison.agree else "DISAGREE"
    gaps = f"loss within {comparison.loss_gap:.0e}, gradients within {comparison.gradient_gap:.0e}"
    return [*lines, f"  loop and grouped GEMMs {verdict} in float64: {gaps} (relative)"]


def plot(path: Path, title: str, unigram: float, history: History, comparison: Comparison) -> None:
    """Draw the losses, the experts' shares and the speeds into a PNG at ``path``."""
    style = {
        "font.size": 10,
        "text.color": INK,
        "axes.edgecolor": RULE,
        "axes.labelcolor": MUTED,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with plt.rc_context(style):
        figure = plt.figure(figsize=(11, 5.6), dpi=120, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, hspace=0.06, wspace=0.04)
        grid = figure.add_gridspec(2, 2, width_ratios=[2.1, 1])
        figure.suptitle(title, x=0.018, ha="left", fontsize=14, fontweight="bold")
        _plot_losses(figure.add_subplot(grid[:, 0]), unigram, history)
        _plot_usage(figure.add_subplot(grid[0, 1]), history.usage)
        _plot_rates(figure.add_subplot(grid[1, 1]), comparison)
        figure.savefig(path)
        plt.close(figure)


def _heading(axes: plt.Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10.5, color=INK, pad=8)


def _plot_losses(axes: plt.Axes, unigram: float, history: History) -> None:
    steps = np.arange(1, len(history.train) + 1)
    held_out_steps, held_out = np.array(history.held_out).T
    reach = len(steps) // 80
    smooth = [np.mean(history.train[i - min(reach, i) : i + min(reach, i) + 1]) for i in range(len(steps))]
    axes.plot(steps, history.train, color=PALE, linewidth=0.8, alpha=0.6)
    axes.plot(steps, smooth, color=PALE, linewidth=2.2, label="training")
    axes.plot(held_out_steps, held_out, color=DEEP, linewidth=2.2, marker="o", markersize=5, label="held out")
    axes.axhline(unigram, color=WARM, linewidth=1.4, linestyle=(0, (5, 3)))
    end = len(steps)
    axes.text(end, unigram + 0.05, f"unigram model {unigram:.3f}", color=WARM, ha="right", va="bottom")
    below = held_out[-1] < unigram
    place = {"xytext": (0, -10 if below else 10), "textcoords": "offset points", "va": "top" if below else "bottom"}
    axes.annotate(f"{held_out[-1]:.3f}", (end, held_out[-1]), color=DEEP, ha="right", fontweight="bold", **place)
    top = max(held_out[0], unigram) * 1.04
    axes.set_xlim(0, end * 1.03)
    axes.set_ylim(0, top)
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("training step")
    axes.set_ylabel("nats per byte")
    other = axes.secondary_yaxis("right", functions=(bits, lambda b: b * math.log(2)))
    other.set_ylabel("bits per byte", color=MUTED)
    other.tick_params(length=0, colors=MUTED)
    other.spines["right"].set_visible(False)
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.98), labelcolor=INK)
    _heading(axes, "Loss on training batches and on held-out files")


def _plot_usage(axes: plt.Axes, usage: Tensor) -> None:
    blocks, experts = usage.shape
    relative = usage.numpy() * experts
    image = axes.imshow(relative, cmap="Blues", vmin=0, vmax=2, aspect="auto")
    bar = axes.figure.colorbar(image, ax=axes, orientation="horizontal", fraction=0.07, pad=0.06, aspect=30)
    bar.set_ticks([0, 1, 2], labels=["unused", "even share", "twice that or more"])
    bar.ax.tick_params(length=0, labelsize=7.5)
    for label, side in zip(bar.ax.get_xticklabels(), ("left", "center", "right"), strict=True):
        label.set_horizontalalignment(side)
    bar.outline.set_visible(False)
    axes.set_yticks(range(blocks), [f"block {i + 1}" for i in range(blocks)])
    axes.set_xticks([])
    axes.tick_params(length=0, colors=INK)
    axes.spines[:].set_visible(False)
    if experts <= 64:  # more would be white lines and nothing else
        axes.set_xticks([x + 0.5 for x in range(experts - 1)], minor=True)
    axes.set_yticks([y + 0.5 for y in range(blocks - 1)], minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="minor", length=0)
    _heading(axes, f"Load of the {experts} experts, held-out bytes")


def _plot_rates(axes: plt.Axes, comparison: Comparison) -> None:
    names, rates = list(comparison.rates), np.array(list(comparison.rates.values()))
    colors = ["#c3cad2", "#7fb0e0", DEEP][: len(names)]
    axes.barh(range(len(names)), rates, color=colors, height=0.62)
    for row, rate in enumerate(rates):
        label = f"{rate:,.0f}" + (f"  {rate / rates[0]:.2f}x" if row else "")
        axes.text(rate + rates.max() * 0.02, row, label, va="center", fontsize=9, color=INK)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, rates.max() * 1.5)
    axes.set_xticks([])
    axes.tick_params(length=0, colors=INK)
    axes.spines[:].set_visible(False)
    _heading(axes, "Tokens/s, forward + backward")

"""Draws which room of the package imports which, from the imports in the code, into docs/architecture.svg.

    python -m tools.import_graph [--check]

A room is a folder or a module directly under ``tgl``, or a folder of implementations in ``tgl.backends``. An arrow says
that importing the one room imports the other; it is left out where a chain of other arrows says the same. A dashed
arrow is an import inside a function or for type checkers alone. ``--check`` writes nothing, and fails where the picture
is not what the command writes.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tgl"
PICTURE = ROOT / "docs" / "architecture.svg"

Graph = dict[str, set[str]]
Edge = tuple[str, str]

# --- imports ----------------------------------------------------------------------------------------------------------


def name_of(path: Path) -> str:
    """Return the dotted name of the module in the file ``path``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules() -> dict[str, Path]:
    """Return the files of all modules of the package, by module name."""
    return {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when the module is imported, without those for type checkers."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            typing = isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"
            yield from statements(statement.orelse if typing else statement.body + statement.orelse)
        elif isinstance(statement, (ast.Try, ast.With, ast.For)):
            yield from statements(statement.body)


def imported(source: str, package: str, known: Iterable[str], *, anywhere: bool = False) -> set[str]:
    """Return the modules among ``known`` that a module of ``package`` imports when it is imported itself.

    Args:
        source: text of the module.
        package: the package that relative imports start from.
        known: names of modules.
        anywhere: whether to count imports inside functions and for type checkers too.
    """
    tree, known, found = ast.parse(source), set(known), set()
    for statement in ast.walk(tree) if anywhere else statements(tree.body):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - statement.level + 1] if statement.level else []
            base = ".".join([*above, *(statement.module or "").split(".")]).rstrip(".")
            for alias in statement.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in known else base)
    return found & known


def module_graph(*, anywhere: bool = False) -> Graph:
    """Return what every module of the package imports; ``anywhere`` as for ``imported``."""
    known = modules()
    packages = {name: name if path.name == "__init__.py" else name.rpartition(".")[0] for name, path in known.items()}
    return {name: imported(path.read_text(), packages[name], known, anywhere=anywhere) for name, path in known.items()}


def room_of(module: str) -> str:
    """Return the room of a module: ``ops`` for ``tgl.ops.moe``, ``tgl`` for the package itself.

    A folder in ``tgl.backends`` is a room as well: ``backends.cpu`` for ``tgl.backends.cpu.gemm``.
    """
    parts = module.split(".")
    nested = parts[1:2] == ["backends"] and len(parts) > 2 and (PACKAGE / "backends" / parts[2]).is_dir()
    return ".".join(parts[1 : 3 if nested else 2]) or module


def room_graph(*, anywhere: bool = False) -> Graph:
    """Return which other rooms every room imports; ``anywhere`` as for ``imported``."""
    graph: Graph = {}
    for module, targets in module_graph(anywhere=anywhere).items():
        room = room_of(module)
        graph.setdefault(room, set()).update(map(room_of, targets))
    return {room: targets - {room} for room, targets in sorted(graph.items())}


# --- picture ----------------------------------------------------------------------------------------------------------

BOX_WIDTH, BOX_HEIGHT, GAP, LEVEL_HEIGHT, MARGIN, DUMMY_WIDTH = 132, 30, 14, 82, 16, 28


class Spot(NamedTuple):
    """The centre of a box, or of the bend of an arrow."""

    x: float
    y: float


def reachable(graph: Graph, start: str) -> set[str]:
    """Return the rooms at the ends of chains of arrows from ``start``."""
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        room = waiting.pop()
        if room not in found:
            found.add(room)
            waiting += graph[room]
    return found


def shortened(graph: Graph) -> Graph:
    """Return the graph without arrows that follow from a chain of others."""
    return {
        room: {t for t in targets if not any(t in reachable(graph, other) for other in targets)}
        for room, targets in graph.items()
    }


def levels_of(graph: Graph) -> dict[str, int]:
    """Return how many arrows the longest chain below each room has."""
    levels: dict[str, int] = {}

    def level(room: str) -> int:
        if room not in levels:
            levels[room] = 1 + max(map(level, graph[room]), default=-1)
        return levels[room]

    for room in graph:
        level(room)
    return levels


def placed(edges: list[Edge], levels: dict[str, int]) -> tuple[dict[str, Spot], dict[Edge, list[str]], float]:
    """Return the spot of every box and bend, the chain of nodes of every edge, and the width of the picture."""
    rows: list[list[str]] = [[] for _ in range(max(levels.values()) + 1)]
    for room in sorted(levels):
        rows[levels[room]].append(room)
    chains = {}
    for upper, lower in edges:
        bends = [f"{upper}>{lower}@{level}" for level in range(levels[upper] - 1, levels[lower], -1)]
        for bend in bends:
            rows[int(bend.rpartition("@")[2])].append(bend)
        chains[upper, lower] = [upper, *bends, lower]
    near: dict[str, list[str]] = {node: [] for row in rows for node in row}
    for chain in chains.values():
        for one, other in itertools.pairwise(chain):
            near[one].append(other)
            near[other].append(one)

    def width(node: str) -> int:
        return DUMMY_WIDTH if "@" in node else BOX_WIDTH

    def spread(row: list[str]) -> dict[str, float]:
        at = -(sum(map(width, row)) + GAP * (len(row) - 1)) / 2
        centres = {}
        for node in row:
            centres[node] = at + width(node) / 2
            at += width(node) + GAP
        return centres

    x = {node: at for row in rows for node, at in spread(row).items()}
    for sweep in range(24):  # every row in the order of its neighbours' centres, downwards and upwards by turns
        for row in rows if sweep % 2 else rows[::-1]:
            row.sort(key=lambda node: (sum(x[n] for n in near[node]) / (len(near[node]) or 1), node))
            x.update(spread(row))
    left = min(x[node] - width(node) / 2 for node in x)
    right = max(x[node] + width(node) / 2 for node in x)
    top = len(rows) - 1
    spots = {
        node: Spot(x[node] - left + MARGIN, MARGIN + BOX_HEIGHT / 2 + (top - level) * LEVEL_HEIGHT)
        for level, row in enumerate(rows)
        for node in row
    }
    return spots, chains, right - left + 2 * MARGIN


def path_of(chain: list[str], spots: dict[str, Spot]) -> str:
    """Return the curve of an arrow, from the lower side of the first box to the upper side of the last."""
    points = [spots[node] for node in chain]
    points[0] = Spot(points[0].x, points[0].y + BOX_HEIGHT / 2)
    points[-1] = Spot(points[-1].x, points[-1].y - BOX_HEIGHT / 2 - 5)
    parts = [f"M{points[0].x:.0f},{points[0].y:.0f}"]
    for a, b in itertools.pairwise(points):
        middle = (a.y + b.y) / 2
        parts.append(f"C{a.x:.0f},{middle:.0f} {b.x:.0f},{middle:.0f} {b.x:.0f},{b.y:.0f}")
    return " ".join(parts)


def draw(solid: Graph, everything: Graph) -> str:
    """Return the picture as SVG: ``solid`` arrows, and dashed ones for what ``everything`` has besides."""
    below = {room: reachable(solid, room) for room in solid}
    shown = [(room, target) for room, targets in sorted(shortened(solid).items()) for target in sorted(targets)]
    late = [(a, b) for a in sorted(everything) for b in sorted(everything[a]) if b not in below[a]]
    levels = levels_of({room: solid[room] | everything[room] for room in solid})
    spots, chains, width = placed(shown + late, levels)
    height = 2 * MARGIN + BOX_HEIGHT + max(levels.values()) * LEVEL_HEIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
        f'height="{height}" font-family="monospace" font-size="13">',
        "<title>Rooms of tgl and what they import; written by python -m tools.import_graph</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#556"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height}" fill="#ffffff"/>',
    ]
    for edge in shown + late:
        dashes = ' stroke-dasharray="5 4"' if edge in late else ""
        lines.append(
            f'<path d="{path_of(chains[edge], spots)}" fill="none" stroke="#556" stroke-width="1.2"{dashes} '
            f'marker-end="url(#tip)"><title>{edge[0]} imports {edge[1]}</title></path>'
        )
    for room in sorted(levels):
        x, y = spots[room]
        fill = "#e8eaf6" if PACKAGE.joinpath(*room.split(".")).is_dir() or room == "tgl" else "#f7f7f7"
        lines.append(
            f'<rect x="{x - BOX_WIDTH / 2:.0f}" y="{y - BOX_HEIGHT / 2:.0f}" width="{BOX_WIDTH}" '
            f'height="{BOX_HEIGHT}" rx="4" fill="{fill}" stroke="#3f51b5"/>'
        )
        lines.append(f'<text x="{x:.0f}" y="{y + 4:.0f}" text-anchor="middle" fill="#111">{room}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def picture() -> str:
    """Return the picture of the package as it is."""
    return draw(room_graph(), room_graph(anywhere=True))


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tools.import_graph", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail where the picture is not what the command writes")
    if not parser.parse_args().check:
        PICTURE.write_text(picture())
    elif PICTURE.read_text() != picture():
        print(f"{PICTURE.relative_to(ROOT)} is not what `python -m tools.import_graph` writes")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

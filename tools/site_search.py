"""Ask the search of the built site what newcomers ask, and fail where another page than theirs comes first.

    python tools/site_search.py [site]

The site's own search runs: its worker's JavaScript, over the index that the browser loads, in V8.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from py_mini_racer import MiniRacer

ANSWERS = {
    "install": "getting_started",
    "first program": "getting_started",
    "which gpu": "support",
    "how fast": "benchmarks/index",
    "benchmark": "benchmarks/index",
    "autocast": "dtypes",
    "compile": "compile_a_model",
    "expert parallel": "expert_parallel",
    "transformers": "transformers",
    "checkpointing": "memory",
    "lora": "lora",
    "mxfp8": "recipes",
    "nan": "debugging",
    "profiler": "profiling",
    "vllm": "vllm",
    "main_grad": "training",
    "export": "shipping",
    "grouped_gemm": "api/ops",
    "MoELayer": "api/layers",
    "topk_router": "api/routing",
}
# What a worker has of a browser. Messages go in by `ask`, and the last answer is kept.
BROWSER = """
var self = globalThis, console = {warn() {}}, ask, answer;
function addEventListener(_, handler) { ask = handler; }
function postMessage(message) { answer = message; }
"""
SETUP, QUERY = 0, 2  # types of messages to the worker


class Search:
    def __init__(self, site: Path):
        (worker,) = site.glob("assets/javascripts/workers/search.*.min.js")
        index = json.loads((site / "search" / "search_index.json").read_text())
        self._engine = MiniRacer()
        self._engine.eval(BROWSER + worker.read_text())
        self._send(SETUP, {"options": {"suggest": False}, **index})

    def _send(self, kind: int, data: object) -> None:
        self._engine.eval(f"ask({{data: {json.dumps({'type': kind, 'data': data})}}})")

    def pages(self, question: str) -> list[str]:
        """Return the pages that are found, best first."""
        self._send(QUERY, question)
        found = json.loads(str(self._engine.eval("JSON.stringify(answer.data.items)")))
        return [sections[0]["location"].partition(".html")[0] for sections in found]


def main() -> None:
    search = Search(Path(sys.argv[1] if len(sys.argv) > 1 else "site"))
    found = {question: search.pages(question)[:3] for question in ANSWERS}
    wrong = [f"{q!r} finds {', '.join(found[q])}, not {page}" for q, page in ANSWERS.items() if found[q][:1] != [page]]
    sources = sorted({page for pages in found.values() for page in pages if page.startswith("source/")})
    if wrong or sources:
        raise SystemExit("\n".join([*wrong, *(f"{page} is a source, and found" for page in sources)]))


if __name__ == "__main__":
    main()

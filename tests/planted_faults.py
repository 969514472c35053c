"""Planted faults: ``python -m tests.planted_faults`` changes one expression at a time and runs the tests on it.

Faults are drawn from the functions of ``--packages``, planted in a forked process one at a time, and followed by the
tests of ``--paths`` that reach the changed function: those of the quick run first, then those marked ``slow``. Which
tests reach a function is recorded once, from a few cases of every test function, in build/planted_faults.jsonl; delete
that file after larger changes.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import importlib
import itertools
import json
import os
import random
import resource
import select
import signal
import sys
import time
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.fault_kinds import Fault, Source

PACKAGES = ("tgl/ops", "tgl/nn", "tgl/meta", "tgl/tensor", "tgl/backends/cpu")
FOLDERS = ("ops", "nn", "meta", "quantize", "tensor")
FILES = ("backends", "debug", "layouts", "nothing", "offload", "optim", "recipes", "wrong_arguments")
PATHS = (*(f"tests/{name}" for name in FOLDERS), *(f"tests/test_{name}.py" for name in FILES))
RECORD = Path("build/planted_faults.jsonl")
CASES = 4  # of a test function, for the record of what it reaches, until they have taken ENOUGH seconds
ENOUGH = 2
WALL = 5  # seconds that a process may take for each of processor time, before it is stopped


class Reach(NamedTuple):
    """Seconds that a case of a test function takes, and the functions that its cases call."""

    seconds: float
    functions: frozenset[str]


def function_of(item: pytest.Item) -> str:
    return item.nodeid.split("[")[0]


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and those of the functions inside, in the order of the text."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


class Runner:
    """A pytest plugin that collects once, and runs tests in forked processes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.failed = False
        files = [path for package in args.packages for path in sorted(Path(package).rglob("*.py"))]
        self.sources = {os.path.abspath(path): Source(path) for path in files}
        self.live: dict[types.CodeType, list[types.FunctionType]] = defaultdict(list)
        self.unreliable: set[str] = set()  # tests that fail without a fault

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for source in self.sources.values():
            importlib.import_module(source.module)
        gc.unfreeze()  # frozen objects, which are those of the collection, are not listed
        for value in gc.get_objects():
            if type(value) is types.FunctionType and value.__code__.co_filename in self.sources:
                self.live[value.__code__].append(value)
        self.record(session.items)
        verdicts: Counter[str] = Counter()
        reaches = self.reaches()
        for fault in self.draw():
            try:
                verdict, by = self.find(fault, session.items, reaches)
            except TimeoutError as error:  # a fault that hangs, or a machine that is busy
                verdict, by = "undecided", str(error)
            verdicts[verdict] += 1
            print(f"{verdict}: {fault.path}:{fault.line} {fault.kind}\n{fault.diff}\n  {by}\n", flush=True)
        print(f"seed {self.args.seed}, {verdicts.total()} planted: {dict(verdicts)}")
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = True

    def fails(self, item: pytest.Item) -> bool:
        self.failed = False
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return self.failed

    def forked(self, call: Callable[[Callable[[str], None]], str | None], seconds: float) -> str | None:
        """Return what ``call`` returns in a process of its own, or what it noted last before it died."""
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(nothing, stream)
            try:
                result = call(lambda text: os.write(write, f"{text}\n".encode()))
                os.write(write, f"\0{result or ''}\n".encode())
            finally:
                os._exit(0)
        os.close(write)
        text, end = b"", time.monotonic() + WALL * seconds
        while select.select([read], [], [], max(0, end - time.monotonic()))[0]:
            part = os.read(read, 1 << 16)
            text += part
            if not part or b"\0" in part:
                break
        else:
            part = None
        os.close(read)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        last = (text.decode().splitlines() or ["the process"])[-1]
        if part is None:
            raise TimeoutError(f"no end of {last} after {WALL * seconds:.0f} seconds")
        return last[1:] or None if last.startswith("\0") else f"{last} (died)"

    def record(self, items: list[pytest.Item]) -> None:
        """Add what a few cases of every test function reach to the record."""
        cases: dict[str, dict[str, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
        known = self.reaches()
        for item in items:
            if function_of(item) not in known:
                cases[item.nodeid.split("::")[0]][function_of(item)].append(item)
        for number, functions in enumerate(cases.values()):
            print(f"recording file {number + 1} of {len(cases)}", file=sys.stderr)
            self.forked(lambda note, functions=functions: self.record_file(functions), 600)

    def record_file(self, functions: dict[str, list[pytest.Item]]) -> None:
        names = {}
        for function in itertools.chain(*self.live.values()):
            for code in codes(function.__code__):
                names[id(code)] = self.sources[code.co_filename].name(code.co_firstlineno)
        for test, items in functions.items():
            profile, start, count = cProfile.Profile(builtins=False), time.process_time(), 0
            for item in items[:: -(-len(items) // CASES)]:
                profile.enable()
                self.fails(item)
                profile.disable()
                count += 1
                if time.process_time() - start > ENOUGH:
                    break
            seconds = (time.process_time() - start) / count
            seen = {id(entry.code) for entry in profile.getstats()}
            reached = sorted({names[code] for code in seen if names.get(code)})
            line = {"test": test, "seconds": round(seconds, 4), "functions": reached}
            with RECORD.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def reaches(self) -> dict[str, Reach]:
        RECORD.parent.mkdir(exist_ok=True)
        lines = map(json.loads, RECORD.read_text().splitlines() if RECORD.exists() else ())
        return {line["test"]: Reach(line["seconds"], frozenset(line["functions"])) for line in lines}

    def replacements(self, fault: Fault) -> dict[types.CodeType, types.CodeType]:
        """Return the code that differs with the fault, for live functions that can take it."""
        source = self.sources[os.path.abspath(fault.path)]
        # By name and line, as a fault may leave a lambda or a comprehension out.
        changed = {(code.co_name, code.co_firstlineno): code for code in codes(source.code(fault))}
        pairs = [(code, changed.get((code.co_name, code.co_firstlineno), code)) for code in codes(source.code())]
        named = [(a, b) for a, b in pairs if not a.co_name.startswith("<")]
        return {a: b for a, b in named if a != b and a in self.live and a.co_freevars == b.co_freevars}

    def draw(self) -> list[Fault]:
        """Draw faults, their kinds by turns."""
        draws = random.Random(self.args.seed)
        kinds: dict[str, list[Fault]] = defaultdict(list)
        for source in self.sources.values():
            for fault in source.faults():
                kinds[fault.kind].append(fault)
        for faults in kinds.values():
            draws.shuffle(faults)
        drawn: list[Fault] = []
        while len(drawn) < self.args.count and any(kinds.values()):
            for faults in kinds.values():
                while faults:
                    fault = faults.pop()
                    if self.replacements(fault):
                        drawn.append(fault)
                        break
        return drawn[: self.args.count]

    def find(self, fault: Fault, items: list[pytest.Item], reaches: dict[str, Reach]) -> tuple[str, str]:
        """Return which run finds a fault, and the test that does; quick tests first, and few cases of one function."""
        rank: Counter[str] = Counter()
        quick: list[tuple[Any, pytest.Item, float]] = []
        slow: list[tuple[Any, pytest.Item, float]] = []
        for item in items:
            reach = reaches.get(function_of(item))
            if reach and fault.function in reach.functions:
                part = slow if item.get_closest_marker("slow") else quick
                rank[function_of(item)] += 1
                part.append(((rank[function_of(item)] * reach.seconds, item.nodeid), item, reach.seconds))
        if not quick and not slow:
            return "not reached", ""
        for name, part in (("quick", quick), ("slices", slow))[: 1 + (self.args.tests == "all")]:
            tests, left = [], self.args.seconds
            for _, item, seconds in sorted(part, key=lambda entry: entry[0]):
                if seconds <= left:
                    tests.append(item)
                    left -= seconds
            while found := self.finder(fault, [item for item in tests if item.nodeid not in self.unreliable]):
                if not self.finder(None, [item for item in tests if item.nodeid == found.split(" (")[0]]):
                    return name, found
                self.unreliable.add(found.split(" (")[0])
        return "not found", f"by {len(quick)} quick tests and {len(slow)} others"

    def finder(self, fault: Fault | None, items: list[pytest.Item]) -> str | None:
        """Return the first test that fails with the fault."""

        def call(note: Callable[[str], None]) -> str | None:
            for code, changed in (self.replacements(fault) if fault else {}).items():
                for function in self.live[code]:
                    # Equal code of two files is one key.
                    if function.__code__.co_filename == changed.co_filename:
                        function.__code__ = changed
            for item in items:
                note(item.nodeid)
                if self.fails(item):
                    return item.nodeid
            return None

        return self.forked(call, 3 * self.args.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=90)
    parser.add_argument("--tests", choices=("quick", "all"), default="all", help="of which runs (default: both)")
    parser.add_argument("--seconds", type=float, default=60, help="of tests in each run, for one fault")
    parser.add_argument("--packages", nargs="+", default=PACKAGES)
    parser.add_argument("--paths", nargs="+", default=PATHS)
    args = parser.parse_args()
    marker = "not gpu" if args.tests == "all" else "not gpu and not slow"
    sys.exit(pytest.main(["-q", "-s", "-p", "no:cacheprovider", "-m", marker, *args.paths], plugins=[Runner(args)]))


if __name__ == "__main__":
    main()

"""Runs mutants of one kernel: ``python -m tests.mutation.worker SUBJECT PER_KIND [ID ...]``.

Prints one JSON line per mutant: the verdict is ``caught`` (an EmulatorError or a wrong result), ``survived``, or
``unreached`` (it survived, and a trap in its place is never executed either).
"""

import json
import os
import re
import signal
import sys
import tempfile
import time

SEEDS = (0, 1)
TIME_LIMIT = 20  # seconds of processor time per launch; a mutant that takes longer hangs


class Hang(Exception):
    """The time limit of a launch."""


def _alarm(*_):
    raise Hang


def main():
    import torch

    from cute_emulator import EmulatorError, emulate

    from ..third_party.common import poison
    from .kernels import SUBJECTS
    from .mutants import mutants, reached

    subject, per_kind, wanted = SUBJECTS[sys.argv[1]], int(sys.argv[2]), set(sys.argv[3:])
    signal.signal(signal.SIGVTALRM, _alarm)
    seen: list[str] = []
    usual: set[str] = set()  # warnings of the unmutated kernel

    def attempt(text, seed, problem):
        """None, or how the run differs from a correct one."""
        call, out, want = problems[problem]
        poison(out)
        signal.setitimer(signal.ITIMER_VIRTUAL, TIME_LIMIT)
        try:
            with emulate(subject.arch, seed=seed, timing="adversarial", strict_loads=strict) as session:
                session.edit_ptx = lambda original: seen.append(original) or text or original
                call()
        except Hang:
            return "hang", f"no end within {TIME_LIMIT} s"
        except EmulatorError as e:
            return type(e).__name__, str(e)
        except Exception as e:  # a defect of the emulator itself: reported as such
            return "internal error", f"{type(e).__name__}: {e}"
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if not torch.equal(out, want):
            return "wrong result", ""
        fresh = {re.sub(r"\d+", "#", w): w for x in session.launches for w in x.warnings}
        for known in usual:
            fresh.pop(known, None)
        if text is None:
            usual.update(fresh)
            return None
        return ("warning", next(iter(fresh.values()))) if fresh else None

    def first_difference(text):
        """The first schedule, over both problems, in which a text does not run right."""
        for seed in SEEDS:
            for problem in range(len(problems)):
                how = attempt(text, seed, problem)
                if how is not None:
                    return *how, seed, problem
        return None

    strict = False
    with emulate(subject.arch):
        problems = subject.prepare()
    first = first_difference(None)
    assert first is None, f"the unmutated kernel fails: {first}"
    original = seen[0]
    assert set(seen) == {original}, "the problems compile to different kernels"
    strict = True
    strict = attempt(None, 0, 0) is None  # register loads without a wait: an error where the kernel has all its waits
    for m in mutants(original, per_kind):
        if wanted and m.id not in wanted:
            continue
        started = time.time()
        found = first_difference(m.text)
        verdict = "caught" if found else "survived"
        if not found and all(attempt(reached(original, m.line), 0, p) is None for p in range(len(problems))):
            verdict = "unreached"
        record = {"id": m.id, "kind": m.kind, "original": m.original[:160], "verdict": verdict}
        if found:
            record |= {"how": found[0], "message": found[1][:300], "seed": found[2], "problem": found[3]}
        print(json.dumps(record | {"seconds": round(time.time() - started, 2)}), flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:  # mutants would only fill the cache of translations
        os.environ["XDG_CACHE_HOME"] = cache
        main()

"""``python -m tests.mutation``: the whole mutation score, written to docs/mutation_score.md.

``--results DIR`` keeps the raw records there and reuses those of a finished kernel; ``--sample`` also rewrites the
fixed sample that the tests run.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from .kernels import SUBJECTS
from .survivors import explain

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = Path(__file__).with_name("sample.json")
PER_SUBJECT = 14


def run(subject, per_kind, results):
    """Records of all mutants of a kernel, from an earlier run if there is one."""
    path = results / f"{subject}.jsonl"
    if not path.exists():
        command = [sys.executable, "-m", "tests.mutation.worker", subject, str(per_kind)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        path.write_text(done.stdout)
    return [json.loads(line) for line in path.read_text().splitlines()]


def classify(subject, record):
    """(verdict, reason): caught, unreached, harmless or missed."""
    if record["verdict"] != "survived":
        return record["verdict"], record.get("how", "")
    return explain(subject, record)


def sample(all_records):
    """Per kernel, caught mutants of as many kinds as possible, half of them deletions; the quickest of each."""
    picked, seen = {}, set()
    for subject, records in all_records.items():
        caught = sorted((r for r in records if r["verdict"] == "caught"), key=lambda r: r["seconds"])
        first = {}
        for r in caught:
            first.setdefault(r["id"].split("#")[0], r)
        deleted = [r["id"] for r in first.values() if r["kind"] == "delete"][: PER_SUBJECT // 2]
        semantic = [r for r in first.values() if r["kind"] != "delete"]
        semantic.sort(key=lambda r: r["kind"] in seen)  # kinds that no other kernel shows come first
        semantic = semantic[: PER_SUBJECT - len(deleted)]
        seen.update(r["kind"] for r in semantic)
        picked[subject] = sorted(deleted + [r["id"] for r in semantic])
    return picked


def table(rows):
    head = "| " + " | ".join(rows[0]) + " |\n|" + " --- |" * len(rows[0]) + "\n"
    return head + "".join("| " + " | ".join(str(c).replace("|", "\\|") for c in r) + " |\n" for r in rows[1:])


def report(all_records):
    """The committed page."""
    summary = [["kernel", "mutants", "caught", "missed", "harmless", "not executed", "score"]]
    kinds: dict[str, Counter] = {}
    survivors = [["kernel", "mutant", "instruction", "verdict", "reason"]]
    how: Counter = Counter()
    total: Counter = Counter()
    for subject, records in all_records.items():
        count: Counter = Counter()
        for r in records:
            verdict, reason = classify(subject, r)
            count[verdict] += 1
            kinds.setdefault(r["kind"], Counter())[verdict] += 1
            if verdict == "caught":
                how[r["how"]] += 1
            elif verdict != "unreached":
                survivors.append([subject, f"`{r['id']}`", f"`{r['original'][:70]}`", verdict, reason])
        total += count
        summary.append([subject, *row(count)])
    summary.append(["**all**", *row(total)])
    by_kind = [["kind of bug", "caught", "missed", "harmless", "not executed"]]
    for kind, c in sorted(kinds.items()):
        by_kind.append([kind, c["caught"], c["missed"], c["harmless"], c["unreached"]])
    reports = [["reported as", "mutants"], *[[k, n] for k, n in how.most_common()]]
    return f"""# Mutation score of the kernel emulator

Written by `python -m tests.mutation`; the method is described in the [README](../README.md#how-it-was-validated). Every
synchronising instruction of each kernel is deleted in turn, and {len(kinds) - 1} kinds of semantic bug are planted at
up to a fixed number of places each, all at PTX level. A mutant is *caught* when one of the schedules ends in a report
(a warning that the kernel as it is does not give included) or in a wrong result; *not executed* means that a trap in
its place is not reached with these shapes either; *harmless* that the kernel is still right, for the reason given. The
score is caught / (caught + missed).

{table(summary)}
## By kind of bug

{table(by_kind)}
## How they were reported

{table(reports)}
## Survivors

{table(survivors)}"""


def row(c):
    tried = c["caught"] + c["missed"]
    score = f"{100 * c['caught'] / tried:.1f} %" if tried else "-"
    return [sum(c.values()), c["caught"], c["missed"], c["harmless"], c["unreached"], score]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "mutation")
    parser.add_argument("--per-kind", type=int, default=2)
    parser.add_argument("--sample", action="store_true")
    args = parser.parse_args()
    args.results.mkdir(parents=True, exist_ok=True)
    records = {s: run(s, args.per_kind, args.results) for s in SUBJECTS}
    (ROOT / "docs").mkdir(exist_ok=True)
    (ROOT / "docs" / "mutation_score.md").write_text(report(records))
    if args.sample:
        SAMPLE.write_text(json.dumps(sample(records), indent=1) + "\n")


if __name__ == "__main__":
    main()

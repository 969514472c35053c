"""``python -m tests.third_party``: run every third-party case and write docs/third_party_kernels.md."""

import argparse
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# quack patches the DSL and fixes the architecture when it is imported: a process for each
DRIVERS = (
    ("cutlass_operators", "sm_80"),
    ("cutlass_operators", "sm_90a"),
    ("quack_gemm", "sm_90a"),
    ("cutlass_operators", "sm_100a"),
    ("quack_gemm", "sm_100a"),
    ("cutlass_operators", "sm_120a"),
    ("quack_gemm", "sm_120a"),
)


def run(module, arch, seeds):
    """Records of all cases of a driver for one architecture."""
    command = [sys.executable, "-m", f"tests.third_party.{module}", "--arch", arch, "--seeds", seeds]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def describe(record):
    """(types, tile and cluster, shape) of a record as text."""
    c, s = record["config"], record["shape"]
    types = (
        f"{c['a_fmt']} x {c['b_fmt']}, scales per {16 if c['a_fmt'].endswith('nvfp4') else c.get('vec', 32)}"
        if "a_fmt" in c
        else c["ab"]
    )
    types += f" -> {c['out']}" + (", f16 accumulation" if c.get("acc") == "f16" else "")
    tile = "x".join(map(str, c["tile"])) + " / " + "x".join(map(str, c["cluster"]))
    sizes = f"groups {', '.join(map(str, s['sizes']))}; " if "sizes" in s else ""
    return types, tile, sizes + ", ".join(f"{k}={v}" for k, v in s.items() if k != "sizes")


def page(records, seeds):
    """The committed page."""
    packages = sorted({r["package"] for r in records})
    versions = ", ".join(f"`{p}` {importlib.metadata.version(p)}" for p in (*packages, "nvidia-cutlass-dsl"))
    rows = ["| kernel | arch | kind | types | tile / cluster | shape | error | seconds |", "|" + " --- |" * 8]
    for r in records:
        types, tile, shape = describe(r)
        name = f"{r['kernel']} ({r['package'].split('-')[0]}: {r['case']}{' *' if r['finding'] else ''})"
        rows.append(
            f"| {name} | {r['arch']} | {r['kind']} | {types} | {tile} | {shape} | {r['error']:g} | {r['seconds']} |"
        )
    return f"""# Third-party kernels in the emulator

Written by `python -m tests.third_party --seeds {seeds}` with {versions}. Inputs are small integers, and scales
powers of two, so that every product and sum is exact: `error` is the largest absolute difference from torch in float64,
rounded to the output type, over all schedules (adversarial timing, race detector on), and 0 is demanded. `seconds` is
processor time per launch (quack compiles in its first one). A kernel marked * is reported as it is, for shared memory
"written without fence.proxy.async"; the figures are those of the kernel with that fence added.

{chr(10).join(rows)}
"""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0,1,2")
    seeds = parser.parse_args().seeds
    records = [r for module, arch in DRIVERS for r in run(module, arch, seeds)]
    failed = [f"{r['package']} {r['case']}: {r.get('failure', r.get('error'))}" for r in records if r.get("error") != 0]
    if failed:
        sys.exit("\n".join(failed))
    (ROOT / "docs" / "third_party_kernels.md").write_text(page(records, seeds))


if __name__ == "__main__":
    main()

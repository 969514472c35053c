"""``python -m tests.hardware instructions`` compares single instructions on the device with the emulator;
``products`` compares its two kinds of MMA with each other;
``capture FILE DRIVER CASE ...`` writes launches made in the emulator; ``replay FILE ...`` runs them on the device."""

import sys

from . import instructions, launches, products
from .driver import Device


def main(verb, *args):
    if verb == "instructions":
        results = instructions.compare(Device(), instructions.everything())
        wrong = [r for r in results if r[2]]
        for name, n, bad, first in wrong:
            print(f"{name}: {bad} of {n} differ; {first}")
        print(f"{len(results)} forms, {sum(r[1] for r in results)} results, {len(wrong)} forms differ")
        return bool(wrong)
    if verb == "products":
        found = products.compare(Device())
        print(
            f"{found.differing} of {found.sums} sums differ between mma.sync and wgmma; largest error {found.error:.2g}"
        )
        return found.error > products.ROUNDING
    if verb == "capture":
        path, driver, *names = args
        cases = __import__(f"tests.third_party.{driver}", fromlist=["CASES"]).CASES
        launches.save(path, {name: launches.capture(cases[name]) for name in names})
        return False
    worst = False
    for path in args:
        for name, parts in launches.replay_file(path).items():
            bad = sum(p[1] for p in parts)
            worst = worst or bad > 0
            print(f"{name}: {parts[0][0]} output bytes, {bad} differ")
    return worst


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

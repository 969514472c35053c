"""The demo's model trains on a device as it does on a CPU: in every recipe, eager, compiled and captured.

A compiled graph plans its own memory around the ops, and a captured one keeps it: what an op writes, reads or leaves to
a later launch beyond what it says shows there and nowhere else.
"""

import multiprocessing
import os
import pickle
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from tests import chips, demo_training
from tests.demo_training import History, Size

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_compiler")]

ARCH = chips.arch()
if ARCH is None:
    pytest.skip("needs a device that the kernels are built for", allow_module_level=True)

RECIPES = chips.EVERY
SIZE = Size(dim=256, layers=2, experts=32, context=256, windows=8, steps=24)
WAYS = {
    "eager": {"how": demo_training.eager},
    "compiled": {"how": demo_training.compiled},
    "captured": {"how": demo_training.eager, "capture": True},
}


def histories() -> dict[str, History]:
    """Train on the CPU in every recipe, and in float32, each in a process of its own."""
    with ProcessPoolExecutor(len(RECIPES) + 1, multiprocessing.get_context("spawn")) as pool:
        threads = max(1, (multiprocessing.cpu_count() - 1) // (len(RECIPES) + 1))
        found = {name: pool.submit(demo_training.train, name, SIZE, threads=threads) for name in RECIPES}
        found["float32"] = pool.submit(demo_training.train, "none", SIZE, dtype=torch.float32, threads=threads)
        return {name: future.result() for name, future in found.items()}


def of_one_process(folder: Path) -> dict[str, History]:
    """``histories`` of the first process that calls this; others that run tests wait for its file."""
    file = folder / "histories.pickle"
    with FileLock(folder / "histories.lock"):
        if not file.exists():
            file.write_bytes(pickle.dumps(histories()))
    return pickle.loads(file.read_bytes())


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """A ``Future`` of the histories, which are computed in the background."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of the run
    with ThreadPoolExecutor(1) as background:
        yield background.submit(of_one_process, folder)


def costs(references: dict[str, History], curve) -> list[float]:
    """The most that any recipe on the CPU has been away from float32 in any step so far."""
    exact = curve(references["float32"])
    largest, found = 0.0, []
    for step, value in enumerate(exact):
        away = (abs(curve(references[name])[step] - value) for name in RECIPES)
        largest = max(largest, *away)
        found.append(largest)
    return found


def assert_alike(ours: History, theirs: History, references: dict[str, History]) -> None:
    """``theirs`` is the CPU's run in the recipe of ``ours``.

    A first gradient may differ by half of what the recipe costs there, and by twice what bfloat16 does: both sides
    round. Loss and norm may differ by four times what low precision has cost any recipe so far: small differences grow
    from step to step.
    """
    exact, rounded = (references[name].gradients for name in ("float32", "none"))
    wrong = []
    for name, wanted in theirs.gradients.items():
        gap, size = (ours.gradients[name] - wanted).norm(), exact[name].norm()
        limit = (wanted - exact[name]).norm() / 2 + 2 * (rounded[name] - exact[name]).norm()
        if not gap <= limit:  # NaN is not
            wrong.append(f"{name}: {gap / size:.3g} from the CPU, at most {limit / size:.3g}")
    assert not wrong, "gradients of the first step, relative to float32's:\n" + "\n".join(wrong)
    for title, curve in (("loss", lambda h: h.losses), ("norm", lambda h: h.norms)):
        for step, (mine, wanted, cost) in enumerate(zip(curve(ours), curve(theirs), costs(references, curve))):
            assert abs(mine - wanted) <= 4 * cost, f"{title} of step {step}: {mine:.4f}, on the CPU {wanted:.4f}"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", WAYS)
def test_training_has_the_losses_of_a_cpu(recipe, way, references):
    # Before the CPU is waited for: it computes meanwhile.
    ours = demo_training.train(recipe, SIZE, device="cuda", **WAYS[way])
    on_cpu = references.result()
    theirs = on_cpu[recipe]
    assert_alike(ours, theirs, on_cpu)
    assert theirs.losses[-1] < 0.6 * theirs.losses[0]

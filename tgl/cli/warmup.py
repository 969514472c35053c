"""``python -m tgl.warmup``: compile the kernels of training steps into the cache on disk, without a GPU::

    python -m tgl.warmup --chip sm_90 experts=8,hidden=4096,ffn=14336,tokens=4096,top_k=2 package.module:step

A step is a ``tgl.MoE`` block given by its sizes, or a function that runs a step of a model on the meta device. ATen's
grouped products are included if the function calls ``tgl.integrations.torch.enable()`` first. The function
``tgl.warmup`` prepares a single call on the current device.
"""

from __future__ import annotations

import argparse

from ..cutlass_kernels.archs import arch_of
from ..cutlass_kernels.runtime import cache, device
from .step_kernels import named_step, recorded, store

NO_CALLS = "no op that tgl serves was called; ATen's products are served after `tgl.integrations.torch.enable()`"


def main(arguments: list[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tgl.warmup", description=(__doc__ or "").partition("::")[0])
    parser.add_argument("--chip", required=True, help="what the kernels are for: sm_80 to sm_121")
    parser.add_argument("--directory", help="where to keep them; default: where a job looks for them")
    parser.add_argument("steps", nargs="+", metavar="STEP", help="fields of a block, or module:function")
    given = parser.parse_args(arguments)
    try:
        arch_of(given.chip)
        steps = {text: named_step(text) for text in given.steps}
    except ValueError as error:
        parser.error(str(error))
    reason = device.packages_reason()
    if reason is not None:
        parser.error(f"compiling kernels {reason}")
    if given.directory is not None:
        cache.set_directory(given.directory)
    try:
        cache.directory()
    except OSError as error:
        parser.error(f"kernels cannot be kept ({error}); name a directory with --directory")
    for text, step in steps.items():
        before, calls = cache.count(), recorded(step)
        if not calls:
            print(f"  {NO_CALLS}")
        for sentence in store(calls, given.chip):
            print(f"  {sentence}")
        print(f"{text}: compiled {cache.count() - before}")
    print(f"{cache.count()} kernels in {cache.directory()}")

"""The text: sources of the running Python's standard library, as bytes, with whole files held out."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# Third-party code, tests, and generated tables: not the prose and code that the model is to learn.
SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "__pycache__",
}
HELD_OUT_SHARE = 0.05
HELD_OUT_BYTES = 1 << 15  # scored at every evaluation
SEPARATOR = b"\0"  # stands between two files; no source contains it


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text.

    Attributes:
        train: uint8 ``[bytes]``, the training files one after the other.
        held_out: int64 ``[windows, context + 1]``, evenly spaced over the held-out files.
        files: number of training and of held-out files.
        unigram: nats per byte of a model that knows only how often each byte occurs in ``train``, on ``held_out``.
    """

    train: Tensor
    held_out: Tensor
    files: tuple[int, int]
    unigram: float

    def batch(self, size: int, generator: torch.Generator) -> Tensor:
        """int64 ``[size, context + 1]``: windows that start anywhere in the training text."""
        length = self.held_out.shape[1]
        starts = torch.randint(self.train.shape[0] - length + 1, (size, 1), generator=generator)
        return self.train[starts + torch.arange(length)].long()


def load(context: int, root: Path | None = None) -> Corpus:
    """Read every ``.py`` file below ``root`` (default: the folder of ``os``) and split by a hash of its relative path.

    The same files are held out on every machine that has the same Python.

    Raises:
        FileNotFoundError: there is too little text for windows of ``context + 1`` bytes.
    """
    root = Path(os.__file__).parent if root is None else root
    train, held_out = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not SKIPPED_FOLDERS.intersection(name.parts):
            draw = int.from_bytes(hashlib.sha256(name.as_posix().encode()).digest()[:4], "big") / 2**32
            (held_out if draw < HELD_OUT_SHARE else train).append(path.read_bytes())
    train_text, held_out_text = _stream(train), _stream(held_out)
    if min(len(train_text), len(held_out_text)) <= context:
        raise FileNotFoundError(
            f"{root} must hold the sources of the standard library, more than {context} bytes to train on and as many "
            f"held out, but has {len(train_text)} and {len(held_out_text)}, in {len(train)} and {len(held_out)} files"
        )
    windows = max(1, min(HELD_OUT_BYTES, len(held_out_text)) // (context + 1))
    starts = torch.linspace(0, len(held_out_text) - context - 1, windows, dtype=torch.float64).long()
    scored = held_out_text[starts[:, None] + torch.arange(context + 1)].long()
    return Corpus(train_text, scored, (len(train), len(held_out)), _unigram(train_text, scored[:, 1:]))


def _stream(files: list[bytes]) -> Tensor:
    return torch.from_numpy(np.frombuffer(SEPARATOR.join(files), dtype=np.uint8).copy())


def _unigram(train: Tensor, targets: Tensor) -> float:
    counts = torch.bincount(train.int(), minlength=256).double() + 1  # add one, for bytes never seen
    return -(counts / counts.sum()).log()[targets].mean().item()

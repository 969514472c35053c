"""Machine code of a kernel, read with nvdisasm: registers, local memory and instructions."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


def nvdisasm() -> str:
    """Return the path of the disassembler: that of the package ``nvidia-cuda-nvdisasm``, or else one on PATH.

    Raises:
        FileNotFoundError: there is none.
    """
    try:
        for file in importlib.metadata.files("nvidia-cuda-nvdisasm") or ():
            if file.name == "nvdisasm":
                return str(file.locate())
    except importlib.metadata.PackageNotFoundError:
        pass
    found = shutil.which("nvdisasm")
    if found is None:
        raise FileNotFoundError("machine code is read with the package nvidia-cuda-nvdisasm, or nvdisasm on PATH")
    return found


@dataclass(frozen=True)
class Report:
    """The report of one kernel.

    Attributes:
        registers: per thread, at launch.
        frame: bytes of stack per thread.
        opcodes: static count of machine instructions, by name with the first modifier (``"HGMMA.64x128x16"``).
        loops_over_lanes: how many instructions that take uniform registers are repeated for each lane whose operands
            are others. The assembler makes such a loop around a TMA instruction where it cannot show that the lanes of
            a warp go together.
    """

    registers: int
    frame: int
    opcodes: Counter[str]
    loops_over_lanes: int

    def count(self, prefix: str) -> int:
        """Instructions whose name begins with ``prefix``."""
        return sum(n for name, n in self.opcodes.items() if name.startswith(prefix))

    @property
    def spills(self) -> int:
        """Accesses to local memory."""
        return self.count("LDL") + self.count("STL")


INSTRUCTION = r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*(?:\.\w+)*)\s*([^;]*);"


def loads_before_use(cubin: bytes, bits: int) -> tuple[int, int]:
    """Global loads of ``bits``, and how many of them stand before the first instruction that reads what one loads."""
    taken, found, before = set(), 0, None
    for name, operands in re.findall(INSTRUCTION, _disassembled(cubin), re.M):
        registers = [int(number) for number in re.findall(r"\bR(\d+)", operands)]
        if name.startswith("LDG") and name.endswith(f".{bits}"):
            found += 1
            taken |= {registers[0] + i for i in range(bits // 32)}
        elif name != "CS2R" and before is None and taken & set(registers):
            before = found
    return found, found if before is None else before


def between(cubin: bytes, inner: str, outer: str) -> tuple[int, int]:
    """Return how many instructions ``inner`` of the block of code with most of them stand between the first and the
    last ``outer`` of that block, and how many in all; names by their beginnings. A block ends at a label or a branch.
    """
    blocks = re.split(r"^\.L\S+:|\bBRA\b|\bBSYNC\b", _disassembled(cubin), flags=re.M)
    names = ([name for name, _ in re.findall(INSTRUCTION, block, re.M)] for block in blocks)
    most = max(names, key=lambda found: sum(name.startswith(inner) for name in found))
    at = [i for i, name in enumerate(most) if name.startswith(outer)]
    inside = most[at[0] : at[-1]] if at else []
    return tuple(sum(name.startswith(inner) for name in part) for part in (inside, most))  # type: ignore[return-value]


def additions_in_turns(cubin: bytes) -> int:
    """Return how many float32 additions stand between a barrier at which a warpgroup waits for its turn and its MMAs.

    They delay the other warpgroup, whose turn is next. Behind a branch the assembler does not move them there.
    """
    found, inside = 0, None
    for name, _ in re.findall(INSTRUCTION, _disassembled(cubin), re.M):
        if name.startswith("BAR.SYNC"):
            inside = 0
        elif inside is not None and name in ("FFMA", "FADD"):
            inside += 1
        elif name.startswith("QGMMA") and inside is not None:
            found, inside = found + inside, None
        elif name == "BRA":
            inside = None
    return found


def inspect(cubin: bytes, kernel: str = "") -> Report:
    """Read a cubin: the most registers and stack and all instructions of the kernels whose names hold ``kernel``."""
    text = _disassembled(cubin)
    sections = re.split(r"^//-+ \.text\.(\S+) -+$", text, flags=re.M)
    code = "\n".join(body for name, body in zip(sections[1::2], sections[2::2]) if kernel in name)
    names = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*(?:\.\w+)?)[^;]*;", code, re.M)
    registers, frame = (_attribute(text, name, kernel) for name in ("REGCOUNT", "FRAME_SIZE"))
    return Report(registers, frame, Counter(names), code.count("BRA.U.ANY"))


def _disassembled(cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([nvdisasm(), str(path)], capture_output=True, text=True, check=True).stdout


def _attribute(text: str, name: str, kernel: str) -> int:
    """The largest value of an attribute that the cubin states per function."""
    blocks = re.findall(rf"EIATTR_{name}\n(.*?)(?=//-----|\n\n)", text, re.S)
    stated = [re.search(r"index@\((\S+)\)\s.*\.word\s+0x([0-9a-f]+)", block, re.S) for block in blocks]
    return max(int(found[2], 16) for found in stated if found and kernel in found[1])

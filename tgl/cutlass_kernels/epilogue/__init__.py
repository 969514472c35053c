"""The epilogue: the steps from an accumulator to memory.

The steps are the same on every architecture, for one chunk of registers at a time: add the bias times the row scale,
add the old output where sums are rounded to 16 bits, round, stage in shared memory, store. ``EpilogueSpec`` states
which of them a kernel has and is a part of its key; ``EpilogueArgs`` carries their operands from the launch.

Each kind of extension has one place. A factor is a step beside ``add_bias``: a field of the spec, an operand if it has
one, and the arithmetic on the chunk's registers. A second output, such as an activation, is a second tensor map, whose
chunk is staged and stored after the first; a quantised one has a map per direction and writes its scales. Scales of an
operand are loaded by another map into the same stage of the mainloop's ring and bounded by the same policy as the
operand; the epilogue does not see them.

Launchers import ``EpilogueSpec``, which is plain Python; GEMM kernels import everything.
"""

from .epilogue_spec import EpilogueSpec

__all__ = ["EpilogueSpec"]

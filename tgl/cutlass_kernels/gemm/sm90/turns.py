"""Turns at the tensor cores of two consumer warpgroups: who has issued its MMAs lets the other one issue."""

from cutlass import Int32, cute

TURN_BARRIER = 4  # named barrier on which the first warpgroup waits for its turn
THREADS = 2 * 128


@cute.jit
def wait_turn(who: Int32):
    """Wait until the other warpgroup has given the turn to ``who``, who calls this."""
    cute.arch.barrier(barrier_id=TURN_BARRIER + who, number_of_threads=THREADS)


@cute.jit
def give_turn(who: Int32):
    """Let ``who`` multiply."""
    cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + who, number_of_threads=THREADS)

"""Ping-pong between two consumer warpgroups, or teams of them, which multiply alternately: a named barrier for each."""

from cutlass import Int32, cute

TURN_BARRIER = 4  # named barrier on which the first team waits for its turn


@cute.jit
def wait_turn(team: Int32):
    """Wait until the other team has given the turn to this one."""
    cute.arch.barrier(barrier_id=TURN_BARRIER + team, number_of_threads=2 * 128)


@cute.jit
def give_turn(team: Int32):
    """Let ``team`` multiply."""
    cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + team, number_of_threads=2 * 128)

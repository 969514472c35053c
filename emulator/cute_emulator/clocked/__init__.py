"""A model of time: what a chip's units take, and a launch whose warps go on in the order of their clocks.

``costs`` has the facts of a chip, ``schedule`` what the instructions between two events take, ``launch`` the units that
copies and MMAs keep busy.
"""

from .costs import Costs, costs_of
from .launch import ClockedLaunch, Cycles, Usage

__all__ = ["ClockedLaunch", "Costs", "Cycles", "Usage", "costs_of"]

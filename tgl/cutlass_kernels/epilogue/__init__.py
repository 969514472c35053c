"""What happens to an accumulator on its way to memory."""

from .spec import EpilogueSpec

__all__ = ["EpilogueSpec"]

"""The former module of ``_pending_wgrads.Delayed``, by which pickles of layers name the class."""

from ._pending_wgrads import Delayed

__all__ = ["Delayed"]

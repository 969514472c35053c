"""The reader of imports that draws the picture of the architecture page."""

from tools.import_graph import imported

SOURCE = """
import os, p.a
from . import b, attribute
from .c import name
from .. import q
from ..q import r
if TYPE_CHECKING:
    from . import typed
else:
    from . import d
def later():
    from . import e
"""


def test_imports_are_read_as_they_are_meant():
    modules = {"p", "p.a", "p.s", "p.s.b", "p.s.c", "p.q", "p.q.r", "p.s.typed", "p.s.d", "p.s.e"}
    assert imported(SOURCE, "p.s", modules) == {"p.a", "p.s.b", "p.s", "p.s.c", "p.q", "p.q.r", "p.s.d"}
    assert imported(SOURCE, "p.s", modules, anywhere=True) == modules - {"p"}

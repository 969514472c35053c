"""The counter of ``tests.structure`` on small modules, and what it may never find in this package."""

from pathlib import Path

import pytest

from tests import structure

ROOT = Path(__file__).parents[1]
LONG_LISTS = 109  # functions with 8 and more parameters; docs/development.md says which may stay


def test_counts_of_a_small_package(tmp_path):
    package = tmp_path / "tgl" / "cutlass_kernels"
    package.mkdir(parents=True)
    (package / "host.py").write_text(
        '"""Docstring."""\n\nfrom tgl.cutlass_kernels import other\n\n\n# comment\ndef f(a, b, c, d, e, f, g, h):\n'
        '    """Two\n    lines."""\n    import cutlass\n    return a == "sm_90"\n'
    )
    (package / "other.py").write_text("import cutlass\nfrom . import host\n")
    found = structure.measure(tmp_path)
    assert found == {
        "host lines": 4,
        "kernel lines": 2,
        "functions of 8": 1,
        "import cycles": 1,
        "longest file": 11,
    }


@pytest.fixture(scope="module")
def measured():
    return structure.measure(ROOT)


def test_no_import_cycles(measured):
    assert measured["import cycles"] == 0


def test_functions_with_many_parameters_do_not_grow(measured):
    found = measured[f"functions of {structure.MANY}"]
    assert found <= LONG_LISTS, (
        "make one argument of parameters that travel together: `python -m tests.structure --list`"
    )
    assert found == LONG_LISTS, f"there are fewer now: write {found} here, so that it stays so"

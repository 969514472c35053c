"""The table of architectures in docs/transformers.md is what the adapter says of the release that tests install."""

import pytest

pytest.importorskip("transformers")

from tests.integrations import architectures


@pytest.mark.slow
def test_the_table_is_current():
    assert architectures.on_page() == architectures.table(), "run `python -m tests.integrations.architectures`"

"""docs/api.md is what the docstrings say."""

import runpy

from tests.helpers.source_tree import ROOT


def test_api_page_is_in_step() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_api.py"))["page"]()
    assert (ROOT / "docs" / "api.md").read_text() == page, "run: python docs/make_api.py > docs/api.md"

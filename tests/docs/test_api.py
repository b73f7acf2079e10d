"""The API pages list every public name."""

import importlib
import pathlib
import re

import pytest

PAGES = pathlib.Path(__file__).parents[2] / "docs" / "api"
ROOMS = ("jrb", "jrb.checkpoint", "jrb.datasets", "jrb.interop", "jrb.layouts", "jrb.plot")
ROOMS += ("jrb.remote", "jrb.storages", "jrb.transforms", "jrb.types")


def documented():
    """Returns the names on the API pages."""
    text = "\n".join(path.read_text() for path in PAGES.glob("*.rst"))
    return set(
        re.findall(r"(?:auto|py:)(?:class|function|exception|data|module):: (jrb[\w.]*)", text)
    )


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_is_on_a_page(room):
    there = documented()
    for name in importlib.import_module(room).__all__:
        same = {f"{other}.{name}" for other in ROOMS}
        assert there & same, f"{room}.{name} is on no page"


def test_every_page_is_in_the_list_of_pages():
    listed = (PAGES / "index.rst").read_text().split()
    assert {path.stem for path in PAGES.glob("*.rst")} - {"index"} <= set(listed)

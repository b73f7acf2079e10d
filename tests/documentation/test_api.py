"""The API pages list every public name, and no others."""

import pathlib
import re

import pytest
from generate import public

PAGES = pathlib.Path(__file__).parents[2] / "docs" / "api"


def documented():
    """Returns the objects on the API pages, by name."""
    text = "\n".join(path.read_text() for path in PAGES.glob("*.rst"))
    kinds = r"(?:auto|py:)(?:class|function|exception|data|module):: (jrb[\w.]*)"
    names = re.findall(kinds, text)
    for room in re.findall(r"automodule:: (jrb[\w.]*)\n   :members:", text):
        names += [name for name, _ in public.public_objects() if name.rpartition(".")[0] == room]
    return {name: public.resolve(name) for name in names}


@pytest.mark.parametrize("room", public.ROOMS)
def test_every_public_name_is_on_a_page(room):
    """Another room may have a name too: then it must be that of the same object."""
    on_pages = documented()
    for name, value in public.public_objects():
        if name.rpartition(".")[0] != room:
            continue
        last = name.rpartition(".")[2]
        same = [its for its in on_pages if its.endswith(f".{last}") and on_pages[its] is value]
        assert same, f"{name} is on no page"


def test_every_page_is_in_the_list_of_pages():
    listed = (PAGES / "index.rst").read_text().split()
    assert {path.stem for path in PAGES.glob("*.rst")} - {"index"} <= set(listed)

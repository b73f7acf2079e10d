"""The walkthrough names only files and functions that exist."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]


def test_files_and_functions_exist():
    page = (ROOT / "docs/walkthrough.md").read_text()
    cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    assert len(cells) > 25
    for cell in cells:
        for part in cell.split(";"):
            path, *names = re.findall(r"`([\w./]+)`", part)
            code = (ROOT / "jrb" / path).read_text()
            for name in names:
                assert re.search(rf"(def|class) {name}\b", code), (path, name)

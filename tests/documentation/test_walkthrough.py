"""The walkthrough and other pages for contributors name only files and functions that exist."""

import pathlib
import re

import jax
import pytest

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


PAGES = ["ARCHITECTURE.md", "CONTRIBUTING.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("jrb/_*/README.md"))
FOLDERS = ("jrb", "tests", "docs", "examples", "benchmarks", ".ci")
ELSEWHERE = {"MySampler", *dir(jax.lax)}
"""Names of others: a reader's, and JAX's."""


@pytest.mark.parametrize("name", PAGES)
def test_every_name_on_pages_for_contributors_exists(name):
    """Every word of a code span is one of the code or a file's; every path is that of a file."""
    text = re.sub(r"^```.*?^```", "", (ROOT / name).read_text(), flags=re.DOTALL | re.MULTILINE)
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    sources = [path for path in files if path.suffix == ".py"] + [ROOT / "pyproject.toml"]
    known = {word for path in sources for word in re.findall(r"\w+", path.read_text())}
    known |= {word for path in files for word in re.findall(r"\w+", path.name)} | ELSEWHERE
    spans = re.findall(r"`([^`]+)`", text)
    assert len(spans) > 5
    assert {word for span in spans for word in re.findall(r"\w+", span)} - known == set()
    paths = [span for span in spans if re.fullmatch(r"(\w[\w.]*/)+[\w.]*", span)]
    folders = [ROOT, ROOT / "jrb", (ROOT / name).parent]
    # `rows/` is in the folder of a store.
    missing = [path for path in paths if not any((folder / path).exists() for folder in folders)]
    assert [path for path in missing if not re.match(r"rows\b|rows-7", path)] == []

"""What pages point to is there."""

import pathlib
import re
import urllib.parse

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md"]
PAGES += sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
INCLUDED = re.compile(r"^```\{(?:include|literalinclude)\} (\S+)$", re.MULTILINE)


def prose(path):
    """A page without its code."""
    text = re.sub(r"^```(?!\{).*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "code", text)


def anchors(path):
    """The names of a page's headings, as GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in headings}


def broken(path):
    """The links of a page that lead nowhere."""
    text = prose(path)
    targets = LINK.findall(text) + INCLUDED.findall(path.read_text())
    for target in targets:
        url = urllib.parse.urlsplit(target)
        if url.scheme:
            if url.scheme not in ("https", "http") or "." not in url.netloc:
                yield target
            continue
        file = (path.parent / urllib.parse.unquote(url.path)) if url.path else path
        if not file.exists() or (
            url.fragment and file.suffix == ".md" and url.fragment not in anchors(file)
        ):
            yield target


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    assert list(broken(path)) == []


def test_broken_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A title\n\n[a](page.md#a-title) [b](#b) [c](other.md) `[d](other.md)`\n"
        "[e](https:///) ![f](https://example.org/x.png)\n\n```python\n[g](other.md)\n```\n"
    )
    assert list(broken(page)) == ["#b", "other.md", "https:///"]


def test_the_readme_fits_a_few_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150

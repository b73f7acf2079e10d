"""The targets of all links exist."""

import pathlib
import re
import urllib.parse

import pytest
from generate import made

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md"]
PAGES += sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
INCLUDED = re.compile(r"^```\{(?:include|literalinclude)\} (\S+)$", re.MULTILINE)


URL = re.compile(r"https?://[^\s)>\]\"'`\\\\|*]+")
OURS = "https://github.com/jrb-dev/jrb"
SITE = "https://jrb.readthedocs.io"
KNOWN = (
    r"https://arxiv\.org/abs/\d{4}\.\d{4,5}",
    r"https://openreview\.net/forum\?id=\w+",
    r"https://(github|gitlab)\.com/[\w.-]+/[\w.-]+",
    r"https://gymnasium\.farama\.org(/[\w./-]+)?",
    r"https://minari\.farama\.org(/[\w./-]+)?",
    r"https://docs\.jax\.dev/en/latest/[\w./-]+\.html",
    r"https://(docs\.ray\.io|jrb\.readthedocs\.io/?|keepachangelog\.com(/en/[\d.]+)?/?|semver\.org)",
)
"""What a link to another site may look like. Add a new site here."""
# Links into the repository lead to a file that is there.
FILES = (
    f"{OURS}/blob/main/",
    f"{OURS}/tree/main/",
    "https://raw.githubusercontent.com/jrb-dev/jrb/main/",
    "https://colab.research.google.com/github/jrb-dev/jrb/blob/main/",
)
OTHERS = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CITATION.cff")]
OTHERS += sorted([*ROOT.glob("docs/api/*.rst"), *ROOT.glob("notebooks/*.ipynb")])


def is_known(url):
    """Returns True if a link has a known form, or leads to a file of the repository."""
    for start in FILES:
        if url.startswith(start):
            return (ROOT / url.removeprefix(start)).exists()
    page = re.fullmatch(rf"{SITE}/en/latest/([\w/-]+)\.html", url)
    if page:
        return any((ROOT / "docs" / f"{page[1]}{end}").exists() for end in (".md", ".rst"))
    url = url.removeprefix("git+").partition("#")[0].removesuffix(".git")
    ours = re.fullmatch(rf"{OURS}(/(issues|security)[\w./-]*)?", url)
    return bool(ours) or any(re.fullmatch(form, url) for form in KNOWN)


def prose(path):
    """Returns the text of a page without its code."""
    text = re.sub(r"^```(?!\{).*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "code", text)


def anchors(path):
    """Returns the anchors of a page's headings, as GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in headings}


def broken(path):
    """Returns the broken links of a page."""
    text = prose(path)
    targets = LINK.findall(text) + INCLUDED.findall(path.read_text())
    for target in targets:
        url = urllib.parse.urlsplit(target)
        if url.scheme:
            if url.scheme not in ("https", "http") or "." not in url.netloc:
                yield target
            continue
        if "_made" in pathlib.PurePosixPath(url.path).parts:  # drawn when the pages are built
            if pathlib.PurePosixPath(url.path).stem not in made.names():
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


@pytest.mark.parametrize("path", PAGES + OTHERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_other_sites_have_a_known_form(path):
    urls = {url.rstrip(".,;:") for url in URL.findall(path.read_text())}
    assert [url for url in sorted(urls) if not is_known(url)] == []


def test_unknown_links_are_found():
    known = [f"{OURS}/blob/main/README.md", "https://arxiv.org/abs/1707.01495", f"{OURS}.git"]
    known += [SITE, f"{SITE}/en/latest/versions.html"]
    wrong = [f"{OURS}/blob/main/none.md", f"{SITE}/en/latest/none.html"]
    wrong += ["https://arxiv.org/pdf/1707.01495", "http://semver.org"]
    assert [url for url in known + wrong if not is_known(url)] == wrong


def test_broken_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A title\n\n[a](page.md#a-title) [b](#b) [c](other.md) `[d](other.md)`\n"
        "[e](https:///) ![f](https://example.org/x.png) [h](_made/cycle.png)\n"
        "[i](_made/none.png)\n\n```python\n[g](other.md)\n```\n"
    )
    assert list(broken(page)) == ["#b", "other.md", "https:///", "_made/none.png"]


def test_the_readme_fits_a_few_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150

"""The documentation in a browser: nothing is cut off, and searches find the right page."""

import os
import pathlib
import subprocess
import sys
import urllib.parse

import pytest

import jrb

from . import browser

for package in ("furo", "myst_nb", "sphinx_copybutton", "matplotlib", "optax"):
    pytest.importorskip(package, reason="needs the extras docs and demo")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("docs")]

ROOT = pathlib.Path(__file__).parents[2]
WIDTHS = (420, 1280)
OVERFLOW = """frame => {
  const root = frame.contentDocument.documentElement;
  return root.scrollWidth - root.clientWidth;
}"""
CUT = """frame => [...frame.contentDocument.querySelectorAll("article :is(pre, .table-wrapper)")]
  .filter(part => !part.closest("details") && part.scrollWidth > part.clientWidth + 1)
  .map(part => part.textContent.trim().slice(0, 60))
"""
FIRST_RESULT = """async frame => {
  const page = frame.contentDocument, found = name => page.querySelector("#search-results " + name);
  const ended = () => /found|did not match/.test(found("p.search-summary")?.textContent || "");
  while (!ended()) await new Promise(resolve => setTimeout(resolve, 50));
  return found("ul.search > li > a")?.getAttribute("href") || "nothing";
}"""
SEARCHES = {
    "install": "install.html",
    "Rainbow": "algorithms.html",
    "PPO": "guides/ppo.html",
    "Dreamer": "algorithms.html",
    "which buffer": "algorithms.html",
    "Atari": "use/units.html",
    "soft reset": "use/schedules.html",
    "memory": "guides/larger-than-the-gpu.html",
    "HER": "guides/hindsight.html",
    "resume": "guides/resume.html",
    "out of memory": "troubleshooting.html",
    "prioritized replay": "guides/purejaxrl-prioritized.html",
    "n-step": "use/units.html",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Builds all pages, and returns their folder."""
    browser.find()
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", "-d", out / "trees"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [*command, "docs", out / "html"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out / "html"


@pytest.fixture(scope="module")
def pages(site):
    """Returns the paths of all pages."""
    found = [path.relative_to(site) for path in site.rglob("*.html")]
    return sorted(str(path) for path in found if path.parts[0] != "_static")


def test_no_page_is_wider_than_the_window(site, pages):
    assert len(pages) > 70
    overflows = browser.measure(site, pages, WIDTHS, OVERFLOW)
    wide = {page: each for page, each in zip(pages, overflows, strict=True) if any(each)}
    assert wide == {}, f"pixels too many at {WIDTHS}"


def test_no_code_and_no_table_is_cut_on_a_wide_window(site, pages):
    parts = browser.measure(site, pages, (1280,), CUT)
    assert {page: cut for page, (cut,) in zip(pages, parts, strict=True) if cut} == {}


def test_a_page_that_is_too_wide_is_found(tmp_path):
    page = '<!doctype html><div style="width: 500px">wide</div>'
    (tmp_path / "wide.html").write_text(f"<style>body {{ margin: 0 }}</style>{page}")
    assert browser.measure(tmp_path, ["wide.html"], WIDTHS, OVERFLOW) == [[80, 0]]


def test_every_page_has_a_description_an_icon_and_the_version(site, pages):
    parts = ('<meta name="description" content="', '<link rel="shortcut icon"', jrb.__version__)
    texts = {page: (site / page).read_text() for page in pages}
    assert [page for page, text in texts.items() if any(part not in text for part in parts)] == []


def test_every_notebook_can_be_run_in_colab_and_downloaded(site):
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text = (site / "notebooks" / f"{path.stem}.html").read_text()
        place = f"github/jrb-dev/jrb/blob/main/notebooks/{path.name}"
        assert f'href="https://colab.research.google.com/{place}"' in text
        assert len(list(site.glob(f"_downloads/*/{path.name}"))) == 1


def test_a_search_finds_the_right_page_first(site):
    queries = [f"search.html?q={urllib.parse.quote(words)}" for words in SEARCHES]
    answers = browser.measure(site, queries, (800,), FIRST_RESULT)
    firsts = {words: first for words, (first,) in zip(SEARCHES, answers, strict=True)}
    assert firsts == SEARCHES

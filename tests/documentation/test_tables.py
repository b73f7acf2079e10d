"""The tables of the pages on performance and scale agree with the results."""

import pathlib
import re
import shutil

import pytest
from generate import drawings, tables

from benchmarks.report import figures, files, markdown, own

ROOT = pathlib.Path(__file__).parents[2]
GROUPS = sorted(path.stem for path in tables.RESULTS.glob("*.json"))


@pytest.mark.parametrize("name", GROUPS)
def test_a_table_says_what_the_results_say(name):
    rows = files.read(tables.RESULTS, name)["rows"]
    lines = [line for line in tables.table(name).splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    if name in own.COLUMNS:
        assert len(lines) == len(rows) + 2
        return
    assert len(lines) == len(markdown.by_case(rows)) + 2
    shown = "\n".join(lines)
    for row in rows:
        assert row.get("ratio") is None or f"({figures.ratio(row['ratio'])})" in shown


def test_every_group_can_be_shown_alone():
    last = {"remote": "ratio", "skew": "ratio", "offline": "seconds"}
    for name in last:
        rows = files.read(tables.RESULTS, name)["rows"]
        for row, line in zip(rows, tables.table(name).splitlines()[2:], strict=True):
            shown = float(line.split("|")[-2].replace(",", ""))
            assert shown == pytest.approx(row[last[name]], abs=0.0051, rel=0.01)
    rows = files.read(tables.RESULTS, "scale")["rows"]
    for row, line in zip(rows, tables.table("scale").splitlines()[2:], strict=True):
        want = row["n"]["100000000"]["least_us"]
        assert float(line.split("|")[-2]) == pytest.approx(want, abs=0.0051, rel=0.01)


def test_only_wanted_rows_are_in_a_table():
    both = tables.table("cycle", "uniform step | tree")
    assert "| uniform step |" in both
    assert "| sum-tree alone |" in both
    assert "prioritized" not in both
    with pytest.raises(ValueError, match=r"windows\.json whose name has 'nothing'"):
        tables.table("windows", "nothing")


def test_a_page_gets_its_tables():
    lines = "<!-- table: cycle | uniform step -->\n<!-- machine: cycle -->\n<!-- plot: none | a -->"
    page = tables.filled(f"before\n{lines}\nafter")
    assert "| uniform step |" in page
    assert "prioritized" not in page
    assert "benchmarks/results/cycle.json" in page
    assert "<!--" not in page


def test_what_was_not_measured_says_how(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    page = tables.filled("<!-- table: cycle -->\n<!-- machine: cycle -->\n<!-- plot: cycle | a -->")
    assert "python -m benchmarks cycle --out benchmarks/results" in page
    assert "<!--" not in page
    shutil.copy(ROOT / "benchmarks/results/cycle.json", tmp_path)
    assert tables.filled("<!-- plot: cycle | Times -->") == "![Times](_made/cycle.png)"


@pytest.mark.parametrize("page", tables.PAGES)
def test_pages_are_filled(page):
    before = (tables.RESULTS.parents[1] / "docs" / f"{page}.md").read_text()
    text = tables.filled(before)
    there = [name for name in GROUPS if re.search(f"<!-- (table|folded): {name} ", before)]
    assert text.count("| :-- |") >= len(there) > 0
    assert "<!--" not in text


@pytest.mark.parametrize("name", [*drawings.DRAWINGS, "ratios"])
def test_drawings_are_whole_and_within_their_sheet(name):
    import xml.etree.ElementTree as ElementTree

    drawn = tables.chart if name == "ratios" else drawings.DRAWINGS[name]
    svg = next(ElementTree.fromstring(drawn()).iter("{http://www.w3.org/2000/svg}svg"))
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    for part in svg:
        at = {key: float(part.attrib.get(key, 0)) for key in ("x", "y", "width", "height")}
        assert 0 <= at["x"] <= at["x"] + at["width"] <= width
        assert 0 <= at["y"] <= at["y"] + at["height"] <= height
    assert svg[0].tag.endswith("title")


def test_the_summary_has_a_line_for_each_headline():
    lines = tables.summary().splitlines()
    assert len(lines) == 2 + len(tables.HEADLINES)
    assert all(0 < float(line.split("|")[-2]) < 2 for line in lines[2:])


def test_the_chart_has_a_bar_for_each_headline():
    chart = tables.chart()
    assert [line.words for line in tables.headlines()] == [line[-1] for line in tables.HEADLINES]
    assert chart.count('class="one"') == chart.count('class="empty"') == len(tables.HEADLINES)

"""The tables of the pages on performance and scale say what the results say."""

import json

import pytest
from generate import drawings, tables


@pytest.mark.parametrize("name", tables.COLUMNS)
def test_a_table_has_a_line_for_each_row_and_a_cell_for_each_column(name):
    rows = json.loads((tables.RESULTS / f"{name}.json").read_text())["rows"]
    lines = tables.table(name).splitlines()
    assert len(lines) == len(rows) + 2
    assert {line.count("|") for line in lines} == {len(tables.COLUMNS[name]) + 1}
    last = name in ("checkpoint", "host", "remote", "skew", "scale")
    for row, line in zip(rows, lines[2:], strict=True):
        shown = float(line.split("|")[-2 if last else -3])
        want = row["n"]["100000000"]["least_us"] if name == "scale" else row["ratio"]
        assert shown == pytest.approx(want, abs=0.0051, rel=0.01)


def test_only_wanted_rows_are_in_a_table():
    both = tables.table("windows", "over flashbax | once").splitlines()[2:]
    assert len(both) == 6
    assert not any("gather" in line for line in both)
    with pytest.raises(ValueError, match=r"windows\.json whose name has 'nothing'"):
        tables.table("windows", "nothing")


def test_a_page_gets_its_tables():
    page = tables.filled("before\n<!-- table: cycle | frames -->\n<!-- machine: cycle -->\nafter")
    assert "| uniform, frames |" in page
    assert "uniform cycle" not in page
    assert "benchmarks/results/cycle.json" in page
    assert "<!--" not in page


@pytest.mark.parametrize(("page", "count"), [("performance", 6), ("scale", 2)])
def test_pages_name_results_that_there_are(page, count):
    assert page in tables.PAGES
    text = tables.filled((tables.RESULTS.parents[1] / "docs" / f"{page}.md").read_text())
    assert text.count("| :-- |") == count
    assert "<!--" not in text


def test_figures():
    assert [tables.figure(value) for value in (0.666, 16.27, 999.6, 12345.6)] == [
        "0.67",
        "16.3",
        "1,000",
        "12,346",
    ]
    assert [tables.power(n) for n in (10**4, 10**7, 4096, 100)] == ["10⁴", "10⁷", "4,096", "100"]


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_drawings_are_whole_and_within_their_sheet(name):
    import xml.etree.ElementTree as ElementTree

    svg = ElementTree.fromstring(drawings.DRAWINGS[name]())
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    for part in svg:
        at = {key: float(part.attrib.get(key, 0)) for key in ("x", "y", "width", "height")}
        assert 0 <= at["x"] <= at["x"] + at["width"] <= width
        assert 0 <= at["y"] <= at["y"] + at["height"] <= height
    assert svg[0].tag.endswith("title")

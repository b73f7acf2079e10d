"""Results are written, read back, and formatted."""

import io

import matplotlib.image
import pytest
import rich.console

from benchmarks.report import figures, files, markdown, own, plots, terminal
from tests.benchmarks.tiny import result


def test_results_are_written_and_read_back(tmp_path):
    path = files.write(tmp_path / "new", result())
    assert path.name == "cycle.json"
    assert files.read(tmp_path / "new", "cycle") == result()
    assert files.read(tmp_path, "cycle") is None


def test_a_table_has_a_row_for_each_case_and_a_column_for_each_peer():
    table = markdown.table(result()["rows"]).splitlines()
    assert table == [
        "All: 5 leaves; B 256.",
        "",
        f"|  | N | jrb | SB3 {markdown.HOST} |",
        "| :-- | --: | --: | --: |",
        "| step | 10⁵ | 20.0 µs | 1.00 ms (0.021) |",
        "| step | 10⁶ | 30.0 µs | failed |",
    ]
    with pytest.raises(ValueError, match="some rows"):
        markdown.table([])


def test_a_page_names_what_is_missing_failed_or_on_the_host():
    page = own.page([result()], {"brax": ["brax"]})
    assert "Not installed, so not compared: brax (`pip install brax`)." in page
    assert markdown.HOST_NOTE in page
    assert "- SB3: in tensors." in page
    assert "- SB3, step: MemoryError: too large" in page
    assert "cpu (x86, 2 cores, copies 12.3 GB/s); Python 3.12, jax 0.9. A quick run" in page


def test_a_terminal_shows_the_same():
    console = rich.console.Console(width=120, record=True, file=io.StringIO())
    terminal.show(result(), console)
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert lines[1:3] == [
        "All: 5 leaves; B 256",
        "In brackets: what jrb takes, over what the other takes.",
    ]
    assert lines[3:11] == [
        "",
        "step  N 10⁵",
        "  jrb       20.0 µs",
        f"  SB3 {markdown.HOST}     1.00 ms  (0.021)",
        "",
        "step  N 10⁶",
        "  jrb       30.0 µs",
        f"  SB3 {markdown.HOST}      failed",
    ]


@pytest.mark.parametrize("group", ["cycle", "sizes"])
def test_pictures_are_drawn_of_lines_and_of_marks(group, tmp_path):
    pytest.importorskip("matplotlib")
    assert plots.draw(result(group), tmp_path / "a.png")
    image = matplotlib.image.imread(tmp_path / "a.png")
    assert image.shape[1] == 9 * 130
    assert image[..., :3].std() > 0
    assert not plots.draw({**result(group), "rows": []}, tmp_path / "b.png")


def test_figures():
    assert [figures.figure(value) for value in (0.666, 16.27, 999.6, 12345.6)] == [
        "0.67",
        "16.3",
        "1,000",
        "12,346",
    ]
    assert [figures.power(n) for n in (10**4, 10**7, 4096, 100)] == ["10⁴", "10⁷", "4,096", "100"]
    assert [figures.seconds(value) for value in (2.5, 0.0123, 1e-5, 3e-8)] == [
        "2.50 s",
        "12.3 ms",
        "10.0 µs",
        "30.0 ns",
    ]
    assert figures.told(None, "B") == "-"
    assert [figures.ratio(value) for value in (1.239, 0.1, 0.00512)] == ["1.24", "0.10", "0.0051"]
    assert figures.sizes({"N": 1000, "E": "", "items": "a"}, ["items", "E", "N"]) == ["a", "N 10³"]

"""Every notebook runs from its first to its last cell and reproduces its stored outputs."""

import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("nbclient")

from notebooks import execute
from tests import conftest

ROOT = pathlib.Path(execute.__file__).parents[1]
LARGEST = 400_000  # bytes
# By default every fourth case of a slow test runs (see conftest.py): OFTEN is put first and fifth.
OFTEN = ["07_your_own_parts", "08_look_inside"]
NAMES = [name for name in execute.names() if name not in OFTEN]
NAMES = [OFTEN[0], *NAMES[:3], OFTEN[1], *NAMES[3:]]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_gives_what_is_stored_in_it(name):
    flags = "--flags=" + " ".join(conftest.QUICK)
    command = [sys.executable, "-m", "notebooks.execute", "--check", flags, name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("name", execute.names())
def test_a_notebook_is_stored_with_its_outputs_and_little_else(name):
    notebook, path = execute.read(name), ROOT / "notebooks" / f"{name}.ipynb"
    assert path.stat().st_size < LARGEST
    assert [cell.id for cell in notebook.cells] == [
        f"cell-{number:02d}" for number in range(1, len(notebook.cells) + 1)
    ]
    assert notebook.cells[0].source.startswith("# ")
    assert "What you learn here:" in notebook.cells[0].source
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert any("image/png:" in execute.text_of(cell) for cell in code)
    home = str(pathlib.Path.home())
    for cell in notebook.cells:
        assert cell.metadata.keys() <= {"tags"}
        assert not any(path in line for line in execute.text_of(cell) for path in (home, str(ROOT)))


def stored_and_found(output, tags=()):
    """Returns a notebook whose only cell prints 1, and the same notebook with another output."""
    from nbformat import v4

    metadata = {"tags": list(tags)}
    both = [[v4.new_output("stream", text="1\n", name="stdout")], output]
    cells = [v4.new_code_cell("print(1)", id="a", outputs=out, metadata=metadata) for out in both]
    return [v4.new_notebook(cells=[cell]) for cell in cells]


def stream(text, name="stdout"):
    from nbformat import v4

    return [v4.new_output("stream", text=text, name=name)]


def test_other_text_is_told_line_by_line():
    assert execute.differences(*stored_and_found(stream("1\n"))) == []
    told = execute.differences(*stored_and_found(stream("2\n")))
    assert told[0] == "cell 1 (a):"
    assert {"-1", "+2"} <= set(told)


def test_text_that_varies_has_to_be_there():
    assert execute.differences(*stored_and_found(stream("2\n"), ["varies"])) == []
    assert execute.differences(*stored_and_found([], ["varies"]))


def test_what_goes_to_stderr_is_told():
    assert execute.differences(*stored_and_found(stream("?\n", "stderr"), ["varies"]))

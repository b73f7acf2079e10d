"""Runs the notebooks of this folder, each from its first to its last cell.

    python -m notebooks.execute [--check] [--flags FLAGS] [NAME ...]

Without `--check` what comes out is written into them. With it nothing is written, and text that
differs from what is stored is an error, but for cells with the tag `varies`: times, memory, paths,
and what floats of another processor lead to. Of pictures only their being there is compared. What
goes to stderr is an error. Kernels get XLA's flags from `--flags` alone.
"""

import argparse
import difflib
import os
import pathlib
import re
import sys
import tempfile
import time
from typing import Any

import nbclient
import nbformat
from traitlets.config import Config

HERE = pathlib.Path(__file__).parent
SECONDS = 300  # for one cell, on the busiest machine
COLORS = re.compile(r"\x1b\[[0-9;]*m")
PICTURES = ("image/png", "image/svg+xml", "image/jpeg")


def names() -> list[str]:
    """Of all notebooks, in their order."""
    return sorted(path.stem for path in HERE.glob("*.ipynb"))


def read(name: str) -> Any:
    """A notebook as it is stored."""
    return nbformat.read(HERE / f"{name}.ipynb", as_version=4)


def write(name: str, notebook: Any) -> None:
    """Stores a notebook, with as little beside its cells as there may be."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    nbformat.validate(notebook)
    nbformat.write(notebook, HERE / f"{name}.ipynb")


def environment(flags: str = "") -> dict[str, str]:
    """What a kernel is started with: this checkout, the CPU, and no settings of who starts it.

    Args:
        flags: those of XLA.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_", "MPL", "PYTEST"))
    }
    paths = [str(HERE.parent), *filter(None, [kept.get("PYTHONPATH")])]
    path = os.pathsep.join(paths)
    return kept | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def run(notebook: Any, flags: str = "") -> Any:
    """The same with what comes out of it when it is run, by XLA with these flags.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raises.
    """
    notebook = nbformat.from_dict(notebook)
    with tempfile.TemporaryDirectory() as sockets:  # nothing listens on a port
        client = nbclient.NotebookClient(
            notebook,
            config=Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}}),
            kernel_name="python3",
            timeout=SECONDS,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(HERE)}},
        )
        client.execute(env=environment(flags))
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata.clear()  # that a picture needs a light page: ours go with any
    return notebook


def text_of(cell: Any) -> list[str]:
    """Lines of what came out of a cell; a picture is a line that says so."""
    lines = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            lines += [f"{output.name}:", *output.text.splitlines()]
            continue
        for kind, content in sorted(output.data.items()):
            lines += [f"{kind}:", *(content.splitlines() if kind not in PICTURES else [])]
    return lines


def differences(stored: Any, found: Any) -> list[str]:
    """What a run gave otherwise than stored, and what it wrote to stderr, in readable lines."""
    lines = []
    for number, (old, new) in enumerate(zip(stored.cells, found.cells, strict=True), 1):
        before, after = text_of(old), text_of(new)
        varies = "varies" in old.metadata.get("tags", [])
        if "stderr:" in after or not (varies or before == after):
            lines += [f"cell {number} ({old.id}):", *("    " + x for x in old.source.splitlines())]
            lines += difflib.unified_diff(before, after, "stored", "found", lineterm="")
        elif varies and bool(before) != bool(after):
            lines += [f"cell {number} ({old.id}): nothing came out, or nothing is stored"]
    return lines


def main() -> None:
    """Runs what is named, or all; exits with 1 if something differs."""
    parser = argparse.ArgumentParser(prog="notebooks.execute", description="Runs the notebooks.")
    parser.add_argument("names", nargs="*", default=names(), help="such as 03_time; all by default")
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    parser.add_argument("--flags", default="", help="of XLA; none by default")
    options = parser.parse_args()
    failed = []
    for name in options.names:
        stored, start = read(name), time.perf_counter()
        try:
            found = run(stored, options.flags)
        except nbclient.exceptions.CellExecutionError as error:
            print(f"{name}: {COLORS.sub('', str(error))}")
            failed.append(name)
            continue
        print(f"{name}: {time.perf_counter() - start:.1f} s")
        if wrong := differences(stored, found) if options.check else []:
            print("\n".join(wrong))
            failed.append(name)
        if not options.check:
            write(name, found)
    if failed:
        sys.exit(f"not as stored, or not run to the end: {', '.join(failed)}")


if __name__ == "__main__":
    main()

"""The layers, and the manners of the package."""

import ast
import inspect
import pathlib
import subprocess
import sys

import pytest

import jrb
from jrb._util import wording

ROOT = pathlib.Path(jrb.__file__).parent

ROOMS = [
    {"_util"},
    {"_store", "_xla", "keys", "ring"},
    {"types", "layouts", "state", "sum_tree", "limits"},
    {"_core"},
    {"writers", "storages", "samplers", "units", "transforms"},
    {"authoring", "buffer"},
    {"sharding", "environments"},
    {"mix"},
    {"loops", "read", "migrate"},
    {"interop", "tables"},
    {"checkpoint", "iterate"},
    {"datasets", "plot", "remote", "testing"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
"""The files and folders of the package, from those that import nothing else of it upwards."""


def modules():
    return sorted(ROOT.rglob("*.py"))


def name_of(path):
    """Such as `jrb.units.n_step`."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path):
    """The modules of the package that a module imports."""
    known = set(map(name_of, modules()))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "jrb":
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found = {name if name in known else node.module for name in names}
            yield from sorted(found - {"jrb"})  # public names, which are imported when needed


def height_of(module):
    room = module.split(".")[1]
    return next(number for number, rooms in enumerate(ROOMS) if room in rooms)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_rooms_import_what_is_below_them(path):
    mine = name_of(path)
    if mine == "jrb":
        return
    for other in imported(path):
        same = other.split(".")[1] == mine.split(".")[1]
        assert same or height_of(other) < height_of(mine), f"{mine} imports {other}"


def test_no_modules_import_each_other_in_a_circle():
    below = {name_of(path): set(imported(path)) - {name_of(path)} for path in modules()}
    rooms = {name_of(path) for path in modules() if path.stem == "__init__"}
    while below:  # take away those that import nothing which is left
        free = {name for name, others in below.items() if not (others - rooms) & below.keys()}
        assert free, f"these import each other: {sorted(below)}"
        below = {name: others for name, others in below.items() if name not in free}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_asserts_prints_or_pickles(path):
    if path.name == "testing.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.Assert)
        assert not (isinstance(node, ast.Name) and node.id == "print")
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert "pickle" not in ast.dump(node)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_core_imports_nothing_but_its_dependencies(path):
    allowed = {"jax", "jaxlib", "chex", "numpy", "h5py", "jrb"}
    standard = set(__import__("sys").stdlib_module_names)
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        for name in names:
            assert name.split(".")[0] in allowed | standard, f"{path.name} imports {name}"


def test_all_public_names_exist_and_are_documented():
    for name in jrb.__all__:
        assert getattr(jrb, name).__doc__ or name == "TED"


def test_no_function_has_the_name_of_a_module():
    """As importing the module would put it in its place."""
    rooms = {path.stem for path in ROOT.iterdir()}
    for name in jrb.__all__:
        assert name not in rooms or inspect.ismodule(getattr(jrb, name))


def test_a_bare_import_is_without_jax():
    code = "import jrb, sys; assert 'jax' not in sys.modules and 'load' in dir(jrb)"
    code += "; import jrb.checkpoint; jrb.rebuild, jrb.datasets; from jrb import *; load, ring"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=ROOT.parent)


def test_a_missing_extra_is_named():
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jrb\[demo\]'"):
        wording.require("no_such_module_anywhere", "demo")

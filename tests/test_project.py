"""The layers of the package and its conventions."""

import ast
import collections
import functools
import importlib
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import jrb
from jrb.authoring import require

ROOT = pathlib.Path(jrb.__file__).parent

ROOMS = [
    {"_util"},
    {"_store", "_xla", "keys", "ring", "limits"},
    {"types", "layouts", "state", "sum_tree", "queries", "jaxpr_search"},
    {"_core"},
    {"writers", "storages", "samplers", "units", "transforms"},
    {"authoring", "buffer", "doctor"},
    {"sharding", "mix", "migrate", "environments", "testing"},
    {"read"},
    {"loops", "tables", "iterate", "interop", "checkpoint", "plot"},
    {"datasets", "remote", "demo", "cli", "compat"},
    {"__main__"},
]
"""The files and folders of the package in layers, lowest first; none imports from above."""

PUBLIC = ["jrb", *(f"jrb.{name}" for name in jrb.__all__ if inspect.ismodule(getattr(jrb, name)))]
PUBLIC += [f"jrb.{name}" for name in ("authoring", "compat.flashbax", "keys", "sharding")]
PUBLIC += [f"jrb.{name}" for name in ("samplers", "storages", "units", "writers")]

LINES, FILES, CHAIN, HELPERS = 45_150, 189, 10, 38
"""Limits of the package's size; one line in 25 is a comment that says what a block achieves."""


@functools.cache
def modules():
    """Returns the path and syntax tree of each module, by names such as `jrb.units.n_step`."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path, ast.parse(path.read_text())
    return found


def imported(module):
    """Yields the modules of the package that a module imports.

    Public names imported from `jrb` do not count: `jrb` loads them when they are used.
    """
    for node in ast.walk(modules()[module][1]):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "jrb":
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from {name if name in modules() else node.module for name in names} - {"jrb"}


def room_of(module):
    return module.split(".")[1]


def height_of(module):
    return next(number for number, rooms in enumerate(ROOMS) if room_of(module) in rooms)


def test_rooms_import_what_is_below_them():
    for module in modules().keys() - {"jrb"}:
        for other in imported(module):
            is_below = height_of(other) < height_of(module)
            assert is_below or room_of(other) == room_of(module), f"{module} imports {other}"


def test_no_modules_import_each_other_in_a_circle():
    below = {name: set(imported(name)) - {name} for name in modules()}
    rooms = {name for name, (path, _) in modules().items() if path.stem == "__init__"}
    while below:  # remove modules that import none of the remaining ones
        free = {name for name, others in below.items() if not (others - rooms) & below.keys()}
        assert free, f"these import each other: {sorted(below)}"
        below = {name: others for name, others in below.items() if name not in free}


def test_no_asserts_prints_or_pickles():
    for module in modules().keys() - {"jrb.testing"}:
        for node in ast.walk(modules()[module][1]):
            assert not isinstance(node, ast.Assert), module
            assert not (isinstance(node, ast.Name) and node.id == "print"), module
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "pickle" not in ast.dump(node), module


def test_the_core_imports_nothing_but_its_dependencies():
    allowed = {"jax", "jaxlib", "chex", "numpy", "h5py", "jrb", *sys.stdlib_module_names}
    for module, (_, tree) in modules().items():
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            for name in names:
                assert name.split(".")[0] in allowed, f"{module} imports {name}"


def longest_chain():
    """Returns the length of the longest chain of files and folders that import one another."""
    below = {}
    for module in modules().keys() - {"jrb", "jrb.__main__"}:
        others = below.setdefault(room_of(module), set())
        others.update(room_of(other) for other in imported(module))

    @functools.cache
    def length(room):
        return 1 + max(map(length, below[room] - {room}), default=0)

    return max(map(length, below))


def helpers():
    """Returns the names of short module-level functions that are used once."""
    uses, short = collections.Counter(), []
    for _, tree in modules().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute):
                uses[node.id if isinstance(node, ast.Name) else node.attr] += 1
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.decorator_list:
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = sum(each.end_lineno - each.lineno + 1 for each in body)
                short += [node.name] * (lines <= 6)
    return [name for name in short if uses[name] == 1 and short.count(name) == 1]


def test_the_package_does_not_grow():
    """New code should replace old code; otherwise raise a limit above and say why."""
    lines = sum(path.read_text().count("\n") for path, _ in modules().values())
    assert lines <= LINES
    assert len(modules()) <= FILES
    assert longest_chain() <= CHAIN
    assert len(helpers()) <= HELPERS


def test_few_tests_import_private_modules():
    """Tests that need private names should reach them through `tests/seams.py`."""
    # `jrb/_store` has no public names: its own tests, at its path, are not counted.
    tests = [path for path in (ROOT.parent / "tests").rglob("*.py") if path.parent.name != "_store"]
    reach = [path.name for path in tests if re.search(r"^from jrb\._", path.read_text(), re.M)]
    assert len(reach) <= 10, sorted(reach)


def test_all_public_names_exist_and_are_documented():
    for name in jrb.__all__:
        assert getattr(jrb, name).__doc__ or name == "TED"


@pytest.mark.parametrize("name", PUBLIC)
def test_public_modules_list_public_names_only(name):
    module = importlib.import_module(name)
    assert set(dir(module)) == {*module.__all__} | ({"__version__"} if name == "jrb" else set())
    assert all(hasattr(module, each) for each in dir(module))


def test_no_function_has_the_name_of_a_module():
    """Importing a module of that name would replace the function in `jrb`."""
    rooms = {path.stem for path in ROOT.iterdir()}
    for name in jrb.__all__:
        assert name not in rooms or inspect.ismodule(getattr(jrb, name))


@pytest.mark.slow
def test_a_bare_import_is_without_jax():
    code = "import jrb, sys; assert 'jax' not in sys.modules and 'load' in dir(jrb)"
    code += "; import jrb.checkpoint; jrb.rebuild, jrb.compat.flashbax; from jrb import *; ring"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=ROOT.parent)


def test_a_missing_extra_is_named():
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jrb\[demo\]'"):
        require("no_such_module_anywhere", "demo")

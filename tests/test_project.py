"""The layers, and the manners of the package."""

import ast
import pathlib

import pytest

import jrb
from jrb import extras

ROOT = pathlib.Path(jrb.__file__).parent

LAYERS = [
    {"extras", "_store", "versions"},
    {"pytree", "order"},
    {"keys", "ring", "bits", "tree", "display", "checks", "casting"},
    {"types", "permutation", "sum_tree", "layouts", "prng"},
    {"rows"},
    {"line", "episodes", "columns"},
    {"writers", "storages", "samplers", "units", "transforms"},
    {"state"},
    {"compiled", "expected"},
    {"outside"},
    {"buffer"},
    {"testing", "demo", "mix"},
    {"loops"},
    {"demo_report", "checkpoint", "iterate"},
    {"cli"},
    {"__init__"},
]


def modules():
    return sorted(ROOT.rglob("*.py"))


def layer_of(path):
    """How high a module stands: the folder's layer, or the file's."""
    name = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return next(number for number, names in enumerate(LAYERS) if name in names)


def imported(path):
    """The modules of the package that a module imports, as names below it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "jrb":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("jrb."):
            yield node.module.split(".")[1]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    if path.parent == ROOT and path.stem == "__init__":
        return
    mine = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for name in imported(path):
        below = layer_of(ROOT / name)
        inside = name == mine and path.parent != ROOT
        assert below < layer_of(path) or inside, f"{path.name} imports {name}"


def test_every_module_is_in_a_layer():
    for path in modules():
        assert layer_of(path) >= 0


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


def test_a_missing_extra_is_named():
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jrb\[demo\]'"):
        extras.require("no_such_module_anywhere", "demo")

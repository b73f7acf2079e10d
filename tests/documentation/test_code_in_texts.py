"""Code in error messages, docstrings and pages uses names and arguments that there are."""

import ast
import pathlib
import re

import pytest
from generate import public

import jrb

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = sorted(pathlib.Path(jrb.__file__).parent.rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/**/*.rst")])
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
OTHERS = (
    "Recorder(hole_:",  # a summary of a recorder, not a call
    "Remote(streams=hole_",  # nor is this
    "ReplayBuffer.dumps",  # of TorchRL, as is the next
    "PrioritizedSampler(alpha, beta)",
    "buffer.replace(sample=...)",  # of flashbax
)
"""The beginnings of uses that are not of this package's API."""


def strings(path):
    """Yields the strings in a file of the package, with their lines; values are `public.HOLE`."""
    tree = ast.parse(path.read_text())
    parts = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts |= {id(part) for part in ast.walk(node)}
            pieces = [getattr(part, "value", None) for part in node.values]
            yield node.lineno, "".join(it if isinstance(it, str) else public.HOLE for it in pieces)
        elif id(node) not in parts and isinstance(getattr(node, "value", None), str):
            yield node.lineno, node.value


def ours(mistakes):
    return [one for one in mistakes if not one.startswith(OTHERS)]


def test_code_in_strings_of_the_package():
    lines = [
        f"{path.relative_to(ROOT)}:{line}: {mistake}"
        for path in PACKAGE
        for line, text in strings(path)
        for mistake in ours(public.mistakes(text))
    ]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_in_a_page(path):
    """Blocks may be of other libraries, so only what begins with `jrb.` counts in these."""
    text = path.read_text()
    lines = ours(public.mistakes(text, only_full=True))
    for code in re.findall(r"`([^`]+)`", FENCE.sub("", text)):
        lines += ours(public.mistakes(code))
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Use jrb.remote(buffer, shards=2), or one for each.", 1),
        ("Use jrb.remote.serve(buffer, example, streams=2, shards=2).", 0),
        ("see `jrb.Prioritised`", 1),
        ("sampler=jrb.Prioritized(alfa=0.6)", 1),
        ("sampler=jrb.Prioritized(alpha=0.6)", 0),
        ("Sequence(8, padding=True) or Sequence(8, partial='pad')", 1),
        ("`buffer.smaple(state, key)`", 1),
        ("`ReplayBuffer.take_all`, `ReplayBuffer.take`, `Sample.weights`", 1),
        ("jrb.save(path, buffer, state, keeps=3)", 1),
        ("jrb.load(..., capacity=8), jrb.load(path)", 0),
        ("jrb.Mixture((jrb.Queue(), jrb.Uniform(replace=False)), (0.5, 0.5))", 1),
        (">>> jrb.ReplayBuffer(\n...     8, batch=2,\n... )", 1),
        ("Ask for it. Use Queue. Or write a Tower(of=stones).", 0),
    ],
)
def test_mistakes_are_found(text, number):
    assert len(public.mistakes(text)) == number

"""The public names of jrb, and the uses of them in texts. Needs neither Sphinx nor docutils."""

import ast
import collections
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

ROOMS = (
    "jrb",
    "jrb.checkpoint",
    "jrb.interop",
    "jrb.datasets",
    "jrb.layouts",
    "jrb.limits",
    "jrb.plot",
    "jrb.remote",
    "jrb.sum_tree",
    "jrb.ring",
    "jrb.storages",
    "jrb.testing",
    "jrb.transforms",
    "jrb.types",
    "jrb.authoring",
    "jrb.keys",
)
"""Where public names are imported from; the first that has a name is where it is documented."""

NO_NAMES = {
    "jrb.dtype",  # a key of Arrow's metadata, as is the next
    "jrb.recording",
    "jrb._benchmarks",  # a module of the installed package only
}
"""What looks like a name of the package and is none."""

HOLE = "hole_"
"""Stands for a value that a text gets when the program runs, as in an f-string."""

_USE = re.compile(r"(?<![\w./@-])(?:jrb|buffer(?!\.py)|[A-Z]\w+)(?:\.[A-Za-z]\w*)*")
_CONTINUED = re.compile(r"^\s*(?:\.\.\. |\+)", re.MULTILINE)
"""The beginning of a line of code that goes on, in a doctest or in a diff."""


def public_objects() -> Iterator[tuple[str, Any]]:
    """Yields every public name with its room, such as `jrb.plot.episode`, and the object."""
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in getattr(module, "__all__", ()):
            yield f"{room}.{name}", getattr(module, name)


def resolve(name: str) -> Any:
    """Returns the object with a dotted name below `jrb`; raises AttributeError without one."""
    value = importlib.import_module("jrb")
    for number, part in enumerate(name.split(".")[1:], 2):
        try:
            value = _attribute(value, part)
        except AttributeError:
            if not inspect.ismodule(value):
                raise
            try:
                value = importlib.import_module(".".join(name.split(".")[:number]))
            except ModuleNotFoundError as error:
                raise AttributeError(str(error)) from error
    return value


def _attribute(value: Any, name: str) -> Any:
    """Returns an attribute; the type of a field that the instances of a class have."""
    fields = value.__annotations__ if isinstance(value, type) else {}
    return fields[name] if name in fields and not hasattr(value, name) else getattr(value, name)


def _meanings(use: str) -> list[str]:
    """Returns the full names that a name in a text may stand for; none if it is not of jrb."""
    first, dot, others = use.partition(".")
    if first == "jrb":
        return [] if use in NO_NAMES or not dot else [use]
    if first == "buffer":
        return [f"jrb.{kind}{dot}{others}" for kind in ("ReplayBuffer", "Sharded", "Mix")]
    return [f"{name}{dot}{others}" for name in _by_last_name().get(first, ())]


@functools.cache
def _by_last_name() -> dict[str, list[str]]:
    """Returns the full names of all public objects, by their last part."""
    names = collections.defaultdict(list)
    for name, _ in public_objects():
        names[name.rpartition(".")[2]].append(name)
    return names


def mistakes(text: str, only_full: bool = False) -> list[str]:
    """Returns what a text says of jrb that is not so: names that are not there, wrong arguments.

    A name counts if it begins with `jrb.`; or, unless `only_full`, with a public class or `buffer`,
    if an attribute or arguments follow. Its arguments are compared with the signature.
    """
    text, lines = _CONTINUED.sub(" ", text), []
    for match in _USE.finditer(text):
        use, arguments = match[0], _arguments(text[match.end() :])
        is_full = use.startswith("jrb.")
        is_word = "." not in use and (arguments is None or use == "buffer")
        if HOLE in use or (not is_full and (only_full or is_word)):
            continue
        faults = [_fault(name, arguments) for name in _meanings(use)]
        if faults and all(faults):
            shown = use if arguments is None else f"{use}({arguments})"
            lines.append(f"{shown}: {faults[0]}")
    return lines


def _arguments(text: str) -> str | None:
    """Returns what is between the parentheses that a text begins with; None without any."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if text[0] != "(" or depth == 0:
            return text[1:place] if place else None
    return None


def _fault(name: str, arguments: str | None) -> str | None:
    """Returns what is wrong with the use of a full name, or None."""
    try:
        value = resolve(name)
        if arguments is None:
            return None
        if not callable(value):
            return "is not callable"
        call = ast.parse(f"f({arguments})", mode="eval").body
        if not isinstance(call, ast.Call):
            return None
        places = [one for one in call.args if not isinstance(one, ast.Constant | ast.Starred)]
        open_ended = len(places) < len(call.args)  # an ellipsis, or numbers of a pattern
        keywords = {one.arg: None for one in call.keywords if one.arg not in (None, HOLE)}
        inspect.signature(value).bind_partial(*([] if open_ended else places), **keywords)
    except SyntaxError:
        return "is no code"
    except (AttributeError, TypeError) as error:
        return str(error)
    except ValueError:  # a function of C without a signature
        return None
    return None

"""Several buffers in one folder: their names, and what belongs to each."""

from collections.abc import Iterator
from typing import Any, TypeGuard

from jrb import _saved, shards
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import descriptions
from jrb.mix import Mix
from jrb.sharded import Sharded

Several = Any
"""A `ReplayBuffer`, a `Mix`, a `Sharded`, or a dict or tuple of them."""

_LONGEST = 200  # bytes of the name of a folder


def check(buffer: Several, verb: str) -> None:
    """Raises unless it is a description that can be saved, or some of them."""
    if isinstance(buffer, ReplayBuffer | Mix | Sharded):
        return
    if not isinstance(buffer, dict | tuple) or not buffer:
        order = "(path, buffer)" if verb == "load" else "(path, buffer, state)"
        raise TypeError(
            f"{verb}: expected a ReplayBuffer, a Mix, or a dict or tuple of them, or a Sharded, "
            f"got {type(buffer).__name__}. The order is {verb}{order}."
        )
    for name, part in each(buffer).items():
        if not isinstance(name, str):
            raise TypeError(f"{verb}: expected names of buffers, got the key {name!r}.")
        check(part, verb)
    folders(list(each(buffer)))


def is_one(buffer: Several) -> TypeGuard[ReplayBuffer]:
    """Whether it is a single buffer."""
    return isinstance(buffer, ReplayBuffer)


def each(thing: Any) -> dict[str, Any]:
    """The entries of a Mix, a dict or a tuple, or the shards of a Sharded, by name."""
    if isinstance(thing, Sharded):
        return {name: thing.part_at(k) for k, name in enumerate(shards.names(thing))}
    if isinstance(thing, dict):
        return thing
    entries = thing.buffers if isinstance(thing, Mix) else thing
    names = getattr(entries, "_fields", None) or map(str, range(len(entries)))
    return dict(zip(names, entries, strict=True))


def of_each(buffer: Any, thing: Any, what: str) -> dict[str, Any]:
    """What belongs to each of some buffers, by its name.

    Args:
        buffer: a Mix, a dict or a tuple of buffers.
        thing: a tuple for a Mix; else a dict with the same names, or a tuple of that length.
        what: what it is, for the error.

    Raises:
        ValueError: it is of another form, or has other names.
    """
    if isinstance(buffer, Sharded):
        return dict.fromkeys(each(buffer), thing)
    names, form = list(each(buffer)), dict if isinstance(buffer, dict) else tuple
    text = type(thing).__name__
    if isinstance(thing, form):
        found = each(tuple(thing) if isinstance(buffer, Mix) else thing)
        if found.keys() == set(names):
            return {name: found[name] for name in names}
        text = f"those of {list(found)}"
    raise ValueError(
        f"{what}: expected a {form.__name__} of {len(names)} {what.split()[-1]}, one for each of "
        f"{names}, got {text}."
    )


def pairs(buffer: Several, state: Any) -> Iterator[tuple[ReplayBuffer, Any]]:
    """All single buffers, and their states."""
    if is_one(buffer):
        yield buffer, state
        return
    if isinstance(buffer, Sharded):
        if isinstance(state, tuple):  # else items lie on devices
            yield from ((buffer.part_at(k), one) for k, one in shards.split(buffer, state).items())
        return
    states = of_each(buffer, state, "save: states")
    for name, part in each(buffer).items():
        yield from pairs(part, states[name])


def form_of(thing: Any) -> Any:
    """What a dict or tuple is, for JSON."""
    if isinstance(thing, dict):
        return {"dict": list(thing)}
    if not hasattr(thing, "_fields"):
        return {"tuple": len(thing)}
    return {"class": descriptions.name_of(type(thing)), "fields": list(thing._fields)}


def formed(form: Any, parts: dict[str, Any], given: Any) -> Any:
    """The dict or tuple that it was, of these entries.

    Args:
        form: what it was.
        parts: by name.
        given: one of the same kind, or None.

    Raises:
        UnknownError: a class that the program has not defined.
    """
    if "dict" in form:
        return {name: parts[name] for name in form["dict"]}
    if "tuple" in form:
        return tuple(parts[str(number)] for number in range(form["tuple"]))
    fields = form["fields"]
    same = lambda cls: list(getattr(cls, "_fields", ())) == fields
    cls: Any = descriptions.find_class(form["class"])
    cls = cls if same(cls) else type(given)
    if not same(cls):
        raise descriptions.UnknownError(
            f"load: expected the class {form['class']} with the fields {fields}, in which the "
            "buffers were. Import its module first, or pass load(path, buffer=...)."
        )
    return cls(**{name: parts[name] for name in fields})


def folders(names: list[str]) -> dict[str, str]:
    """The folder of each buffer, below that of the checkpoint.

    Raises:
        ValueError: names that cannot be told apart as folders, or are too long.
    """
    found = {name: _saved.folder_name(name) for name in names}
    lower = [folder.lower() for folder in found.values()]
    for name, folder in found.items():
        if len(folder) > _LONGEST or lower.count(folder.lower()) > 1:
            raise ValueError(
                f"save: buffer {name[:80]!r}: expected a name of at most {_LONGEST} bytes that no "
                "other has in small letters, as it becomes that of a folder. Rename it."
            )
    return found

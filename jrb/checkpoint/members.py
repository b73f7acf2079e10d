"""Several buffers in one folder: their names, and what belongs to each."""

from typing import Any

from jrb import _saved
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import descriptions
from jrb.mix import AnyState, Mix
from jrb.sharding import Sharded
from jrb.sharding import states as shard_states

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


def each(buffer: Several) -> dict[str, Any]:
    """Those of which a Mix, a dict or a tuple is made, or the shards of a Sharded, by name."""
    if isinstance(buffer, Sharded):
        return dict.fromkeys(shard_states.names(buffer), buffer.part)
    return _entries(buffer.buffers if isinstance(buffer, Mix) else buffer)


def _entries(thing: dict[str, Any] | tuple[Any, ...]) -> dict[str, Any]:
    """The entries of a dict or a tuple, by name."""
    if isinstance(thing, dict):
        return thing
    names = descriptions.fields_of(type(thing)) or map(str, range(len(thing)))
    return dict(zip(names, thing, strict=True))


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
        found = _entries(tuple(thing) if isinstance(buffer, Mix) else thing)
        if found.keys() == set(names):
            return {name: found[name] for name in names}
        text = f"those of {list(found)}"
    raise ValueError(
        f"{what}: expected a {form.__name__} of {len(names)} {what.split()[-1]}, one for each of "
        f"{names}, got {text}."
    )


def states_of(buffer: Several, state: AnyState) -> dict[str, AnyState]:
    """The state of each of several buffers, by its name; of shards, those that are here."""
    if isinstance(buffer, Sharded):
        known = shard_states.names(buffer)
        return {known[number]: one for number, one in shard_states.split(buffer, state).items()}
    return of_each(buffer, state, "save: states")


def form_of(kind: type, names: list[str]) -> descriptions.Json:
    """What a dict or tuple with these names is, for JSON."""
    if issubclass(kind, dict):
        return {"dict": names}
    fields = descriptions.fields_of(kind)
    if fields is None:
        return {"tuple": len(names)}
    return {"class": descriptions.name_of(kind), "fields": list(fields)}


def names_of(form: Any, most: int) -> set[str]:
    """The names of the entries of a dict or tuple that `form_of` described, if they are so many."""
    if "tuple" in form:
        return set(map(str, range(min(form["tuple"], most + 1))))
    return set(form["dict"] if "dict" in form else form["fields"])


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
    same = lambda cls: list(descriptions.fields_of(cls) or ()) == fields
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

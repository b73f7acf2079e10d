"""A checkpoint in a folder, whatever is in it: one buffer, several, or a storage's own rows."""

from typing import Any

from jrb._store import generation, opening
from jrb._store.errors import DamagedError, StaleError
from jrb.checkpoint import beside, commits, parts, snapshots
from jrb.checkpoint.beside import Beside
from jrb.checkpoint.hooks import Inward, Outward
from jrb.checkpoint.members import Several
from jrb.checkpoint.opened import Opened
from jrb.checkpoint.snapshots import Source
from jrb.state import Device
from jrb.types import Item

_NOTHING, _PLAIN, _THERE = Beside(), Outward(), Inward()


def save(
    path: str, saved: Source, keep: int, extra: Beside = _NOTHING, out: Outward = _PLAIN
) -> int:
    """Saves now; the number of the generation. Writes of other threads wait."""
    begun: parts.AnyPending | int = 0
    try:
        with snapshots.reading(saved):
            begun = pending(path, saved, keep, False, extra, out)
            return begun if isinstance(begun, int) else begun.finish(keep)
    except BaseException:
        if not isinstance(begun, int):
            begun.close()
        raise


def pending(
    path: str, saved: Source, keep: int, copy: bool, extra: Beside, out: Outward
) -> parts.AnyPending | int:
    """A save that is to be finished, or the number of the generation if it is over already.

    Args:
        path: of the folder.
        saved: one state, or several.
        keep: how many older generations stay.
        copy: whether what will be written is copied now, so that the state may change.
        extra: what is saved besides.
        out: what becomes of items.
    """
    is_commit = saved.lies_at(path)
    if is_commit:
        commits.check(keep, extra, out)
    begun: parts.AnyPending | None = None
    try:
        with snapshots.reading(saved):
            begun = parts.pending(path, saved, extra, out)
            begun.open(copy)
            return begun.finish(keep) if is_commit else begun
    except BaseException:  # an interrupt may come where the context ends
        if begun is not None:
            begun.close()
        raise


def check(saved: Source) -> None:
    """Raises what a save would raise before it writes."""
    with snapshots.reading(saved):
        parts.pending("", saved, _NOTHING, _PLAIN)


def load(
    path: str,
    buffer: Several,
    example: Item,
    device: Device,
    number: int | None = None,
    extra: Item = None,
    back: Inward = _THERE,
) -> Any:
    """Loads a generation, the newest one if none is named.

    Returns:
        A description and its state; and what was saved besides, where `extra` is an example of it.
    """
    folder = opening.folder_at(path)
    while True:
        there = generation.numbers(folder)[-1:]
        try:
            one = generation.newest(folder) if number is None else opening.at(folder, number)
            opened = Opened(path, one)
            besides = () if extra is None else (beside.restored(opened, extra),)
            return *parts.load(opened, buffer, example, device, back), *besides
        except (DamagedError, FileNotFoundError, StaleError):
            if number is not None or generation.numbers(folder)[-1:] == there:
                raise  # else the next generation has come meanwhile


def generations(path: str) -> list[int]:
    """The generations that are there, oldest first."""
    return [number for number in generation.numbers(opening.folder_at(path)) if number]

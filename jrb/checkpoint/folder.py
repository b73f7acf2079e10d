"""A checkpoint in a folder, whatever is in it: one buffer, a mix, or a storage's own rows."""

from typing import Any

from jrb._store import generation, opening
from jrb._store.errors import DamagedError, StaleError
from jrb._store.files import Folder
from jrb.checkpoint import beside, commits, host_items, mixes, native
from jrb.checkpoint.beside import Beside
from jrb.mix import AnyState, Description, Mix
from jrb.state import Device
from jrb.types import Item

_NOTHING = Beside()


def save(
    path: str, buffer: Description, state: AnyState, keep: int, extra: Beside = _NOTHING
) -> int:
    """Saves now; the number of the generation. Writes of other threads wait."""
    saved: native.Pending | mixes.Pending | int = 0
    try:
        with host_items.reading(buffer, state):
            saved = pending(path, buffer, state, keep, False, extra)
            return saved if isinstance(saved, int) else saved.finish(keep)
    except BaseException:
        if not isinstance(saved, int):
            saved.close()
        raise


def pending(
    path: str, buffer: Description, state: AnyState, keep: int, copy: bool, extra: Beside
) -> native.Pending | mixes.Pending | int:
    """A save that is to be finished, or the number of the generation if it is over already.

    Args:
        path: of the folder.
        buffer: the description.
        state: its state.
        keep: how many older generations stay.
        copy: whether what will be written is copied now, so that the state may change.
        extra: what is saved besides.
    """
    if isinstance(buffer, Mix):
        return mixes.Pending(path, buffer, state, copy, extra)
    if host_items.is_own(path, buffer, state):
        return commits.save(buffer, state, keep, extra)
    with host_items.reading(buffer, state):
        return native.Pending(path, buffer, state, copy, extra)


def load(
    path: str,
    buffer: Description | None,
    example: Item,
    device: Device,
    number: int | None = None,
    extra: Item = None,
) -> Any:
    """Loads a generation, the newest one if none is named.

    Returns:
        A description and its state; and what was saved besides, where `extra` is an example of it.
    """
    folder = opening.folder_at(path)
    while True:
        there = generation.numbers(folder)[-1:]
        try:
            return _load(path, folder, buffer, example, device, number, extra)
        except (DamagedError, FileNotFoundError, StaleError):
            if number is not None or generation.numbers(folder)[-1:] == there:
                raise  # else the next generation has come meanwhile


def _load(
    path: str,
    folder: Folder,
    buffer: Description | None,
    example: Item,
    device: Device,
    number: int | None,
    extra: Item,
) -> Any:
    opened = generation.newest(folder) if number is None else opening.at(folder, number)
    besides = () if extra is None else (beside.restored(path, opened, extra),)
    if (opened.body["meta"] or {}).get("kind") == mixes.KIND:
        return *mixes.restored(path, buffer, example, device, opened), *besides
    return *native.load(path, buffer, example, device, opened.number or None), *besides


def verify(path: str) -> list[str]:
    """All that is wrong, a line each."""
    return opening.damages(path) + mixes.damages(path)


def generations(path: str) -> list[int]:
    """The generations that are there, oldest first."""
    return [number for number in generation.numbers(opening.folder_at(path)) if number]

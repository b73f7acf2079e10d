"""What Minari's storages have in common: the leaves of an episode, spaces as JSON, JPEG images.

T steps of an episode.
"""

import dataclasses
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jrb._base import extras

Space = Mapping[str, Any]
"""A space as Minari writes it: `{"type": "Box", "dtype": ..., "shape": ..., ...}`."""

_IMAGE = 32  # pixels: what is smaller is no image to Minari


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """An array of one episode, before it is read.

    Attributes:
        rows: how many there are.
        shape: of one row.
        dtype: NumPy's.
        read: reads it, `[rows, ...]`.
        is_jpeg: whether it is kept as JPEG images.
    """

    rows: int
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]
    is_jpeg: bool = False

    @property
    def form(self) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and dtype of a row."""
        return self.shape, self.dtype


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """An episode, before it is read.

    Attributes:
        where: in which file, for errors.
        leaves: by name, such as `observations/image`. Entries of a tuple are `_index_0` and so on.
        others: the names of what is no array of numbers.
    """

    where: str
    leaves: dict[str, Leaf]
    others: tuple[str, ...]


def subspaces(space: Space) -> dict[str, Space] | None:
    """The spaces within one, by the names of their entries; None if it has no such."""
    inner = space.get("subspaces")
    if isinstance(inner, Mapping):
        return {str(name): entry for name, entry in inner.items()}
    if isinstance(inner, Sequence):
        return {f"_index_{number}": entry for number, entry in enumerate(inner)}
    return None


def leaf_spaces(name: str, space: Space) -> Iterator[tuple[str, Space]]:
    """The spaces of single arrays, by the names of these."""
    inner = subspaces(space)
    if inner is None:
        yield name, space
        return
    for part, entry in inner.items():
        yield from leaf_spaces(f"{name}/{part}", entry)


def shape_of(space: Space | None) -> tuple[int, ...] | None:
    """The shape of one array of a space; None if it says nothing of that."""
    if space is None:
        return None
    match space.get("type"):
        case "Box":
            return tuple(map(int, space["shape"]))
        case "Discrete":
            return ()
        case "MultiDiscrete":
            return np.shape(space["nvec"])
        case "MultiBinary":
            sides = space["n"]
            return tuple(sides) if isinstance(sides, list) else (int(sides),)
        case _:
            return None


def is_image(space: Space | None) -> bool:
    """Whether Minari takes a space for one of images, which it keeps as JPEG unless told not to."""
    if space is None or space.get("type") != "Box" or space.get("dtype") != "uint8":
        return False
    shape = shape_of(space) or ()
    if len(shape) not in (2, 3) or min(shape[:2]) < _IMAGE:
        return False
    return not np.any(space["low"]) and bool(np.all(np.equal(space["high"], 255)))


def image_shape(where: str, frame: bytes) -> tuple[int, ...]:
    """The shape of an image."""
    return _decoded(where, frame).shape


def images(where: str, frames: Sequence[bytes], shape: tuple[int, ...]) -> np.ndarray:
    """JPEG images as an array uint8 `[rows, ...]`.

    Raises:
        ValueError: one of them is none, or of another shape.
    """
    found = np.empty((len(frames), *shape), np.uint8)
    for row, frame in enumerate(frames):
        image = _decoded(where, frame)
        if image.shape != shape:
            raise ValueError(
                f"{where}: expected images of shape {shape}, got {image.shape} in row {row}."
            )
        found[row] = image
    return found


def _decoded(where: str, frame: bytes) -> np.ndarray:
    pillow = extras.require("PIL.Image", "datasets")
    try:
        with pillow.open(io.BytesIO(frame), formats=["JPEG"]) as image:
            return np.asarray(image)
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise ValueError(f"{where}: expected JPEG images, got something else: {error}") from error

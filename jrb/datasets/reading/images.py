"""Leaves of pictures: images within tables, and frames of videos beside them.

K episodes, T steps over all of them. Pictures are `[height, width, channel]`.
"""

import contextlib
import functools
import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jrb.authoring import require
from jrb.datasets.reading import arrow
from jrb.datasets.reading.columns import Column

_AT_ONCE = 16  # images
_PALETTE = "P"


class ImageColumn(arrow.ArrowColumn):
    """A column of encoded images, bytes or `{bytes, path}`, decoded when they are read.

    All have the shape and dtype of the first one.
    """

    def __init__(self, files: arrow.ArrowFiles, name: str) -> None:
        super().__init__(files, arrow.ArrowLeaf((name,), np.dtype(np.uint8)))

    @functools.cached_property
    def _first_image(self) -> np.ndarray:
        return self._decoded(self._bytes(next(self._pieces(0, 1)))[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """`[T, height, width, channel]`."""
        return (len(self), *self._first_image.shape)

    @property
    def dtype(self) -> np.dtype:
        """That of the first image."""
        return self._first_image.dtype

    @property
    def _rows_at_once(self) -> int:
        return _AT_ONCE

    def _bytes(self, held: Any) -> list[bytes]:
        """What is stored for each row; paths are not followed."""
        types = require("pyarrow", "datasets").types
        if types.is_struct(held.type):
            place = held.type.get_field_index("bytes")
            self._check(place >= 0, "a field 'bytes'", str(held.type))
            held = held.flatten()[place]
        is_bytes = types.is_binary(held.type) or types.is_large_binary(held.type)
        self._check(is_bytes, "images as bytes", str(held.type))
        self._check(held.null_count == 0, "the bytes of images", "a null")
        return held.to_pylist()

    def _values(self, piece: Any) -> np.ndarray:
        found = np.empty((len(piece), *self.shape[1:]), self.dtype)
        for place, data in enumerate(self._bytes(piece)):
            image = self._decoded(data)
            is_like = image.shape == found.shape[1:] and image.dtype == found.dtype
            self._check(is_like, _about(self._first_image), _about(image))
            found[place] = image
        return found

    def _decoded(self, data: bytes) -> np.ndarray:
        pillow = require("PIL.Image", "datasets")
        try:
            with pillow.open(io.BytesIO(data)) as image:
                found = np.array(image.convert("RGB") if image.mode == _PALETTE else image)
        except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
            raise ValueError(
                f"{self._path}: column '{self._leaf.name}': expected whole images, got one that "
                f"is not: {error}"
            ) from error
        return found if found.ndim == 3 else found[..., None]


def _about(image: np.ndarray) -> str:
    return f"{image.dtype} {list(image.shape)}"


class VideoColumn:
    """The frames of videos, uint8 RGB, decoded when they are read.

    Args:
        paths: the video of each episode.
        begins: float64 `[K]`, the time within it, in seconds, at which an episode begins.
        ends: int64 `[K]`, the number of steps up to the end of each episode.
        times: the times of steps within their episodes, in seconds.
        shape: of a frame.
        fps: frames in a second.
    """

    def __init__(
        self,
        paths: Sequence[str],
        begins: np.ndarray,
        ends: np.ndarray,
        times: Column,
        shape: tuple[int, int, int],
        fps: float,
    ) -> None:
        self._paths, self._begins, self._ends, self._times = paths, begins, ends, times
        self._frame, self._tolerance = tuple(shape), 0.5 / fps
        self._last: _VideoFile | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """`[T, height, width, channel]`."""
        return (len(self), *self._frame)

    @property
    def dtype(self) -> np.dtype:
        """uint8."""
        return np.dtype(np.uint8)

    def __len__(self) -> int:
        """T."""
        return int(self._ends[-1])

    def __getitem__(self, part: slice) -> np.ndarray:
        """These frames."""
        start, stop, _ = part.indices(len(self))
        found = np.empty((stop - start, *self._frame), np.uint8)
        place = start
        while place < stop:
            episode = int(np.searchsorted(self._ends, place, side="right"))
            end = min(stop, int(self._ends[episode]))
            times = self._times[place:end].astype(np.float64) + self._begins[episode]
            for number, frame in enumerate(self._video(episode).frames(times, self._tolerance)):
                self._check(episode, frame)
                found[place - start + number] = frame
            place = end
        return found

    def _video(self, episode: int) -> "_VideoFile":
        path = self._paths[episode]
        if self._last is None or self._last.path != path:
            self._last = _VideoFile(path)
        return self._last

    def _check(self, episode: int, frame: np.ndarray) -> None:
        if frame.shape != self._frame:
            raise ValueError(
                f"{self._paths[episode]}: expected frames {list(self._frame)}, got "
                f"{list(frame.shape)}."
            )


class _VideoFile:
    """A file of video, read on from the frame that was read last."""

    def __init__(self, path: str) -> None:
        self._av = require("av", "video")
        self.path = path
        with self._refused():
            self._container = self._av.open(path)
            self._stream = self._container.streams.video[0]
        self._decoded: Iterator[Any] = iter(())
        self._held = self._ahead = None

    def frames(self, times: np.ndarray, tolerance: float) -> Iterator[np.ndarray]:
        """Those nearest to rising times in seconds.

        Raises:
            ValueError: the file is damaged, or has none so near.
        """
        with self._refused():
            if self._held is None or self._held.time > times[0] + tolerance:
                self._seek(max(0.0, times[0] - tolerance))
            for time in times.tolist():
                while self._is_late(time):
                    self._held, self._ahead = self._ahead, next(self._decoded, None)
                if self._held is None or abs(self._held.time - time) > tolerance:
                    raise ValueError(
                        f"{self.path}: expected a frame at {time:.3f} s, got none so near."
                    )
                yield self._held.to_ndarray(format="rgb24")

    def _is_late(self, time: float) -> bool:
        """Whether the next frame is nearer to a time than the one that is held."""
        if self._ahead is None or self._held is None:
            return False
        return abs(self._ahead.time - time) <= abs(self._held.time - time)

    def _seek(self, time: float) -> None:
        """Goes to the last frame before a time that is coded on its own."""
        begin = int(time / self._stream.time_base) + (self._stream.start_time or 0)
        self._container.seek(begin, stream=self._stream)
        self._decoded = self._container.decode(self._stream)
        self._held = next(self._decoded, None)
        self._ahead = next(self._decoded, None)

    @contextlib.contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        except (self._av.error.FFmpegError, IndexError) as error:
            raise ValueError(
                f"{self.path}: expected a whole video, got one that is not: {error}"
            ) from error


def channels_last(shape: Sequence[int], names: Any) -> tuple[int, int, int]:
    """The shape `[height, width, channel]` of what may have its channels first."""
    first, *_, last = shape
    named = isinstance(names, list) and names and str(names[0]).startswith("channel")
    is_first = named or (first in (1, 3, 4) and last not in (1, 3, 4))
    return (shape[1], shape[2], first) if is_first else (first, shape[1], last)

"""Columns of images, decoded from tables or from videos.

K episodes, T steps over all of them. Images are `[height, width, channel]`.
"""

import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jrb.authoring import require
from jrb.datasets.reading import arrow
from jrb.datasets.reading.names import check, explain_damage
from jrb.datasets.reading.tabular import Column, DerivedColumn

_AT_ONCE = 16  # the number of images that are decoded at once


def decode_image(data: bytes, where: str) -> np.ndarray:
    """Decodes an image to `[height, width]` or `[height, width, channel]`; raises if damaged."""
    pillow = require("PIL.Image", "datasets")
    damage = (OSError, SyntaxError, ValueError, pillow.DecompressionBombError)
    # The pixels of a palette image are indices of colours, so such an image becomes RGB.
    with explain_damage(where, "whole images", damage), pillow.open(io.BytesIO(data)) as image:
        return np.array(image.convert("RGB") if image.mode == "P" else image)


class ImageColumn(arrow.ArrowColumn):
    """A column of encoded images, which are bytes or `{bytes, path}`; reading decodes them.

    Gray images get an axis of one channel, unless `has_channels` is False.
    """

    def __init__(
        self, files: arrow.ArrowFiles, path: tuple[str, ...], has_channels: bool = True
    ) -> None:
        super().__init__(files, path)
        self._has_channels = has_channels

    @property
    def _rows_at_once(self) -> int:
        return _AT_ONCE

    def _values(self, piece: Any) -> np.ndarray:
        types = require("pyarrow", "datasets").types
        array = self._field(piece)
        # A struct has the bytes of the image, and often a path, which is not read.
        if types.is_struct(array.type):
            place = array.type.get_field_index("bytes")
            self._check(place >= 0, "a field 'bytes'", str(array.type))
            array = array.flatten()[place]
        is_bytes = types.is_binary(array.type) or types.is_large_binary(array.type)
        self._check(is_bytes, "images as bytes", str(array.type))
        self._check(array.null_count == 0, "the bytes of images", "a null")
        # Decode the images, and compare each with the first of the column.
        images = [decode_image(data, self._where) for data in array.to_pylist()]
        if self._has_channels:
            images = [image if image.ndim == 3 else image[..., None] for image in images]
        first = vars(self)["_example"][0] if "_example" in vars(self) else images[0]
        for image in images:
            about = [f"{each.dtype} {list(each.shape)}" for each in (first, image)]
            self._check(about[0] == about[1], *about)
        return np.stack(images)


def video_column(
    videos: Sequence[str],
    begins: np.ndarray,
    ends: np.ndarray,
    times: Column,
    shape: tuple[int, int, int],
    fps: float,
) -> DerivedColumn:
    """Returns a column of uint8 RGB frames from videos, decoded when they are read.

    Episode k begins at `begins[k]` seconds in the file `videos[k]`; `times`, `[T]`, are the seconds
    of each step after the begin of its episode. `ends` is as in `Table`.
    """

    def read(start: int, stop: int) -> np.ndarray:
        frames, row = np.empty((stop - start, *shape), np.uint8), start
        while row < stop:
            episode = int(np.searchsorted(ends, row, side="right"))
            # Decode the frames of one episode at a time, as each has a file and a begin of its own.
            end, path = min(stop, int(ends[episode])), videos[episode]
            at = times[row:end].astype(np.float64) + begins[episode]
            for frame in _nearest_frames(path, at, 0.5 / fps):
                check(frame.shape == shape, path, f"frames {list(shape)}", list(frame.shape))
                frames[row - start] = frame
                row += 1
        return frames

    return DerivedColumn((int(ends[-1]), *shape), np.dtype(np.uint8), read)


def _nearest_frames(path: str, times: np.ndarray, tolerance: float) -> Iterator[np.ndarray]:
    """Yields the frames nearest to ascending times in seconds; raises if one is too far."""
    av = require("av", "video")
    damage = (av.error.FFmpegError, IndexError)
    with explain_damage(path, "a whole video", damage), av.open(path) as container:
        stream = container.streams.video[0]
        # Seeking finds the last key frame before the first time; decoding begins there.
        begin = max(0.0, times[0] - tolerance) / stream.time_base
        container.seek(int(begin) + (stream.start_time or 0), stream=stream)
        frames: Iterator[Any] = iter(container.decode(stream))
        frame, following = next(frames, None), next(frames, None)
        # Go on to the next frame as long as it is no farther from the time than this one.
        for time in times.tolist():
            while frame and following and abs(following.time - time) <= abs(frame.time - time):
                frame, following = following, next(frames, None)
            if frame is None or abs(frame.time - time) > tolerance:
                raise ValueError(f"{path}: expected a frame at {time:.3f} s, got none so near.")
            yield frame.to_ndarray(format="rgb24")

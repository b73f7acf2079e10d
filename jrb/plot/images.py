"""Finds leaves that are images, and tiles them. H height, W width, C channels, K frames."""

from typing import Any

import numpy as np

from jrb.plot import canvas
from jrb.plot.canvas import Axes, Row, Tone

_LEAST, _CHANNELS, _SIDE = 5, 16, 128
_PLANES = np.array(
    [[int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)] for color in canvas.CYCLE]
)
PALE = 0.22
"""The opacity of masked images."""

Order = tuple[int | None, int, int, int | None]
"""The axes of frames, height, width and channels in one item; None for an axis that it lacks."""


def axes_order(shape: tuple[int, ...]) -> Order | None:
    """Returns the axes of an image with this shape; None if the shape is no image's.

    Images are `(H, W)`, `(H, W, C)`, `(C, H, W)` with C = 3, `(K, H, W)`, `(K, H, W, C)`, and
    `(K, C, H, W)` with C = 1 or 3. C is at most 16, H and W at least 5. The first form that fits
    counts.
    """
    wide = [length >= _LEAST for length in shape]
    if len(shape) == 2 and all(wide):
        return None, 0, 1, None
    if len(shape) == 3 and wide[0] and wide[1] and shape[2] <= _CHANNELS:
        return None, 0, 1, 2
    if len(shape) == 3 and wide[1] and wide[2]:
        return (None, 1, 2, 0) if shape[0] == 3 else (0, 1, 2, None)
    if len(shape) == 4 and wide[1] and wide[2] and shape[3] <= _CHANNELS:
        return 0, 1, 2, 3
    if len(shape) == 4 and wide[2] and wide[3] and shape[1] in (1, 3):
        return 0, 2, 3, 1
    return None


def to_frames(values: np.ndarray, order: Order, lead: int) -> np.ndarray:
    """Returns images `[*lead, ...]` as `[*lead, K, H, W, C]`."""
    axes = [lead + axis for axis in order if axis is not None]
    values = np.moveaxis(values, axes, range(lead, lead + len(axes)))
    values = np.expand_dims(values, lead) if order[0] is None else values
    return values[..., None] if order[3] is None else values


def find_images(leaves: dict[str, Any], lead: int) -> tuple[str, Order] | None:
    """Returns name and axes of the first leaf with images, preferring those not below `next`."""
    for name in sorted(leaves, key=lambda name: name.startswith("next")):
        # Leaves of a `ListStorage` are any Python objects, which may have no shape.
        dtype, shape = (getattr(leaves[name], part, None) for part in ("dtype", "shape"))
        order = axes_order(tuple(shape[lead:])) if shape is not None else None
        if order is not None and getattr(dtype, "kind", "") in "biuf":
            return name, order
    return None


def to_rgb(frames: np.ndarray) -> tuple[np.ndarray, str]:
    """Returns frames `[..., H, W, C]` as RGB from 0 to 1, and a text on how they were made."""
    # Leave out rows and columns of pixels of large images.
    step = max(1, -(-max(frames.shape[-3:-1]) // _SIDE))
    frames, channels = frames[..., ::step, ::step, :], frames.shape[-1]
    if channels > 1 and (
        frames.dtype == np.bool_ or (channels != 3 and np.isin(frames, (0, 1)).all())
    ):
        # Each plane of flags has a colour; where several are set, the last one wins.
        planes = np.full((*frames.shape[:-1], 3), 0.09, np.float32)
        for channel in range(channels):
            planes[frames[..., channel] != 0] = _PLANES[channel % len(_PLANES)]
        return planes, f"a colour for each of {channels} planes"
    # Three channels are RGB; of any other number, show the last one in grey.
    more = "" if channels in (1, 3) else f"the last of {channels} channels"
    values = frames if channels == 3 else np.repeat(frames[..., -1:], 3, axis=-1)
    if values.dtype == np.uint8:
        return values.astype(np.float32) / 255, more
    # Scale other dtypes from their least value, at most 0, to their greatest, at least 1.
    values = np.nan_to_num(values.astype(np.float32))
    low, high = values.min(initial=0), values.max(initial=1)
    return np.clip((values - low) / (high - low), 0, 1), more


def tile(pictures: np.ndarray, opacity: np.ndarray) -> np.ndarray:
    """Returns one RGBA image of pictures `[rows, columns, H, W, 3]` with opacities per picture."""
    rows, columns, high, wide, _ = pictures.shape
    gap = max(1, round(min(high, wide) / 14))
    # A gap follows each picture, to the right and below, and the last gaps are cut off.
    sheet = np.zeros((rows, high + gap, columns, wide + gap, 4), np.float32)
    sheet[:, :high, :, :wide, :3] = pictures.transpose(0, 2, 1, 3, 4)
    sheet[:, :high, :, :wide, 3] = opacity[:, None, :, None]
    return sheet.reshape(rows * (high + gap), columns * (wide + gap), 4)[:-gap, :-gap]


def image_row(sheet: np.ndarray, title: str, more: str) -> Row:
    """Returns a row with one panel, whose height fits the picture."""

    def draw(axes: Axes, tone: Tone) -> None:
        axes.imshow(sheet, interpolation="nearest", aspect="equal")
        axes.set(xticks=[], yticks=[], anchor="W")
        axes.spines[:].set_visible(False)
        canvas.write_title(axes, tone, title, more)

    high, wide = sheet.shape[:2]
    return Row(min((canvas.WIDTH - 0.4) * high / wide, 5.0) + 0.6, [draw], around=0.6)

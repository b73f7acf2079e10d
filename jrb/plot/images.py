"""Leaves that are images, as tiles of one picture. H height, W width, C channels, K frames."""

import dataclasses
from typing import Any

import numpy as np

from jrb._util import pytree
from jrb.plot import canvas
from jrb.plot.canvas import Axes, Row, Tone

_LEAST, _CHANNELS, _SIDE = 5, 16, 128
_PLANES = np.array(
    [[int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)] for color in canvas.CYCLE]
)
_DARK = 0.09  # what is behind planes of which none is set
PALE = 0.22
"""The opacity of what is masked."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """How the axes of one item of a leaf are to be taken.

    Attributes:
        axes: where frames, height, width and channels are; None for what it does not have.
    """

    axes: tuple[int | None, int, int, int | None]

    def frames(self, values: np.ndarray, lead: int) -> np.ndarray:
        """From `[*lead, ...]` to `[*lead, K, H, W, C]`."""
        there = [lead + axis for axis in self.axes if axis is not None]
        moved = np.moveaxis(values, there, range(lead, lead + len(there)))
        if self.axes[0] is None:
            moved = np.expand_dims(moved, lead)
        return moved if self.axes[3] is not None else moved[..., None]


def kind_of(shape: tuple[int, ...]) -> Kind | None:
    """What one item of this shape is, if an image: the last axes decide where they can.

    `(H, W)`, `(H, W, C)`, `(C, H, W)` of three channels, `(K, H, W)`, `(K, H, W, C)` and
    `(K, C, H, W)`, with C up to 16 and H and W from 5 on.
    """
    wide = lambda *axes: all(shape[axis] >= _LEAST for axis in axes)
    if len(shape) == 2 and wide(0, 1):
        return Kind((None, 0, 1, None))
    if len(shape) == 3 and wide(0, 1) and shape[2] <= _CHANNELS:
        return Kind((None, 0, 1, 2))
    if len(shape) == 3 and wide(1, 2) and shape[0] == 3:
        return Kind((None, 1, 2, 0))
    if len(shape) == 3 and wide(1, 2):
        return Kind((0, 1, 2, None))
    if len(shape) == 4 and wide(1, 2) and shape[3] <= _CHANNELS:
        return Kind((0, 1, 2, 3))
    if len(shape) == 4 and wide(2, 3) and shape[1] in (1, 3):
        return Kind((0, 2, 3, 1))
    return None


def found(specs: dict[str, Any], lead: int) -> tuple[str, Kind] | None:
    """The first leaf that is an image, of what was seen before an action if there is one.

    Args:
        specs: leaves by their names, or what has their shapes and dtypes, `[*lead, ...]`.
        lead: how many axes come before those of an item.
    """
    names = sorted(specs, key=lambda name: name.startswith("next"))
    for name in names:
        leaf = specs[name]
        if not pytree.is_array(leaf) or np.dtype(getattr(leaf, "dtype", object)).kind not in "biuf":
            continue
        kind = kind_of(tuple(leaf.shape[lead:]))
        if kind is not None:
            return name, kind
    return None


def colored(frames: np.ndarray) -> tuple[np.ndarray, str]:
    """Frames `[..., H, W, C]` as red, green and blue from 0 to 1, and what is to be said of it."""
    step = max(1, -(-max(frames.shape[-3:-1]) // _SIDE))
    frames, channels = frames[..., ::step, ::step, :], frames.shape[-1]
    if channels == 1:
        return np.repeat(_bright(frames), 3, axis=-1), ""
    if frames.dtype == np.bool_ or (channels != 3 and np.isin(frames, (0, 1)).all()):
        return _planes(frames != 0), f"a colour for each of {channels} planes"
    if channels == 3:
        return _bright(frames), ""
    return np.repeat(_bright(frames[..., -1:]), 3, axis=-1), f"the last of {channels} channels"


def _bright(values: np.ndarray) -> np.ndarray:
    """From 0 to 1: of uint8 by 255, of floats in that range as they are, else by their bounds."""
    if values.dtype == np.uint8:
        return values.astype(np.float32) / 255
    numbers = np.nan_to_num(values.astype(np.float32))
    low, high = numbers.min(initial=0), numbers.max(initial=1)
    return np.clip((numbers - low) / (high - low), 0, 1)


def _planes(planes: np.ndarray) -> np.ndarray:
    """Flags `[..., H, W, C]` as colours; where several are set, that of the last one."""
    shown = np.full((*planes.shape[:-1], 3), _DARK, np.float32)
    for channel in range(planes.shape[-1]):
        shown[planes[..., channel]] = _PLANES[channel % len(_PLANES)]
    return shown


def tiles(pictures: np.ndarray, shown: np.ndarray) -> np.ndarray:
    """Pictures `[rows, columns, H, W, 3]` as one, with these opacities, `[rows, columns]`."""
    rows, columns, high, wide, _ = pictures.shape
    gap = max(1, round(min(high, wide) / 14))
    sheet = np.zeros((rows * (high + gap) - gap, columns * (wide + gap) - gap, 4), np.float32)
    for row in range(rows):
        for column in range(columns):
            y, x = row * (high + gap), column * (wide + gap)
            sheet[y : y + high, x : x + wide, :3] = pictures[row, column]
            sheet[y : y + high, x : x + wide, 3] = shown[row, column]
    return sheet


def beside(sheets: list[np.ndarray]) -> np.ndarray:
    """Sheets `[height, width, 4]` side by side, of which the first is the highest."""
    high = len(sheets[0])
    gap = np.zeros((high, max(2, high // 24), 4), np.float32)
    parts = []
    for sheet in sheets:
        parts += [gap, np.pad(sheet, ((0, high - len(sheet)), (0, 0), (0, 0)))]
    return np.concatenate(parts[1:], axis=1)


def row(sheet: np.ndarray, title: str, more: str) -> Row:
    """A row with one panel, as high as the picture needs."""

    def draw(axes: Axes, tone: Tone) -> None:
        axes.imshow(sheet, interpolation="nearest", aspect="equal")
        axes.set(xticks=[], yticks=[], anchor="W")
        axes.spines[:].set_visible(False)
        canvas.say(axes, tone, title, more)

    high, wide = sheet.shape[:2]
    return Row(min((canvas.WIDTH - 0.4) * high / wide, 5.0) + 0.6, [draw], around=0.6)

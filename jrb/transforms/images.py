"""Transforms of images, uint8 or floating, whose last axes are height, width and channels."""

import abc
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from jrb._util import checks, pytree
from jrb._xla import random_bits
from jrb.transforms.leaves import LeafTransform, Paths, check_numbers, dtype_name
from jrb.types import Item, TransformContext

Axes = tuple[int, int]  # of height and width
Layout = Literal["HWC", "CHW", "HW"]


@pytree.component
class ToFloat(LeafTransform):
    """Turns uint8 images into floats: x * scale, from 0 to 1 by default.

    Attributes:
        paths: the leaves to change; None for uint8 leaves of the observation and next observation.
        scale: the factor.
        dtype: the dtype of the result.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(8, batch_size=2, transforms=(jrb.transforms.ToFloat(),))
        >>> state = buffer.init({"observation": jnp.zeros(3, jnp.uint8)})
        >>> state = buffer.add(state, {"observation": jnp.array([0, 51, 255], jnp.uint8)})
        >>> buffer.sample(state, jax.random.key(0)).data["observation"][0].round(3).tolist()
        [0.0, 0.20000000298023224, 1.0]
    """

    paths: Paths | None = None
    scale: float = 1 / 255
    dtype: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers("ToFloat", scale=self.scale)
        object.__setattr__(self, "dtype", dtype_name("ToFloat", self.dtype))

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """Returns the data with images as floats."""
        out = super().apply(data, batch)
        # Floats pass unchanged. If nothing changed, the images are elsewhere.
        pairs = zip(jax.tree.leaves(data), jax.tree.leaves(out), strict=True)
        if all(new is old for old, new in pairs):
            raise ValueError(
                f"ToFloat: expected a leaf of dtype uint8 in the observation, got the leaves "
                f"{pytree.leaf_names(data)} without one. Name it with paths=."
            )
        return out

    def _change_leaf(self, name: str, leaf: jax.Array, batch: TransformContext) -> jax.Array:
        if leaf.dtype == jnp.uint8:
            return (leaf.astype(jnp.float32) * self.scale).astype(self.dtype)
        if self.paths is None:
            return leaf
        raise TypeError(f"ToFloat: leaf '{name}': expected dtype uint8, got {leaf.dtype}.")


class ImageTransform(LeafTransform):
    """Changes images, by default those of the observation and next observation.

    Attributes:
        layout: the last axes of images, in order, such as "HWC".
    """

    layouts: ClassVar[tuple[str, ...]] = ("HWC", "CHW", "HW")
    layout: Layout

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice("layout", self.layout, self.layouts)
        # Check the sizes that subclasses have.
        for name in ("height", "width", "most"):
            if hasattr(self, name):
                checks.count(name, getattr(self, name))

    def _change_leaf(self, name: str, leaf: jax.Array, batch: TransformContext) -> jax.Array:
        if leaf.ndim < batch.mask.ndim + len(self.layout):
            lead = "[B, ..., " if batch.mask.ndim == 1 else "[B, L, ..., "
            raise ValueError(
                f"{type(self).__name__}: leaf '{name}': expected images {lead}"
                f"{', '.join(self.layout)}], got shape {leaf.shape}. Name the images with paths=, "
                "or their layout."
            )
        # The axes of height and width, after those of the batch.
        first = leaf.ndim - len(self.layout)
        axes = first + self.layout.index("H"), first + self.layout.index("W")
        return self._change_image(name, leaf, axes, batch.key)

    @abc.abstractmethod
    def _change_image(self, name: str, leaf: jax.Array, axes: Axes, key: jax.Array) -> jax.Array:
        """Returns a leaf `[B, ..., *layout]`, changed along its axes of height and width."""

    def _find_margins(
        self, name: str, leaf: jax.Array, axes: Axes, size: tuple[int, int]
    ) -> list[int]:
        """Returns by how many pixels images exceed `size`, in height and width."""
        margins = [leaf.shape[axis] - length for axis, length in zip(axes, size, strict=True)]
        if min(margins) < 0:
            raise ValueError(
                f"{type(self).__name__}: leaf '{name}': expected images of at least {size}, got "
                f"shape {leaf.shape}. Use Resize, or a smaller window."
            )
        return margins


@pytree.component
class Resize(ImageTransform):
    """Resizes images; uint8 stays uint8, rounded.

    Attributes:
        height: rows of the result.
        width: columns of the result.
        paths: the leaves to change; None for the observation and next observation.
        layout: the last axes of images, in order, such as "HWC".
        method: the method of `jax.image.resize`.
    """

    height: int
    width: int
    paths: Paths | None = None
    layout: Layout = "HWC"
    method: str = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            jax.image.ResizeMethod.from_string(self.method)
        except (ValueError, TypeError):
            raise ValueError(
                f"Resize: method: expected one of jax.image.resize, got {self.method!r}."
            ) from None

    def _change_image(self, name: str, leaf: jax.Array, axes: Axes, key: jax.Array) -> jax.Array:
        shape = list(leaf.shape)
        shape[axes[0]], shape[axes[1]] = self.height, self.width
        return _round_to(jax.image.resize(pytree.widen(leaf), shape, self.method), leaf.dtype)


@pytree.component
class Grayscale(ImageTransform):
    """Turns colours into one channel: 0.299 red + 0.587 green + 0.114 blue; uint8 stays uint8.

    Attributes:
        paths: the leaves to change; None for the observation and next observation.
        layout: "HWC" or "CHW".
        keep: True to keep the axis of channels, with length 1.

    Reference: ITU-R BT.601.
    """

    layouts: ClassVar[tuple[str, ...]] = ("HWC", "CHW")
    paths: Paths | None = None
    layout: Layout = "HWC"
    keep: bool = True

    def _change_image(self, name: str, leaf: jax.Array, axes: Axes, key: jax.Array) -> jax.Array:
        axis = axes[0] - self.layout.index("H") + self.layout.index("C")
        if leaf.shape[axis] != 3:
            raise ValueError(
                f"Grayscale: leaf '{name}': expected 3 channels in layout {self.layout}, got "
                f"shape {leaf.shape}. Name the images with paths=, or their layout."
            )
        # The brightness is a weighted sum over the channels.
        wide = jnp.moveaxis(pytree.widen(leaf), axis, -1)
        light = jnp.sum(wide * jnp.asarray([0.299, 0.587, 0.114], wide.dtype), axis=-1)
        light = _round_to(light, leaf.dtype)
        return jnp.expand_dims(light, axis) if self.keep else light


@pytree.component
class RandomShift(ImageTransform):
    """Shifts the images of each item by up to `most` pixels each way, and repeats their border.

    All images in one leaf of an item, such as those of a window or a stack, get the same shift;
    other leaves, such as the next observation, get another.

    Attributes:
        most: the largest shift, in pixels.
        paths: the leaves to change; None for the observation and next observation.
        layout: the last axes of images, in order, such as "HWC".

    Reference: Yarats et al., 2021, "Image augmentation is all you need", section 3.1.
    """

    most: int = 4
    paths: Paths | None = None
    layout: Layout = "HWC"

    def _change_image(self, name: str, leaf: jax.Array, axes: Axes, key: jax.Array) -> jax.Array:
        offsets = _draw_integers(key, leaf, 2 * self.most + 1) - self.most
        return _cut_windows(leaf, axes, offsets, [leaf.shape[axis] for axis in axes])


@pytree.component
class RandomCrop(ImageTransform):
    """Crops images to a window at a random position, the same for all images of an item.

    Attributes:
        height: rows of the window.
        width: columns of the window.
        paths: the leaves to change; None for the observation and next observation.
        layout: the last axes of images, in order, such as "HWC".

    Reference: Laskin et al., 2020, "Reinforcement learning with augmented data", section 4.
    """

    height: int
    width: int
    paths: Paths | None = None
    layout: Layout = "HWC"

    def _change_image(self, name: str, leaf: jax.Array, axes: Axes, key: jax.Array) -> jax.Array:
        margins = self._find_margins(name, leaf, axes, (self.height, self.width))
        # Height and width have different margins, and each takes its own column of the same words.
        offsets = [
            _draw_integers(key, leaf, margin + 1)[:, way] for way, margin in enumerate(margins)
        ]
        return _cut_windows(leaf, axes, jnp.stack(offsets, axis=1), [self.height, self.width])


@pytree.component
class CenterCrop(ImageTransform):
    """Crops images to their middle, such as for evaluation where training has `RandomCrop`.

    Attributes:
        height: rows of the window.
        width: columns of the window.
        paths: the leaves to change; None for the observation and next observation.
        layout: the last axes of images, in order, such as "HWC".
    """

    height: int
    width: int
    paths: Paths | None = None
    layout: Layout = "HWC"

    def _change_image(self, name: str, leaf: jax.Array, axes: Axes, key: jax.Array) -> jax.Array:
        size = self.height, self.width
        margins = self._find_margins(name, leaf, axes, size)
        for axis, margin, length in zip(axes, margins, size, strict=True):
            leaf = jax.lax.slice_in_dim(leaf, margin // 2, margin // 2 + length, axis=axis)
        return leaf


def _draw_integers(key: jax.Array, leaf: jax.Array, below: int) -> jax.Array:
    """Returns random integers in [0, below), int32 `[B, 2]`."""
    words = random_bits.bits(key, (2, leaf.shape[0], 2))
    return random_bits.below(jnp.int32(below), words[0], words[1])


def _cut_windows(leaf: jax.Array, axes: Axes, offsets: jax.Array, sizes: list[int]) -> jax.Array:
    """Returns the window of each item at its offset, int32 `[B, 2]`, with the border repeated."""

    def window(item: jax.Array, offset: jax.Array) -> jax.Array:
        for axis, start, size in zip(axes, offset, sizes, strict=True):
            # Clipped indices repeat the border: no copy of the image with a padding is made.
            at = jnp.arange(size, dtype=jnp.int32) + start
            item = jnp.take(item, jnp.clip(at, 0, item.shape[axis - 1] - 1), axis=axis - 1)
        return item

    return jax.vmap(window)(leaf, offsets)


def _round_to(wide: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns floats in another dtype, rounded and kept in range for integers."""
    if not jnp.issubdtype(dtype, jnp.integer):
        return wide.astype(dtype)
    info = jnp.iinfo(dtype)
    return jnp.clip(jnp.round(wide), info.min, info.max).astype(dtype)

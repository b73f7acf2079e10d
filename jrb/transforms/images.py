"""Transforms of images, uint8 or floating, whose last axes are height, width and channels."""

from typing import Literal

import jax
import jax.numpy as jnp

from jrb._util import checks, pytree
from jrb._xla import random_bits
from jrb.transforms.leaves import Paths, check_paths, dtype_name, observations, rewritten
from jrb.types import Item, Transform, TransformContext

Layout = Literal["HWC", "CHW", "HW"]
_LAYOUTS = ("HWC", "CHW", "HW")


@pytree.component
class ToFloat(Transform):
    """uint8 images as floats: x * scale, from 0 to 1 by default.

    Attributes:
        paths: which leaves; None for those of the observation and the next that are uint8.
        scale: what is multiplied with.
        dtype: of the result.

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
        check_paths("ToFloat", self.paths)
        object.__setattr__(self, "dtype", dtype_name("ToFloat", self.dtype))

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """The data, with images as floats."""
        paths = observations(data, batch.keys) if self.paths is None else self.paths
        found = []

        def change(name: str, leaf: jax.Array) -> jax.Array:
            if leaf.dtype != jnp.uint8:
                if self.paths is None:
                    return leaf
                raise TypeError(f"ToFloat: leaf '{name}': expected dtype uint8, got {leaf.dtype}.")
            found.append(name)
            return (leaf.astype(jnp.float32) * self.scale).astype(jnp.dtype(self.dtype))

        out = rewritten(data, paths, "ToFloat", change)
        if not found:
            raise ValueError(
                f"ToFloat: expected a leaf of dtype uint8 in the observation, got the leaves "
                f"{pytree.leaf_names(data)} without one. Name it with paths=."
            )
        return out


@pytree.component
class Resize(Transform):
    """Another height and width; uint8 stays uint8, rounded.

    Attributes:
        height: rows of the result.
        width: columns of the result.
        paths: which leaves; None for the observation and the next.
        layout: what the last axes are.
        method: of `jax.image.resize`.
    """

    height: int
    width: int
    paths: Paths | None = None
    layout: Layout = "HWC"
    method: str = "linear"

    def __post_init__(self) -> None:
        checks.count("height", self.height)
        checks.count("width", self.width)
        _check_images("Resize", self.paths, self.layout)

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """The data, with images of that size."""

        def resize(name: str, leaf: jax.Array) -> jax.Array:
            rows, columns = _axes(name, leaf, batch, self.layout, "Resize")
            shape = list(leaf.shape)
            shape[rows], shape[columns] = self.height, self.width
            resized = jax.image.resize(pytree.wide(leaf), shape, self.method)
            return _as(resized, leaf.dtype)

        return rewritten(data, _paths(self.paths, data, batch), "Resize", resize)


@pytree.component
class Grayscale(Transform):
    """One channel for three: 0.299 red + 0.587 green + 0.114 blue; uint8 stays uint8, rounded.

    Attributes:
        paths: which leaves; None for the observation and the next.
        layout: "HWC" or "CHW".
        keep: whether the axis of channels stays, with length 1.

    Reference: ITU-R BT.601.
    """

    paths: Paths | None = None
    layout: Literal["HWC", "CHW"] = "HWC"
    keep: bool = True

    def __post_init__(self) -> None:
        check_paths("Grayscale", self.paths)
        checks.choice("layout", self.layout, ("HWC", "CHW"))

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """The data, with images of one channel."""

        def gray(name: str, leaf: jax.Array) -> jax.Array:
            axis = leaf.ndim + (-1 if self.layout == "HWC" else -3)
            if leaf.ndim < batch.mask.ndim + 3 or leaf.shape[axis] != 3:
                raise ValueError(
                    f"Grayscale: leaf '{name}': expected 3 channels in layout {self.layout}, got "
                    f"shape {leaf.shape}. Name the images with paths=, or their layout."
                )
            wide = jnp.moveaxis(pytree.wide(leaf), axis, -1)
            light = jnp.sum(wide * jnp.asarray([0.299, 0.587, 0.114], wide.dtype), axis=-1)
            light = _as(light, leaf.dtype)
            return jnp.expand_dims(light, axis) if self.keep else light

        return rewritten(data, _paths(self.paths, data, batch), "Grayscale", gray)


@pytree.component
class RandomShift(Transform):
    """Every item moved by up to `most` pixels each way, its border repeated.

    All images of an item, of a window and of a stack, move alike; the observation and the next
    observation, and other leaves, move on their own.

    Attributes:
        most: pixels.
        paths: which leaves; None for the observation and the next.
        layout: what the last axes are.

    Reference: Yarats et al., 2021, "Image augmentation is all you need", section 3.1.
    """

    most: int = 4
    paths: Paths | None = None
    layout: Layout = "HWC"

    def __post_init__(self) -> None:
        checks.count("most", self.most)
        _check_images("RandomShift", self.paths, self.layout)

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """The data, with images moved."""
        names = pytree.leaf_names(data)

        def shift(name: str, leaf: jax.Array) -> jax.Array:
            axes = _axes(name, leaf, batch, self.layout, "RandomShift")
            offsets = _random(batch.key, names.index(name), leaf, 2 * self.most + 1) - self.most
            sizes = [leaf.shape[axis] for axis in axes]
            return _windows(leaf, axes, offsets, sizes)

        return rewritten(data, _paths(self.paths, data, batch), "RandomShift", shift)


@pytree.component
class RandomCrop(Transform):
    """A window of every image, at a random place, the same for all images of an item.

    Attributes:
        height: rows of the window.
        width: columns of the window.
        paths: which leaves; None for the observation and the next.
        layout: what the last axes are.

    Reference: Laskin et al., 2020, "Reinforcement learning with augmented data", section 4.
    """

    height: int
    width: int
    paths: Paths | None = None
    layout: Layout = "HWC"

    def __post_init__(self) -> None:
        checks.count("height", self.height)
        checks.count("width", self.width)
        _check_images("RandomCrop", self.paths, self.layout)

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """The data, with smaller images."""
        names = pytree.leaf_names(data)

        def crop(name: str, leaf: jax.Array) -> jax.Array:
            axes = _axes(name, leaf, batch, self.layout, "RandomCrop")
            room = _room(name, leaf, axes, (self.height, self.width), "RandomCrop")
            places = [_random(batch.key, names.index(name), leaf, n + 1)[:, i] for i, n in room]
            return _windows(leaf, axes, jnp.stack(places, axis=1), [self.height, self.width])

        return rewritten(data, _paths(self.paths, data, batch), "RandomCrop", crop)


@pytree.component
class CenterCrop(Transform):
    """The middle of every image: what stands for `RandomCrop` where nothing is random.

    Attributes:
        height: rows of the window.
        width: columns of the window.
        paths: which leaves; None for the observation and the next.
        layout: what the last axes are.
    """

    height: int
    width: int
    paths: Paths | None = None
    layout: Layout = "HWC"

    def __post_init__(self) -> None:
        checks.count("height", self.height)
        checks.count("width", self.width)
        _check_images("CenterCrop", self.paths, self.layout)

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """The data, with smaller images."""

        def crop(name: str, leaf: jax.Array) -> jax.Array:
            axes, size = (
                _axes(name, leaf, batch, self.layout, "CenterCrop"),
                (self.height, self.width),
            )
            for i, n in _room(name, leaf, axes, size, "CenterCrop"):
                leaf = jax.lax.slice_in_dim(leaf, n // 2, n // 2 + size[i], axis=axes[i])
            return leaf

        return rewritten(data, _paths(self.paths, data, batch), "CenterCrop", crop)


def _check_images(name: str, paths: Paths | None, layout: str) -> None:
    check_paths(name, paths)
    checks.choice("layout", layout, _LAYOUTS)


def _paths(paths: Paths | None, data: Item, batch: TransformContext) -> Paths:
    return observations(data, batch.keys) if paths is None else paths


def _axes(
    name: str, leaf: jax.Array, batch: TransformContext, layout: str, what: str
) -> tuple[int, int]:
    """The axes of height and width, which come after those of the batch and the window."""
    if leaf.ndim < batch.mask.ndim + len(layout):
        lead = "[B, ..., " if batch.mask.ndim == 1 else "[B, L, ..., "
        raise ValueError(
            f"{what}: leaf '{name}': expected images {lead}{', '.join(layout)}], got shape "
            f"{leaf.shape}. Name the images with paths=, or their layout."
        )
    first = leaf.ndim - len(layout)
    return first + layout.index("H"), first + layout.index("W")


def _room(
    name: str, leaf: jax.Array, axes: tuple[int, int], size: tuple[int, int], what: str
) -> list[tuple[int, int]]:
    """How many pixels more than that an image has each way: (0, rows), (1, columns)."""
    room = [leaf.shape[axis] - most for axis, most in zip(axes, size, strict=True)]
    if min(room) < 0:
        raise ValueError(
            f"{what}: leaf '{name}': expected images of at least {size}, got shape {leaf.shape}. "
            "Use Resize, or a smaller window."
        )
    return list(enumerate(room))


def _random(key: jax.Array, number: int, leaf: jax.Array, below: int) -> jax.Array:
    """int32 `[B, 2]` in [0, below), other ones for every number."""
    words = random_bits.bits(random_bits.fold(key, number), (2, leaf.shape[0], 2))
    return random_bits.below(jnp.int32(below), words[0], words[1])


def _windows(
    leaf: jax.Array, axes: tuple[int, int], offsets: jax.Array, sizes: list[int]
) -> jax.Array:
    """From each item the window at its offset, int32 `[B, 2]`; beyond the border, the border."""

    def window(item: jax.Array, offset: jax.Array) -> jax.Array:
        for axis, start, size in zip(axes, offset, sizes, strict=True):
            at = jnp.arange(size, dtype=jnp.int32) + start
            item = jnp.take(item, jnp.clip(at, 0, item.shape[axis - 1] - 1), axis=axis - 1)
        return item

    return jax.vmap(window)(leaf, offsets)


def _as(wide: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Floats in another dtype, rounded and kept in range for integers."""
    if not jnp.issubdtype(dtype, jnp.integer):
        return wide.astype(dtype)
    info = jnp.iinfo(dtype)
    return jnp.clip(jnp.round(wide), info.min, info.max).astype(dtype)

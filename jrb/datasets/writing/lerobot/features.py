"""What LeRobot calls the leaves of items, and how its tables hold them.

L steps of an episode.
"""

import dataclasses
import io
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._base import extras
from jrb.datasets.writing.pieces import FLAGS
from jrb.datasets.writing.source import Source
from jrb.keys import within
from jrb.layouts.names import Leaves, flatten

OWN = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
"""The features that each set has, a number a step."""

_DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float16", "float32", "float64")
_AFTER = "next/observation"
_MOST_AXES = 5


@dataclasses.dataclass(frozen=True)
class Feature:
    """A leaf as LeRobot has it.

    Attributes:
        name: with dots between its parts.
        leaf: the name in TED.
        dtype: NumPy's.
        shape: of a step.
        is_image: whether it is stored as PNGs.
    """

    name: str
    leaf: str
    dtype: str
    shape: tuple[int, ...]
    is_image: bool = False

    @property
    def about(self) -> dict[str, Any]:
        """As `info.json` tells of it; `jrb` has what LeRobot cannot say."""
        names = ["height", "width", "channels"] if self.is_image else None
        shape = list(self.shape) or [1]
        found = {"dtype": "image" if self.is_image else self.dtype, "shape": shape, "names": names}
        if self.name in OWN:
            return found
        return {**found, "jrb": {"leaf": self.leaf, "shape": list(self.shape)}}

    def column(self, array: np.ndarray) -> Any:
        """Arrow's array of steps `[L, ...]`."""
        pa = extras.require("pyarrow", "datasets")
        if self.is_image:
            kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
            return pa.array([{"bytes": _png(image), "path": None} for image in array], kind)
        column = pa.array(np.ascontiguousarray(array).reshape(-1))
        if self.shape in ((), (1,)):
            return column
        if len(self.shape) == 1:
            return pa.FixedSizeListArray.from_arrays(column, self.shape[0])
        for size in reversed(self.shape):
            offsets = np.arange(0, len(column) + 1, size, dtype=np.int32)
            column = pa.ListArray.from_arrays(offsets, column)
        return column


def _png(image: np.ndarray) -> bytes:
    pillow = extras.require("PIL.Image", "datasets")
    data = io.BytesIO()
    pillow.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(data, "PNG")
    return data.getvalue()


def own_features() -> list[Feature]:
    """Those that each set has."""
    return [Feature(name, name, dtype, ()) for name, dtype in OWN.items()]


def with_done(source: Source) -> dict[str, Any]:
    """The specs of leaves by their names in TED, with `next/done` if there is any flag."""
    spec = {
        source.names[name]: leaf for name, leaf in flatten(source.spec, "write_lerobot").items()
    }
    if any(flag in spec for flag in FLAGS):
        spec["next/done"] = jax.ShapeDtypeStruct((), np.dtype(bool))
    return spec


def features_of(spec: Mapping[str, Any], after: bool, images: bool) -> list[Feature]:
    """The features of a set.

    Args:
        spec: of one step, by leaf in TED.
        after: whether the next observations are features too.
        images: whether pictures are stored as PNGs.

    Raises:
        ValueError: LeRobot cannot hold a leaf, or two would have one name.
    """
    features = [
        _feature(leaf, about, images)
        for leaf, about in spec.items()
        if leaf not in OWN and (after or not (within(leaf, _AFTER) or leaf == "next/valid"))
    ]
    names = [feature.name for feature in features]
    for feature in features:
        if names.count(feature.name) > 1 or feature.name in OWN:
            raise ValueError(
                f"leaf '{feature.leaf}': expected a name of its own, got '{feature.name}', which "
                "another feature has. Rename it."
            )
    return features


def _feature(leaf: str, about: Any, images: bool) -> Feature:
    dtype, shape = str(about.dtype), tuple(about.shape)
    is_key = jnp.issubdtype(about.dtype, jax.dtypes.prng_key)
    if is_key or dtype not in (*_DTYPES, *_FLOATS):
        raise ValueError(
            f"leaf '{leaf}': expected a dtype that LeRobot has ({', '.join(_DTYPES)}, "
            f"{', '.join(_FLOATS)}), got {dtype}. Cast it, keys by jax.random.key_data."
        )
    if len(shape) > _MOST_AXES or 0 in shape:
        raise ValueError(
            f"leaf '{leaf}': expected at most {_MOST_AXES} axes, none of length 0, got "
            f"{list(shape)}."
        )
    seen = within(leaf, "observation") or within(leaf, _AFTER)
    is_picture = dtype == "uint8" and len(shape) == 3 and shape[-1] in (1, 3)
    is_image = images and seen and is_picture
    whole = leaf in ("observation", _AFTER)
    name = leaf.replace("/", ".") + (".image" if is_image else ".state") * whole
    return Feature(name, leaf, dtype, shape, is_image)


def done_of(leaves: Leaves) -> np.ndarray | None:
    """Bool `[L]`: whether any flag is set; None if there is none."""
    flags = [leaves[name] for name in FLAGS if name in leaves]
    if not flags:
        return None
    return np.any([flag.astype(bool).reshape(len(flag), -1).any(1) for flag in flags], axis=0)


def check_chain(leaves: Leaves, number: int) -> None:
    """Refuses next observations that are not the observations of the next steps.

    Raises:
        ValueError: they would be lost.
    """
    for name, array in leaves.items():
        if not within(name, _AFTER):
            continue
        twin = leaves.get(name.removeprefix("next/"))
        rest = None if twin is None else np.ascontiguousarray(twin[1:])
        if rest is None or rest.tobytes() != np.ascontiguousarray(array[:-1]).tobytes():
            raise ValueError(
                f"leaf '{name}': expected the next step's observation, got others in episode "
                f"{number}. Give next_observations=True, which stores them as features."
            )

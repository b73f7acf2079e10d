"""The state of a buffer, the sample, and the protocol of descriptions."""

from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol

import jax
import jax.numpy as jnp

from jrb._util import display, pytree, wording
from jrb._util.pytree import HostState
from jrb.keys import Keys
from jrb.ring import Ring

if TYPE_CHECKING:
    import jrb


class BufferState(pytree.State):
    """All arrays of a buffer. N capacity, E environments.

    Attributes:
        storage: the items. For `DeviceStorage`, a pytree with leaves `[N, ...]`; or, if small
            leaves are packed into one array, an object with leaves by name, whose `.leaves` is a
            copy of that pytree.
        writer: the position of the next row; for `RoundRobin` a `jrb.ring.Clock`.
        sampler: the state of the sampler.
        unit: the state of the unit.
        transforms: a tuple of the states of the transforms that have one.
        edits: uint32 `[]`, which changes whenever stored items are edited.
        numbers: integers `[E]`, the episode number of each environment's newest row; None unless
            `Keys.episode` names such a leaf, and the unit or a transform with a state uses ends.
        ring: the shape of the ring that the state was made for; not an array.
    """

    storage: Any
    writer: Any
    sampler: Any
    unit: Any
    edits: jax.Array
    transforms: Any = ()
    numbers: jax.Array | None = None
    ring: Ring | None = pytree.static(default=None)

    def __len__(self) -> int:
        """Raises TypeError: the number of items is an array, which `ReplayBuffer.size` returns."""
        raise TypeError(
            "len(state): expected buffer.size(state), which gives the transitions that it holds, "
            "and buffer.capacity, which gives those that it has room for."
        )

    if not TYPE_CHECKING:  # or every misspelt name would have a type
        __getattr__ = wording.refuse_attribute

    def __repr__(self) -> str:
        return display.text(self, self._title(), self._facts())

    def _repr_html_(self) -> str:
        return display.html(self, self._title(), self._facts())

    def _title(self) -> str:
        """Returns the class name and the memory of arrays, and of rows on the host."""
        arrays = [leaf for leaf in jax.tree.leaves(self) if pytree.is_array(leaf)]
        title = f"{type(self).__name__}, {wording.bytes_text(pytree.nbytes(arrays))}"
        host_bytes = self.storage.host_bytes if isinstance(self.storage, HostState) else 0
        return f"{title} and {wording.bytes_text(host_bytes)} on the host" if host_bytes else title

    def _facts(self) -> dict[str, str]:
        # States under `vmap` share no facts: say how many they are.
        lead = jnp.shape(self.edits) if pytree.is_array(self.edits) else ()
        if lead:
            return {"states under vmap": " x ".join(map(str, lead))}
        facts = {}
        for part in (self.writer, self.sampler, self.unit):
            facts |= part.summary(self.ring) if isinstance(part, pytree.State) else {}
        return facts


class Sample(pytree.State):
    """A sampled batch. B batch size, L window length.

    Attributes:
        data: the items, leaves `[B, ...]` or `[B, L, ...]`.
        indices: int32 `[B]`, the slots of the anchors.
        probabilities: float32 `[B]`, the probability of drawing each anchor; 0 where nothing was
            drawn.
        weights: float32 `[B]`, importance weights; 1 without priorities, 0 where nothing was drawn.
        mask: bool `[B]` or `[B, L]`, True for real entries, False for padding.
        info: a dict of arrays, which depends on the unit. With a `jrb.Mixture`, `sampler`, int32
            `[B]`, is the number of the sampler that drew each anchor; with `count_draws=True`,
            `draws`, int32 `[B]`, is how often each item was drawn before.
        stamp: uint32 `[B]`, the generations of the slots, by which overwritten items are noticed.
        origin: a text that identifies the description that drew the sample; not an array. Methods
            refuse samples of another description. None, for samples made by hand or after
            `sample.replace(origin=None)`, switches this check off.

    Buffers with equal capacity, sampler, unit, writer and keys have the same origin, whatever their
    storage, batch size and transforms: a method cannot refuse a sample of another such buffer.
    """

    data: Any
    indices: jax.Array
    probabilities: jax.Array
    weights: jax.Array
    mask: jax.Array
    info: dict[str, jax.Array]
    stamp: jax.Array
    origin: str | None = pytree.static(default=None)

    if not TYPE_CHECKING:  # or every misspelt name would have a type
        __getattr__ = wording.refuse_attribute

        def __getitem__(self, name: object) -> Any:
            raise TypeError(f"sample[...]: the items are in sample.data, such as data[{name!r}].")

    def __repr__(self) -> str:
        return display.text(self, type(self).__name__, self._facts())

    def _repr_html_(self) -> str:
        return display.html(self, type(self).__name__, self._facts())

    def _facts(self) -> dict[str, str]:
        if not pytree.is_array(self.mask):
            return {}
        return {
            "real entries": display.share(self.mask, self.mask.size),
            "probabilities": display.spread(self.probabilities),
            "weights": display.spread(self.weights),
        }


def check_origin(method: str, sample: Sample, origin: str) -> None:
    """Raises ValueError if the sample was drawn by a description with another origin."""
    if sample.origin not in (None, origin):
        raise ValueError(
            f"{method}: expected a Sample that this buffer drew, {origin}, got one of "
            f"{sample.origin}, whose slots are others. Pass what sample or draw of this very "
            "description gave; if both describe one state, pass sample.replace(origin=None)."
        )


Device = jax.sharding.Sharding | BufferState | Any | None  # type checkers know no jax.Device
"""The place for arrays: a device, a sharding, a state of shardings; None for the default device."""

Memory = Literal["device", "host", "files"] | None
"""The memory whose bytes are counted; None for all."""


class Buffer(Protocol):
    """The fields and methods of `jrb.ReplayBuffer` that the modules which it imports use."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    capacity: Final[int]
    num_envs: Final[int | None]
    batch_size: Final[int | None]
    sampler: Final["jrb.types.Sampler"]
    unit: Final["jrb.types.Unit"]
    writer: Final["jrb.types.Writer"]
    storage: Final[Any]
    transforms: Final[tuple[Any, ...]]
    keys: Final[Keys]
    min_size: Final[int | None]

    @property
    def ring(self) -> Ring:
        """The shape of the ring."""
        ...

    def size(self, state: BufferState) -> jax.Array:
        """Returns the number of transitions held, int32 `[]`."""
        ...

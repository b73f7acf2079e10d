"""A dataset of known episodes, written as a recording.

T steps, K episodes.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jrb._store.files import Folder
from jrb.datasets.format import native
from jrb.datasets.recording import parts
from jrb.datasets.recording.parts import TERMINATED, TRUNCATED, RecordedLeaf, RecordingSchema
from jrb.layouts.names import Leaves

_FLAGS = (TERMINATED, TRUNCATED)


class DatasetWriter:
    """Writes steps, episode after episode, into parts of some megabytes.

    Args:
        path: of an empty folder.

    Attributes:
        steps: the number of steps that were given.
    """

    def __init__(self, path: str) -> None:
        self._folder, self._name = Folder(path), parts.new_writer_name("dataset")
        self._blocks: list[tuple[Leaves, Leaves]] = []
        self._held = self._number = self._episode = self._step = self.steps = 0

    def append(self, leaves: Leaves, is_last: np.ndarray) -> None:
        """Writes steps.

        Args:
            leaves: arrays `[T, ...]` by their names in TED, always of the same dtypes and shapes.
            is_last: bool `[T]`, the steps that end an episode.

        Raises:
            OSError: the disk is full or broken.
        """
        starts = np.concatenate([[-self._step], np.flatnonzero(is_last) + 1])
        number = np.cumsum(is_last) - is_last
        steps = np.arange(len(is_last)) - starts[number]
        env = np.zeros(len(is_last), np.int32)
        added = {parts.EPISODE: self._episode + number, parts.STEP: steps, parts.ENV: env}
        self._blocks.append((added | {name: leaves[name] for name in _FLAGS}, leaves))
        self._episode, self._step = self._episode + len(starts) - 1, len(is_last) - int(starts[-1])
        self._held += sum(leaf.nbytes for leaf in leaves.values())
        self.steps += len(is_last)
        if self._held >= parts.PART_BYTES:
            self._seal()

    def _seal(self) -> None:
        """Writes the blocks in memory as a part."""
        own, leaves = (
            {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
            for blocks in zip(*self._blocks, strict=True)
        )
        self._number += 1
        self._write(self._number, RecordingSchema(None, _specs(leaves), (), {}, {}), own, leaves)
        first = lambda arrays: {name: array[:0] for name, array in arrays.items()}
        self._blocks, self._held = [(first(own), first(leaves))], 0

    def _write(self, number: int, schema: RecordingSchema, own: Leaves, leaves: Leaves) -> None:
        native_leaves = {it.name: leaves[it.name].astype(it.numpy) for it in schema.leaves}
        data = schema.encode(own, native_leaves)
        self._folder.write_new(parts.part_name(self._name, number), [data])

    def finish(
        self, facts: Mapping[str, np.ndarray], metadata: Mapping[str, Any], notes: tuple[str, ...]
    ) -> None:
        """Writes what is left, and what is known of the dataset.

        Args:
            facts: arrays `[K]` by name; arrays of other things than numbers are left out.
            metadata: entries that JSON does not have are left out.
            notes: sentences for readers.

        Raises:
            ValueError: there are no steps.
        """
        if not self.steps:
            raise ValueError(
                f"{self._folder.path}: expected at least one step to be written, got none."
            )
        self._seal()
        own, leaves = self._blocks[0]
        facts = {name: fact for name, fact in facts.items() if fact.dtype.kind in "biuf"}
        metadata = parts.json_part(metadata)
        schema = RecordingSchema(None, _specs(leaves), notes, metadata, facts)
        self._write(0, schema, own, leaves)


def _specs(leaves: Leaves) -> tuple[RecordedLeaf, ...]:
    return tuple(
        RecordedLeaf(name, str(native(leaf.dtype)), leaf.shape[1:])
        for name, leaf in sorted(leaves.items())
        if name not in _FLAGS
    )

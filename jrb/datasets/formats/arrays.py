"""Plain arrays: one `.npz` or HDF5 file, all arrays of one length, a row a step."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from jrb.authoring import ExpansionLimit, declared_nbytes
from jrb.datasets.format import Source
from jrb.datasets.reading import hdf5, npz
from jrb.datasets.reading.columns import (
    Column,
    Table,
    TableFormat,
    check_lengths,
    check_roles_present,
    left_out_note,
    table_of,
)
from jrb.datasets.reading.mapping import episode_text, to_ted
from jrb.keys import Keys


@dataclasses.dataclass(frozen=True)
class Arrays(TableFormat):
    """Plain arrays under names that a mapping gives, or usual ones (`obs`, `actions`, `rewards`).

    An episode ends where a flag says so, and before a row with another `episode`, a number or a
    text. Rewards may be missing.

    Attributes:
        mapping: from names in the file to those of `jrb.Keys` or of leaves in TED; or `jrb.Keys`
            with the names in the file. None for usual names alone.
    """

    name: ClassVar[str] = "arrays"
    looks_for: ClassVar[str] = "an .npz or HDF5 file with arrays of one length"

    mapping: Mapping[str, Any] | Keys | None = None

    def matches(self, source: Source) -> bool:
        """Returns whether there are arrays, all of one length."""
        if shapes := npz.top(source):
            return len({shape[0] for shape in shapes.values()}) == 1
        try:
            with hdf5.opened(source) as file:
                arrays = [each for each in hdf5.below(file).values() if each.is_numeric]
                return len(set(map(len, arrays))) == 1
        except (TypeError, ValueError, OSError):
            return False

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """Opens the file."""
        with self._opened(source) as (arrays, texts, left_out):
            names = episode_text(arrays, texts, self.mapping, source)
            left_out |= texts.keys() - set(names)
            arrays |= {name: texts[name] for name in names}
            check_lengths(source, arrays)
            limit = ExpansionLimit(source, [source], self.max_expansion)
            limit.add(declared_nbytes(arrays))
            leaves = to_ted(arrays, self.mapping, source)
            columns = {leaves[name]: column for name, column in arrays.items()}
            check_roles_present(source, columns, leaves, ("observation", "action"))
            key, notes = tuple(sorted(leaves.items())), left_out_note(left_out)
            yield table_of(source, columns, files=[source], cache_key=key, notes=notes)

    @contextlib.contextmanager
    def _opened(
        self, source: Source
    ) -> Iterator[tuple[dict[str, Column], dict[str, Column], set[str]]]:
        """Yields the arrays of numbers and of texts, and the names of everything else."""
        if hdf5.is_hdf5(source):
            with hdf5.opened(source) as file:
                every = hdf5.below(file)
                arrays: dict[str, Column] = {n: e for n, e in every.items() if e.is_numeric}
                texts: dict[str, Column] = {n: e for n, e in every.items() if e.is_text}
                yield arrays, texts, every.keys() - arrays.keys() - texts.keys()
        elif npz.is_npz(source):
            with npz.opened(source, self.max_expansion) as archive:
                yield archive.columns, archive.texts, set(archive.left_out)
        else:
            raise ValueError(f"{source}: expected an .npz or HDF5 file, got another.")

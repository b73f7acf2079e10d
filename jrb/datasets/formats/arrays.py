"""Plain arrays: one `.npz` or HDF5 file, all arrays of one length, a row a step.

Their names are told by a mapping, or are usual ones (`obs`, `actions`, `rewards`, ...).
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from jrb._util import expansion
from jrb.datasets.format import Source
from jrb.datasets.reading import hdf5, npz
from jrb.datasets.reading.flags import read_flags, remembered_flags
from jrb.datasets.reading.flat import Column, Flat, Table, check_lengths, left_out_note
from jrb.datasets.reading.mapping import episode_text, to_ted
from jrb.keys import Keys


@dataclasses.dataclass(frozen=True)
class Arrays(Flat):
    """Plain arrays.

    An episode ends where a flag says so, and before a row whose `episode`, a number or a text, is
    another.
    Rewards may lack.

    Attributes:
        mapping: from names in the file to those of `jrb.Keys` or of leaves in TED; or `jrb.Keys`
            that say where in the file things lie. None for usual names alone.
    """

    name: ClassVar[str] = "arrays"
    looks_for: ClassVar[str] = "an .npz or HDF5 file with arrays of one length"

    mapping: Mapping[str, Any] | Keys | None = None

    def matches(self, source: Source) -> bool:
        """Whether there are arrays, all of one length."""
        if shapes := npz.top(source):
            return len({shape[0] for shape, _ in shapes.values()}) == 1
        try:
            with hdf5.opened(source) as file:
                arrays = [each for each in hdf5.below(file).values() if each.is_numeric]
                return len(set(map(len, arrays))) == 1
        except (TypeError, ValueError, OSError):
            return False

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """The columns."""
        with self._opened(source) as (found, texts, left_out):
            names = episode_text(found, texts, self.mapping, source)
            left_out |= texts.keys() - set(names)
            found |= {name: texts[name] for name in names}
            check_lengths(source, found)
            limit = expansion.Limit(source, [source], self.max_expansion)
            limit.add(expansion.nbytes(found))
            leaves = to_ted(found, self.mapping, source)
            columns = {leaves[name]: column for name, column in found.items()}
            _check(source, columns, leaves)
            flags = remembered_flags([source], leaves, lambda: read_flags(columns, source))
            yield flags.table(columns, left_out_note(left_out))

    @contextlib.contextmanager
    def _opened(
        self, source: Source
    ) -> Iterator[tuple[dict[str, Column], dict[str, Column], set[str]]]:
        """The arrays of numbers and of texts, and the names of everything else."""
        if hdf5.is_hdf5(source):
            with hdf5.opened(source) as file:
                every = hdf5.below(file)
                found: dict[str, Column] = {n: e for n, e in every.items() if e.is_numeric}
                texts: dict[str, Column] = {n: e for n, e in every.items() if e.is_text}
                yield found, texts, every.keys() - found.keys() - texts.keys()
        elif npz.is_npz(source):
            with npz.opened(source, self.max_expansion) as archive:
                yield archive.columns, archive.texts, set(archive.left_out)
        else:
            raise ValueError(f"{source}: expected an .npz or HDF5 file, got something else.")


def _check(source: Source, columns: Mapping[str, Column], leaves: Mapping[str, str]) -> None:
    """Refuses files in which nothing is an observation, or an action."""
    for role in ("observation", "action"):
        if not any(name.split("/")[0] == role for name in columns):
            raise ValueError(
                f"{source}: expected an array for '{role}', got {list(leaves)}. Tell which it is: "
                f"mapping={{<its name>: '{role}'}}."
            )

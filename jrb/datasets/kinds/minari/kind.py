"""Minari: a folder `data` with `metadata.json` and HDF5, Arrow or Parquet files; episodes apart.

T steps of an episode.
"""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from jrb.datasets.kind import Description, Episode, Indexed, Source
from jrb.datasets.kinds.minari import (
    about as minari_about,
)
from jrb.datasets.kinds.minari import (
    arrow as minari_arrow,
)
from jrb.datasets.kinds.minari import (
    scan as minari_scan,
)

_COUNTS = {"total_episodes", "total_steps"}


@dataclasses.dataclass(frozen=True)
class Minari(Indexed):
    """Sets of Minari, of the versions 0.4 and 0.5: the folder of a set, or its folder `data`.

    Entries of a tuple become those of a dict, `_index_0` and so on. `infos` with T + 1 rows, the
    first of them from the reset, are read as observations are: `info[t]` was known before the
    action, `next/info[t]` came with the reward. Those with T rows are `info[t]`. JPEG images are
    decoded; what is no array of numbers is left out.
    """

    name: ClassVar[str] = "minari"
    looks_for: ClassVar[str] = (
        f"a folder, or one with a folder data, with {minari_about.FILE} "
        f"({', '.join(sorted(_COUNTS))}) and {minari_about.MAIN}, or Arrow or Parquet files"
    )
    own_files: ClassVar[str] = (
        r"(data/)?(metadata\.json|main_data\.hdf5|additional_data_\d+\.hdf5|"
        r"\d+/(metadata\.json|[^/]+\.(arrow|parquet)))"
    )

    def recognises(self, source: Source) -> bool:
        """Whether there are metadata of this kind, and data beside them."""
        folder = minari_about.folder_of(source)
        if folder is None:
            return False
        try:
            about = minari_about.read(folder)
        except (ValueError, OSError):
            return False
        layout = about.get("data_format", "hdf5")
        if layout == "hdf5" and not os.path.isfile(os.path.join(folder, minari_about.MAIN)):
            return False
        return about.keys() >= _COUNTS and layout in ("hdf5", *minari_arrow.FORMATS)

    def describe(self, source: Source) -> Description:
        """What there is, from the shapes of all arrays."""
        return minari_scan.scanned(source, self.max_expansion).description

    def pick(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """The episodes of these numbers."""
        scan = minari_scan.scanned(source, self.max_expansion)
        with minari_scan.opened(scan.folder, scan.description.metadata) as files:
            for number in numbers:
                yield scan.episode(files, number)

    def rewards(self, source: Source, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        """The rewards of these episodes, without the rest of them."""
        scan = minari_scan.scanned(source, self.max_expansion)
        with minari_scan.opened(scan.folder, scan.description.metadata) as files:
            for number in numbers:
                yield scan.read(files, number, ["rewards"])["rewards"]

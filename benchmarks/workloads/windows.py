"""Samples of 32 windows of 64 steps, compared with a plain gather of as many rows."""

from collections.abc import Iterator

from ..setup import WINDOWS, Setup
from .case import Case, Wanted, beside
from .programs import cycle


def cases(wanted: Wanted) -> Iterator[Case]:
    """Yields complete, episode-first and padded windows of 1 and of 16 environments."""
    for n in wanted.pick((10**4,), (10**4, 10**6, 10**7)):
        for envs in (1, 16):
            for unit in WINDOWS:
                setup = Setup("episodic", n, envs, 32, unit=unit)
                draw = lambda peer, setup: cycle(peer, setup, 300, ("sample",))
                yield beside(wanted, f"sample of {unit}", setup, draw)

"""The time of a step from 10^3 to 10^8 items of one float32: 16 rows, 256 items, 256 priorities."""

from collections.abc import Iterator

from ..setup import Setup
from .case import Case, Wanted, beside
from .programs import cycle

NAMES = {"uniform": "uniform: add, sample", "prioritized": "prioritized: add, sample, update"}


def cases(wanted: Wanted) -> Iterator[Case]:
    """Yields a uniform and a prioritized case at each power of ten."""
    for power in wanted.pick(range(3, 7), range(3, 9)):
        for sampler, name in NAMES.items():
            setup = Setup("number", 10**power, envs=16, sampler=sampler)
            step = lambda peer, setup: cycle(peer, setup, 300)
            yield beside(wanted, name, setup, step)

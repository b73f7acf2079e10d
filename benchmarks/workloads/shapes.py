"""A step with few and many environments, small and large batches."""

from collections.abc import Iterator

from ..setup import Setup
from .case import Case, Wanted, beside
from .programs import cycle


def cases(wanted: Wanted) -> Iterator[Case]:
    """Yields E from 1 to 1024 with batches of 256, then B of 32 and 4096 with 64 environments."""
    shapes = [(envs, 256) for envs in wanted.pick((1, 1024), (1, 16, 64, 1024))]
    shapes += [(64, batch) for batch in wanted.pick((32,), (32, 4096))]
    for envs, batch in shapes:
        for sampler in ("uniform", "prioritized"):
            setup = Setup("vector", 102_400, envs, batch, sampler)
            step = lambda peer, setup: cycle(peer, setup, 100)
            yield beside(wanted, f"{sampler} step", setup, step)

"""One jitted call per method, in a Python loop that waits for each result."""

from collections.abc import Iterator

from ..setup import Setup
from .case import Case, Wanted, beside
from .programs import ALL, calls


def cases(wanted: Wanted) -> Iterator[Case]:
    """Yields cases of each method alone, then of the complete step."""
    n = wanted.pick(10**4, 10**5)
    for sampler in ("uniform", "prioritized"):
        setup = Setup("vector", n, sampler=sampler)
        chosen = ALL if setup.prioritized else ALL[:2]
        for methods in [(method,) for method in chosen] + [chosen]:
            step = lambda peer, setup, methods=methods: calls(peer, setup, 300, methods)
            yield beside(wanted, f"{sampler}: {' + '.join(methods)}", setup, step)

"""Many agents under vmap, each with its own buffer."""

import dataclasses
from collections.abc import Iterator

from ..peers import Peer
from ..setup import Setup
from ..timing import Program
from .case import Case, Wanted, beside
from .programs import methods_of, scanned


def cases(wanted: Wanted) -> Iterator[Case]:
    """Yields cases of 8 and 64 agents, each with 4 environments and batches of 64."""
    on_device = Wanted([peer for peer in wanted.peers if peer.on_device], wanted.quick)
    for count in (8, 64):
        for sampler in ("uniform", "prioritized"):
            setup = Setup("vector", wanted.pick(2000, 10_000), 4, 64, sampler)
            make = lambda peer, setup, count=count: vmapped(peer, setup, count)
            yield beside(on_device, f"{sampler} step", setup, make, facts={"agents": count})


def vmapped(peer: Peer, setup: Setup, agents: int) -> Program:
    """Returns a scan of a vmapped step; agents start from equal states, with different keys."""
    steps = peer.steps(dataclasses.replace(setup, n=setup.n * agents), 100)
    return scanned(peer.full(setup), setup, steps, methods_of(setup), agents)

"""The bytes of memory per transition, including all state of the buffer."""

from collections.abc import Iterator

from .. import items
from ..peers import Peer
from ..setup import Setup
from ..timing import Program
from .case import Case, Wanted, beside

SETUPS = {
    "uniform": Setup("vector", 10**4),
    "prioritized": Setup("vector", 10**4, sampler="prioritized"),
    "prioritized, 19 leaves": Setup("nested", 10**4, sampler="prioritized"),
    "windows": Setup("episodic", 10**4, 16, 32, unit="slices"),
    "frames": Setup("frames", 4096, 16),
    "frames, stored once": Setup("frames", 4096, 16, once=True),
    "stacks of 4 frames": Setup("frames", 4096, 16, unit="stack"),
}


def cases(wanted: Wanted) -> Iterator[Case]:
    """Yields cases of full buffers: their bytes divided by their capacity."""
    for name, setup in SETUPS.items():
        facts = {"item bytes": items.width(setup.items)}
        yield beside(wanted, name, setup, held, facts=facts, unit="B")


def held(peer: Peer, setup: Setup) -> Program:
    """Makes a buffer; returns a program that does nothing, with the bytes as a fact."""
    nbytes = peer.full(setup).nbytes
    return Program(lambda: None, facts={"value": nbytes / setup.capacity if nbytes else None})

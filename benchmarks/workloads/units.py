"""Samples of n-step returns, windows and frame stacks, and of samplers that consume items."""

from collections.abc import Iterator

from ..peers import Buffer, Peer
from ..setup import Setup
from ..timing import Program
from .case import Case, Wanted, beside
from .programs import cycle, methods_of, scanned


def cases(wanted: Wanted) -> Iterator[Case]:
    """Yields steps of each unit, of a consuming sampler, and with observations stored once."""
    n, step = wanted.pick(10**4, 10**5), lambda peer, setup: cycle(peer, setup, 300)
    for sampler in ("uniform", "prioritized"):
        setup = Setup("episodic", n, envs=16, sampler=sampler, unit="n-step")
        yield beside(wanted, f"{sampler}, 3-step returns", setup, step)
    for envs, sampler in ((16, "uniform"), (16, "prioritized"), (1, "uniform"), (64, "uniform")):
        setup = Setup("episodic", n, envs, 32, sampler, "slices")
        draw = lambda peer, setup: cycle(peer, setup, 300, ("add", "sample"))
        yield beside(wanted, f"{sampler}, windows of 64", setup, draw)
    few = lambda peer, setup: cycle(peer, setup, 50)
    for envs, batch in wanted.pick([(8, 32)], [(1, 32), (8, 32), (16, 256)]):
        yield beside(
            wanted, "stacks of 4 frames", Setup("frames", 4096, envs, batch, unit="stack"), few
        )
    yield beside(
        wanted, "without replacement", Setup("vector", n, sampler="without replacement"), step
    )
    for envs, batch in wanted.pick([(8, 32)], [(1, 32), (8, 32), (1, 256), (16, 256)]):
        yield _once(wanted, Setup("frames", 4096, envs, batch, once=True))


def _once(wanted: Wanted, setup: Setup) -> Case:
    """Returns a case of observations stored once, with jrb storing them twice for comparison."""
    case = beside(
        wanted, "observations stored once", setup, lambda peer, setup: _drawn_first(peer, setup)
    )
    ours = next(peer for peer in wanted.peers if peer.name == "jrb")
    twice = Setup(setup.items, setup.n, setup.envs, setup.batch)
    case.programs["jrb, stored twice"] = lambda: _drawn_first(ours, twice)
    return case


def _drawn_first(peer: Peer, setup: Setup) -> Program:
    """Returns steps that add each next observation as the following observation.

    On the device, episodes have 50 rows.
    """
    if not peer.on_device:
        return cycle(peer, setup, 100)
    buffer = peer.full(setup)
    return scanned(_following(buffer, setup), setup, 100, methods_of(setup))


def _following(buffer: Buffer, setup: Setup) -> Buffer:
    """Returns the buffer with an `add` whose observation is the last row's next observation."""
    import jax.numpy as jnp

    add, seen = buffer.add, jnp.asarray(setup.fresh(1)[0]["obs"])
    begun, sample = (buffer.state, seen, jnp.int32(0)), buffer.sample

    def following(state: object, rows: dict) -> object:
        inner, seen, time = state
        after = rows["next_obs"]
        inner = add(inner, rows | {"obs": seen})
        ended = time % 50 == 49
        return inner, jnp.where(ended, after + jnp.uint8(7), after), time + 1

    def drawn(state: object, key: object) -> object:
        return None, sample(state[0], key)[1]

    return Buffer(begun, following, drawn, nbytes=buffer.nbytes)

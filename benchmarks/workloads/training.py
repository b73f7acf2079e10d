"""Complete trainings, in seconds per environment step: one loop with the buffer of each peer."""

import importlib.util
from collections.abc import Iterator

from ..timing import Program
from . import dqn
from .case import Case, Wanted


def cases(wanted: Wanted) -> Iterator[Case]:
    """Yields rejax's DQN with both buffers, and a loop like purejaxrl's with three buffers."""
    steps, known = wanted.pick(2_000, 50_000), {peer.name for peer in wanted.peers}
    if importlib.util.find_spec("rejax") is not None:
        programs = {"jrb": lambda: in_rejax(steps, True), "rejax": lambda: in_rejax(steps, False)}
        yield Case("rejax's DQN", {"steps": steps, "N": 131_072}, programs, weight=0.5)
    for capacity in wanted.pick((10_000,), (10_000, 131_072)):
        programs = {
            name: lambda make=make, n=capacity: looped(make(n), steps)
            for name, make in dqn.REPLAYS.items()
            if name in known
        }
        facts = {"steps": steps, "N": capacity}
        yield Case("DQN in the style of purejaxrl", facts, programs, weight=0.5)


def in_rejax(steps: int, with_ours: bool) -> Program:
    """Returns a training by rejax, with its own buffer or with jrb's."""
    from . import in_rejax as learner

    return trained(learner.train(steps, with_ours), steps)


def looped(replay: dqn.Replay, steps: int) -> Program:
    """Returns a training by the loop of `dqn`."""
    return trained(dqn.train(replay, steps), steps)


def trained(train: dqn.Train, steps: int) -> Program:
    """Returns a program of a complete training, compiled beforehand."""
    import jax

    run = jax.jit(train).lower(jax.random.key(0)).compile()
    return Program(lambda: jax.block_until_ready(run(jax.random.key(0))), steps)

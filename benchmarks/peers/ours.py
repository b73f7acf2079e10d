"""jrb itself, as a peer."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jrb

from .. import items
from .. import setup as wanted
from ..setup import Setup
from .peer import Buffer, Drawn, Peer

KEYS = jrb.Keys(observation="obs", next_observation="next_obs", reward="reward", done="done")
SAMPLERS = {
    "uniform": jrb.Uniform,
    "prioritized": jrb.Prioritized,
    "without replacement": jrb.WithoutReplacement,
}
UNITS = {
    "transition": jrb.Transition(),
    "n-step": jrb.NStep(wanted.STEPS, wanted.DISCOUNT),
    "slices": jrb.Sequence(wanted.LENGTH),
    "episodes": jrb.Sequence(wanted.LENGTH, sample_by="episodes"),
    "padded": jrb.Sequence(wanted.LENGTH, partial="pad"),
    "stack": jrb.FrameStack(wanted.STACK),
}


def described(setup: Setup) -> jrb.ReplayBuffer:
    """Returns the jrb buffer of a setup."""
    return jrb.ReplayBuffer(
        setup.capacity,
        num_envs=setup.envs,
        batch_size=setup.batch,
        sampler=SAMPLERS[setup.sampler](),
        unit=UNITS[setup.unit],
        storage=jrb.DeviceStorage(share_next_observations=setup.once),
        keys=KEYS,
    )


class Ours(Peer):
    """Pure functions of a state."""

    name = "jrb"
    note = "in Python loops the methods of `jrb.jitted`"
    on_device = True
    samplers = tuple(SAMPLERS)
    units = tuple(UNITS)
    once = True
    most = 10**9

    def full(self, setup: Setup) -> Buffer:
        """A full buffer."""
        buffer, example = described(setup), items.example(setup.items)
        state, extend = buffer.init(example), jax.jit(buffer.extend, donate_argnums=0)
        for piece in setup.pieces():
            state = extend(state, piece)
        methods, consumes = jrb.jitted(buffer), setup.sampler == "without replacement"

        def drawing(methods: Any) -> Callable[[Any, jax.Array], tuple[Any, Drawn]]:
            def sample(state: Any, key: jax.Array) -> tuple[Any, Drawn]:
                draw = methods.draw if consumes else lambda *args: (None, methods.sample(*args))
                after, found = draw(state, key)
                return after, Drawn(found.data, found if setup.prioritized else ())

            return sample

        return Buffer(
            state=state,
            add=buffer.add,
            sample=drawing(buffer),
            update=buffer.update_priority,
            nbytes=buffer.nbytes(example),
            rows=jax.device_put,
            read=lambda data: jax.tree.map(np.asarray, data),
            in_python=(methods.add, drawing(methods), methods.update_priority),
        )

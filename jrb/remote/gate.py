"""Who may go on: the actor that holds those who add, or those who sample, back."""

import asyncio
import warnings

import jax

from jrb.limits import SampleToInsert
from jrb.remote.library import ray


class Gate:
    """Counts for all shards together what was added and sampled; an actor of its own.

    Where Ray has to restart it, it begins in balance.
    """

    def __init__(self, limits: SampleToInsert) -> None:
        jax.config.update("jax_platforms", "cpu")
        self._limits, self._counters, self._changed = limits, limits.init(), asyncio.Condition()
        self._may = {"insert": jax.jit(limits.may_insert), "sample": jax.jit(limits.may_sample)}
        self._after = {"insert": jax.jit(limits.inserted), "sample": jax.jit(limits.sampled)}
        self._most = {"insert": 0, "sample": 0}
        if _is_restarted():
            for start in range(0, limits.min_size, _MOST):
                count = min(_MOST, limits.min_size - start)
                self._counters = self._after["insert"](self._counters, count)

    async def wait(self, what: str, count: int) -> None:
        """Waits until so many items may be added, or samples taken, and counts them.

        Raises:
            ValueError: so many at once, with what others ask for, could be held back for ever.
        """
        self._check(what, count)
        async with self._changed:
            may = self._may[what]
            await self._changed.wait_for(lambda: bool(may(self._counters, count)))
            self._counters = self._after[what](self._counters, count)
            self._changed.notify_all()

    def _check(self, what: str, count: int) -> None:
        """Raises where both sides could wait for each other: between the two bounds."""
        most = self._most | {what: max(count, self._most[what])}
        needed = (most["insert"] * self._limits.ratio + most["sample"]) / 2
        if needed > self._limits.tolerance or count > _MOST:
            raise ValueError(
                f"limits: expected a tolerance of at least {needed:g} where {most['insert']} items "
                f"are added and {most['sample']} samples taken at once, at most {_MOST}, got "
                f"{self._limits.tolerance:g}: both sides would wait for each other. Make the "
                "tolerance larger, or the chunks or batches smaller."
            )
        self._most = most


_MOST = 10**5  # that a limit counts at once


def _is_restarted() -> bool:
    """Whether Ray has started this actor again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what Ray itself uses here
        return ray().get_runtime_context().was_current_actor_reconstructed

"""The checks of `jrb.debug`, and the observers that are called after each method."""

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jrb._core import steps
from jrb.state import Buffer, BufferState, Sample

# The most keys that are remembered, the newest ones.
_MOST_KEYS = 1_000_000
_USED_TWICE = (
    "sample: a key was used before, by another draw: both draw alike. Split or fold_in the key."
)
_REFUSED = (
    "update_priority: {} priorities are NaN, infinite or negative: they are refused. Give "
    "jnp.abs(td_error), and look for what is not finite."
)
_STALE = (
    "update_priority: {} entries of the sample were overwritten since it was drawn: they are left "
    "out. Update sooner, or take a larger capacity."
)

OBSERVERS: list[Callable[..., None]] = []
"""Functions that are called after each write, draw and update with the method's name, the
description, the state, a dict of other arguments, and the result. Arrays in these may be traced."""


def notify(method: str, buffer: Buffer, state: BufferState, result: Any, **arguments: Any) -> None:
    """Calls all observers."""
    for observer in OBSERVERS:
        observer(method, buffer, state, arguments, result)


class DebugWarning(UserWarning):
    """A check of `jrb.debug` found a mistake."""


def debug(on: bool = True) -> contextlib.ExitStack:
    """Switches on checks that cost time, for good or within a `with`; they warn (`DebugWarning`).

    - Priorities that are NaN, infinite or negative, also inside `jit`.
    - A key that two draws use: both give the same batch, or nearly.
    - A draw inside `jit` that finds nothing, or fewer than `min_size` items: its batch is masked.
    - Updates by a sample some of whose entries were overwritten since: these entries are left out.

    Functions that were compiled before have no checks; those compiled while checks are on keep
    them. Inside `jit` a check is a callback to the host, and callbacks may run in any order;
    `jax.effects_barrier()` waits for all of them. If warnings are errors, the computation fails.

    Args:
        on: False switches the checks off.

    Example:
        >>> import warnings, jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(8, batch_size=2, sampler=jrb.Prioritized())
        >>> state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(4)})
        >>> with jrb.debug(), warnings.catch_warnings(record=True) as told:
        ...     warnings.simplefilter("always")
        ...     batches = [buffer.sample(state, jax.random.key(0)) for _ in range(2)]
        >>> print(told[0].message)
        sample: a key was used before, by another draw: both draw alike. Split or fold_in the key.
    """
    # The checks are on at once, without a `with` too; the end of a `with` restores what was before.
    undo = contextlib.ExitStack()
    undo.callback(_switch, _observe in OBSERVERS)
    _switch(on)
    return undo


def _switch(on: bool) -> None:
    while _observe in OBSERVERS:
        OBSERVERS.remove(_observe)
    _keys.clear()
    if on:
        OBSERVERS.append(_observe)


# The keys of the newest draws, oldest first.
_keys: dict[tuple[Any, bytes], None] = {}


def _observe(method: str, buffer: Buffer, state: BufferState, arguments: dict, result: Any) -> None:
    if method == "sample":
        mask, least = result[1].mask, buffer.min_size
        _call_on_host(_check_key, jax.random.key_data(arguments["key"]))
        few = "" if least is None else f", or fewer than min_size={least}"
        text = (
            f"sample: the buffer has no item that can be drawn{few}: the batch is masked. Look at "
            f"can_sample before. {buffer.unit.anchor_requirement}"
        ).rstrip()
        _call_on_host(functools.partial(_warn_if_any, text), (~mask.any()).astype(jnp.int32))
    elif method == "update_priority":
        which, priorities = arguments["which"], arguments["priorities"]
        good = (priorities >= 0) & jnp.isfinite(priorities.astype(jnp.float32))
        if isinstance(which, Sample):
            # Priorities of masked entries, or masked steps, are not used and may be anything.
            drawn = steps.has_item(which)
            is_of_anchors = good.shape == which.indices.shape
            # Priorities of rows may be without those of a burn-in.
            good = good | ~(drawn if is_of_anchors else which.mask[:, -good.shape[-1] :])
            now = buffer.writer.generation_of(buffer.ring, state.writer, which.indices)
            stale = jnp.sum(drawn & (now != which.stamp), dtype=jnp.int32)
            _call_on_host(functools.partial(_warn_if_any, _STALE), stale)
        refused = jnp.sum(~good, dtype=jnp.int32)
        _call_on_host(functools.partial(_warn_if_any, _REFUSED), refused)


def _call_on_host(check: Callable[[np.ndarray], None], array: jax.Array) -> None:
    """Calls `check` with the array as NumPy's: at once, or inside `jit` when the program runs."""
    if isinstance(array, jax.core.Tracer):
        jax.debug.callback(lambda value: check(np.asarray(value)), array)
    else:
        check(np.asarray(array))


def _check_key(data: np.ndarray) -> None:
    """Warns if a draw has used the key of these words before."""
    key = (data.shape, data.tobytes())
    if key in _keys:
        _warn_if_any(_USED_TWICE, np.ones(()))
    _keys[key] = None
    # Forget the oldest key: a dict keeps the order of insertion.
    if len(_keys) > _MOST_KEYS:
        del _keys[next(iter(_keys))]


def _warn_if_any(text: str, count: np.ndarray) -> None:
    """Warns unless the count is 0; the count replaces {} in the text."""
    if count:
        warnings.warn(text.replace("{}", str(count)), DebugWarning, stacklevel=2)

"""The picture of how often anchors are drawn, beside how often they should be."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb import sum_tree
from jrb._core import steps
from jrb._core.steps import context_of
from jrb._util import checks
from jrb.buffer import ReplayBuffer
from jrb.plot import canvas, facts, words
from jrb.plot.canvas import Axes, Row, Tone
from jrb.samplers import Prioritized, Uniform
from jrb.samplers.prioritized import Priorities
from jrb.state import Buffer, BufferState
from jrb.types import PrioritizedSampler

_BATCH, _SHOWN, _GROUPS, _ENOUGH = 256, 60, 2000, 10


def draws(
    buffer: ReplayBuffer, state: BufferState, key: jax.Array, n: int, ax: Axes | None = None
) -> Any:
    """Shows how often anchors are drawn, beside how often they are expected to be.

    Draws `n` anchors, in batches of `batch_size` (256 if the buffer has none), without reading
    items, and counts them. The expectation is that of `Prioritized`, a share of the mass, or of
    `Uniform`, the same for all; for other samplers and units whose draws change nothing, what the
    draws themselves say by their probabilities. Samplers that consume have none: then counts alone
    are shown.

    A chi-square test over groups of anchors, of at least 10 expected draws each, says whether the
    difference is what chance explains. Draws that are stratified, or without replacement in a
    batch, differ by less than chance.

    Args:
        buffer: the description.
        state: is only read; a sampler that consumes goes on with a state of its own.
        key: a PRNG key. It is consumed.
        n: how many anchors are drawn, at least 1.
        ax: an axes of matplotlib in whose place the picture is drawn; None for a new figure.

    Returns:
        The figure.

    Raises:
        TypeError: as `jrb.plot.state`; a `key` that is none, an `n` that is no integer.
        ValueError: as `jrb.plot.state`; an `n` below 1.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(9)
        >>> state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(9)})
        >>> figure = jrb.plot.draws(buffer, state, jax.random.key(0), 10_000)
        >>> figure.axes[0].get_title(loc="left")
        '10,000 draws of 9 anchors: as far from the expectation as chance explains'
    """
    facts.check(buffer, state, "plot.draws")
    facts.check_known(key, "plot.draws: key")
    _check(key, n)
    if not bool(buffer.can_sample(state)):
        more = f"of {words.count(int(buffer.size(state)), 'item')} that the buffer holds"
        return canvas.drawn(canvas.note("There is nothing to draw", more), ax, "plot.draws")
    counted = _counted(buffer, state, key, int(n))
    return canvas.drawn(_rows(buffer, state, counted), ax, "plot.draws")


def _check(key: jax.Array, n: int) -> None:
    try:
        checks.key(key)
        checks.count("n", n)
    except (TypeError, ValueError) as error:
        raise type(error)(f"plot.draws: {error}") from None


@dataclasses.dataclass(frozen=True)
class Counted:
    """What was drawn.

    Attributes:
        seen: int64 `[N]`, how often each slot was.
        told: float64 `[N]`, how likely each was by what its draws say; 0 if it was not drawn.
    """

    seen: np.ndarray
    told: np.ndarray

    @property
    def total(self) -> int:
        """The draws that were not masked."""
        return int(self.seen.sum())


def _counted(buffer: ReplayBuffer, state: BufferState, key: jax.Array, n: int) -> Counted:
    size = min(n, buffer.batch_size or _BATCH)
    light = state.replace(storage=None)
    keys = jax.random.split(key, n // size + 1)
    seen = jnp.zeros(buffer.capacity, jnp.int32), jnp.zeros(buffer.capacity, jnp.float32)
    light, seen = _drawn(buffer, light, seen, keys[:-1], size)
    if n % size:
        _, seen = _drawn(buffer, light, seen, keys[-1:], n % size)
    return Counted(np.asarray(seen[0], np.int64), np.asarray(seen[1], np.float64))


@functools.partial(jax.jit, static_argnames="size")
def _drawn(buffer: Buffer, state: BufferState, seen: Any, keys: jax.Array, size: int) -> Any:
    """The state after a batch for each key, and how often each slot was drawn, and how likely."""

    def draw(carry: Any, key: jax.Array) -> tuple[Any, None]:
        sampler, (counts, told) = carry
        now = state.replace(sampler=sampler)
        sampler, drawn = steps.draw(buffer, now, key, size, None, read=False)
        slots = jnp.where(drawn.probabilities > 0, drawn.slots, buffer.capacity)
        counts = counts.at[slots].add(1, mode="drop")
        told = told.at[slots].max(drawn.probabilities, mode="drop")
        return (sampler, (counts, told)), None

    (sampler, seen), _ = lax.scan(draw, (state.sampler, seen), keys)
    return state.replace(sampler=sampler), seen


def _expected(buffer: ReplayBuffer, state: BufferState, counted: Counted) -> tuple[Any, str]:
    """How likely each slot is, float64 `[N]`, and by what; None where there is no such thing."""
    if buffer.sampler.consumes:
        return None, f"{type(buffer.sampler).__name__} uses anchors up: there is no expectation"
    masses = None
    if isinstance(buffer.sampler, Prioritized) and isinstance(state.sampler, Priorities):
        masses = np.asarray(sum_tree.leaf_values(state.sampler.masses), np.float64)
        if masses.sum() > 0:
            return masses / masses.sum(), "expected: each anchor's share of the mass"
    alike = _anchors(buffer, state)
    if alike is not None and (masses is not None or isinstance(buffer.sampler, Uniform)):
        return alike, "expected: all anchors alike"
    return counted.told, "expected: what the draws give as their probabilities"


def _anchors(buffer: ReplayBuffer, state: BufferState) -> np.ndarray | None:
    """The same for all anchors, float64 `[N]`; None where one stands for more than a slot."""
    slots, shares, count = jax.device_get(_places(buffer, state.replace(storage=None)))
    if (shares[:count] != 1).any():
        return None
    found = np.zeros(buffer.capacity)
    found[slots[:count]] = 1 / count
    return found


@jax.jit
def _places(buffer: Buffer, state: BufferState) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The slots of anchors, int32 `[N]`, how likely each is at its place, and their number."""
    anchors = buffer.unit.anchors(context_of(buffer, state.writer), state.unit)
    place = jnp.minimum(jnp.arange(buffer.capacity, dtype=jnp.int32), anchors.count - 1)
    return *anchors.nth(jnp.maximum(place, 0), jax.random.key(0)), anchors.count


def _rows(buffer: ReplayBuffer, state: BufferState, counted: Counted) -> list[Row]:
    chances, by = _expected(buffer, state, counted)
    if chances is None:
        return [Row(2.6, [lambda *at: _alone(counted, by, *at)])]
    verdict = _verdict(buffer, counted, chances)
    panels = [Row(2.7, [lambda *at: _by_slot(counted, chances, verdict, by, *at)])]
    if chances[chances > 0].max() > 1.0001 * chances[chances > 0].min():
        panels.append(Row(2.6, [lambda *at: _by_chance(counted, chances, *at)]))
    return panels


def _alone(counted: Counted, by: str, axes: Axes, tone: Tone) -> None:
    """Counts without an expectation."""
    seen = counted.seen
    borders = facts.even(len(seen), _SHOWN)
    canvas.bars(axes, borders, np.add.reduceat(seen, borders[:-1]), canvas.BLUE)
    _label(axes, borders)
    anchors = words.count(int((seen > 0).sum()), "anchor")
    title = f"{words.count(counted.total, 'draw')} of {anchors}"
    title += f", none more than {words.count(int(seen.max()), 'time')}"
    canvas.say(axes, tone, title, by)


def _by_slot(
    counted: Counted, chances: np.ndarray, verdict: tuple[str, str], by: str, axes: Axes, tone: Tone
) -> None:
    """Around the ring: bars for what was drawn, a line and a band for what was expected."""
    borders = facts.even(len(chances), _SHOWN)
    seen = np.add.reduceat(counted.seen, borders[:-1])
    want, spread = _expectation(chances, borders, counted.total)
    canvas.bars(axes, borders, seen, canvas.SKY, label="observed")
    _band(axes, borders, want, spread)
    axes.set_ylim(0, 1.28 * max(seen.max(), (want + 2 * spread).max()))
    _label(axes, borders)
    canvas.legend(axes, tone, columns=3)
    anchors = words.count(int((chances > 0).sum()), "anchor")
    title = f"{words.count(counted.total, 'draw')} of {anchors}: {verdict[0]}"
    canvas.say(axes, tone, title, "; ".join(filter(None, [verdict[1], by])))


def _band(axes: Axes, borders: np.ndarray, want: np.ndarray, spread: np.ndarray) -> None:
    axes.stairs(want, borders, baseline=None, color=canvas.ORANGE, linewidth=1.4, label="expected")
    axes.stairs(
        want + 2 * spread,
        borders,
        baseline=np.maximum(want - 2 * spread, 0),
        fill=True,
        color=canvas.ORANGE,
        alpha=0.25,
        linewidth=0,
        label="two standard deviations",
    )


def _label(axes: Axes, borders: np.ndarray) -> None:
    axes.set_xlim(0, borders[-1])
    canvas.whole_numbers(axes.xaxis, 8)
    canvas.whole_numbers(axes.yaxis, 4)
    canvas.label(axes, "slot", "draws")


def _expectation(
    chances: np.ndarray, borders: np.ndarray, total: int
) -> tuple[np.ndarray, np.ndarray]:
    """The draws expected in each part, and their standard deviation if draws are independent."""
    share = np.add.reduceat(chances, borders[:-1])
    return share * total, np.sqrt(total * share * np.clip(1 - share, 0, 1))


def _by_chance(counted: Counted, chances: np.ndarray, axes: Axes, tone: Tone) -> None:
    """From the least likely anchors to the likeliest, in parts of about equal expectation."""
    order = np.argsort(chances, kind="stable")
    order = order[chances[order] > 0]
    borders = _equal_parts(chances[order] * counted.total, 30, _ENOUGH)
    seen = np.add.reduceat(counted.seen[order], borders[:-1])
    want, spread = _expectation(chances[order], borders, counted.total)
    each = want / np.diff(borders)
    axes.errorbar(
        each,
        seen / want,
        2 * spread / want,
        fmt="o",
        color=canvas.BLUE,
        markersize=4,
        elinewidth=1,
    )
    axes.axhline(1, color=canvas.ORANGE, linewidth=1.2)
    if each.max() / each.min() > 30:
        canvas.powers(axes.xaxis)
    canvas.label(axes, "draws expected of an anchor", "observed / expected")
    worst = float(np.abs(seen / want - 1).max())
    title = f"Likely and unlikely anchors: at most {words.percent(worst)} off"
    groups = words.count(len(want), "group")
    canvas.say(axes, tone, title, f"{groups}; bars: two standard deviations")


def _equal_parts(want: np.ndarray, most: int, least: float) -> np.ndarray:
    """Borders of at most so many parts of about equal sums, each of at least `least` if it can."""
    total = float(want.sum())
    parts = int(max(1, min(most, total // least, len(want))))
    at = np.searchsorted(np.cumsum(want), total * np.arange(1, parts) / parts)
    return np.unique(np.concatenate([[0], at + 1, [len(want)]]).clip(0, len(want)))


def _verdict(buffer: ReplayBuffer, counted: Counted, chances: np.ndarray) -> tuple[str, str]:
    """Whether chance explains the difference, and how that is known."""
    strange = int(counted.seen[chances <= 0].sum())
    if strange:
        return f"{strange:,} of what was not expected at all", ""
    here = np.flatnonzero(chances > 0)
    want = chances[here] * counted.total
    borders = _equal_parts(want, _GROUPS, _ENOUGH)
    if len(borders) < 3:
        return "too few to tell", f"at least {2 * _ENOUGH:,} draws and two anchors are needed"
    want, seen = (np.add.reduceat(part, borders[:-1]) for part in (want, counted.seen[here]))
    value, freedom = float(((seen - want) ** 2 / want).sum()), len(want) - 1
    chance = chi_square_above(value, freedom)
    how = f"chi-square {words.number(value)} over {freedom:,} degrees of freedom, p = {chance:.2g}"
    if chance < 1e-3:
        return "further from the expectation than chance explains", how
    if chance > 1 - 1e-3:
        return "closer to the expectation than chance alone", how + _why_closer(buffer)
    return "as far from the expectation as chance explains", how


def _why_closer(buffer: ReplayBuffer) -> str:
    sampler = buffer.sampler
    if isinstance(sampler, PrioritizedSampler) and sampler.stratified:
        return ": draws are stratified"
    return ": no replacement in a batch" if isinstance(buffer.sampler, Uniform) else ""


def chi_square_above(value: float, freedom: int) -> float:
    """The probability that chi-square of so many degrees of freedom is above a value.

    Reference: Wilson and Hilferty, 1931, "The distribution of chi-square".
    """
    small = 2 / (9 * freedom)
    z = ((value / freedom) ** (1 / 3) - (1 - small)) / math.sqrt(small)
    return math.erfc(z / math.sqrt(2)) / 2

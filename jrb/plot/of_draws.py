"""The plot of observed and expected counts of draws. N capacity."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._core.steps import anchors_to_draw, count_draw
from jrb._xla import random_bits
from jrb._xla.compiling import by_description
from jrb.authoring import checks
from jrb.buffer import ReplayBuffer
from jrb.plot import canvas, facts
from jrb.plot.canvas import Axes, Row, Tone
from jrb.read import anchors_in_order
from jrb.samplers import Prioritized, Uniform
from jrb.state import Buffer, BufferState
from jrb.types import PrioritizedSampler

_BATCH, _BARS, _GROUPS, _ENOUGH = 256, 60, 2000, 10


def draws(
    buffer: ReplayBuffer, state: BufferState, key: jax.Array, n: int, ax: Axes | None = None
) -> Any:
    """Plots how often anchors are drawn, and how often they are expected to be drawn.

    The function draws `n` anchors in batches of `batch_size` (256 if the buffer has none), without
    reading items. For `Prioritized`, an anchor's expectation is its share of the mass; for
    `Uniform`, all anchors have the same. For other samplers, and for units whose anchors cover
    several slots, it is the probability that the draws report. Samplers that consume items, or draw
    groups, have no expectation, so only counts are shown.

    A chi-square test over groups of anchors, of at least 10 expected draws each, decides if the
    difference can be due to chance. Draws that are stratified, or without replacement in a batch,
    differ less than by chance.

    Args:
        buffer: the buffer.
        state: its state. It is only read: draws of a consuming sampler change a copy.
        key: a PRNG key. It is consumed.
        n: the number of draws, at least 1; `Grouped` rounds it up to whole groups.
        ax: the matplotlib axes to replace by the plot; None for a new figure.

    Returns:
        The figure.

    Raises:
        TypeError: as in `jrb.plot.state`; `key` is not a PRNG key, or `n` is not an integer.
        ValueError: as in `jrb.plot.state`; or `n` is below 1.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(9)
        >>> state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(9)})
        >>> figure = jrb.plot.draws(buffer, state, jax.random.key(0), 10_000)
        >>> figure.axes[0].get_title(loc="left")
        '10,000 draws of 9 anchors: as far from the expectation as chance explains'
    """
    facts.check_state(buffer, state, "plot.draws")
    facts.check_concrete(key, "plot.draws: key")
    try:
        random_bits.check_key(key)
        checks.count("n", n)
    except (TypeError, ValueError) as error:
        raise type(error)(f"plot.draws: {error}") from None
    if not bool(buffer.can_sample(state)):
        more = f"of {canvas.count(int(buffer.size(state)), 'item')} that the buffer holds"
        return canvas.draw_text("There is nothing to draw", more, ax, "plot.draws")
    # Draw full batches in one scan, then the remaining draws as one smaller batch.
    whole = lambda count: count + -count % getattr(buffer.sampler, "per_group", 1)
    size = whole(min(int(n), buffer.batch_size or _BATCH))
    keys = jax.random.split(key, n // size + 1)
    # Without the storage, items cannot be read by mistake; a few samplers read leaves.
    sampler = state.sampler
    light = state if buffer.sampler.reads else state.replace(storage=None)
    counts = jnp.zeros(buffer.capacity, jnp.int32), jnp.zeros(buffer.capacity, jnp.float32)
    sampler, counts = _count_draws(buffer, light, sampler, counts, keys[:-1], size)
    if n % size:
        _, counts = _count_draws(buffer, light, sampler, counts, keys[-1:], whole(n % size))
    seen, reported = np.asarray(counts[0], np.int64), np.asarray(counts[1], np.float64)
    chances, source = _expected_chances(buffer, state, reported)
    row = Row(2.7, [lambda *at: _plot_counts(buffer, seen, chances, source, *at)])
    return canvas.draw_rows([row], ax, "plot.draws")


@by_description("size")
def _count_draws(
    buffer: Buffer, state: BufferState, sampler: Any, counts: Any, keys: jax.Array, size: int
) -> Any:
    """Draws a batch per key; returns the sampler's state, and counts and chances by slot."""

    def step(carry: Any, key: jax.Array) -> tuple[Any, None]:
        sampler, (seen, reported) = carry
        anchors = anchors_to_draw(buffer, state.replace(sampler=sampler), None)
        sampler, draw = buffer.sampler.draw(buffer.ring, sampler, anchors, key, size, None)
        sampler, draw = count_draw(buffer, sampler, draw)
        # Drop padding, by an index beyond the last slot.
        slots = jnp.where(draw.mask & (draw.probabilities > 0), draw.slots, buffer.capacity)
        seen = seen.at[slots].add(1, mode="drop")
        reported = reported.at[slots].max(draw.probabilities, mode="drop")
        return (sampler, (seen, reported)), None

    return lax.scan(step, (sampler, counts), keys)[0]


def _expected_chances(
    buffer: ReplayBuffer, state: BufferState, reported: np.ndarray
) -> tuple[np.ndarray | None, str]:
    """Returns the chance of each slot, float64 `[N]` or None, and a text on its source."""
    sampler = buffer.sampler
    if sampler.consumes or sampler.reads_written:
        why = "uses anchors up" if sampler.consumes else "draws groups"
        return None, f"{type(sampler).__name__} {why}: there is no expectation"
    if isinstance(sampler, Prioritized):
        masses = facts.masses_of(buffer, state, np.asarray(buffer.priorities(state)))
        if masses.sum() > 0:
            return masses / masses.sum(), "expected: each anchor's share of the mass"
    slots, within, count = anchors_in_order(buffer, state)
    # If an anchor covers several slots, `within` is the chance of each, below 1.
    if isinstance(sampler, Prioritized | Uniform) and (within[:count] == 1).all():
        alike = np.zeros(buffer.capacity)
        alike[slots[:count]] = 1 / count
        return alike, "expected: all anchors alike"
    return reported, "expected: what the draws give as their probabilities"


def _plot_counts(
    buffer: ReplayBuffer,
    seen: np.ndarray,
    chances: np.ndarray | None,
    source: str,
    axes: Axes,
    tone: Tone,
) -> None:
    """Plots counts by slot as bars, and the expectation as a line with a band."""
    # Plot the observed counts.
    borders, total = facts.even_edges(len(seen), _BARS), int(seen.sum())
    bars = np.add.reduceat(seen, borders[:-1])
    canvas.plot_bars(axes, borders, bars, canvas.SKY, label="observed")
    axes.set(xlim=(0, borders[-1]), xlabel="slot of the ring", ylabel="draws")
    canvas.whole_numbers(axes.xaxis, 8)
    canvas.whole_numbers(axes.yaxis, 4)
    if chances is None:
        anchors = canvas.count(int((seen > 0).sum()), "anchor")
        most = canvas.count(int(seen.max()), "time")
        title = f"{canvas.count(total, 'draw')} of {anchors}, none more than {most}"
        canvas.write_title(axes, tone, title, source)
        return
    # Plot the expected counts, with a band of two standard deviations of a binomial distribution.
    share = np.add.reduceat(chances, borders[:-1])
    want, spread = share * total, np.sqrt(total * share * np.clip(1 - share, 0, 1))
    axes.stairs(want, borders, baseline=None, color=canvas.ORANGE, linewidth=1.4, label="expected")
    low, high = np.maximum(want - 2 * spread, 0), want + 2 * spread
    look = {"color": canvas.ORANGE, "alpha": 0.25, "linewidth": 0}
    axes.stairs(high, borders, baseline=low, fill=True, label="two standard deviations", **look)
    axes.set_ylim(0, 1.28 * max(bars.max(), high.max()))
    canvas.add_legend(axes, tone, columns=3)
    # Say in the title whether chance explains the difference.
    verdict, reason = judge(buffer, seen, chances)
    anchors = canvas.count(int((chances > 0).sum()), "anchor")
    title = f"{canvas.count(total, 'draw')} of {anchors}: {verdict}"
    canvas.write_title(axes, tone, title, "; ".join(filter(None, [reason, source])))


def judge(buffer: ReplayBuffer, seen: np.ndarray, chances: np.ndarray) -> tuple[str, str]:
    """Returns a verdict on the counts given the chances, both `[N]`, and a text on the test."""
    odd = int(seen[chances <= 0].sum())
    if odd:
        return f"{odd:,} of what was not expected at all", ""
    likely = np.flatnonzero(chances > 0)
    want = chances[likely] * seen.sum()
    # Groups have about equal expectations, large enough for a chi-square test.
    groups = int(max(1, min(_GROUPS, want.sum() // _ENOUGH, len(want))))
    at = np.searchsorted(np.cumsum(want), want.sum() * np.arange(1, groups) / groups)
    borders = np.unique(np.concatenate([[0], at + 1, [len(want)]]).clip(0, len(want)))
    if len(borders) < 3:
        return "too few to tell", f"at least {2 * _ENOUGH:,} draws and two anchors are needed"
    want, seen = (np.add.reduceat(part, borders[:-1]) for part in (want, seen[likely]))
    # Test the difference of observed and expected counts of the groups.
    value, freedom = float(((seen - want) ** 2 / want).sum()), len(want) - 1
    chance = chi_square_above(value, freedom)
    test = (
        f"chi-square {canvas.number(value)} over {freedom:,} degrees of freedom, p = {chance:.2g}"
    )
    if chance < 1e-3:
        return "further from the expectation than chance explains", test
    if chance <= 1 - 1e-3:
        return "as far from the expectation as chance explains", test
    # Name the cause of counts that are closer to the expectation than independent draws are.
    sampler, reason = buffer.sampler, ""
    if isinstance(sampler, PrioritizedSampler) and sampler.stratified:
        reason = ": draws are stratified"
    elif isinstance(sampler, Uniform):
        reason = ": no replacement in a batch"
    return "closer to the expectation than chance alone", test + reason


def chi_square_above(value: float, freedom: int) -> float:
    """Returns the probability that a chi-square variable exceeds `value`, approximately.

    Reference: Wilson and Hilferty, 1931, "The distribution of chi-square".
    """
    small = 2 / (9 * freedom)
    z = ((value / freedom) ** (1 / 3) - (1 - small)) / math.sqrt(small)
    return math.erfc(z / math.sqrt(2)) / 2

"""Units in plain Python: which rows are anchors, and how many rows later they become anchors."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

import jrb


@dataclasses.dataclass
class Facts:
    """Facts about one stored row.

    Attributes:
        ahead: number of rows of its episode from it on, itself included.
        following: number of rows of its environment from it on, itself included.
        ended: True if its episode has ended.
        older: number of rows of its environment that are stored before it.
        position: number of rows of its episode before it, stored or not.
        count: number of rows of its environment before it, stored or not.
    """

    ahead: int
    following: int
    ended: bool
    older: int
    position: int
    count: int

    def whole(self, k):
        """Returns True if its stack of k frames is stored."""
        return min(self.position, k - 1) <= self.older


@dataclasses.dataclass(frozen=True)
class Rule:
    """A unit, which rows are its anchors, and how many rows later they become anchors."""

    unit: Any
    is_anchor: Callable = lambda row: True
    late: Callable = lambda row: 0
    all_held: bool = False
    by_lane: bool = False  # True if anchors are ordered environment by environment

    @property
    def knows_past(self):
        """True if the unit tracks the position of rows in their episodes."""
        return not isinstance(self.unit, jrb.Transition | jrb.NStep | jrb.Hindsight)


def _hindsight():
    reward = lambda achieved, goal: jnp.float32(achieved == goal)
    achieved = ("next", "observation")
    options = {"achieved": achieved, "goal": ("observation",), "next_goal": None}
    return jrb.Hindsight(reward, "final", **options)


RULES = {
    "transition": Rule(jrb.Transition(), all_held=True),
    "n-step": Rule(jrb.NStep(3, 0.9), all_held=True),
    "strict n-step": Rule(
        jrb.NStep(3, 0.9, strict=True),
        lambda row: row.ahead >= 3 or row.ended,
        lambda row: min(row.ahead, 3) - 1,
    ),
    "windows": Rule(jrb.Sequence(3), lambda row: row.ahead >= 3, lambda row: 2),
    "windows of a period": Rule(
        jrb.Sequence(2, stride=2),
        lambda row: row.ahead >= 2 and row.position % 2 == 0,
        lambda row: 1,
    ),
    "padded windows of a period": Rule(
        jrb.Sequence(2, stride=3, partial="pad"), lambda row: row.position % 3 == 0
    ),
    "windows over ends": Rule(
        jrb.Sequence(2, cross_episodes=True), lambda row: row.following >= 2, lambda row: 1
    ),
    "windows across": Rule(
        jrb.Sequence(2, cross_episodes=True, stride=2),
        lambda row: row.following >= 2 and row.count % 2 == 0,
        lambda row: 1,
    ),
    "whole episodes": Rule(
        jrb.Sequence(3, sample_by="whole_episodes"),
        lambda row: row.position == 0 and row.ended,
        lambda row: row.ahead - 1,
        by_lane=True,
    ),
    "packed": Rule(
        jrb.Packed(3, 2),
        lambda row: row.position == 0 and row.ended,
        lambda row: row.ahead - 1,
        by_lane=True,
    ),
    "stacks": Rule(jrb.FrameStack(3), lambda row: row.whole(3)),
    "stacked windows": Rule(
        jrb.FrameStack(2, unit=jrb.Sequence(2, stride=3)),
        lambda row: row.whole(2) and row.ahead >= 2 and row.position % 3 == 0,
        lambda row: 1,
    ),
    "stacked strict n-step": Rule(
        jrb.FrameStack(2, unit=jrb.NStep(2, 0.9, strict=True)),
        lambda row: row.whole(2) and (row.ahead >= 2 or row.ended),
        lambda row: min(row.ahead, 2) - 1,
    ),
    "hindsight": Rule(_hindsight(), all_held=True),
}


def anchors(rule, writer):
    """Returns pairs of an anchor and a sort key, which orders anchors by when they became so."""
    if not writer.is_chronological:
        return [(row, (0, 0, row.slot)) for row in writer.slots]
    found = []
    for env, lane in enumerate(writer.lanes):
        stop = len(lane) - 1
        for number in reversed(range(len(lane))):
            row = lane[number]
            stop = number if row.ends else stop
            facts = Facts(
                stop - number + 1,
                len(lane) - number,
                lane[stop].ends,
                number,
                row.position,
                row.count,
            )
            if rule.is_anchor(facts):
                found.append((row, (number + rule.late(facts), env, number)))
    return found

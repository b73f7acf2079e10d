"""Samplers in plain Python: which anchors each kind may draw, given anchors in rank order."""

import collections
import math
from fractions import Fraction

import numpy as np

import jrb


class Alike:
    """Draws any anchors, with replacement; the base of the other models."""

    def __init__(self, sampler, spaces):
        self.sampler, self.spaces = sampler, spaces
        self.empty()

    def empty(self):
        """Resets the state."""

    def wrote(self, new, held, anchors, waits):
        """Handles one written row."""

    def changed(self, before, after, names=None, lanes=False):
        """Handles the anchors before and after one call, both in rank order."""

    def told_anew(self, before, after):
        """Handles a rebuild of all anchors."""

    def adopt(self, old, anchors):
        """Continues from the sampler of another buffer."""

    def unread(self, anchors):
        """Returns the anchors that must not be overwritten; None if all may be."""
        return

    def may(self, anchors):
        """Returns the anchors that may be drawn."""
        return anchors

    def ready(self, anchors):
        """Returns True if there is something to draw."""
        return bool(self.may(anchors))

    def draw(self, anchors, slots, real):
        """Asserts that a draw is possible, and updates the state."""
        may = {row.slot for row in self.may(anchors)}
        assert all(real) if may else not any(real)
        assert not may or set(slots) <= may

    def draw_some(self, anchors, slots):
        """Asserts that a draw may be of these slots, of which as many were drawn as fit."""
        assert set(slots) <= {row.slot for row in self.may(anchors)}
        assert bool(slots) == self.ready(anchors)

    def at_end(self, anchors, slots, real):
        """Asserts that a draw of many is possible, and draws every anchor that may be drawn."""
        assert set(drawn(slots, real)) == {row.slot for row in self.may(anchors)}


def drawn(slots, real):
    """Returns the slots that are not masked."""
    return [slot for slot, one in zip(slots, real, strict=True) if one]


class Newest(Alike):
    def may(self, anchors):
        count = self.sampler.count
        if count is None:
            share = Fraction(self.sampler.fraction).limit_denominator(2**16 - 1)
            count = math.ceil(share * len(anchors))
        return anchors[max(0, len(anchors) - count) :]


class Distinct(Alike):
    """Draws each anchor at most once per batch."""

    def draw(self, anchors, slots, real):
        count = min(len(slots), len(anchors))
        assert real == [place < count for place in range(len(slots))]
        assert len(set(slots[:count])) == count
        assert set(slots[:count]) <= {row.slot for row in anchors}

    def draw_some(self, anchors, slots):
        assert len(set(slots)) == len(slots)
        super().draw_some(anchors, slots)

    at_end = draw


class Priorities(Alike):
    """Stores the priorities of anchors in their rows."""

    def empty(self):
        self.highest, self.refused = np.float32(1), 0

    def wrote(self, new, held, anchors, waits):
        given = [row.given for row in new if row.given is not None]
        good = [one for one in given if is_priority(one)]
        self.refused += len(given) - len(good)
        self.learn(held, anchors)
        self.highest = max([self.highest, *good])
        for row in [] if waits else held:
            row.given = None  # without delayed anchors it was used at once

    def learn(self, rows, anchors):
        """Sets the priorities of rows that are new anchors, and clears those of other rows."""
        here, default = set(anchors), self.highest
        if self.sampler.new_priority == "largest_held":
            stay = [row.priority for row in anchors if row.priority is not None]
            default = max([priority for priority in stay if priority > 0], default=np.float32(1))
        for row in rows:
            if row not in here:
                row.priority = None
            elif row.priority is None:
                row.priority = row.given if is_priority(row.given) else default
                row.given = None

    def changed(self, before, after, names=None, lanes=False):
        self.learn({*before, *after}, after)

    told_anew = changed

    def update(self, rows, priorities):
        seen = [self.highest]
        for row, priority in zip(rows, priorities, strict=True):
            if row is None or row.priority is None or row.priority < 0:
                continue
            if not is_priority(priority):
                self.refused += 1
            else:
                row.priority = priority
                seen.append(priority)
        self.highest = max(seen)

    def adopt(self, old, anchors):
        if self.sampler == old.sampler:
            self.highest, self.refused = old.highest, old.refused
        else:
            self.highest = max([np.float32(1), *(row.priority for row in anchors)])

    def may(self, anchors):
        return [row for row in anchors if row.priority is not None and row.priority >= 0]

    def at_end(self, anchors, slots, real):
        self.draw(anchors, slots, real)  # rows of priority 0 are hardly ever drawn


class Limited:
    """The part of a model with `max_draws`: items that were drawn so often are used up."""

    lost = 0

    def may(self, anchors):
        return [row for row in super().may(anchors) if row.draws < self.sampler.max_draws]

    def unread(self, anchors):
        return self.may(anchors)

    def learn(self, rows, anchors):
        super().learn(rows, anchors)
        for row in anchors:
            self.use(row, 0)

    def use(self, row, uses):
        """Drops a row with a priority, if it is used up after some more uses."""
        if row.priority is not None and row.draws + uses >= self.sampler.max_draws:
            row.priority = np.float32(-2)

    def changed(self, before, after, names=None, lanes=False):
        self.lost = len(set(self.unread(before)) - set(after))
        super().changed(before, after, names, lanes)

    def adopt(self, old, anchors):
        super().adopt(old, anchors)
        for row in anchors:
            self.use(row, 0)

    def draw(self, anchors, slots, real):
        may, uses = {row.slot: row for row in self.may(anchors)}, collections.Counter()
        if may and self.sampler in DISTINCT:
            slots = slots[: len(may)]
            assert len(set(slots)) == len(slots)
            assert not any(real[len(slots) :])
        for slot, is_real in zip(slots, real, strict=False):
            left = may and self.sampler.max_draws - may[slot].draws - uses[slot]
            assert is_real == (bool(may) and left > 0)
            uses[slot] += is_real
        for slot, count in uses.items():
            self.use(may[slot], count) if count else None

    def draw_some(self, anchors, slots):
        super().draw_some(anchors, slots)
        may = {row.slot: row for row in self.may(anchors)}
        for slot, count in collections.Counter(slots).items():
            assert may[slot].draws + count <= self.sampler.max_draws
            assert count == 1 or self.sampler not in DISTINCT
            self.use(may[slot], count)

    def at_end(self, anchors, slots, real):
        may = {row.slot for row in self.may(anchors)}
        self.draw(anchors, slots, real)
        if not self.sampler.prioritized:  # rows of priority 0 are hardly ever drawn
            assert set(drawn(slots, real)) == may


class LimitedNewest(Limited, Newest):
    """Draws the newest of the anchors with draws left, in the order of their rows."""

    def unread(self, anchors):
        return [row for row in anchors if row.draws < self.sampler.max_draws]

    def may(self, anchors):
        return Newest.may(self, sorted(self.unread(anchors), key=self.time_of))


class Groups(Alike):
    """Draws groups of the last anchors of a key: lists of rows by key, the newest group last."""

    def empty(self):
        self.groups, self.known = {}, set()

    def wrote(self, new, held, anchors, waits):
        self.changed(None, None)

    def changed(self, before, after, names=None, lanes=False, aligned=None):
        order, one = self.entered(aligned), self.sampler
        for key, rows in list(self.groups.items()):
            self.groups[key] = [row for row in rows if row in order]
            if not self.groups[key]:
                del self.groups[key]
        for row in order:
            if row in self.known:
                continue
            key = row.items["key"]
            if key not in self.groups and len(self.groups) == one.num_groups:
                del self.groups[next(iter(self.groups))]
            self.groups[key] = [*self.groups.pop(key, []), row][-one.per_group :]
        self.known = set(order)

    def told_anew(self, before, after, aligned="oldest"):
        self.empty()
        self.changed(before, after, aligned=aligned)

    def adopt(self, old, anchors):
        self.told_anew(None, anchors, "newest")

    def drawable(self):
        """Returns the slots of each group that may be drawn, as tuples."""
        one, groups = self.sampler, list(self.groups.values())
        if one.partial == "drop":
            groups = [rows for rows in groups if len(rows) == one.per_group]
        newest = one.sampler.count if isinstance(one.sampler, jrb.Newest) else 0
        return {tuple(row.slot for row in rows) for rows in groups[-newest:]}

    def may(self, anchors):
        slots = {slot for group in self.drawable() for slot in group}
        return [row for row in anchors if row.slot in slots]

    def draw(self, anchors, slots, real):
        groups, size = self.drawable(), self.sampler.per_group
        seen = [
            tuple(drawn(slots[at : at + size], real[at : at + size]))
            for at in range(0, len(slots), size)
        ]
        for at, group in enumerate(seen):
            assert real[at * size :][: len(group)] == [True] * len(group)
        count = len(seen) if groups else 0
        if self.sampler.sampler in DISTINCT:
            count = min(count, len(groups))
            assert len(set(seen[:count])) == count
        assert set(seen[:count]) <= groups
        assert not any(seen[count:])


class Queue(Alike):
    """Draws the anchors of every `stride`-th row; the last `left` anchors were not passed yet."""

    lost = 0

    def empty(self):
        self.left, self.rows = 0, 0

    def wrote(self, new, held, anchors, waits):
        for row in new:
            row.nth = self.rows
        self.rows += 1

    def waiting(self, anchors):
        return anchors[len(anchors) - self.left :]

    def may(self, anchors):
        return [row for row in self.waiting(anchors) if row.nth % self.sampler.stride == 0]

    def unread(self, anchors):
        first = self.may(anchors)[:1]
        return anchors[anchors.index(first[0]) :] if first else []

    def changed(self, before, after, names=None, lanes=False):
        here, waits = set(after), self.waiting(before)
        new = len(after) - sum(row in here for row in before)
        gone = [row for row in waits if row not in here]
        self.lost = len(set(gone) & set(self.may(before)))
        self.left = min(len(waits) - len(gone) + new, len(after))

    def told_anew(self, before, after):
        self.left = min(self.left, len(after))

    def adopt(self, old, anchors):
        same = type(old) is type(self)
        self.left = min(old.left, len(anchors)) if same else len(anchors)
        if same and self.sampler.stride == old.sampler.stride:
            self.rows = old.rows
            return
        # Counted anew, from the oldest row that is held, also those that are no anchors yet.
        self.rows = 0
        for lane in self.lanes():
            for self.rows, row in enumerate(lane, 1):
                row.nth = self.rows - 1

    def draw(self, anchors, slots, real):
        want = self.may(anchors)[: len(slots)]
        assert real == [place < len(want) for place in range(len(slots))]
        assert slots[: len(want)] == [row.slot for row in want]
        if want:
            self.left = len(anchors) - anchors.index(want[-1]) - 1

    at_end = draw


class LifoState(Alike):
    """Draws each anchor once, the newest first."""

    lost = 0

    def empty(self):
        self.drawn = set()

    def unread(self, anchors):
        """Returns all anchors from the oldest undrawn one on."""
        fresh = [number for number, row in enumerate(anchors) if row not in self.drawn]
        return anchors[min(fresh, default=len(anchors)) :]

    def may(self, anchors):
        return [row for row in reversed(anchors) if row not in self.drawn]

    def changed(self, before, after, names=None, lanes=False):
        self.lost = len(set(before) - self.drawn - set(after))
        self.drawn &= set(after)

    told_anew = changed

    def adopt(self, old, anchors):
        self.drawn = old.drawn & set(anchors) if type(old) is type(self) else set()

    def draw(self, anchors, slots, real):
        fresh = self.may(anchors)[: len(slots)]
        assert real == [place < len(fresh) for place in range(len(slots))]
        assert slots[: len(fresh)] == [row.slot for row in fresh]
        self.drawn |= set(fresh)

    at_end = draw


class Epochs(Alike):
    """Draws the places 0, 1, ... of an epoch; a place whose anchor left gives a newer anchor.

    If all rows are anchors, each slot has a place (`spaces`). Otherwise there are as many places as
    there were anchors when the epoch began.
    """

    def empty(self):
        self.begin(0)

    def begin(self, length):
        self.length = self.position = length
        self.places, self.passes, self.gone = [], 0, 0

    def changed(self, before, after, names=id, lanes=False):
        before, after = list(map(names, before)), list(map(names, after))
        here, old = set(after), set(before)
        left = sum(name not in here for name in before)
        stay = [name for name in after if name in old]
        if before != after if lanes else not before[left:] == stay == after[: len(stay)]:
            self.begin(0)
        self.gone += left

    def told_anew(self, before, after):
        self.begin(0)

    def draw(self, anchors, slots, real):
        needed = len(slots) if self.sampler.drop_last else 1
        if self.length - self.position < needed:
            if self.passes == self.sampler.uses or self.length < needed:
                self.begin(len(anchors))
            self.places, self.position = list(range(self.length)), 0
            self.passes += 1
        inside = min(len(slots), self.length - self.position)
        inside = inside if inside >= needed else 0
        self.position += inside
        assert not any(real[inside:])
        taken = self.places[:inside]
        if self.sampler.shuffle:
            taken = self.some(anchors, slots[:inside], real[:inside])
        else:
            want = [self.shows(place, anchors) for place in taken]
            assert real[:inside] == [slot is not None for slot in want]
            assert drawn(slots, real) == drawn(want, real[:inside])
        self.places = [place for place in self.places if place not in taken]

    def some(self, anchors, slots, real):
        """Returns the drawn places in any order; which empty places were drawn is unknown."""
        shown = {self.shows(place, anchors): place for place in self.places}
        taken = [shown[slot] for slot in drawn(slots, real)]
        assert len(set(taken)) == len(taken)
        hidden = sum(self.shows(place, anchors) is None for place in self.places)
        assert len(slots) - len(taken) <= hidden
        return taken

    def shows(self, place, anchors):
        """Returns the slot that a place gives; None if it has no anchor."""
        at = (place - self.gone) % (self.spaces or max(self.length, 1))
        return anchors[at].slot if at < len(anchors) else None

    def at_end(self, anchors, slots, real):
        self.draw(anchors, slots, real)


def is_priority(number):
    return number is not None and np.isfinite(number) and number >= 0


DISTINCT = [jrb.Uniform(False), jrb.Uniform(False, count_draws=True)]
DISTINCT += [jrb.Uniform(False, max_draws=count) for count in range(1, 4)]
_KINDS = {"Prioritized": Priorities, "Queue": Queue, "Lifo": LifoState, "Newest": Newest}
_KINDS |= {"WithoutReplacement": Epochs, "Grouped": Groups}


def of(buffer, all_held):
    """Returns the model of a buffer's sampler."""
    sampler, spaces = buffer.sampler, buffer.capacity if all_held else None
    kind = _KINDS.get(type(sampler).__name__, Alike)
    if kind is Newest and sampler.max_draws is not None:
        kind = LimitedNewest
    elif sampler.max_draws is not None:
        kind = type("Limited" + kind.__name__, (Limited, kind), {})
    elif sampler in DISTINCT:
        kind = Distinct
    return kind(sampler, spaces)

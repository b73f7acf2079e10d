"""A buffer in plain Python: its methods, composed of models of writers, units and samplers."""

import numpy as np

from tests.methods import samplers, units, writers
from tests.methods.writers import MANY, Row


class Model:
    """The contents of a state, and the items that may be drawn from it."""

    def __init__(self, buffer, rule):
        self.take_parts(buffer, rule)
        self.anchors, self.draws = [], 0

    def take_parts(self, buffer, rule):
        self.buffer, self.rule, self.unit = buffer, rule, buffer.unit
        self.writer = writers.of(buffer)
        self.sampler = samplers.of(buffer, rule.all_held)
        self.sampler.time_of = lambda row: (self.writer.lanes[row.env].index(row), row.env)
        self.sampler.entered = self.entered
        self.sampler.lanes = lambda: self.writer.lanes

    def at(self, slot):
        return self.writer.held().get(int(slot))

    # Anchors.

    def learn(self):
        """Updates the anchors after a change; those that stay keep their order."""
        found = dict(units.anchors(self.rule, self.writer))
        stay = [row for row in self.anchors if row in found and self.writer.is_chronological]
        new = found.keys() - set(stay)
        order = stay + sorted(new, key=lambda row: found[row][1:])
        self.anchors = self.sorted(order)

    def learn_anew(self):
        """Rebuilds the anchors, as after a replay of all rows one by one."""
        found = sorted(units.anchors(self.rule, self.writer), key=lambda pair: pair[1])
        rows = [row for row, _ in found]
        self.anchors = self.sorted(rows)

    def entered(self, aligned=None):
        """Returns all anchors in the order in which they became so.

        Those of one row follow each other by environment. With several rows, `aligned` tells where
        all environments have a row at the same time: at their "oldest" or "newest" rows.
        """
        if not self.writer.is_chronological:
            return [row for row in self.writer.came if row in self.writer.slots]
        shift = [-len(lane) * (aligned == "newest") for lane in self.writer.lanes]
        found = units.anchors(self.rule, self.writer)
        order = lambda pair: ((pair[1][0] + shift[pair[1][1]]) * bool(aligned), *pair[1][1:])
        return [row for row, _ in sorted(found, key=order)]

    @property
    def per_env(self):
        """Returns True if anchors are ordered environment by environment."""
        return self.writer.is_chronological and (self.buffer.writer.per_env or self.rule.by_lane)

    def sorted(self, anchors):
        """Returns anchors in rank order."""
        return self.writer.sorted(anchors, self.rule.all_held) if self.per_env else anchors

    def changed(self, before):
        """Updates the sampler after a call."""
        lanes = self.per_env
        places = self.rule.all_held and (lanes or not self.writer.is_chronological)
        names = (lambda row: row.slot) if places else id
        self.sampler.changed(before, self.anchors, names, lanes)

    # Methods.

    def write(self, given, length):
        """Writes the rows that are not masked and for which there is room."""
        before, room = self.anchors, self.room()
        for t in range(length):
            rows = self.rows(given, t)
            room -= bool(rows)
            if rows and room >= 0:
                self.writer.write(rows)
                self.learn()
                own = list(self.writer.held().values()) if self.writer.is_chronological else rows
                anchors = self.anchors if self.writer.is_chronological else self.writer.taken(rows)
                self.sampler.wrote(rows, own, anchors, self.unit.has_delayed_anchors)
        self.writer.told(given.get("told"))
        self.learn()
        self.changed(before)
        assert not (self.buffer.writer.blocks_when_full and getattr(self.sampler, "lost", 0))

    def rows(self, given, t):
        """Returns the items that are written at time t."""
        names, found = ("number", "key", "x", "after", "reward", "done"), []
        for env in range(self.writer.envs):
            if given["mask"][t] if given["mask"].ndim == 1 else given["mask"][t, env]:
                items = {name: given[name][t, env] for name in names}
                own = given["priorities"][t, env] if "priorities" in given else None
                found.append(Row(env, items, own))
        return found

    def room(self):
        """Returns the number of rows for which there is room."""
        if not self.buffer.writer.blocks_when_full:
            return 10**9
        held = len(self.writer.lanes[0])
        free, unread = self.writer.size - held, self.sampler.unread(self.anchors)
        if unread is None or not self.anchors:
            return free
        age = {row: number for lane in self.writer.lanes for number, row in enumerate(lane)}
        # Limited draws come in any order: the oldest row that has draws left counts.
        first = unread if self.buffer.sampler.max_draws is not None else unread[:1]
        read = min((age[row] for row in first), default=age[self.anchors[-1]] + 1)
        return free + max(0, read - self.unit.lookback - (self.unit.max_entry_delay or 0))

    def set(self, slots, values, flags):
        """Overwrites values; with flags, also recomputes the ends of episodes and the anchors."""
        found = {slot: (self.at(slot), number) for number, slot in enumerate(slots)}
        for row, number in found.values():
            for name in values if row else ():
                row.items[name] = values[name][number]
            if row and row.items["done"]:
                row.cut = False  # clearing the flag later also clears the cut
        if flags and not self.unit.one_row:
            before = self.anchors
            self.writer.counted()
            self.learn_anew()
            if not self.rule.all_held:
                self.sampler.told_anew(before, self.anchors)

    def truncate(self, mask):
        before = self.anchors
        self.writer.truncate(mask)
        self.learn()
        if not self.unit.one_row:
            self.changed(before)

    def empty(self):
        self.writer.empty()
        self.sampler.empty()
        self.anchors = []

    def draw(self, slots, real, draws):
        if self.unit.anchors_per_entry > 1:
            self.sampler.draw_some(self.anchors, samplers.drawn(slots, real))
        else:
            self.sampler.draw(self.anchors, slots, real)
        held = self.writer.held()
        drawn = [held[slot] for slot in samplers.drawn(slots, real)]
        self.draws += len(drawn)
        if self.buffer.sampler.count_draws:
            assert samplers.drawn(draws, real) == [row.draws for row in drawn]
        for row in drawn:
            row.draws += 1

    def drop(self, slot):
        row = self.at(slot)
        if row and row.priority is not None:
            row.priority = np.float32(-2)

    def update(self, slots, priorities):
        self.sampler.update([self.at(slot) for slot in slots], priorities)

    # Rebuilding as another description.

    def is_refused(self, buffer):
        """Returns True if redistributing rows would break the history that the new unit needs."""
        lanes = getattr(self.writer, "lanes", [])
        if buffer.writer.per_env or not buffer.writer.is_chronological:
            return False
        return len(set(map(len, lanes))) > 1 and buffer.unit.requires_contiguous_history

    def rebuild(self, buffer, rule):
        """Moves all rows to a buffer of other parts."""
        old, held, is_same_unit = self.sampler, self.writer, buffer.unit == self.unit
        self.forget(buffer, rule)
        self.take_parts(buffer, rule)
        held.into(self.writer)
        self.learn_anew()
        sampler = self.buffer.sampler
        if sampler.consumes and sampler.max_draws is None and not is_same_unit:
            old = samplers.Alike(old.sampler, None)  # an order of other anchors is of no use
        self.adopt(old)

    def forget(self, buffer, rule):
        """Drops the values that the new parts cannot restore."""
        for row in self.writer.held().values():
            row.cut = row.cut and not self.unit.one_row
            if not self.rule.knows_past or (rule != self.rule and row.position):
                row.position = MANY
            if not self.rule.knows_past or rule != self.rule:
                row.count = 0
            if not (buffer.sampler.count_draws and self.buffer.sampler.count_draws):
                row.draws = 0
            if not (buffer.sampler.prioritized and self.buffer.sampler.prioritized):
                row.priority = None
            if buffer.sampler != self.buffer.sampler:
                row.given = None

    def adopt(self, old):
        """Continues from the old sampler, as far as the new one can."""
        here = set(self.anchors)
        for row in self.writer.held().values():
            if row not in here:
                row.priority = None
            elif row.priority is None:
                row.priority = np.float32(1)
        self.sampler.adopt(old, self.anchors)

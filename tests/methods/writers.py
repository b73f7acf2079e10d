"""Writers in plain Python: the stored rows and their slots, for each kind of writer."""

import dataclasses
import itertools
import math
from typing import Any

MANY = 6 * 10**6  # stands for an unknown number of rows; a multiple of all strides


@dataclasses.dataclass(eq=False)
class Row:
    """One item of one environment, with its slot, priorities and counts."""

    env: int
    items: dict[str, Any]
    given: Any = None
    slot: int = -1
    priority: Any = None
    position: int = 0
    count: int = 0
    nth: int = 0
    draws: int = 0
    cut: bool = False

    @property
    def ends(self):
        return self.items["done"] or self.cut


class InTurn:
    """A ring per environment; the rings stay aligned if all environments step together."""

    is_chronological = True

    def __init__(self, envs, size, writer):
        self.envs, self.size, self.writer = envs, size, writer
        self.empty()

    def empty(self):
        self.lanes, self.cursor = [[] for _ in range(self.envs)], [0] * self.envs

    def held(self):
        """Returns all stored rows by slot."""
        return {row.slot: row for lane in self.lanes for row in lane}

    def in_order(self):
        """Returns the slots, oldest first: by the number of newer rows of the environment."""
        rows = [[row for row in rows if row is not None] for rows in self.aligned()]
        return [slot for row in rows for slot in sorted(one.slot for one in row)]

    def write(self, rows):
        """Writes one row, of the environments that step."""
        for row in rows:
            lane, cursor = self.lanes[row.env], self.cursor
            row.slot = cursor[row.env] * self.envs + row.env
            row.position = lane[-1].position + 1 if lane and not lane[-1].ends else 0
            row.count = lane[-1].count + 1 if lane else 0
            cursor[row.env] = (cursor[row.env] + 1) % self.size
            lane.append(row)
            del lane[: -self.size]

    def told(self, numbers):
        """Does nothing: the contents follow from the writes."""

    def sorted(self, anchors, all_held):
        """Sorts anchors by environment; by slot in a full ring, if all rows are anchors."""
        full = [all_held and len(lane) == self.size for lane in self.lanes]
        return sorted(anchors, key=lambda row: (row.env, row.slot if full[row.env] else 0))

    def truncate(self, mask):
        for lane, cuts in zip(self.lanes, mask, strict=True):
            if cuts and lane:
                lane[-1].cut |= not lane[-1].items["done"]

    def counted(self):
        """Recomputes the positions and counts of all but the oldest rows, after flags changed."""
        for lane in self.lanes:
            for before, row in itertools.pairwise(lane):
                row.position = 0 if before.ends else before.position + 1
                row.count = before.count + 1

    def into(self, other):
        """Moves all rows to an empty writer."""
        if not other.is_chronological:
            rows = [row for rows in self.aligned() for row in rows if row is not None]
            other.write(rows)
            return
        even = len({len(lane) for lane in self.lanes}) == 1
        lanes = self.lanes if even or other.writer.per_env else self.dealt()
        for env, lane in enumerate(lanes):
            for number, row in enumerate(lane):
                row.env, row.slot = env, number * self.envs + env
        other.lanes, other.cursor = lanes, [len(lane) % self.size for lane in lanes]
        other.counted()

    def aligned(self):
        """Returns rows `[T][E]`, aligned by the newest; None where an environment has fewer."""
        most = max(map(len, self.lanes))
        lanes = [[None] * (most - len(lane)) + lane for lane in self.lanes]
        return list(zip(*lanes, strict=True))

    def dealt(self):
        """Returns rings of equal length: all rows end to end, with episodes cut at the seams."""
        surplus = sum(map(len, self.lanes)) % self.envs
        oldest = [row for row in (*self.aligned(), [])[0] if row is not None]
        surplus = {row.env for row in oldest} and surplus
        for lane in self.lanes:
            if lane:
                lane[-1].cut |= not lane[-1].items["done"]
        line = [row for env, lane in enumerate(self.lanes) for row in lane[env < surplus :]]
        line = line[len(line) % self.envs :]
        size = len(line) // self.envs
        lanes = [line[env * size : (env + 1) * size] for env in range(self.envs)]
        for lane in lanes:
            if lane:
                lane[-1].cut |= not lane[-1].items["done"]
        return lanes


class OneByOne:
    """Items without an order in time, each placed in a slot individually."""

    is_chronological = False

    def __init__(self, envs, size, writer):
        self.envs, self.size, self.writer = envs, envs * size, writer
        self.empty()

    def empty(self):
        self.slots, self.came, self.total = [], [], 0

    def held(self):
        return {row.slot: row for row in self.slots}

    def in_order(self):
        return [row.slot for row in self.came if row in self.slots]

    def write(self, rows):
        for row in rows:
            self.came.append(row)
            self.place(row)

    def taken(self, new):
        """Returns the stored rows, as far as they are known: of some kinds only the new ones."""
        return self.slots

    def put(self, slot, row):
        row.slot = slot
        self.slots[slot : slot + 1] = [row]

    def told(self, numbers):
        """Does nothing: the contents follow from the writes."""

    def truncate(self, mask):
        """Does nothing: no row follows another."""

    def counted(self):
        """Does nothing: items have no episodes."""

    def into(self, other):
        """Moves all items to an empty writer; a chronological one makes each an episode."""
        rows = [row for row in self.came if row in self.slots]
        if not other.is_chronological:
            other.write(rows)
            other.total = self.total if len(rows) == other.size else len(rows)
            return
        for number, row in enumerate(rows[len(rows) % self.envs :]):
            row.cut, row.env = not row.items["done"], number % self.envs
            other.write([row])


class Best(OneByOne):
    """Keeps the best items."""

    def place(self, row):
        rank = row.items["reward"]
        worst = min(self.slots, key=lambda row: (row.items["reward"], row.slot), default=None)
        if math.isnan(rank):
            return
        if len(self.slots) < self.size:
            self.put(len(self.slots), row)
        elif rank > worst.items["reward"]:
            self.put(worst.slot, row)


class AnyOf(OneByOne):
    """Keeps a random subset of all items, taken from the buffer; impossible subsets fail."""

    def empty(self):
        super().empty()
        self.new = {}

    def place(self, row):
        self.new[row.items["number"]] = row
        self.total += 1
        if self.total <= self.size:
            self.put(self.total - 1, row)

    def taken(self, new):
        return new

    def told(self, numbers):
        """Takes over the number of the item in each slot, after the items of one call."""
        for slot in range(min(self.total, self.size)):
            if self.slots[slot].items["number"] != numbers[slot]:
                self.put(slot, self.new[numbers[slot]])
        self.new = {}


def of(buffer):
    """Returns the model of a buffer's writer."""
    ring, writer = buffer.ring, buffer.writer.writable()
    known = {"MaxValue": Best, "Reservoir": AnyOf}
    return known.get(type(writer).__name__, InTurn)(ring.envs, ring.rows, buffer.writer)

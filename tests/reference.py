"""Models of buffers in plain Python: lists of rows, oldest first."""


class Ring:
    """A model of a ring of R rows of E items."""

    def __init__(self, rows, envs):
        self.rows, self.envs = rows, envs
        self.items, self.written = [], 0
        self.slots = [None] * (rows * envs)

    def add(self, row, mask=True):
        if not mask:
            return
        first = self.written % self.rows * self.envs
        self.slots[first : first + self.envs] = row
        self.items = (self.items + list(row))[-self.rows * self.envs :]
        self.written += 1

    def extend(self, rows, mask=None):
        for t, row in enumerate(rows):
            self.add(row, mask is None or mask[t])

    def empty(self):
        self.items, self.written = [], 0
        self.slots = [None] * len(self.slots)

    def held(self):
        return {slot: item for slot, item in enumerate(self.slots) if item is not None}


class Episodes:
    """A model of R rows of E environments: lists of transitions with their episode numbers."""

    def __init__(self, rows, envs):
        self.rows, self.envs = rows, envs
        self.time, self.cursor, self.number = 0, 0, [0] * envs
        self.fresh = [True] * envs  # True if an environment's next row begins an episode
        self.held = [[] for _ in range(envs)]  # the rows of each environment, oldest first

    def add(self, row, mask=True):
        """Adds a row: E transitions, each a dict with flags such as `done`."""
        if not mask:
            return
        for env, item in enumerate(row):
            slot = self.cursor * self.envs + env
            ends = any(item.get(flag) for flag in ("done", "terminated", "truncated"))
            entry = dict(item, time=self.time, episode=self.number[env], slot=slot, env=env)
            entry["ends"] = ends
            entry["first"] = self.fresh[env]
            self.fresh[env] = ends
            self.held[env] = (self.held[env] + [entry])[-self.rows :]
            self.number[env] += ends
        self.time, self.cursor = self.time + 1, (self.cursor + 1) % self.rows

    def extend(self, rows, mask=None):
        for t, row in enumerate(rows):
            self.add(row, mask is None or mask[t])

    def empty(self):
        self.held, self.cursor = [[] for _ in range(self.envs)], 0
        self.number = [number + 1 for number in self.number]
        self.fresh = [True] * self.envs

    def truncate(self, which):
        """Ends the episodes of the selected environments at their newest transitions."""
        for env in range(self.envs):
            if which[env] and self.held[env] and not self.held[env][-1]["ends"]:
                self.held[env][-1]["ends"] = True
                self.number[env] += 1
                self.fresh[env] = True

    def all(self):
        return [entry for rows in self.held for entry in rows]

    def at(self, env, time):
        """Returns the transition of an environment at a time, or None."""
        return next((entry for entry in self.held[env] if entry["time"] == time), None)

    def of_episode(self, entry):
        """Returns the stored transitions of an entry's episode, oldest first."""
        rows = self.held[entry["env"]]
        return [other for other in rows if other["episode"] == entry["episode"]]

    def ahead(self, entry, most):
        """Returns the transition and its successors in its episode, at most `most` in all."""
        rows = [other for other in self.of_episode(entry) if other["time"] >= entry["time"]]
        return rows[:most]

    def behind(self, entry, most):
        """Returns up to `most` predecessors of the transition in its episode, oldest first."""
        rows = [other for other in self.of_episode(entry) if other["time"] < entry["time"]]
        return rows[max(0, len(rows) - most) :]

    def stack(self, entry, k, begins):
        """Returns the frames of a stack, oldest first; None if one of them was overwritten.

        `begins` maps (env, episode) to the time of the episode's first transition.
        """
        first = begins[entry["env"], entry["episode"]]
        times = [max(entry["time"] - back, first) for back in reversed(range(k))]
        found = [self.at(entry["env"], time) for time in times]
        return None if None in found else [other["frame"] for other in found]


class OnceModel:
    """A model of shared next observations: rows leave when `room` for separate ones runs out."""

    def __init__(self, rows, envs, room):
        self.rows, self.envs, self.room = rows, envs, room
        self.held, self.apart = [], []  # rows; the number of each row's separate observations

    def add(self, row, mask=True):
        if not mask:
            return
        if self.held:
            pairs = zip(self.held[-1], row, strict=True)
            needed = sum(old["after"] != new["frame"] for old, new in pairs)
            self.drop(max(0, len(self.held) + 1 - self.rows))
            while sum(self.apart) + needed > self.room:
                self.drop(next(i for i, count in enumerate(self.apart) if count) + 1)
            if self.held:
                self.apart[-1] = needed
        self.held.append(row)
        self.apart.append(0)

    def drop(self, count):
        self.held, self.apart = self.held[count:], self.apart[count:]

    def empty(self):
        self.held, self.apart = [], []

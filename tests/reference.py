"""The buffer in plain Python: a list of rows, oldest first."""


class Ring:
    """What a full ring of R rows of E items holds, item by item."""

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

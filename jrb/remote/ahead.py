"""Batches that are drawn before they are wanted."""

import collections
import itertools
import time
from collections.abc import Callable
from typing import Any

from jrb.remote.drawing import PAUSE, Draw, Drawing
from jrb.remote.library import ray
from jrb.state import Device, Sample


class Ahead:
    """An iterator over batches, without end; made by `Remote.ahead`.

    As many draws as `depth` says are under way or have come and lie on the device. There is no
    thread: Ray draws and sends, and JAX copies, while the caller computes.
    """

    def __init__(
        self,
        drawing: Drawing,
        before: Callable[[], None],
        batch_size: int,
        depth: int,
        beta: float | Callable[[int], float] | None,
        device: Device,
    ) -> None:
        self._drawing, self._before, self._device = drawing, before, device
        self._batch_size, self._depth, self._beta = batch_size, depth, beta
        self._group = max(1, depth // 2)  # a call has a price of its own
        self._asked, self._permit = 0, None
        self._line: collections.deque[Draw | Sample] = collections.deque()

    def __iter__(self) -> "Ahead":
        return self

    def __next__(self) -> Sample:
        """The next batch; waits until there is something to draw."""
        sample = None
        while sample is None:
            self._fill(patient=True)
            first = self._line[0]  # an interrupt of the wait leaves it there
            sample = self._taken(first) if isinstance(first, Draw) else first
            self._line.popleft()
            if sample is None:
                time.sleep(PAUSE)
        try:
            self._fill(patient=False)
            self._fetch()
        except BaseException:  # also an interrupt: the next call returns the batch
            self._line.appendleft(sample)
            raise
        return sample

    def _fill(self, patient: bool) -> None:
        """Asks for more, as far as that is allowed."""
        self._before()
        while len(self._line) + self._group <= self._depth and self._is_allowed(patient):
            numbers = range(self._asked, self._asked + self._group)
            betas = [self._beta(n) if callable(self._beta) else self._beta for n in numbers]
            self._line.extend(self._drawing.ask(self._batch_size, betas))
            self._asked += self._group

    def _is_allowed(self, patient: bool) -> bool:
        """Whether the limit lets more pass; waits for that, or for the first batch in line."""
        if self._permit is None:
            self._permit = self._drawing.permit(self._batch_size, self._group)
        if self._permit is None:
            return True
        first: Any = self._line[0] if self._line else None
        others = first.parts[:1] if isinstance(first, Draw) else []
        wait = patient and not isinstance(first, Sample)
        found, _ = ray().wait([self._permit, *others], timeout=None if wait else 0)
        if self._permit not in found:
            return False
        ray().get(self._permit)
        self._permit = None
        return True

    def _fetch(self) -> None:
        """Puts those that have come on the device."""
        draws = {place: one for place, one in enumerate(self._line) if isinstance(one, Draw)}
        there = self._drawing.there(list(draws.values()))
        for place, draw in itertools.islice(draws.items(), there):
            sample = self._taken(draw)
            if sample is None:
                return
            self._line[place] = sample

    def _taken(self, draw: Draw) -> Sample | None:
        return self._drawing.take(draw, self._device)

"""Times several programs in turn, in one process, so that changes of speed affect all alike."""

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np


def _nothing() -> None:
    pass


@dataclasses.dataclass
class Program:
    """A timed program.

    Attributes:
        call: runs `steps` steps and waits for the results.
        steps: the number of steps per call.
        before: called before each call, and not timed.
        facts: other results, such as the memory that the program needs.
        times: seconds per step, one number per call.
    """

    call: Callable[[], Any]
    steps: int = 1
    before: Callable[[], Any] = _nothing
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    times: list[float] = dataclasses.field(default_factory=list)

    def run(self) -> None:
        """Calls the program once and records the time per step."""
        self.before()
        start = time.perf_counter()
        self.call()
        self.times.append((time.perf_counter() - start) / self.steps)

    def warm(self) -> None:
        """Calls the program once and discards all times."""
        self.run()
        self.times.clear()


def in_turn(programs: Iterable[Program], rounds: int, tick: Callable[[], Any] = _nothing) -> None:
    """Calls each program once per round; all must have been warmed up."""
    programs = list(programs)
    for _ in range(rounds):
        for program in programs:
            program.run()
            tick()


def ratio(one: Program, other: Program) -> float:
    """Returns the median over rounds of the time of `one` divided by the time of `other`."""
    return float(np.median(np.array(one.times) / np.array(other.times)))

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
    """Something that is called again and again.

    Attributes:
        call: does its work `steps` times, and waits for the results.
        steps: how often.
        before: done before each call, and not timed.
        facts: what else is known of it, such as the memory it takes.
        times: seconds a step, one number a call.
    """

    call: Callable[[], Any]
    steps: int = 1
    before: Callable[[], Any] = _nothing
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    times: list[float] = dataclasses.field(default_factory=list)

    def run(self) -> None:
        """Calls it once, and notes the time of a step."""
        self.before()
        start = time.perf_counter()
        self.call()
        self.times.append((time.perf_counter() - start) / self.steps)

    def warm(self) -> None:
        """Calls it once, and forgets how long that took."""
        self.run()
        self.times.clear()


def in_turn(programs: Iterable[Program], rounds: int, tick: Callable[[], Any] = _nothing) -> None:
    """Calls the programs one after the other, round after round; all have been warmed up."""
    programs = list(programs)
    for _ in range(rounds):
        for program in programs:
            program.run()
            tick()


def ratio(one: Program, other: Program) -> float:
    """The median, over rounds, of the time of one over the time of the other."""
    return float(np.median(np.array(one.times) / np.array(other.times)))

"""The cases of a workload; the programs of a case are timed in turn."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ..peers import Peer
from ..setup import Setup
from ..timing import Program

Make = Callable[[], Program]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Options of the command line that workloads need.

    Attributes:
        peers: the peers that are chosen and installed.
        quick: if True, use small sizes, for a run of about a minute.
        rounds: number of rounds.
        folder: a folder on the disk to measure, for temporary files.
    """

    peers: Sequence[Peer]
    quick: bool = False
    rounds: int = 15
    folder: str = "."

    def pick(self, quick: Any, full: Any) -> Any:
        """Returns `quick` in a quick run, `full` otherwise."""
        return quick if self.quick else full


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison, a row of a table.

    Attributes:
        what: the name of the case.
        facts: sizes and other columns of the table.
        programs: functions that build the programs, by the name of the peer.
        base: the program to whose time the others are compared.
        weight: factor on the number of rounds.
        within: a context in which the programs are built and run.
        unit: "s" for the time of a step; or the unit of `Program.facts["value"]` for programs
            that are not timed, "B" or "kernels".
    """

    what: str
    facts: dict[str, Any]
    programs: dict[str, Make]
    base: str = "jrb"
    weight: float = 1.0
    unit: str = "s"
    within: Callable[[], Any] = contextlib.nullcontext

    @property
    def name(self) -> str:
        """The name that `--only` searches."""
        return f"{self.what}, " + ", ".join(f"{key} {value}" for key, value in self.facts.items())

    def rounds(self, asked: int) -> int:
        """Returns the number of rounds; 0 for programs that are not timed."""
        return max(1, round(asked * self.weight)) if self.unit == "s" else 0


def beside(
    wanted: Wanted, what: str, setup: Setup, make: Callable[[Peer, Setup], Program], **more: Any
) -> Case:
    """Returns the case of one setup with every peer that supports it."""
    able = [peer for peer in wanted.peers if peer.can(setup)]
    programs = {peer.name: lambda peer=peer: make(peer, setup) for peer in able}
    return Case(what, more.pop("facts", {}) | setup.facts, programs, **more)

"""The processes of a program that save one state together.

They agree by short messages that go through JAX's own coordination service, not through devices:
so they may do it in a thread, beside a training, and hear when one of them has died.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable
from typing import Any, Protocol

from jrb._xla import compat


class ProcessGroup(Protocol):
    """Some processes, which all do the same in the same order."""

    @property
    def is_leader(self) -> bool:
        """Whether this is the first of them."""
        ...

    def all_gather_json(self, work: Callable[[], Any]) -> list[Any]:
        """Returns what the work of each process gave, for JSON, when all have done it.

        Raises:
            OSError: the work of another one failed. What one's own raises comes through.
        """
        ...


class SingleProcess:
    """A single process."""

    is_leader = True

    def all_gather_json(self, work: Callable[[], Any]) -> list[Any]:
        """See `ProcessGroup.all_gather_json`."""
        return [work()]


@dataclasses.dataclass
class DistributedProcesses:
    """Processes that leave messages for each other.

    Attributes:
        number: of this one.
        count: how many there are.
        leave: leaves a message under a name, once.
        fetch: waits for the message of a name.
        name: of what they do together; the same in all of them, and used once.
    """

    number: int
    count: int
    leave: Callable[[str, str], Any]
    fetch: Callable[[str], str]
    name: str
    _step: int = 0

    @property
    def is_leader(self) -> bool:
        """Whether this is the first of them."""
        return self.number == 0

    def all_gather_json(self, work: Callable[[], Any]) -> list[Any]:
        """See `ProcessGroup.all_gather_json`."""
        self._step += 1
        place = f"{self.name}/{self._step}"
        try:
            result = work()
        except BaseException as error:
            self.leave(f"{place}/{self.number}", json.dumps({"error": repr(error)}))
            raise
        self.leave(f"{place}/{self.number}", json.dumps({"result": result}))
        messages = [json.loads(self.fetch(f"{place}/{number}")) for number in range(self.count)]
        for number, message in enumerate(messages):
            if "error" in message:
                raise OSError(
                    f"save: process {number} of {self.count} failed: {message['error']}. What was "
                    "saved before is still there."
                )
        return [message["result"] for message in messages]


_saves = itertools.count()


def of_program() -> ProcessGroup:
    """Returns all processes of this program, for one save."""
    service = compat.coordination()
    if service is None:
        return SingleProcess()
    number, count, leave, fetch = service
    return DistributedProcesses(number, count, leave, fetch, f"jrb/save/{next(_saves)}")

"""What each method of a buffer reads and changes, so that others can compile it or shard it."""

from typing import NamedTuple


class Method(NamedTuple):
    """Describes a method; `jrb.jitted` and `jrb.Sharded` have the same methods as a buffer.

    Attributes:
        changes: the arrays of the state that change: "items" and others; "index", all but items;
            "sampler", those of the sampler only; "" for none.
        reads_items: True if the result has items.
        per_env: True if arguments have an axis of environments.
        num_results: 2 if the result is a pair of arrays.
    """

    changes: str = ""
    reads_items: bool = False
    per_env: bool = False
    num_results: int = 1


METHODS: dict[str, Method] = {
    "add": Method("items", per_env=True),
    "extend": Method("items", per_env=True),
    "set": Method("items"),
    "map": Method("items"),
    "empty": Method("items"),
    "truncate": Method("index", per_env=True),
    "update_priority": Method("sampler"),
    "set_alpha": Method("sampler"),
    "drop": Method("sampler"),
    "draw": Method("sampler", reads_items=True),
    "sample": Method(reads_items=True),
    "take": Method(reads_items=True),
    "size": Method(),
    "in_order": Method(num_results=2),
    "newest": Method(num_results=2),
    "priorities": Method(),
    "can_add": Method(),
    "can_sample": Method(),
}

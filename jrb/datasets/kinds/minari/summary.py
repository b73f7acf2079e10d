"""What an episode of Minari is without its arrays, and whether it is like the others.

T steps of it.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jrb.datasets.kinds.minari.leaf import Stored

TED = {
    "observations": "observation",
    "actions": "action",
    "rewards": "next/reward",
    "terminations": "next/terminated",
    "truncations": "next/truncated",
    "infos": "info",
}
_FLAGS = ("terminations", "truncations")


class Form(NamedTuple):
    """What a leaf is alike in, in all episodes.

    Attributes:
        shape: of a row.
        dtype: NumPy's.
        has_next: whether there are T + 1 rows, so that a step's next row is that of the next step.
        is_jpeg: whether it is kept as images.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    has_next: bool
    is_jpeg: bool


class Summary(NamedTuple):
    """What is known of an episode.

    Attributes:
        where: in which file.
        steps: T.
        is_cut: see `Description.cut`.
        forms: of what can be read, by name.
        others: the names of what cannot.
    """

    where: str
    steps: int
    is_cut: bool
    forms: dict[str, Form]
    others: frozenset[str]


def summary(stored: Stored) -> Summary:
    """What is known of an episode.

    Raises:
        ValueError: it lacks something, or has arrays of lengths that do not fit together.
    """
    _check_complete(stored)
    steps = stored.leaves["rewards"].rows
    rows = {name: leaf.rows for name, leaf in stored.leaves.items()}
    seen = {count for name, count in rows.items() if role(name) == "observations"}
    exact = {count for name, count in rows.items() if role(name) not in ("observations", "infos")}
    if not steps or exact != {steps} or seen not in ({steps}, {steps + 1}):
        raise ValueError(
            f"{stored.where}: expected T > 0 rewards, flags and actions, and T + 1 observations "
            f"(or T), got {rows}."
        )
    fit = {name for name, count in rows.items() if count in (steps, steps + 1)}
    forms = {
        name: Form(leaf.shape, leaf.dtype, leaf.rows > steps, leaf.is_jpeg)
        for name, leaf in stored.leaves.items()
        if name in fit
    }
    is_cut = seen == {steps} and not stored.leaves["terminations"].read()[-1]
    others = frozenset(stored.others) | rows.keys() - fit
    return Summary(stored.where, steps, is_cut, forms, others)


def _check_complete(stored: Stored) -> None:
    """Refuses an episode without what every episode has."""
    roles = {role(name) for name in stored.leaves}
    lacking = [name for name in TED if name not in roles | {"infos"}]
    if lacking:
        raise ValueError(
            f"{stored.where}: expected numbers in {', '.join(lacking)}, got an episode with "
            f"{sorted(stored.leaves)}{_beside(stored)}."
        )
    for name in ("rewards", *_FLAGS):
        if name not in stored.leaves:
            raise ValueError(f"{stored.where}: '{name}': expected an array, got a group.")
    for name in _FLAGS:
        shape, dtype = stored.leaves[name].form
        if shape or dtype.kind not in "biu":
            raise ValueError(
                f"{stored.where}: '{name}': expected bool of shape (T,), got {dtype} of shape "
                f"{('T', *shape)}."
            )


def _beside(stored: Stored) -> str:
    return f", and {sorted(stored.others)}, which are none" if stored.others else ""


def check_alike(found: Summary, first: str, forms: Mapping[str, Form]) -> None:
    """Refuses an episode that has other leaves than the first one, but for infos."""
    mine = {name: form for name, form in found.forms.items() if not is_info(name)}
    for name in sorted(mine.keys() | forms.keys()):
        want, have = forms.get(name), mine.get(name)
        if want is None or have is None or want[:2] != have[:2]:
            raise ValueError(
                f"{found.where}: '{name}': expected {said(want)} as in {first}, got {said(have)}."
            )


def said(form: Form | None) -> str:
    """A form in a few words."""
    return "nothing" if form is None else f"{form.dtype} of shape {('T', *form.shape)}"


def role(name: str) -> str:
    """The first part of the name of a leaf."""
    return name.split("/")[0]


def is_info(name: str) -> bool:
    """Whether a leaf may lack in other episodes."""
    return role(name) == "infos"

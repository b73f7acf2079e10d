"""Texts and HTML of states and descriptions, for terminals and notebooks."""

import html as html_
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jrb._util import pytree, wording
from jrb._util.pytree import Leaf, PyTree
from jrb._util.wording import printable

Row = tuple[str, ...]
"""Cells of a table."""


def host_values(leaf: Leaf) -> np.ndarray | None:
    """Returns the values of an array; None for tracers, donated arrays, keys and non-arrays."""
    if not isinstance(leaf, jax.Array | np.ndarray) or isinstance(leaf, jax.core.Tracer):
        return None
    if isinstance(leaf, jax.Array) and (leaf.is_deleted() or not leaf.is_fully_addressable):
        return None
    return None if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) else np.asarray(leaf)


def share(leaf: Leaf, whole: int) -> str:
    """Returns `30 of 40 (75 %)` for counts that add up to 30; "" if they are not known."""
    counts = host_values(leaf)
    if counts is None:
        return ""
    count = int(counts.sum(dtype=np.int64))
    return f"{count:,} of {whole:,} ({100 * count / max(whole, 1):.0f} %)"


def count(leaf: Leaf) -> str:
    flags = host_values(leaf)
    return "" if flags is None else f"{int(flags.sum(dtype=np.int64)):,}"


def spread(leaf: Leaf) -> str:
    """Returns `mean 0.5, from 0.1 to 2` for numbers; "" if they are unknown, or there are none."""
    numbers = host_values(leaf)
    if numbers is None or not numbers.size:
        return ""
    mean, least, most = numbers.mean(dtype=np.float64), numbers.min(), numbers.max()
    return f"mean {mean:.3g}, from {least:.3g} to {most:.3g}"


def format_code(description: Any) -> str:
    """Returns a description as code: on one line of up to 88 columns, or on a line per field."""
    head = f"{type(description).__name__}("
    fields = [f"{name}={value!r}" for name, value in pytree.changed_fields(description)]
    if len(head) + len(", ".join(fields)) < 88:
        return head + ", ".join(fields) + ")"
    # Indent the lines of parts within this one.
    lines = [field.replace("\n", "\n    ") for field in fields]
    return "\n    ".join([head, *(line + "," for line in lines)]) + "\n)"


def tree_html(description: Any) -> str:
    """Returns a description as a nested HTML list, with the fields of each part below it."""
    return f"<ul style='list-style: none'><li>{_node_html(description)}</li></ul>"


def _node_html(value: Any) -> str:
    if not pytree.is_component(type(value)):
        return _escape(repr(value))
    name = f"<b>{html_.escape(type(value).__name__)}</b>"
    fields = [
        f"<li>{field}: {_node_html(entry)}</li>" for field, entry in pytree.changed_fields(value)
    ]
    return f"{name}<ul>{''.join(fields)}</ul>" if fields else name


def _escape(text: str) -> str:
    return html_.escape(printable(text))


def text(state: PyTree, title: str, facts: dict[str, str]) -> str:
    """Returns a title, facts, and a line per leaf: name, dtype, shape, bytes, value of a scalar."""
    lines = [f"{name}: {fact}" for name, fact in facts.items() if fact]
    return table_text("\n  ".join([title, *lines]), (), _leaf_rows(state))


def html(state: PyTree, title: str, facts: dict[str, str]) -> str:
    """Returns the content of `text` as an HTML table, with the leaves folded away."""
    rows = [(name, fact) for name, fact in facts.items() if fact]
    leaves = table_html("", ("leaf", "type", "memory", "value"), _leaf_rows(state))
    return f"{table_html(title, (), rows)}<details><summary>leaves</summary>{leaves}</details>"


def table_text(title: str, head: Row, rows: Sequence[Row], notes: Sequence[str] = ()) -> str:
    """Returns a title, rows in aligned columns below a head if there is one, and notes."""
    # Pad the cells of each column to the width of the widest one.
    shown = [*([head] if head else []), *rows]
    lines = [tuple(printable(cell, "") for cell in row) for row in shown]
    widths = [max(map(wording.width_of, column)) for column in zip(*lines, strict=True)]
    pad = lambda cell, width: cell + " " * (width - wording.width_of(cell))
    cells = ["  ".join(map(pad, row, widths)).rstrip() for row in lines]
    return "\n  ".join([printable(title), *cells, *map(printable, notes)])


def table_html(title: str, head: Row, rows: Sequence[Row], notes: Sequence[str] = ()) -> str:
    """Returns an HTML table with a head if there is one, and notes below it."""
    top = "".join(f"<th>{_escape(cell)}</th>" for cell in head)
    cells = "".join(
        "<tr>" + "".join(f"<td>{_escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    below = "".join(f"<p>{_escape(note)}</p>" for note in notes)
    caption = f"<caption>{_escape(title)}</caption>" if title else ""
    head_row = f"<tr>{top}</tr>" if head else ""
    return f"<table>{caption}{head_row}{cells}</table>{below}"


def _leaf_rows(state: PyTree) -> list[tuple[str, str, str, str]]:
    rows = []
    for name, leaf in pytree.shown_leaves(state):
        if not pytree.is_array(leaf):
            rows.append((name, type(leaf).__name__, "", repr(leaf)))
            continue
        # Only the values of scalars are shown, if they can be read.
        is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        number = None if leaf.shape else host_values(leaf)
        value = "" if number is None else str(number)
        kind = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        nbytes = wording.bytes_text(leaf.size * leaf.dtype.itemsize)
        rows.append((name, kind, nbytes, "donated" if is_array and leaf.is_deleted() else value))
    return rows

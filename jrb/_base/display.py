"""How a state looks in a terminal and in a notebook."""

import html as html_
from collections.abc import Sequence

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jrb._base import pytree
from jrb._base.pytree import Leaf, PyTree

Row = tuple[str, ...]
"""Cells of a table."""

_UNITS = ("B", "kB", "MB", "GB", "TB")


def text(state: PyTree) -> str:
    """A line for every leaf: name, dtype and shape, bytes, and the value of a number."""
    return table_text(_title(state), (), _rows(state))


def html(state: PyTree) -> str:
    """The same as a table."""
    return table_html(_title(state), ("leaf", "type", "memory", "value"), _rows(state))


def table_text(title: str, head: Row, rows: Sequence[Row], notes: Sequence[str] = ()) -> str:
    """A title, lines in columns below a head if there is one, and notes."""
    lines = [*([head] if head else []), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in lines
    ]
    return "\n  ".join([title, *cells, *notes])


def table_html(title: str, head: Row, rows: Sequence[Row], notes: Sequence[str] = ()) -> str:
    """The same as a table of HTML."""
    top = "".join(f"<th>{html_.escape(cell)}</th>" for cell in head)
    cells = "".join(
        "<tr>" + "".join(f"<td>{html_.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    below = "".join(f"<p>{html_.escape(note)}</p>" for note in notes)
    caption = f"<caption>{html_.escape(title)}</caption>"
    return f"<table>{caption}<tr>{top}</tr>{cells}</table>{below}"


def bytes_text(count: float) -> str:
    """`1.5 MB` for 1500000."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def _title(state: PyTree) -> str:
    arrays = [leaf for leaf in jax.tree.leaves(state) if pytree.is_array(leaf)]
    return f"{type(state).__name__}, {bytes_text(pytree.nbytes(arrays))}"


def _rows(state: PyTree) -> list[tuple[str, str, str, str]]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return [(pytree.leaf_name(path), *_cells(leaf)) for path, leaf in leaves]


def _cells(leaf: Leaf) -> tuple[str, str, str]:
    if not pytree.is_array(leaf):
        return type(leaf).__name__, "", repr(leaf)
    kind = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    return kind, bytes_text(leaf.size * leaf.dtype.itemsize), _value(leaf)


def _value(leaf: Leaf) -> str:
    known = isinstance(leaf, jax.Array | np.ndarray) and not isinstance(leaf, jax.core.Tracer)
    if not known or leaf.shape or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return ""
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return "donated"
    return str(np.asarray(leaf))

"""How a state looks in a terminal and in a notebook."""

import html as html_

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jrb._base import pytree
from jrb._base.pytree import Leaf, PyTree

_UNITS = ("B", "kB", "MB", "GB", "TB")


def text(state: PyTree) -> str:
    """A line for every leaf: name, dtype and shape, bytes, and the value of a number."""
    rows = _rows(state)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n  ".join([_title(state), *lines])


def html(state: PyTree) -> str:
    """The same as a table."""
    cells = "".join(
        "<tr>" + "".join(f"<td>{html_.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in _rows(state)
    )
    head = "<tr><th>leaf</th><th>type</th><th>memory</th><th>value</th></tr>"
    return f"<table><caption>{html_.escape(_title(state))}</caption>{head}{cells}</table>"


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

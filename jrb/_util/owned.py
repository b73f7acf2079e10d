"""Copies of NumPy's arrays, to which whoever passes them may write as soon as a verb returns.

JAX reads an array of NumPy where it lies, and not always before a call returns: a state that is
still being computed is waited for elsewhere. An environment may have put its next observation there
by then, which would be stored in place of the one that was passed.
"""

from typing import Any

import jax
import numpy as np

from jrb._util.pytree import Leaf, PyTree


def copied(tree: PyTree) -> Any:
    """The same pytree, NumPy's arrays copied."""
    return jax.tree.map(copy, tree)


def copy(leaf: Leaf) -> Any:
    """The same for one leaf, or None."""
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

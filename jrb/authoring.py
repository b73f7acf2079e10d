"""Functions for writing parts and dataset formats of your own.

For parts: reads and writes that stay in place, ends of episodes, anchors. For formats: checks of
arguments, paths and optional libraries, limits for files that declare more data than they store,
and helpers for tables and error messages.

N capacity, E environments, T time, B batch.
"""

from collections.abc import Callable

import jax

from jrb._core.steps import context_of
from jrb._core.validate import read_items
from jrb._store.block_store import store_at
from jrb._store.files import Folder, Lock, absolute_path, check_links, make_folder
from jrb._util import casting, checks
from jrb._util.checks import MAX_EXPANSION, ExpansionLimit, declared_nbytes
from jrb._util.display import table_html, table_text
from jrb._util.public import PublicNames
from jrb._util.pytree import check_like, leaf_name, leaf_names, spec_of
from jrb._util.pytree import nbytes as tree_nbytes
from jrb._util.wording import bytes_text, escape_errors, printable, require
from jrb._xla.callbacks import call_on_host
from jrb._xla.compat import enable_x64
from jrb._xla.dependencies import empty_state, materialize, overwrite
from jrb._xla.gather import read as read_rows
from jrb.ring import Ring
from jrb.units.episodes import lengths as episode_lengths

last_of_equals: Callable[[Ring, jax.Array], jax.Array] = Ring.last_of_equals

__all__ = [
    "MAX_EXPANSION",
    "ExpansionLimit",
    "Folder",
    "Lock",
    "absolute_path",
    "bytes_text",
    "call_on_host",
    "casting",
    "check_like",
    "check_links",
    "checks",
    "context_of",
    "declared_nbytes",
    "empty_state",
    "enable_x64",
    "episode_lengths",
    "escape_errors",
    "last_of_equals",
    "leaf_name",
    "leaf_names",
    "make_folder",
    "materialize",
    "overwrite",
    "printable",
    "read_items",
    "read_rows",
    "require",
    "spec_of",
    "store_at",
    "table_html",
    "table_text",
    "tree_nbytes",
]
__dir__: PublicNames = lambda: __all__

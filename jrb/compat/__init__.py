"""Interfaces of other libraries to jrb's buffers, and batches as PyTorch tensors."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jrb._util.public import PublicNames, lazy
from jrb.authoring import casting, leaf_name, require

if TYPE_CHECKING:
    from jrb.compat import flashbax as flashbax

__all__ = ["flashbax", "to_torch"]
__dir__: PublicNames = lambda: __all__

if not TYPE_CHECKING:  # or every misspelt name would have a type
    __getattr__ = lazy(__name__, {"flashbax": "jrb.compat.flashbax"})


def to_torch(batch: Any, *, copy: bool = False) -> Any:
    """Returns a batch, or any pytree of arrays, with its arrays as PyTorch tensors.

    If JAX and PyTorch can share memory, as on a CPU or the same GPU, nothing is copied. Do not
    write to such tensors: the JAX arrays would change.

    Args:
        batch: a `Sample`, its `data`, or any pytree of JAX or NumPy arrays. PRNG keys become
            their words.
        copy: True to copy the arrays, so that the tensors may be written to.

    Raises:
        ModuleNotFoundError: PyTorch is not installed.
        TypeError: PyTorch lacks the dtype of a leaf, such as int4.

    Example:
        tensors = jrb.to_torch(methods.sample(state, 7))
        loss = (tensors.weights * errors(tensors.data) ** 2).mean()
    """
    torch = require("torch", "peers")

    def tensor(path: Any, leaf: Any) -> Any:
        leaf = casting.raw(leaf) if isinstance(leaf, jax.Array) else leaf
        # PyTorch shares the memory of arrays. It warns of read-only ones of NumPy: copy these.
        try:
            if isinstance(leaf, jax.Array):
                result = torch.from_dlpack(leaf)
            else:
                array = np.asarray(leaf)
                result = torch.from_numpy(array if array.flags.writeable else array.copy())
        except (BufferError, RuntimeError, TypeError) as error:
            raise TypeError(
                f"leaf {leaf_name(path)!r}: expected a dtype of PyTorch, got {leaf.dtype}. "
                "Cast it first, such as with jrb.transforms.Cast."
            ) from error
        return result.clone() if copy else result

    return jax.tree_util.tree_map_with_path(tensor, batch)

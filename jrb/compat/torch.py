"""Batches as tensors of PyTorch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb.authoring import leaf_name, require


def to_torch(batch: Any, *, copy: bool = False) -> Any:
    """Returns a batch, or any pytree of arrays, with tensors of PyTorch in the place of arrays.

    Where JAX and PyTorch can share memory, as on a CPU and on one GPU, nothing is copied. Then do
    not write into the tensors: the arrays of JAX would change.

    Args:
        batch: a `Sample`, its `data`, or any pytree of arrays of JAX or NumPy. PRNG keys become
            their words.
        copy: whether the tensors have memory of their own, into which may be written.

    Raises:
        ModuleNotFoundError: PyTorch is not installed.
        TypeError: a leaf has a dtype that PyTorch lacks, such as int4.

    Example:
        tensors = jrb.to_torch(methods.sample(state, 7))
        loss = (tensors.weights * errors(tensors.data) ** 2).mean()
    """
    torch = require("torch", "peers")

    def tensor(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
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

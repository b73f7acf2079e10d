"""Episodes as flat dicts, and whether they are equal to the bit."""

import jax
import numpy as np


def flat(episode):
    pairs = jax.tree_util.tree_leaves_with_path(episode)
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in pairs}


def same(found, wanted):
    found = flat(found)
    assert found.keys() == wanted.keys()
    for name, leaf in wanted.items():
        assert found[name].dtype == leaf.dtype, name
        assert found[name].shape == leaf.shape, name
        np.testing.assert_array_equal(found[name], leaf, err_msg=name)

"""The arguments that methods accept as arrays, and the values that they convert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb


class Lazy:
    """An object with only `__array__`, like Gymnasium's frames, h5py's data sets and tensors."""

    def __init__(self, array, error=None):
        self.array, self.error = array, error

    def __array__(self, dtype=None, copy=None):
        if self.error is not None:
            raise self.error
        return np.asarray(self.array, dtype)


class Tensor(Lazy):
    """A torch tensor, whose dtype NumPy does not know."""

    shape, dtype = (3,), "torch.float32"


ROW = np.arange(3, dtype=np.float32)
ARRAYS = {
    "other byte order": ROW.astype(ROW.dtype.newbyteorder()),
    "lazy": Lazy(ROW),
    "tensor": Tensor(ROW.astype(">f4")),
    "nothing masked": np.ma.array(ROW),
    "memmap": np.asarray(ROW).view(np.memmap),
}


def methods(buffer):
    """Returns functions that write a leaf to a buffer in different ways and read it back."""
    read = lambda state: buffer.take(state, jnp.array([0]))["x"][0]
    held = lambda: buffer.add(buffer.init({"x": ROW}), {"x": ROW + 1})
    sharded = jrb.Sharded(jrb.ReplayBuffer(4, num_envs=2, cast=buffer.cast), 2)
    return {
        "init": lambda leaf: read(buffer.add(buffer.init({"x": leaf}), {"x": ROW})),
        "add": lambda leaf: read(buffer.add(buffer.init({"x": ROW}), {"x": leaf})),
        "jitted": lambda leaf: read(jrb.jitted(buffer).add(buffer.init({"x": ROW}), {"x": leaf})),
        "set": lambda leaf: read(buffer.set(held(), ..., {"x": _of_all(leaf)})),
        "from_items": lambda leaf: jrb.items(*jrb.from_items({"x": leaf}, cast=buffer.cast))["x"],
        "shards": lambda leaf: sharded.add(
            sharded.init({"x": jnp.float32(0)}), {"x": _of_two(leaf)}
        ),
    }


def _of_all(leaf):
    """Repeats a leaf for four slots, in the same type."""
    if isinstance(leaf, list):
        return [leaf] * 4
    if isinstance(leaf, Lazy):
        return type(leaf)(np.stack([leaf.array] * 4), leaf.error)
    return leaf[None].repeat(4, 0)


def _of_two(leaf):
    return (
        leaf[:2] if isinstance(leaf, list | np.ndarray) else type(leaf)(leaf.array[:2], leaf.error)
    )


@pytest.mark.slow
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("kind", ARRAYS)
def test_whatever_is_an_array_is_taken(kind, cast):
    buffer = jrb.ReplayBuffer(4, cast=cast)
    for method in methods(buffer).values():
        found = method(ARRAYS[kind])
        if isinstance(found, jax.Array | np.ndarray):
            np.testing.assert_array_equal(found, ROW)
            assert found.dtype == jnp.float32


@pytest.mark.parametrize(
    ("leaf", "error", "message"),
    [
        ([0.0, 1.0, 2.0], TypeError, "expected an array, got list"),
        (np.ma.array(ROW, mask=[0, 1, 0]), ValueError, "expected values everywhere"),
        (Tensor(ROW, RuntimeError("it requires grad")), TypeError, "got Tensor: it requires grad"),
    ],
    ids=["list", "masked", "tensor"],
)
def test_what_is_none_is_refused_by_name(leaf, error, message):
    for name, method in methods(jrb.ReplayBuffer(4)).items():
        with pytest.raises(error, match=rf"leaf 'x': .*{message}"):
            method(leaf)
        assert name


def test_other_objects_and_nested_lists_are_refused_too():
    buffer = jrb.ReplayBuffer(4, cast=True)
    state = buffer.init({"x": ROW})
    for add in (buffer.add, jrb.jitted(buffer).add):
        with pytest.raises(TypeError, match="leaf 'x': expected an array, got object"):
            add(state, {"x": object()})
    with pytest.raises(TypeError, match="leaf 'a/b': expected an array, got list"):
        buffer.init({"a": {"b": [[1.0], [2.0]]}})
    containers = {"a": [jnp.zeros(2), (jnp.zeros(3), {"b": jnp.int32(0)})]}  # lists of arrays
    assert buffer.init(containers).storage


@pytest.mark.parametrize(
    ("stored", "given", "fits"),
    [
        (jnp.float32, np.float64(3e38), True),
        (jnp.float32, np.float64(1e40), False),
        (jnp.float32, np.float64(-1e300), False),
        (jnp.float32, np.float64(np.inf), True),
        (jnp.float32, np.float64(np.nan), True),
        (jnp.float16, np.float32(1e5), False),
        (jnp.float16, np.int64(70_000), False),
        (jnp.bfloat16, np.float64(3e38), True),
        (jnp.complex64, np.complex128(1e40j), False),
        (jnp.int32, np.int64(2**31 - 1), True),
        (jnp.int32, np.int64(2**31), False),
        (jnp.uint32, np.uint64(2**40), False),
    ],
)
def test_numbers_that_a_dtype_cannot_hold_are_refused(stored, given, fits):
    buffer = jrb.ReplayBuffer(4, cast=True)
    item = {"x": np.asarray([given, given])}
    narrows = stored is jnp.float16  # the compiled method narrows: it cannot check values
    for add in (buffer.add,) if narrows else (buffer.add, jrb.jitted(buffer).add):
        state = buffer.init({"x": jnp.zeros(2, stored)})
        if fits:
            found = buffer.take(add(state, item), jnp.array([0]))["x"][0]
            np.testing.assert_array_equal(found, item["x"].astype(stored))
        else:
            with pytest.raises(ValueError, match=r"leaf 'x': expected (numbers|integers) that"):
                add(state, item)


def test_the_advice_looks_at_the_description():
    for cast, message in [
        (False, "make the buffer with cast=True"),
        (True, r"with \.astype\(int32\)"),
    ]:
        buffer = jrb.ReplayBuffer(4, cast=cast)
        with pytest.raises(TypeError, match=f"expected dtype int32, got uint32.*{message}"):
            buffer.add(buffer.init({"x": jnp.int32(0)}), {"x": np.uint32(1)})
    with pytest.raises(TypeError, match=r"expected dtype int32, got uint32.*with \.astype"):
        buffer.add(buffer.init({"x": jnp.int32(0)}), {"x": np.uint64(1)})

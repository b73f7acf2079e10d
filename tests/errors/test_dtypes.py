"""Items of dtypes that JAX lacks are refused wherever they enter, or converted with `cast=True`."""

import jax
import numpy as np
import pytest

import jrb

WIDE = {"float128": np.longdouble, "complex256": np.clongdouble}
NO_NUMBERS = {
    "void": np.dtype("V3"),
    "structured": np.dtype([("a", "f4"), ("b", "i2")]),
    "text": np.dtype("U4"),
    "bytes": np.dtype("S4"),
    "time": np.dtype("M8[s]"),
    "span": np.dtype("m8[s]"),
    "object": np.dtype(object),
}


def entries(dtype, cast):
    """Yields the name of each method by which an item enters, and a call of it."""
    item = {"next": {"x": np.zeros(2, dtype)}, "y": np.zeros(3, np.float32)}
    rows = lambda count: jax.tree.map(lambda leaf: np.stack([leaf] * count), item)
    good = {"next": {"x": np.zeros(2, np.float32)}, "y": np.zeros(3, np.float32)}
    buffer = jrb.ReplayBuffer(8, batch_size=2, cast=cast)
    methods, state = jrb.jitted(buffer), buffer.add(buffer.init(good), good)
    yield "init", lambda: buffer.init(item)
    yield "add", lambda: buffer.add(state, item)
    yield "extend", lambda: buffer.extend(state, rows(3))
    yield "jitted add", lambda: methods.add(methods.init(good), item)
    yield "jitted extend", lambda: methods.extend(methods.init(good), rows(3))
    yield "from_items", lambda: jrb.from_items(rows(4), cast=cast)
    values = {"next": {"x": np.zeros((1, 2), dtype)}}
    yield "set", lambda: buffer.set(state, np.array([0]), values)


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("name", NO_NUMBERS)
def test_what_is_no_number_is_refused_by_leaf_dtype_and_cure(name, cast):
    for method, call in entries(NO_NUMBERS[name], cast):
        with pytest.raises(TypeError) as caught:
            call()
        text = str(caught.value)
        assert "next/x" in text, (method, text)
        assert str(NO_NUMBERS[name]) in text, (method, text)


@pytest.mark.parametrize("name", WIDE)
def test_numbers_wider_than_those_of_jax_are_refused_or_cast(name):
    for method, call in entries(WIDE[name], False):
        with pytest.raises(TypeError) as caught:
            call()
        assert "next/x" in str(caught.value), (method, str(caught.value))
        assert name in str(caught.value), (method, str(caught.value))
    if name == "float128":
        for _, call in entries(WIDE[name], True):
            call()

"""Python objects in checkpoints: loaded objects equal the saved ones, in their own classes."""

import collections
import dataclasses
import math
import os
import random
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jrb
from jrb import authoring, checkpoint
from tests.seams import bytes_written
from tests.small_blocks import damage, file_of

pytestmark = pytest.mark.slow

KEY = jax.random.key(2)


@dataclasses.dataclass
class Note:
    text: str
    about: object = None


def same(one, other):
    """Asserts that two objects are equal in type, value, dtype and shape."""
    assert type(one) is type(other) or isinstance(other, jax.Array), (one, other)
    if isinstance(other, float):
        assert struct.pack("<d", one) == struct.pack("<d", other)
    elif isinstance(other, jax.Array):
        assert isinstance(one, jax.Array)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    elif isinstance(other, np.ndarray | np.generic):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()
    elif isinstance(other, dict):
        assert list(one) == list(other)
        for key, value in other.items():
            same(one[key], value)
    elif isinstance(other, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            same(*pair)
    else:
        assert one == other


def made(things, capacity=200, envs=None, **parts):
    buffer = jrb.ReplayBuffer(
        capacity, num_envs=envs, batch_size=4, storage=jrb.ListStorage(), **parts
    )
    state = buffer.init(None)
    return buffer, buffer.extend(state, things) if things else state


def there_and_back(path, buffer, state, **how):
    jrb.save(path, buffer, state)
    again, back = jrb.load(path, **how)
    same(jrb.items(again, back), jrb.items(buffer, state))
    if state.storage is not None and bool(buffer.can_sample(state)):
        same(again.sample(back, KEY).data, buffer.sample(state, KEY).data)
    assert checkpoint.verify(path) == []
    return again, back


THINGS = [
    *(None, True, False, 0, -1, 2**61, 2**62, -(2**62), 2**64 - 1, -(2**63)),
    *(0.0, -0.0, 1.5, 5e-324, 1e308, math.inf, -math.inf, math.nan),
    struct.unpack("<d", bytes.fromhex("010000000000f8ff"))[0],
    *("", "foo", "é", '\0\n"\\', "😀", "\ud83d", "\ud83d\ude00", b"", b"\0\xff"),
    *([], (), {}, [[]], ((),), [None, [1, (2, {"a": [3]})]]),
    {"": 1, "a/b": 2, "é": 3, "\ud83d": 4, "tuple": [1], "class": "os:system", "z": 0, "b": 1},
    *(np.arange(6.0).reshape(2, 3), np.zeros((0, 3)), np.float32(3), np.array(5), np.bool_(True)),
    *(
        np.array(["a", "bc"]),
        np.str_("x"),
        np.array([b"x"]),
        np.datetime64("2020-01-01"),
        np.array(""),
    ),
    *(
        np.arange(3, dtype=">i4"),
        np.arange(3, dtype=ml_dtypes.bfloat16),
        np.array(1 + 2j),
        np.void(b"abc"),
    ),
    np.asarray(np.arange(6).reshape(2, 3), order="F"),
    *(jnp.arange(3), jnp.ones((2, 0)), jnp.arange(3, dtype=jnp.bfloat16), jnp.int4(3)),
    *(jax.random.key(3), jax.random.split(jax.random.key(0, impl="rbg"), 2)),
]


def test_objects_of_every_kind(tmp_path):
    buffer, state = made(THINGS)
    there_and_back(tmp_path, buffer, state)
    small, state = made(THINGS, capacity=7, sampler=jrb.Prioritized())
    there_and_back(tmp_path, small, state)
    with authoring.enable_x64():
        wide, its = made([jnp.float64(0.1)])
        there_and_back(tmp_path, wide, its)
    with pytest.raises(TypeError, match="jax_enable_x64"):
        jrb.load(tmp_path)


def thing(rng, depth=3):
    """Returns a random object."""
    kinds = [
        lambda: rng.choice([None, True, math.nan, "a" * rng.randrange(300), rng.random()]),
        lambda: rng.getrandbits(rng.randrange(1, 64)),
        lambda: np.frombuffer(rng.randbytes(4 * rng.randrange(2000)), np.float32),
    ]
    if depth:
        inner = lambda: [thing(rng, depth - 1) for _ in range(rng.randrange(4))]
        kinds += [inner, lambda: tuple(inner())]
        kinds += [lambda: {chr(97 + n): one for n, one in enumerate(inner())}]
    return rng.choice(kinds)()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("envs", [None, 2])
def test_whatever_is_written_and_removed_every_save_holds_it(envs, seed, tmp_path):
    rng = random.Random(seed)
    sampler = [jrb.Prioritized(), jrb.WithoutReplacement(), jrb.Uniform()][seed]
    buffer, state = made([], capacity=150, envs=envs, sampler=sampler)
    states = {}
    for number in range(1, 9):
        count = rng.choice([0, 1, 3, 70])
        row = lambda: thing(rng) if envs is None else [thing(rng) for _ in range(envs)]
        state = buffer.extend(state, [row() for _ in range(count)]) if count else state
        if number == 5:
            state = buffer.empty(state)
        save = checkpoint.save_async(tmp_path, buffer, state, keep=9)
        states[number] = jrb.items(buffer, state)
        save.wait()
        again, back = jrb.load(tmp_path)
        same(jrb.items(again, back), states[number])
        if rng.random() < 0.4:
            buffer, state = again, back
    for number, items in states.items():
        same(jrb.items(*jrb.load(tmp_path, generation=number)), items)
    assert checkpoint.verify(tmp_path) == []


def test_an_empty_one_takes_no_room(tmp_path):
    buffer, state = made([], capacity=100_000)
    assert bytes_written(lambda: jrb.save(tmp_path, buffer, state)) < 1_000_000
    buffer, back = jrb.load(tmp_path)
    assert jrb.items(buffer, back) == []
    there_and_back(tmp_path, buffer, buffer.add(back, "x"))


@dataclasses.dataclass
class Derived:
    a: int
    b: int = dataclasses.field(init=False, default=3)


class Text(str):
    __slots__ = ()


def test_what_no_file_can_hold_is_named_and_nothing_is_written(tmp_path):
    local = dataclasses.make_dataclass("local", ["x"])
    endless = []
    endless.append(endless)
    for one, message in [
        ({"a": [1, {2}]}, r"slot 1\['a'\]\[1\]: expected .*, got builtins\.set"),
        ((object(),), r"slot 1\[0\]: .* got builtins\.object"),
        ({1: 2}, r"got builtins\.dict with the key 1"),
        (local(3), "got .*local"),
        ([lambda: 3], r"slot 1\[0\]: .*function"),
        (Note("a"), "Note"),
        (10**30, "int of more than 64 bits"),
        (Derived(1), "Derived"),
        (Text("x"), "Text"),
        (collections.OrderedDict(a=1), "OrderedDict"),
        (np.array([None]), "expected an array of numbers, got a ndarray of dtype object"),
        (np.zeros(2, [("a", int)]), "expected an array of numbers"),
        (np.ma.array([1]), "MaskedArray"),
        (endless, "holds itself"),
    ]:
        buffer, state = made(["fine", one])
        with pytest.raises((TypeError, ValueError), match=message):
            jrb.save(tmp_path / "x", buffer, state)
        assert not (tmp_path / "x").exists()


def test_a_function_has_to_be_brought_and_may_be_another(tmp_path):
    buffer = jrb.ReplayBuffer(4, batch_size=2, storage=jrb.ListStorage(collate=len))
    state = buffer.add(buffer.init(None), "a")
    jrb.save(tmp_path, buffer, state)
    with pytest.raises(ValueError, match=r"buffer\.storage\.collate.*holds no code"):
        jrb.load(tmp_path)
    other = jrb.ReplayBuffer(4, batch_size=2, storage=jrb.ListStorage(collate=tuple))
    again, back = jrb.load(tmp_path, other)
    assert again.sample(back, KEY).data == ("a", "a")


def test_another_size_and_another_device(tmp_path):
    buffer, state = made(list(range(20)), capacity=16, sampler=jrb.Prioritized())
    jrb.save(tmp_path, buffer, state)
    small, back = jrb.load(tmp_path, capacity=5)
    assert jrb.items(small, back) == [15, 16, 17, 18, 19]
    buffer, state = made([jnp.arange(3), {"a": jax.random.key(0)}])
    jrb.save(tmp_path, buffer, state)
    device = jax.devices()[1]
    again, back = jrb.load(tmp_path, device=device)
    first, second = jrb.items(again, back)
    assert first.devices() == second["a"].devices() == back.writer.cursor.devices() == {device}
    assert jrb.load(tmp_path, example={"any": "thing"})[0] == buffer


def test_without_its_objects(tmp_path):
    things = [object(), lambda: 3, {1, 2}]
    buffer, state = made(things, capacity=2, sampler=jrb.Prioritized())
    jrb.save(tmp_path, buffer, state, items=False)
    again, back = jrb.load(tmp_path, items=jrb.items(buffer, state))
    assert again.sample(back, KEY).data == buffer.sample(state, KEY).data
    with pytest.raises(ValueError, match="expected 2 objects, got 3"):
        jrb.load(tmp_path, items=things)
    with pytest.raises(TypeError, match="expected a list, got dict"):
        jrb.load(tmp_path, items={"a": 1})


def test_hooks_and_hdf5_are_refused(tmp_path):
    buffer, state = made(["a"])
    with pytest.raises(TypeError, match="encode: expected items of arrays, got a ListStorage"):
        jrb.save(tmp_path / "x", buffer, state, encode=lambda items: items)
    with pytest.raises(ValueError, match="layout='h5', got several, objects"):
        jrb.save(tmp_path / "x", buffer, state, layout="h5")
    assert not os.listdir(tmp_path)


def test_a_state_whose_objects_are_gone_is_refused(tmp_path):
    buffer, state = made(["a", "b"], capacity=2)
    later = buffer.add(state, "c")
    with pytest.raises(jrb.StaleError):
        jrb.save(tmp_path / "x", buffer, state)
    there_and_back(tmp_path / "x", buffer, later)
    with pytest.raises(ValueError, match="order is"):
        jrb.save(tmp_path / "x", buffer, {"a": 1})


def test_in_a_mix_with_another(tmp_path):
    one, its = made(["a", {"b": np.arange(3)}])
    other, state = jrb.from_items({"x": jnp.arange(5)}, batch_size=2)
    mix = jrb.Mix((one, other), (0.5, 0.5), 4)
    jrb.save(tmp_path, mix, (its, state))
    again, back = jrb.load(tmp_path)
    assert again == mix
    same(jrb.items(one, back[0]), jrb.items(one, its))
    assert checkpoint.verify(tmp_path) == []


def test_damage_is_found(tmp_path):
    buffer, state = made([{"x": np.arange(3000), "n": n} for n in range(100)])
    jrb.save(tmp_path, buffer, state)
    file = file_of(tmp_path, "objects")
    damage(file, 700_000, 4)
    with pytest.raises(checkpoint.DamagedError, match="objects', block 2"):
        jrb.load(tmp_path)
    assert len(checkpoint.verify(tmp_path)) == 1
    buffer, state = made([{"n": n} for n in range(100)])
    jrb.save(tmp_path, buffer, state)
    damage(tmp_path / "generation-000000000002", -9, 4)
    with pytest.raises(checkpoint.DamagedError, match=r"array '.*': expected the checksum"):
        jrb.load(tmp_path)
    assert len(checkpoint.verify(tmp_path)) == 1

"""Descriptions: what they are hashed by, and what is kept of that."""

import copy
import os
import pickle
import subprocess
import sys

import jax.numpy as jnp
import pytest

import jrb

BUFFER = jrb.ReplayBuffer(8, sampler=jrb.Prioritized(alpha=0.7), unit=jrb.NStep(2, 0.9))


def test_equal_descriptions_have_one_hash():
    other = jrb.ReplayBuffer(8, sampler=jrb.Prioritized(alpha=0.7), unit=jrb.NStep(2, 0.9))
    assert hash(BUFFER) == hash(BUFFER) == hash(other)
    assert other == BUFFER and repr(BUFFER) == repr(other)
    assert hash(BUFFER) != hash(jrb.ReplayBuffer(9))


def test_a_hash_stays_in_the_process_in_which_it_was_made(tmp_path):
    """Names have other hashes in each: a description that keeps its own is found nowhere."""
    hash(BUFFER)
    for one in (copy.copy(BUFFER), copy.deepcopy(BUFFER), pickle.loads(pickle.dumps(BUFFER))):
        assert one == BUFFER and hash(one) == hash(BUFFER)
    (tmp_path / "buffer").write_bytes(pickle.dumps(BUFFER))
    script = (
        "import pickle, jrb\n"
        f"found = pickle.loads(open({str(tmp_path / 'buffer')!r}, 'rb').read())\n"
        "assert found in {jrb.ReplayBuffer(8, sampler=jrb.Prioritized(alpha=0.7),"
        " unit=jrb.NStep(2, 0.9))}\n"
    )
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def test_a_state_with_another_field_is_a_state_like_those_made_anew():
    state = jrb.ReplayBuffer(8).init({"x": jnp.zeros(3)})
    other = state.replace(edits=state.edits + 1)
    assert type(other) is type(state) and other.storage is state.storage
    assert int(other.edits) == int(state.edits) + 1
    with pytest.raises(TypeError, match=r"BufferState: expected fields .*'edits'.*, got \['odd'\]"):
        state.replace(odd=1)

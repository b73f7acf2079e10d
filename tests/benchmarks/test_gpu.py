"""Counts of kernels in programs compiled for a GPU, without a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from benchmarks import gpu, peers
from benchmarks.workloads import kernels
from benchmarks.workloads.case import Wanted
from tests.benchmarks.tiny import SETUPS

pytestmark = pytest.mark.slow

TEXT = """HloModule jit_step, is_scheduled=true

%body (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
  %arg = (s32[], f32[8]) parameter(0)
  %first = s32[] get-tuple-element(%arg), index=0
  %row = f32[8]{0} get-tuple-element(%arg), index=1
  %add = s32[] fusion(%first), kind=kLoop, calls=%fused
  %scatter = f32[8]{0} fusion(%row, %add), kind=kInput, calls=%fused.1
  ROOT %both = (s32[], f32[8]{0}) tuple(%add, %scatter)
}

%taken (arg.1: f32[8]) -> f32[8] {
  %arg.1 = f32[8]{0} parameter(0)
  ROOT %copy = f32[8]{0} copy(%arg.1)
}

ENTRY %main (x: f32[8], n: s32[]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %pair = (s32[], /*index=1*/f32[8]{0}) tuple(%zero, %x)
  %known = (s32[], f32[8]{0}) while(%pair), body=%body, config={"known_trip_count":{"n":"3"}}
  %unknown = (s32[], f32[8]{0}) while(%known), body=%body
  %out = f32[8]{0} get-tuple-element(%unknown), index=1
  %either = f32[8]{0} conditional(%zero, %out, %out), branch_computations={%taken, %taken}
  ROOT %call = f32[8]{0} call(%either), to_apply=%taken
}
"""


def test_kernels_are_counted_for_each_turn_and_what_is_waited_for():
    kernels, waits = gpu.launches(TEXT)
    assert kernels == 3 * 2 + 2 + 2 + 1
    assert waits == 2


def test_a_program_of_this_machine_is_counted_too():
    run = jax.jit(lambda x: jnp.sin(x).sum()).lower(jnp.zeros(100)).compile()
    assert gpu.launches(run.as_text())[0] >= 1


def test_libraries_are_told_of_a_gpu_only_meanwhile():
    before = jax.default_backend()
    with gpu.assumed():
        assert jax.default_backend() == "gpu"
        assert jax.devices("gpu")
    assert jax.default_backend() == before


def test_without_a_gpu_and_its_compiler_it_says_what_to_install(monkeypatch):
    def missing(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    with pytest.raises(RuntimeError, match=r"pip install 'jax\[cuda12\]'"):
        gpu.device()


@pytest.mark.parametrize("name", ["uniform", "prioritized", "n-step"])
def test_every_method_is_looked_through(name, monkeypatch):
    def here(function, *args, donate):
        return jax.jit(function, donate_argnums=donate).lower(*args).compile()

    monkeypatch.setattr(gpu, "compiled", here)
    ours = [peer for peer in peers.ALL if peer.name == "jrb"]
    monkeypatch.setattr(kernels, "SETUPS", {name: dataclasses.replace(SETUPS[name], n=96)})
    cases = list(kernels.cases(Wanted(ours, quick=True)))
    assert len(cases) == (3 if name == "uniform" else 4) - (name == "n-step")
    for case in cases:
        with case.within():
            (program,) = [make() for make in case.programs.values()]
        assert program.facts["value"] > 0
        assert program.facts["temp_bytes"] >= 0


def test_a_batch_is_not_returned_twice():
    found = kernels._distinct({"one": (x := jnp.zeros(3)), "again": x, "other": jnp.zeros(3)})
    assert len(found) == 2

"""A training step: add 64, sample 256, update 256 priorities, compared with every peer."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

import jrb

from ..peers import Buffer, Drawn
from ..setup import Setup
from ..timing import Program
from .case import Case, Wanted, beside
from .programs import cycle, scanned

STEPS = 300


def cases(wanted: Wanted) -> Iterator[Case]:
    """Yields steps with several kinds of items, and cases of a sample or a sum-tree alone."""
    sizes = wanted.pick([("vector", 10**5)], [("vector", 10**5), ("vector", 10**6)])
    sizes += wanted.pick([("frames", 10**3)], [("nested", 10**5), ("frames", 10**4)])
    for kind, n in sizes:
        steps = STEPS // (10 if kind == "frames" else 1)
        for sampler in ("uniform", "prioritized"):
            setup = Setup(kind, n, sampler=sampler)
            yield beside(wanted, f"{sampler} step", setup, lambda p, s, t=steps: cycle(p, s, t))
    for n in wanted.pick([10**5], [10**5, 10**6]):
        setup = Setup("vector", n)
        draw = lambda peer, setup: cycle(peer, setup, 1000, ("sample",))
        yield beside(wanted, "uniform sample alone", setup, draw)
        yield trees(wanted, n)


def trees(wanted: Wanted, n: int) -> Case:
    """Returns a case of sum-trees alone: sample 256 leaves and update them."""
    setup = Setup("number", n, envs=1, sampler="prioritized")
    makers = {"jrb": _ours, "flashbax": _flashbax}
    known = {peer.name for peer in wanted.peers}
    programs = {
        name: lambda make=make: _tree_program(make(n), setup)
        for name, make in makers.items()
        if name in known
    }
    return Case("sum-tree alone", {"items": "masses", "N": n, "E": "", "B": setup.batch}, programs)


def _tree_program(buffer: Buffer, setup: Setup) -> Program:
    return scanned(buffer, setup, STEPS, ("sample", "update"))


def _tree(state: object, sample: object, update: object) -> Buffer:
    """Returns a buffer of indices; a batch holds its indices as floats, for `priorities`."""

    def draw(state: object, key: jax.Array) -> tuple[None, Drawn]:
        at = sample(state, key)
        return None, Drawn({"value": at.astype(jnp.float32)}, at)

    return Buffer(state, lambda state, rows: state, draw, update)


def _ours(n: int) -> Buffer:
    tree = jrb.sum_tree.update(jrb.sum_tree.init(n), jnp.arange(n), jnp.ones(n))
    return _tree(tree, lambda tree, key: jrb.sum_tree.sample(tree, key, 256), jrb.sum_tree.update)


def _flashbax(n: int) -> Buffer:
    from flashbax.buffers import sum_tree

    tree = sum_tree.set_batch_bincount(sum_tree.init(n), jnp.arange(n), jnp.ones(n))
    on_cpu = jax.default_backend() == "cpu"  # as flashbax's buffers choose
    update = sum_tree.set_batch_scan if on_cpu else sum_tree.set_batch_bincount
    return _tree(tree, lambda tree, key: sum_tree.stratified_sample(tree, 256, key), update)

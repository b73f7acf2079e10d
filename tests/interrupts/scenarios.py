"""Scenarios for `Ctrl-C` at random moments of saving, prefetching, recording and loops.

Run as a script with a folder, the number of interrupts, a seed, and names of scenarios; prints the
results as JSON. The handler of a system timer sends SIGINT, as `Ctrl-C` does: `KeyboardInterrupt`
can come between any two Python instructions, in jrb or in other libraries. A scenario recovers in
the exception handler, as users do: the interrupted frames and their objects are still alive there.
"""

import dataclasses
import faulthandler
import functools
import itertools
import json
import os
import random
import shutil
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

import jrb
from jrb import checkpoint, datasets
from tests import seams

PATIENCE = 60  # seconds before a wait counts as a hang


class Attack:
    """Calls functions and interrupts each call at most once, at a random moment.

    Attributes:
        count: the number of interrupts so far.
        most: the number of interrupts to make.
        errors: descriptions of failed checks.
    """

    def __init__(self, seed, most):
        self.rng, self.most, self.count, self.errors = random.Random(seed), most, 0, []
        self._is_armed, self._longest = False, {}
        signal.signal(signal.SIGALRM, self._strike)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _strike(self, *_):
        if self._is_armed:
            self._is_armed = False
            signal.raise_signal(signal.SIGINT)

    @property
    def is_on(self):
        return self.count < self.most and not self.errors

    def __call__(self, name, work, after=None):
        """Calls `work`, and `after` if `work` was interrupted, whether or not it had finished."""
        begun, longest = time.perf_counter(), self._longest.get(name)
        try:
            if longest is not None:  # the first call only measures the duration
                self._is_armed = True
                signal.setitimer(signal.ITIMER_REAL, self.rng.uniform(1e-6, longest))
            work()
            self._is_armed = False
            taken = 1.2 * (time.perf_counter() - begun)
            self._longest[name] = taken if longest is None else 0.8 * longest + 0.2 * taken
        except BaseException:  # JAX and NumPy turn some interrupts into other errors
            if self._is_armed:
                raise
            self.count += 1
            self._longest[name] = 1.02 * (longest or 0.0)  # else slow machines never finish
            if after is not None:
                after()

    def check(self, condition, *about):
        if not condition:
            self.errors.append(list(map(str, about)))


def buffer_of(**parts):
    return jrb.ReplayBuffer(8, batch_size=2, **parts)


def stored(path):
    """Returns the newest generation number, read from file names; does not wait for saves."""
    names = os.listdir(path) if os.path.isdir(path) else []
    return max((int(name[11:]) for name in names if name[11:].isdecimal()), default=0)


def content(path):
    """Returns the `k` of the newest save and the sorted values in its ring."""
    _, state, extra = jrb.load(path, extra={"k": 0})
    return extra["k"], sorted(np.asarray(state.storage["x"]).tolist())


class Saving:
    """A buffer that gains one row between saves; the latest state can be saved again."""

    def __init__(self, attack, path):
        self.attack, self.path, self.k = attack, path, 7
        self.buffer = buffer_of(sampler=jrb.Prioritized())
        rows = {"x": np.arange(8, dtype=np.float32)}
        self.state = self.buffer.extend(self.buffer.init({"x": jnp.zeros(())}), rows)
        self.save()

    def save(self):
        return jrb.save(self.path, self.buffer, self.state, extra={"k": self.k})

    def save_async(self):
        return checkpoint.save_async(self.path, self.buffer, self.state, extra={"k": self.k})

    def advance(self):
        self.k += 1
        row = {"x": np.float32(self.k)}
        self.state, self.generation = self.buffer.add(self.state, row), stored(self.path)

    def check(self, *allowed):
        k, rows = content(self.path)
        whole = rows == list(range(k - 7, k + 1))
        self.attack.check(k in allowed and whole, "found", k, rows, "expected", allowed)


def slowly(*_):
    """Delays every file operation, so that interrupts come during waits for the disk."""
    time.sleep(3e-4)


def save(attack, path):
    seams.set_hook(slowly)
    run = Saving(attack, path)

    def after():
        run.check(run.k - 1, run.k)
        run.save()

    while attack.is_on:
        run.advance()
        attack("save", run.save, after)
        run.check(run.k)
    attack.check(checkpoint.verify(path) == [], "damaged")


def save_async(attack, path):
    seams.set_hook(slowly)
    run, begun = Saving(attack, path), []

    def work():
        begun.append(run.save_async())
        begun[0].wait()

    def after():
        if begun:
            if begun[0].done():
                attack.check(stored(path) > run.generation, "said to be done, and is not there")
            begun[0].wait()
            attack.check(stored(path) > run.generation, "waited for, and is not there")
            run.check(run.k)
        if attack.rng.random() < 0.5:
            run.save_async().wait()
        else:
            run.save()

    while attack.is_on:
        begun.clear()
        run.advance()
        attack("save_async", work, after)
        run.check(run.k)
    attack.check(checkpoint.verify(path) == [], "damaged")


def prefetch(attack, path):
    """Prefetches an iterable: every number arrives once and in order despite interrupts."""
    while attack.is_on:
        depth, taken, found = attack.rng.randrange(1, 4), [], []
        make = lambda: found.append(jrb.prefetch(itertools.count(), depth=depth))  # noqa: B023
        attack("make", make)
        if not found:
            continue
        (batches,) = found
        for _ in range(20):
            # only C calls: every batch that `next` returns is in the list
            take = functools.partial(taken.extend, map(next, itertools.repeat(batches, 5)))
            attack("next", take)
        taken.append(next(batches))
        attack.check(taken == list(range(len(taken))), "batches", taken, depth)
        if attack.rng.random() < 0.3:
            del batches
            found.clear()
        else:
            attack("close", batches.close, batches.close)
            attack.check(list(batches) == [], "not closed")


def prefetch_draws(attack, path):
    """Prefetches batches of a buffer in a loop that is restarted after each interrupt."""
    buffer = buffer_of(sampler=jrb.Prioritized())
    methods = jrb.jitted(buffer)
    held = [methods.extend(buffer.init({"x": 0}), {"x": jnp.arange(8)})]

    def loop():
        with jrb.prefetch(buffer, lambda: held[0], jax.random.key(0)) as batches:
            for number, batch in zip(range(6), batches, strict=False):
                attack.check(np.asarray(batch.mask).all(), "nothing drawn", number)

    while attack.is_on:
        attack("loop", loop)


def loop(attack, path):
    """Calls methods that donate a state: that before or after a call is always to be had."""
    methods, states, calls = _donating(path)
    size = lambda kind: int(np.sum(methods[kind].size(states[kind])))
    numbers = itertools.count()
    while attack.is_on:
        kind, name, args = attack.rng.choice(calls)
        before, with_sample = size(kind), name == "draw"
        if with_sample and not np.all(methods[kind].can_sample(states[kind])):
            continue

        def direct(kind=kind, name=name, args=args, with_sample=with_sample):
            method, state = getattr(methods[kind], name), states[kind]
            if with_sample:
                state, _ = method(state, args[0])
            elif not args:
                state = method(state)
            elif len(args) == 1:
                state = method(state, args[0])
            else:
                state = method(state, args[0], args[1])
            states[kind] = state

        def unpacked(kind=kind, name=name, args=args, with_sample=with_sample):
            result = getattr(methods[kind], name)(states[kind], *args)
            states[kind] = result[0] if with_sample else result

        def after(kind=kind):
            try:
                states[kind] = methods[kind].recover()
            except ValueError as error:
                if not usable(states[kind]):
                    attack.check(False, kind, name, error)  # noqa: B023

        attack(f"{kind} {name}", direct if next(numbers) % 2 else unpacked, after)
        attack.check(usable(states[kind]), kind, name, "donated")
        expected = {"add": before + 1, "extend": before + 3, "empty": 0}.get(name, before)
        attack.check(size(kind) in (before, min(expected, 32)), kind, name, before, size(kind))
        if kind == "memmap":  # only the newest state can be read
            jrb.items(methods[kind].buffer, states[kind])


def _donating(path):
    """Returns methods and states by kind of buffer, and calls: a kind, a method, arguments."""
    buffer = jrb.ReplayBuffer(32, batch_size=4, sampler=jrb.Prioritized())
    memmap = dataclasses.replace(buffer, storage=jrb.MemmapStorage(os.path.join(path, "rows")))
    objects = dataclasses.replace(buffer, storage=jrb.ListStorage())
    mix = jrb.Mix((buffer, dataclasses.replace(buffer, capacity=16)), (0.5, 0.5), batch_size=4)
    buffers = {"device": buffer, "memmap": memmap, "objects": objects}
    buffers |= {"sharded": jrb.Sharded(buffer, 1), "mix": mix}
    item, slots = {"x": np.float32(3)}, np.array([0, 1])
    items, priorities = {"x": np.arange(3, dtype=np.float32)}, np.array([2.0, 5.0], np.float32)
    changes = [("add", item), ("extend", items), ("draw", 3), ("truncate",), ("empty",)]
    changes += [("update_priority", slots, priorities), ("drop", slots), ("set_alpha", 0.5)]
    edits = [("set", slots, {"x": priorities}), ("map", halved)]
    methods = {kind: jrb.jitted(each) for kind, each in buffers.items()}
    states, calls = {}, []
    for kind, each in methods.items():
        if kind == "mix":
            states[kind] = tuple(jrb.jitted(it).extend(it.init(item), items) for it in mix.buffers)
            calls += [(kind, "draw", [5])] * 3
            continue
        example = None if kind == "objects" else item
        rows = [item] * 3 if kind == "objects" else items
        states[kind] = each.extend(each.init(example), rows)
        own = [it for it in changes + edits * (kind != "objects") if hasattr(each, it[0])]
        calls += [(kind, it[0], [rows] if it[0] == "extend" else list(it[1:])) for it in own]
        calls += [(kind, "add", [item])] * 2
    return methods, states, calls


def halved(items):
    return {"x": items["x"] / 2}


def usable(state):
    """Returns True if no array of a state was donated."""
    arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    return not any(array.is_deleted() for array in arrays)


def item(number):
    """Returns step `number` of episodes of ten steps."""
    after = {"reward": np.float32(number), "terminated": np.bool_(number % 10 == 9)}
    return {"observation": np.float32(number), "next": after | {"truncated": np.bool_(False)}}


def record(attack, path):
    """Records items, some inside `jit`: each accepted item is stored once and in order."""
    first = 0
    while attack.is_on:
        recorder = jrb.datasets.Recorder(path, item(0), chunk=5)
        taken = lambda: recorder.held + recorder.sealed  # noqa: B023
        jitted = jax.jit(recorder.record)
        jitted(item(first))  # traced here: an interrupt of tracing corrupts a cache of JAX
        works = {
            "add": lambda: recorder.add(item(first + taken())),  # noqa: B023
            "record": lambda: jax.block_until_ready(jitted(item(first + taken()))),  # noqa: B023
            "flush": recorder.flush,
            "truncate": lambda: recorder.truncate(False),  # noqa: B023
        }
        for _ in range(60):
            name, before = attack.rng.choice([*works, "add"]), taken()
            attack(name, works[name])
            jax.effects_barrier()
            attack.check(before <= taken() <= before + 1, name, before, taken())
        attack("close", recorder.close, recorder.close)
        closing = threading.Thread(target=recorder.close, daemon=True)
        closing.start()  # in another thread: a lock that was not released would block it
        closing.join(PATIENCE)
        attack.check(not closing.is_alive(), "a lock stayed taken")
        rewards = [float(r) for one in datasets.open(path) for r in one["next"]["reward"]]
        wanted = list(range(first, first + taken()))
        attack.check(rewards == wanted, "recorded", rewards, wanted, recorder, os.listdir(path))
        first += taken() + -taken() % 10
        shutil.rmtree(path)


def copy(attack, path):
    """Copies a dataset into a store or through a function: complete at its path, or resumable."""
    with datasets.Recorder(os.path.join(path, "source"), item(0), chunk=50) as recorder:
        for number in range(200):
            recorder.add(item(number))
    source = datasets.open(os.path.join(path, "source"))
    target = os.path.join(path, "target")

    def into_store():
        buffer, state = source.buffer(storage=jrb.MemmapStorage(target))
        attack.check(int(buffer.size(state)) == 200, "rows")
        rewards = np.asarray(jrb.items(buffer, state)["next"]["reward"])
        attack.check(rewards.tolist() == list(range(200)), "items")

    def mapped():
        made = source.preprocess(doubled, target, by="episode")
        attack.check(made.transitions == 200, "steps")

    def mapped_again():
        if not os.path.exists(target):
            mapped()
        attack.check(datasets.open(target).transitions == 200, "not whole")

    while attack.is_on:
        work, after = attack.rng.choice([(into_store, into_store), (mapped, mapped_again)])
        attack(work.__name__, work, after)
        attack.check(not os.path.exists(target) or datasets.open(target).transitions == 200, "?")
        shutil.rmtree(target, ignore_errors=True)
    attack.check(sorted(os.listdir(path)) == ["source"], "left over", os.listdir(path))


def doubled(episode):
    return {**episode, "observation": episode["observation"] * 2}


def threads():
    """Returns the names, or else the identifiers, of all other running Python threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    here = threading.get_ident()
    return [names.get(number, number) for number in sys._current_frames() if number != here]


def main():
    """Runs the scenarios one after the other and prints their results."""
    path, most, seed, *names = sys.argv[1:]
    faulthandler.dump_traceback_later(PATIENCE + int(most), exit=True)  # shows where it hangs
    found = {}
    for name in names:
        attack = Attack(int(seed), int(most))
        globals()[name](attack, os.path.join(path, name))
        seams.set_hook(None)
        until = time.monotonic() + 10
        while threads() and time.monotonic() < until:
            time.sleep(0.01)
        found[name] = {"count": attack.count, "errors": attack.errors, "threads": threads()}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()

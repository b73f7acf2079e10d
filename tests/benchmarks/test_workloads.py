"""Every workload runs once, with tiny sizes and all installed peers."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks import alone, machine, peers, running, timing, workloads
from benchmarks.workloads import case, checkpoint, compiling, host, programs, rfc
from tests.benchmarks.tiny import SETUPS, program

pytestmark = pytest.mark.slow

COPY_SPEED = machine.copy_speed


@pytest.fixture(autouse=True)
def _no_time_for_copies(monkeypatch):
    monkeypatch.setattr(machine, "copy_speed", lambda *_: 1.0)


OURS = [peer for peer in peers.ALL if peer.name in ("jrb", "limit", "NumPy")]


def run(cases, wanted):
    """Runs some cases, of which none may fail, and returns their rows."""
    found = running.group("some", "About.", cases, wanted, lambda name: None)
    assert found["machine"]["versions"]["jax"] == jax.__version__
    assert [row["failed"] for row in found["rows"] if "failed" in row] == []
    return found["rows"]


def quick(folder="."):
    return case.Wanted(OURS, quick=True, rounds=1, folder=str(folder))


@pytest.mark.parametrize("group", workloads.GROUPS)
def test_every_group_has_cases_with_jrb_and_says_what_it_is(group):
    for wanted in (quick(), dataclasses.replace(quick(), quick=False)):
        cases = list(workloads.module(group).cases(wanted))
        assert cases
        bases = [case.base in case.programs or not case.programs for case in cases]
        assert all(bases)
        assert len({case.name for case in cases}) == len(cases)
    assert 10 < len(workloads.about(group)) <= 100


@pytest.mark.parametrize("name", ["prioritized", "slices"])
def test_steps_are_timed_in_a_scan_and_in_python(name):
    setup = SETUPS[name]
    wanted = quick()
    kinds = {
        "cycle": lambda peer, setup: programs.cycle(peer, setup, 2),
        "calls": lambda peer, setup: programs.calls(peer, setup, 2),
    }
    cases = [case.beside(wanted, kind, setup, make) for kind, make in kinds.items()]
    rows = run(cases, wanted)
    assert len(rows) == 2 * sum(peer.can(setup) for peer in OURS)
    assert all(row["median"] >= row["least"] > 0 for row in rows)
    assert all((row["ratio"] is None) == (row["peer"] == "jrb") for row in rows)


def test_a_method_alone_agents_and_compiling():
    from benchmarks.workloads import agents

    wanted, setup = quick(), SETUPS["prioritized"]
    method = lambda peer, setup: programs.calls(peer, setup, 1, ("update",))
    cases = [case.beside(wanted, "update", setup, method)]
    devices = dataclasses.replace(wanted, peers=OURS[::2])
    vmapped = lambda peer, setup: agents.vmapped(peer, setup, 2)
    cases.append(case.beside(devices, "agents", setup, vmapped))
    cases.append(case.beside(devices, "compiling", setup, compiling.compiles))
    assert {row["what"] for row in run(cases, wanted)} == {"update", "agents", "compiling"}


def test_states_are_as_large_as_they_say():
    from benchmarks.workloads import memory

    setup = SETUPS["prioritized"]
    case_ = case.beside(quick(), "held", setup, memory.held, unit="B")
    sizes = {row["peer"]: row["median"] for row in run([case_], quick())}
    assert 168 < sizes["jrb"] < 200
    assert sizes["limit"] == 168


def test_a_step_changes_what_the_limit_holds():
    setup = SETUPS["prioritized"]
    peer = next(peer for peer in OURS if peer.name == "limit")
    buffer = peer.full(setup)
    before = np.asarray(buffer.state["rows"]["reward"])
    body = programs.body_of(buffer, setup, programs.ALL)
    carry = programs.carry_of(buffer, setup, programs.ALL)
    state, data = jax.jit(body)(carry, jax.random.key(1))
    after = np.asarray(state["rows"]["reward"])
    np.testing.assert_array_equal(after[:4], np.asarray(carry[1]["reward"]) + 1)
    np.testing.assert_array_equal(after[8:], before[8:])
    assert np.isin(data["reward"], after).all()
    assert (np.asarray(state["priorities"]) != 1).any()


def test_a_failing_program_does_not_stop_the_others():
    def broken():
        raise MemoryError("too large\nby far")

    fine = lambda: timing.Program(lambda: None)
    cases = [case.Case("step", {"N": 1}, {"jrb": fine, "SB3": broken})]
    rows = running.group("some", "", cases, quick(), lambda name: None)["rows"]
    assert rows[1]["failed"] == "MemoryError: too large"
    assert rows[0]["median"] > 0


def test_programs_take_turns():
    order = []
    made = [timing.Program(lambda name=name: order.append(name)) for name in "AB"]
    for each in made:
        each.warm()
    timing.in_turn(made, 3)
    assert "".join(order) == "ABABABAB"
    assert [len(each.times) for each in made] == [3, 3]


def test_ratios_are_medians_of_the_ratios_of_rounds():
    assert timing.ratio(program([1, 2, 9]), program([2, 2, 3])) == 1
    assert case.Case("", {}, {}, weight=0.5).rounds(15) == 8
    assert case.Case("", {}, {}, unit="B").rounds(15) == 0


def test_the_machine_is_told():
    told = machine.about(("flashbax", "no-such-package"))
    assert told["versions"]["no-such-package"] is None


def test_copies_are_fast():
    assert COPY_SPEED(1 << 16, 1) > 0


def bound(makers, what):
    """Binds the argument of functions that make programs."""
    return {name: lambda make=make: make(what) for name, make in makers.items()}


@pytest.mark.slow
def test_checkpoints_are_measured(tmp_path):
    saved = checkpoint.Saved(32, str(tmp_path))
    again = lambda: checkpoint.ours_again(saved, True)
    plain = {"jrb": checkpoint.ours_save, checkpoint.DISK: checkpoint.plain_save}
    loads = {"jrb": checkpoint.ours_load, checkpoint.DISK: checkpoint.plain_load}
    cases = [
        case.Case("save", {}, bound(plain, saved)),
        case.Case("load", {}, bound(loads, saved)),
        case.Case("again", {}, {"jrb": again}),
    ]
    assert len(run(cases, quick(tmp_path))) == 5


@pytest.mark.slow
def test_draws_from_files_are_measured(tmp_path):
    files = host.Files(1000, str(tmp_path))
    programs_ = {"jrb": lambda: files.program(False), "in jit": lambda: files.program(True)}
    programs_["NumPy take"] = files.take
    cases = [case.Case("files", {}, programs_)]
    assert len(run(cases, quick(tmp_path))) == 3


@pytest.mark.parametrize("storage", rfc.STORAGES)
def test_sample_calls_of_all_storages_are_measured(storage):
    made = {"jrb": lambda: rfc.ours("nested dict", storage, 200)}
    made["bare"] = lambda: rfc.BARE[storage](rfc.data("nested dict", 200), 200)
    assert all(row["median"] > 0 for row in run([case.Case("sample", {}, made)], quick()))


def test_copies_are_measured(tmp_path):
    cases = list(workloads.module("copies").cases(quick(tmp_path)))
    assert {row["peer"] for row in run(cases, quick(tmp_path))} >= {"device to device", "read"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trainings_run():
    from benchmarks.workloads import dqn, training

    for make in (dqn.ours, dqn.flashbax):
        found = training.looped(make(200), 100)
        found.warm()
        assert found.steps == 100


def test_weights_of_skewed_shards_are_measured():
    from benchmarks.alone import skew

    found = skew.row("one shard has 90 %", 0.4, 3)
    assert found["error"] < 1e-6
    assert found["ratio"] > 0


@pytest.mark.slow
def test_methods_at_some_scale_are_measured(monkeypatch):
    from benchmarks.alone import scale

    monkeypatch.setattr(scale, "TASKS", scale.TASKS[-1:])
    rows = scale.together(scale.measured(1600, 1) + scale.measured(3200, 1))
    assert [row["what"] for row in rows] == ["prioritized, 8 shards: all three"]
    assert list(rows[0]["n"]) == ["1600", "3200"]
    assert all(figures["least_us"] > 0 for figures in rows[0]["n"].values())


@pytest.mark.slow
def test_behaviour_is_cloned_and_played(monkeypatch, tmp_path):
    from benchmarks.alone import offline

    monkeypatch.setattr(offline, "PARTS", 2)
    monkeypatch.setattr(offline, "EPISODES", 2)
    result = offline.run(quick())
    row = result["rows"][0]
    assert (row["environment"], row["episodes"]) == ("CartPole-v1", 20)
    assert row["losses"][1] < row["losses"][0]
    assert np.shape(row["returns"]) == (2, 2)
    assert alone.draw({"group": "offline", **result}, tmp_path / "returns.png")


@pytest.mark.cluster
@pytest.mark.xdist_group("ray")
def test_what_is_served_is_measured(cluster):
    import jrb
    from benchmarks.alone import remote

    rows = remote.frames(jrb.DeviceStorage(), rounds=1, calls=2, capacity=800)
    assert all(row["ratio"] > 0 for row in rows)

"""Sets of Minari: those that it records come back as it reads them; damaged ones are refused."""

import contextlib
import json
import pathlib
import re
import shutil

import h5py
import jax
import numpy as np
import pytest

pytest.importorskip("minari")
pytest.importorskip("PIL")

import gymnasium
from gymnasium import spaces
from minari.serialization import serialize_space

import jrb.datasets
from tests.datasets.formats import minari_sets as sets

pytestmark = pytest.mark.interop

FORMAT = jrb.datasets.formats()["minari"]
CARTPOLE = pathlib.Path(__file__).parents[2] / "data" / "minari" / "cartpole-v0"
FORMATS = ("hdf5", "arrow", "parquet")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("minari")


@pytest.fixture(scope="module", params=FORMATS)
def recorded(request, place):
    """A set with all kinds of spaces, and its episodes as Minari reads them."""
    if request.param != "hdf5":
        pytest.importorskip("pyarrow")
    name = f"name/{request.param}-v0"
    return sets.recorded(place, sets.World(), name, data_format=request.param)


def concatenated(episodes):
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *episodes)


@pytest.mark.slow
def test_what_minari_records_is_read_as_minari_reads_it(recorded):
    path, episodes = recorded
    dataset, expected = jrb.datasets.open(path), list(map(sets.in_ted, episodes))
    assert dataset.format.name == "minari"
    assert dataset.lengths.tolist() == [len(each.rewards) for each in episodes]
    for found, want in zip(dataset, expected, strict=True):
        sets.assert_same(found, want)
    for index in (0, 2, 10, 11, -1, -12):
        sets.assert_same(dataset[index], expected[index])
    for part in (slice(2, 5), slice(None, None, -1), slice(0, 0)):
        for found, want in zip(dataset[part], expected[part], strict=True):
            sets.assert_same(found, want)
    sets.assert_same(concatenated(dataset.steps(7)), concatenated(expected))
    sets.assert_same(concatenated(dataset[::-1].blocks()), concatenated(expected[::-1]))
    returns = [each.rewards.sum() for each in episodes]
    assert dataset.returns().tolist() == returns
    sets.assert_same(
        jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), dataset.spec),
        jax.tree.map(lambda leaf: np.zeros_like(leaf[0]), expected[0]),
    )


def test_what_minari_says_of_a_set(recorded):
    dataset = jrb.datasets.open(recorded[0])
    assert dataset.facts["seed"].tolist() == list(range(12))
    assert dataset.facts["id"].dtype == np.int64
    assert dataset.facts["options/plain/x"].tolist() == [None, 2.5] * 6
    assert dataset.metadata["author"] == ["somebody"]
    assert dataset.metadata["action_space"]["type"] == "Tuple"
    assert dataset.metadata["jpeg"] == ["observation/colour", "observation/grey"]
    jpeg, left_out = dataset.notes
    assert "observation/colour, observation/grey are kept as JPEG" in jpeg
    assert left_out.endswith("for each step: 'observations/text'.")


def test_infos_in_dicts(place):
    path, _ = sets.recorded(place, sets.World(nested=True), "name/nested-v0", episodes=1)
    found = jrb.datasets.open(path)[0]
    for infos in (found["info"], found["next"]["info"]):
        assert infos["more"]["grid"].dtype == np.float32
        assert infos["more"]["grid"].tolist() == infos["grid"].tolist()
    assert found["next"]["info"]["grid"][:, 1, 0].tolist() == [1, 2, 3]


def test_infos_in_dicts_of_arrow(place):
    pytest.importorskip("pyarrow")
    options = {"episodes": 1, "data_format": "arrow"}
    path, _ = sets.recorded(place, sets.World(nested=True), "name/nested-arrow-v0", **options)
    found = jrb.datasets.open(path)[0]["info"]
    assert found["more"]["grid"].tolist() == found["grid"].tolist()
    assert found["grid"].shape == (3, 2, 2)


def test_images_that_are_no_jpeg_are_exact(place):
    env = sets.World()
    path, episodes = sets.recorded(place, env, "name/raw-v0", episodes=2, jpeg_encoding=False)
    dataset = jrb.datasets.open(path)
    sets.assert_same(dataset[1], sets.in_ted(episodes[1]))
    assert dataset.metadata["jpeg"] == []
    assert len(dataset.notes) == 1


def test_a_set_without_spaces_is_read_as_it_is_stored(tmp_path):
    """No environment is made, so no code runs that a file names."""
    path = sets.made(tmp_path, [sets.episode(2)])
    whole = jrb.datasets.open(path)[0]
    for name in ("observation_space", "data_format"):
        change(tmp_path, lambda about, name=name: about.pop(name))
        sets.assert_same(jrb.datasets.open(path)[0], whole)


def test_a_set_recorded_once():
    """The set of the repository; by its files alone, as they are."""
    for path in (CARTPOLE, CARTPOLE / "data"):
        dataset = jrb.datasets.open(path)
        assert (len(dataset), dataset.transitions, dataset.notes) == (20, 8543, ())
    assert dataset.metadata["environment"] == "CartPole-v1"
    assert dataset.metadata["observation_space"]["high"][1] == np.inf
    assert dataset.facts["seed"].tolist() == list(range(20))
    with h5py.File(CARTPOLE / "data" / "main_data.hdf5") as file:
        for number, found in enumerate(dataset):
            group = file[f"episode_{number}"]
            flags = group["terminations"][()], group["truncations"][()]
            want = {
                "observation": group["observations"][:-1],
                "action": group["actions"][()],
                "next": {
                    "observation": group["observations"][1:],
                    "reward": group["rewards"][()],
                    "terminated": flags[0],
                    "truncated": flags[1],
                    "done": flags[0] | flags[1],
                },
            }
            sets.assert_same(found, want)


def test_cartpole_recorded_now(place):
    path, episodes = sets.recorded(place, gymnasium.make("CartPole-v1"), "cartpole/now-v3")
    dataset = jrb.datasets.open(path)
    for found, want in zip(dataset, map(sets.in_ted, episodes), strict=True):
        sets.assert_same(found, want)
    assert dataset.metadata["dataset_id"] == "cartpole/now-v3"
    assert dataset.description.cut is None


def test_infos_of_each_step_and_such_that_differ(tmp_path):
    infos = {"infos/a": np.arange(4), "infos/b/c": np.arange(5.0), "infos/odd": np.zeros(9)}
    other = {"infos/a": np.arange(6), "infos/b/c": np.arange(7.0), "infos/d": np.zeros(6)}
    texts = {"infos/text": np.array([b"x"] * 4)}
    path = sets.made(tmp_path, [sets.episode(4, **infos, **texts), sets.episode(6, **other)])
    dataset = jrb.datasets.open(path)
    first = dataset[0]
    assert first["info"].keys() == {"a", "b"}
    assert first["info"]["a"].tolist() == [0, 1, 2, 3]
    assert first["next"]["info"].keys() == {"b"}
    assert first["info"]["b"]["c"].tolist() == [0, 1, 2, 3]
    assert first["next"]["info"]["b"]["c"].tolist() == [1, 2, 3, 4]
    (note,) = dataset.notes
    assert note.endswith("'infos/d', 'infos/odd', 'infos/text'.")


def test_episodes_without_a_last_observation(tmp_path):
    over = sets.episode(3, 1, rows=3, terminations=np.array([False, False, True]))
    over["truncations"] = np.zeros(3, bool)
    path = sets.made(tmp_path, [sets.episode(4, rows=4), over, sets.episode(1, 2)])
    dataset = jrb.datasets.open(path)
    assert [each["next"]["valid"].all() for each in dataset] == [False, True, True]
    assert not dataset[0]["next"]["observation"][-1].any()
    assert dataset[0]["observation"].tobytes() == sets.episode(4, rows=4)["observations"].tobytes()
    dropped = jrb.datasets.open(path, final="drop")
    assert dropped.lengths.tolist() == [3, 3, 1]
    assert dropped[0]["next"]["truncated"].tolist() == [False, False, True]


def test_nan_rewards_are_kept(tmp_path):
    path = sets.made(tmp_path, [sets.episode(2, rewards=np.array([np.nan, 1.0]))])
    assert np.isnan(jrb.datasets.open(path)[0]["next"]["reward"]).tolist() == [True, False]


def test_what_is_added_is_seen(tmp_path):
    path = sets.made(tmp_path, [sets.episode(2)])
    assert len(jrb.datasets.open(path)) == 1
    sets.made(tmp_path, [sets.episode(2), sets.episode(1)])
    assert jrb.datasets.open(path).lengths.tolist() == [2, 1]


def change(folder, how):
    path = folder / "metadata.json"
    about = json.loads(path.read_text())
    how(about)
    path.write_text(json.dumps(about))


def reduced(name):
    """An episode in which a leaf is a row short."""
    found = sets.episode(4)
    return {**found, name: found[name][:-1]}


def without(name):
    return {leaf: array for leaf, array in sets.episode(4).items() if leaf != name}


@pytest.mark.parametrize("name", ["actions", "rewards", "terminations", "truncations"])
def test_arrays_of_several_lengths_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"episode_1: expected arrays of one length, got \{"):
        jrb.datasets.open(sets.made(tmp_path, [sets.episode(3), reduced(name)]))


@pytest.mark.parametrize("name", list(sets.episode(1)))
def test_a_missing_array_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"main_data.hdf5: /episode_1: expected an array '{name}'"):
        jrb.datasets.open(sets.made(tmp_path, [sets.episode(3), without(name)]))


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (sets.episode(3, rows=6), "arrays of one length"),
        (sets.episode(0), "one step or more"),
        (sets.episode(3, observations=np.zeros((4, 2))), "the leaves of the first"),
        (sets.episode(3, actions=np.zeros(3)), "the leaves of the first"),
        (sets.episode(3, terminations=np.full(3, 0.5)), "flags of 0 and 1"),
        (sets.episode(3, truncations=np.zeros((3, 2), bool)), "a flag for each step"),
        (sets.episode(3, observations=np.array([b"text"] * 4)), "an array 'observations'"),
        ({**without("rewards"), "rewards/a": np.zeros(4)}, "an array 'rewards'"),
        ({**without("actions"), "actions/a": np.zeros(4, int)}, "the leaves of the first"),
    ],
)
def test_episodes_that_do_not_fit_are_refused(tmp_path, wrong, match):
    with h5py.File(sets.made(tmp_path, [sets.episode(3)]) + "/main_data.hdf5", "a") as file:
        sets.put(file, "episode_1", wrong)
    change(tmp_path, lambda about: about.update(total_episodes=2))
    with pytest.raises(ValueError, match=match):
        list(jrb.datasets.open(tmp_path))


@pytest.mark.parametrize(
    ("how", "match"),
    [
        (
            lambda about: about.update(total_episodes=3),
            "expected 3 episodes .* got 2; .* missing is 2",
        ),
        (lambda about: about.update(total_episodes=1), "expected 1 episodes .* got 2"),
        (
            lambda about: about.update(total_episodes=10**15),
            "expected 1000000000000000 episodes .* got 2",
        ),
        (
            lambda about: about.update(observation_space="{"),
            "metadata.json: expected metadata of Minari in JSON",
        ),
        (
            lambda about: about.update(env_spec="["),
            "metadata.json: expected metadata of Minari in JSON",
        ),
        (lambda about: about.update(data_format="zarr"), "metadata.json: .*zarr"),
        (lambda about: about.update(data_format="arrow"), "expected 2 episodes .* got 0"),
    ],
)
def test_metadata_that_do_not_fit_are_refused(tmp_path, how, match):
    path = sets.made(tmp_path, [sets.episode(3), sets.episode(2)])
    change(tmp_path, how)
    with pytest.raises(ValueError, match=match):
        jrb.datasets.open(path, format="minari")


def test_a_gap_is_refused(tmp_path):
    path = sets.made(tmp_path, [sets.episode(2)] * 3)
    with h5py.File(path + "/main_data.hdf5", "a") as file:
        del file["episode_1"]
    with pytest.raises(ValueError, match=r"got 2; .* missing is 1"):
        jrb.datasets.open(path)


@pytest.mark.parametrize(
    "link",
    [
        lambda other: h5py.ExternalLink(str(other / "main_data.hdf5"), "/episode_0"),
        lambda other: h5py.ExternalLink(str(other / "secret.hdf5"), "/episode_0"),
        lambda other: h5py.ExternalLink("../other/secret.hdf5", "/episode_0"),
        lambda other: h5py.ExternalLink("main_data.hdf5", "/episode_0/rewards"),
        lambda other: h5py.ExternalLink("main_data.hdf5", "/episode_1"),
        lambda other: h5py.SoftLink("/elsewhere"),
        lambda other: h5py.SoftLink("/episode_1"),
    ],
)
def test_links_that_lead_elsewhere_are_refused(tmp_path, link):
    sets.made(tmp_path / "other", [sets.episode(2), sets.episode(2)])
    shutil.copy(tmp_path / "other" / "main_data.hdf5", tmp_path / "other" / "secret.hdf5")
    path = sets.made(tmp_path / "set", [sets.episode(2), sets.episode(2)])
    with h5py.File(path + "/main_data.hdf5", "a") as file:
        del file["episode_1"]
        file["episode_1"] = link(tmp_path / "other")
    with pytest.raises(
        ValueError, match=r"main_data.hdf5: '/episode_1': expected data in the file itself"
    ):
        jrb.datasets.open(path)


def test_arrays_that_lie_in_other_files_are_not_read(tmp_path):
    path = sets.made(tmp_path, [sets.episode(2)])
    with h5py.File(path + "/main_data.hdf5", "a") as file:
        group = file["episode_0"]
        group["infos/soft"] = h5py.SoftLink("/episode_0/rewards")
        group["infos/nothing"] = h5py.Empty("f8")
        group["infos/one"] = 3.0
    dataset = jrb.datasets.open(path)
    sets.assert_same(dataset[0]["info"]["soft"], dataset[0]["next"]["reward"])
    (note,) = dataset.notes
    assert note.endswith("'infos/nothing', 'infos/one'.")


@pytest.mark.parametrize("name", ["rewards", "infos/x", "observations"])
def test_arrays_that_lie_elsewhere_are_refused(tmp_path, name):
    path = sets.made(tmp_path, [sets.episode(2), sets.episode(2)])
    with h5py.File(path + "/main_data.hdf5", "a") as file:
        file["episode_1"].pop(name, None)
        file["episode_1"][name] = h5py.ExternalLink("/etc/passwd", "x")
    with pytest.raises(ValueError, match=f"'{name}': expected data in the file"):
        jrb.datasets.open(path)


def test_numbers_with_gaps_are_taken_in_their_order(tmp_path):
    path = sets.made(tmp_path, [sets.episode(length) for length in (2, 3, 4)])
    with h5py.File(path + "/main_data.hdf5", "a") as file:
        file.move("episode_2", "episode_10")
        file.move("episode_1", "episode_2")
    dataset = jrb.datasets.open(path)
    assert dataset.lengths.tolist() == [len(each["action"]) for each in dataset] == [2, 3, 4]
    assert (
        "main_data.hdf5: 8 numbers are missing between episode_0 and episode_10." in dataset.notes
    )


def test_more_than_the_files_could_hold_is_refused_before_it_is_read(tmp_path):
    path = sets.made(tmp_path, [sets.episode(1)])
    name = "episode_0/observations"
    with h5py.File(path + "/main_data.hdf5", "w") as file:
        sets.put(file, "episode_0", {**sets.episode(200), "observations": np.zeros(0)})
        del file[name]
        shape = (201, 1 << 15)
        file.create_dataset(name, data=np.zeros(shape), chunks=shape, compression="gzip")
    with pytest.raises(ValueError, match=r"bytes of the files, got 5\d+ declared.*max_expansion="):
        jrb.datasets.open(path)
    space = serialize_space(spaces.Box(-1, 1, shape[1:], np.float64))
    change(tmp_path, lambda about: about.update(observation_space=space))
    assert jrb.datasets.open(path, max_expansion=10_000).transitions == 200


def test_a_group_that_holds_itself_is_refused(tmp_path):
    path = sets.made(tmp_path, [sets.episode(2)])
    with h5py.File(path + "/main_data.hdf5", "a") as file:
        file["episode_0/infos"] = file["episode_0"]
    with pytest.raises(ValueError, match="at most 16 groups in each other"):
        jrb.datasets.open(path)


def test_damaged_files_are_refused(tmp_path):
    """A set whose bytes were changed or cut is read, or refused by a ValueError."""
    steps = [sets.episode(3, seed, **{"infos/a": np.arange(4)}) for seed in range(3)]
    path = tmp_path / "set" / "main_data.hdf5"
    folder = sets.made(path.parent, steps)
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for size in (0, 7, 8, 100, 2000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"main_data\.hdf5|no format matches"):
            list(jrb.datasets.open(folder))
    for _ in range(60):
        changed = bytearray(whole)
        for place in rng.integers(0, len(whole), 5):
            changed[place] = rng.integers(0, 256)
        path.write_bytes(changed)
        with contextlib.suppress(ValueError):
            list(jrb.datasets.open(folder, format="minari"))


def test_damaged_images_are_refused(place, tmp_path):
    path, _ = sets.recorded(place, sets.World(), "name/images-v0", episodes=3)
    shutil.copytree(path, tmp_path / "set")
    with h5py.File(tmp_path / "set" / "data" / "main_data.hdf5", "a") as file:
        images = file["episode_1/observations/grey"]
        images[1] = images[1][:50]
        file["episode_2/observations/grey"][1] = file["episode_2/observations/colour"][1]
    dataset = jrb.datasets.open(tmp_path / "set")
    for number in (1, 2):
        with pytest.raises(ValueError, match=rf"/episode_{number}: .*grey': expected .*images"):
            dataset[number]


def test_damaged_files_of_arrow_are_refused(place, tmp_path):
    pytest.importorskip("pyarrow")
    for layout in FORMATS[1:]:
        options = {"episodes": 3, "data_format": layout}
        path, _ = sets.recorded(place, sets.World(), f"name/cut-{layout}-v0", **options)
        part = pathlib.Path(path) / "data" / "1" / f"part-0.{layout}"
        whole = part.read_bytes()
        part.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match=rf"/data/1/part-0.{layout}: expected a whole"):
            jrb.datasets.open(path)
        part.unlink()
        with pytest.raises(ValueError, match="/data/1: episode_1: expected a file of Arrow"):
            jrb.datasets.open(path)
        shutil.rmtree(part.parent)
        with pytest.raises(ValueError, match="missing is 1"):
            jrb.datasets.open(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metadata.json", b"{"),
        ("metadata.json", b"\xff\xfe"),
        ("metadata.json", b"[1]"),
        ("metadata.json", b"[" * 100_000),
        ("metadata.json", b'{"total_episodes": 1}'),
        ("metadata.json", b'{"total_episodes": 1, "total_steps": 1}'),
        ("metadata.json", b'{"total_episodes": 1, "total_steps": 1, "data_format": [1]}'),
        ("main_data.hdf5", b""),
        ("main_data.hdf5", b"\x89HDF\r\n\x1a\n"),
    ],
)
def test_what_is_no_set_is_not_taken_for_one(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert not FORMAT.matches(str(tmp_path))
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(str(tmp_path))):
        jrb.datasets.open(tmp_path, format="minari")


def test_nothing_else_is_taken_for_a_set(tmp_path):
    for source in (str(tmp_path), str(tmp_path / "no"), [], None, lambda: 0):
        assert not FORMAT.matches(source)
    with pytest.raises(ValueError, match=r"expected a folder with 'metadata\.json'"):
        jrb.datasets.open(tmp_path, format="minari")


def test_files_that_change_under_a_dataset_are_refused(place, tmp_path):
    """Where nothing but an episode's own file tells."""
    pytest.importorskip("pyarrow")
    options = {"episodes": 2, "data_format": "arrow"}
    path, _ = sets.recorded(place, sets.World(), "name/changed-v0", **options)
    dataset = jrb.datasets.open(path)
    data = pathlib.Path(path) / "data"
    shutil.copy(data / "0" / "part-0.arrow", data / "1" / "part-0.arrow")
    assert dataset.lengths.tolist() == [3, 4]
    with pytest.raises(ValueError, match="expected 4 steps in all, as when the dataset was opened"):
        dataset[1]

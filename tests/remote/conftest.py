"""One small cluster for all tests of the folder; without Ray there is nothing to be tested here."""

import importlib.util
import os
import pathlib
import warnings

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("ray") else ["*.py"]

HERE = pathlib.Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.xdist_group("ray"))


@pytest.fixture(scope="session")
def cluster():
    """Ray, whose workers find the packages where this process does."""
    import ray

    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)  # by Ray
        ray.init(
            "local",
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=200_000_000,
            log_to_driver=False,
            logging_level="error",
        )
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def workers(cluster):
    """Two actors, to each of which a test gives what it is to work with."""
    from tests.remote.rows import Worker

    return [cluster.remote(num_cpus=0)(Worker).remote() for _ in range(2)]

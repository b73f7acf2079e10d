"""Actors that all tests of this folder share."""

import pathlib

import pytest

HERE = pathlib.Path(__file__).parent
ALWAYS = ("test_draws_are_those_of_a_buffer_in_this_process",)
"""Of those with a cluster, the ones that run with all others; the rest of them takes minutes."""


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.xdist_group("ray"))
            if "cluster" in item.fixturenames and item.name not in ALWAYS:
                item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def workers(cluster):
    """Two actors; each test gives them the objects to work with."""
    from tests.remote.rows import Worker

    return [cluster.remote(num_cpus=0)(Worker).remote() for _ in range(2)]

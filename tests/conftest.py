"""The settings of all tests: eight simulated devices, strict dtypes, warnings as errors.

Tests spend most of their time compiling, so XLA's optimizations are disabled; this does not change
where XLA copies. Users run the optimizing code generator, which has had faults of its own: with
JRB_TEST_AS_USERS=1, tests are compiled as users' programs are.
"""

import collections
import contextlib
import ctypes
import gc
import importlib.metadata
import os
import pathlib
import sys
import warnings

QUICK = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
]
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) >= (0, 9):
    QUICK += [  # older versions lack some of these flags
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
if os.environ.get("JRB_TEST_AS_USERS"):
    QUICK = []
FLAGS = [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", *QUICK]
os.environ["XLA_FLAGS"] = " ".join(FLAGS)

import hypothesis
import jax
import jax.monitoring
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")

gc.set_threshold(200_000, 20, 100)  # compiled programs are many long-lived objects, slow to scan

hypothesis.settings.register_profile(
    "jrb", deadline=None, max_examples=40, derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("jrb")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Starts one worker more than there are cores: many tests wait for a disk or for processes."""
    config.option.dist = "loadgroup"  # tests that share a cluster run in one worker
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items):
    """Marks pages as slow, and further parameter sets of tests as slow or long.

    Markdown pages compile complete programs. Of three parameter sets of a quick test, one stays in
    the quick part, one is slow and one is long; of a slow test, one set of sixteen is not long.
    Slow tests marked `faults` or `whole` keep all parameter sets.
    """
    sets = collections.Counter()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if item.path.suffix == ".md" or marks & {"cluster", "long"}:
            item.add_marker(pytest.mark.slow)
        elif "slow" not in marks or not marks & {"faults", "whole"}:
            test = item.nodeid.partition("[")[0]
            number = sets[test] % (16 if "slow" in marks else 3)
            if number:
                item.add_marker(pytest.mark.slow)
            if number > 1 or (number and "slow" in marks):
                item.add_marker(pytest.mark.long)
            sets[test] += 1


@pytest.fixture
def compilations():
    """Returns a context manager; its value is a function that counts compilations since entry."""
    events = []
    listen = lambda name, duration, **_: events.append(name)
    jax.monitoring.register_event_duration_secs_listener(listen)

    @contextlib.contextmanager
    def counted():
        before = len(events)
        yield lambda: sum("backend_compile" in name for name in events[before:])

    return counted


@pytest.fixture(autouse=True, scope="module")
def _what_modules_compiled_is_given_back():
    """Frees what a module compiled if memory runs high; a process would otherwise reach 7 GB."""
    gc.freeze()
    yield
    if resident() > 3.5e9:
        gc.unfreeze()
        jax.clear_caches()
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)


def resident():
    """Returns the resident memory of this process in bytes; 0 if unknown."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0


@pytest.fixture(scope="session")
def cluster():
    """Starts a small Ray cluster, whose workers can import the packages of this repository."""
    ray = pytest.importorskip("ray")
    root = str(pathlib.Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
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

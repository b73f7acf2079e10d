"""Small setups and results, for fast tests."""

from benchmarks.setup import Setup
from benchmarks.timing import Program

SETUPS = {
    "uniform": Setup("vector", 96, 8, 4),
    "prioritized": Setup("vector", 96, 8, 4, "prioritized"),
    "19 leaves": Setup("nested", 96, 8, 4),
    "frames": Setup("frames", 24, 4, 4),
    "a number": Setup("number", 96, 8, 4),
    "many environments": Setup("vector", 96, 16, 4),
    "CartPole": Setup("cartpole", 96, 8, 4),
    "without replacement": Setup("vector", 96, 8, 4, "without replacement"),
    "n-step": Setup("episodic", 960, 2, 4, unit="n-step"),
    "slices": Setup("episodic", 960, 2, 4, unit="slices"),
    "one environment": Setup("episodic", 960, 1, 4, unit="slices"),
    "stacks": Setup("frames", 96, 2, 4, unit="stack"),
    "once": Setup("frames", 96, 2, 4, once=True),
}


def program(seconds):
    """Returns a program that does nothing, with these times."""
    return Program(lambda: None, times=list(seconds))


def result(group="cycle"):
    """Returns an example of the results of a run."""
    here = {"items": "5 leaves", "N": 10**5, "B": 256}
    there = here | {"N": 10**6}
    row = lambda what, facts, peer, time, ratio, **more: {
        "what": what,
        "facts": facts,
        "peer": peer,
        "unit": "s",
        "on_device": peer != "SB3",
        "median": time,
        "least": time,
        "ratio": ratio,
        **more,
    }
    return {
        "group": group,
        "about": "A training step.",
        "quick": True,
        "notes": {"SB3": "in tensors"},
        "machine": {"python": "3.12", "jax": "0.9", "device": "cpu", "processor": "x86"}
        | {"cores": 2, "copy_gb_s": 12.34, "versions": {"jax": "0.9", "brax": None}},
        "rows": [
            row("step", here, "jrb", 2e-5, None),
            row("step", here, "SB3", 1e-3, 0.0214),
            row("step", there, "jrb", 3e-5, None),
            {**row("step", there, "SB3", None, None), "failed": "MemoryError: too large"},
        ],
    }

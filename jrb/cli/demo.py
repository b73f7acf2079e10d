"""`jrb demo`: a training to look at."""

import importlib
from typing import Annotated, Any

from jrb._util import wording

typer: Any = wording.require("typer", "cli")
_option = typer.Option


def demo(
    env: Annotated[
        str, _option(help="a gymnax environment with discrete actions; a wrong name lists them")
    ] = ("Breakout-MinAtar"),
    steps: Annotated[int, _option(help="environment steps of each training", min=1)] = 400_000,
    seeds: Annotated[int, _option(help="number of trainings, run together under vmap", min=1)] = 1,
    seed: Annotated[int, _option(help="the first seed")] = 0,
    devices: Annotated[
        int, _option(help="number of devices; simulated on the CPU if there are fewer", min=1)
    ] = 1,
    out: Annotated[str, _option(help="path of the picture")] = "jrb-demo.png",
) -> None:
    """Train a double DQN, all of it inside one jit."""
    if devices > 1:
        importlib.import_module("jrb.demo.devices").prepare(devices)
    report = importlib.import_module("jrb.demo.report")
    report.main(env=env, steps=steps, seeds=seeds, seed=seed, out=out, devices=devices)

"""Sets of LeRobot, written without LeRobot."""

from jrb.datasets.writing.lerobot.sets import write_lerobot

__all__ = ["write_lerobot"]

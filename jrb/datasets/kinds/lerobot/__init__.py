"""LeRobot's sets, versions 2 and 3."""

from jrb.datasets.kinds.lerobot.kind import LeRobot

__all__ = ["LeRobot"]

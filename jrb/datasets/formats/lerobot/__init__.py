"""LeRobot's sets, versions 2 and 3."""

from jrb.datasets.formats.lerobot.format import LeRobot

__all__ = ["LeRobot"]

"""Storages: put rows at slots, get rows at slots."""

from jrb.storages.device import DeviceStorage
from jrb.storages.memmap import MemmapStorage
from jrb.storages.objects import ListStorage
from jrb.storages.spill import SpillStorage

__all__ = ["DeviceStorage", "ListStorage", "MemmapStorage", "SpillStorage"]

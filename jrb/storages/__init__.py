"""Storages: put rows at slots, get rows at slots."""

from jrb.storages.device import DeviceStorage
from jrb.storages.objects import ListStorage

__all__ = ["DeviceStorage", "ListStorage"]

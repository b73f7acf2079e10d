"""Storages: put rows at slots, get rows at slots."""

from jrb.storages.device import DeviceStorage

__all__ = ["DeviceStorage"]

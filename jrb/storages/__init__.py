"""Storages keep the items: they write rows to slots, and read them."""

from jrb._util.public import PublicNames
from jrb.storages.compressed import CompressedStorage
from jrb.storages.device import DeviceStorage
from jrb.storages.host_rows import HostRows, HostStorage, PlainRows
from jrb.storages.memmap import MemmapStorage
from jrb.storages.objects import ListStorage
from jrb.storages.spill import SpillStorage

__all__ = [
    "CompressedStorage",
    "DeviceStorage",
    "HostRows",
    "HostStorage",
    "ListStorage",
    "MemmapStorage",
    "PlainRows",
    "SpillStorage",
]
__dir__: PublicNames = lambda: __all__

"""Readers of TorchRL's dumps and of flashbax's states and vaults, and a writer of the first."""

from jrb._util.public import PublicNames
from jrb.interop.dump import Dump
from jrb.interop.flashbax import read_flashbax, read_vault
from jrb.interop.torchrl import read_torchrl
from jrb.interop.torchrl_write import write_torchrl

__all__ = ["Dump", "read_flashbax", "read_torchrl", "read_vault", "write_torchrl"]
__dir__: PublicNames = lambda: __all__

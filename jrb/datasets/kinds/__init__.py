"""The layouts that are known, one a file, in the order in which they are asked."""

from jrb.datasets.kind import Kind
from jrb.datasets.kinds.d4rl import D4RL
from jrb.datasets.kinds.native import Native, NativeH5
from jrb.datasets.kinds.torchrl import TorchRL

OURS: tuple[Kind, ...] = (Native(), NativeH5(), TorchRL(), D4RL())
"""The special ones first: several layouts could be read as plain arrays."""

"""Our own checkpoints and stores."""

from jrb.datasets.kinds.native.kind import Native, NativeH5

__all__ = ["Native", "NativeH5"]

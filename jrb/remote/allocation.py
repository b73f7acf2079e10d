"""What a server asks of the allocator of its process."""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # the names of `mallopt`, in malloc.h of glibc
_KEPT, _LARGEST = 1 << 28, 1 << 25  # bytes


def keep_freed_memory() -> None:
    """Lets the process keep 256 MB that it has freed, where its library is glibc.

    A server makes and frees batches of megabytes, again and again. By default glibc gives such
    memory back to the system each time, and to have its pages zeroed anew takes as long as to
    gather a batch.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if tune is not None:
        tune(_MMAP_THRESHOLD, _LARGEST)
        tune(_TRIM_THRESHOLD, _KEPT)

"""Simulates parts of Windows on another system.

`python -m tests.platforms.windows` runs a program on stdin.

After the libraries that jrb needs are imported, modules and functions that Windows lacks are
hidden, and folders can no longer be opened. Text mode, file names, the sharing of open files, and
the behaviour of h5py and pyarrow on Windows are not simulated.
"""

import os
import sys

import h5py  # noqa: F401
import jax
import numpy as np  # noqa: F401

_MODULES = ("fcntl", "grp", "posix", "pwd", "resource", "termios")
_FUNCTIONS = (
    *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "chown", "fchmod", "fork", "forkpty"),
    *("fdatasync", "fstatvfs", "geteuid", "getuid", "mkfifo", "posix_fadvise", "posix_fallocate"),
    *("pread", "preadv", "pwrite", "pwritev", "readv", "register_at_fork", "sched_getaffinity"),
    *("statvfs", "sysconf", "uname", "writev"),
)


def hide():
    """Hides the modules and functions that Windows lacks."""
    for name in _MODULES:
        sys.modules[name] = None
    for name in _FUNCTIONS:
        if hasattr(os, name):
            delattr(os, name)
    os.supports_dir_fd = os.supports_fd = os.supports_follow_symlinks = set()
    os.open = _opening(os.open)


def _opening(real):
    def opened(path, flags, mode=0o777, *, dir_fd=None):
        if dir_fd is not None:
            raise NotImplementedError("dir_fd unavailable on this platform")
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", path)
        return real(path, flags, mode)

    return opened


if __name__ == "__main__":
    jax.block_until_ready(jax.numpy.zeros(2))  # starts JAX's threads
    hide()
    exec(compile(sys.stdin.read(), "<stdin>", "exec"), {"__name__": "__main__"})

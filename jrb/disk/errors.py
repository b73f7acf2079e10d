"""What can be wrong with files."""


class DamagedError(ValueError):
    """A file is not what was written: cut short, changed, or missing."""


class LockedError(RuntimeError):
    """Another process, or another thread, is writing there."""

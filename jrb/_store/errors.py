"""What can be wrong with files."""


class DamagedError(ValueError):
    """A file is not what was written: cut short, changed, or missing."""


class LockedError(RuntimeError):
    """Another process, or another thread, is writing there."""


class StaleError(ValueError):
    """What a state speaks of is not there any more: rows on the host were overwritten since."""


class LostWarning(UserWarning):
    """Some of the oldest rows that a commit had promised are gone: the ring came round to them."""

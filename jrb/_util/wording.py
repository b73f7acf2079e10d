"""Numbers as people read them; without JAX."""

_UNITS = ("B", "kB", "MB", "GB", "TB")


def bytes_text(count: float) -> str:
    """`1.5 MB` for 1500000."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"

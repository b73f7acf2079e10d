"""Numbers as words."""


def number(value: float) -> str:
    """`1,234`, `0.0123`, `1.2e-07`: three digits that matter, and all of an integer; `nan`."""
    value = float(value)
    if value.is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.3g}"


def percent(share: float) -> str:
    """`34 %` for 0.34; one digit more below 10 %, and `below 0.1 %` for what is not nothing."""
    if 0 < share < 0.001:
        return "below 0.1 %"
    if 0.999 < share < 1:
        return "above 99.9 %"
    return f"{100 * share:.{0 if share >= 0.1 or share == 0 else 1}f} %"


def count(amount: int, one: str, many: str = "") -> str:
    """`1 episode`, `1,234 episodes`."""
    return f"{amount:,} {one if amount == 1 else many or one + 's'}"


def leaf(name: str) -> str:
    """The name of a leaf, as it is shown; the whole item has no name."""
    return "the item" if name == "." else name.replace("/", " / ")

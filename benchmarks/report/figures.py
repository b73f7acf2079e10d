"""Formats numbers for people."""

from typing import Any

_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_TIMES = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def figure(value: float) -> str:
    """Three figures, with commas between thousands."""
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"


def power(n: int) -> str:
    """`10^6` as people write it; other numbers with commas."""
    digits = str(n)
    exact = digits == "1" + "0" * (len(digits) - 1) and n >= 1000
    return f"10{str(len(digits) - 1).translate(_RAISED)}" if exact else f"{n:,}"


def seconds(value: float) -> str:
    """A time in the unit in which it is 1 or more."""
    scale, unit = next(((s, u) for s, u in _TIMES if value >= s), _TIMES[-1])
    return f"{figure(value / scale)} {unit}"


def told(value: float | None, unit: str) -> str:
    """A value with its unit, a number of things without; a dash for what is not known."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return seconds(value) if unit == "s" else f"{figure(value)} {unit}"


def ratio(value: float) -> str:
    """Two figures after the point, or more where there would be none."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def fact(value: Any) -> str:
    """A size, or a word."""
    return power(value) if isinstance(value, int) else str(value)


def sizes(facts: dict[str, Any], names: list[str]) -> list[str]:
    """Some facts with their names, without those that are empty; words speak for themselves."""
    found = {name: facts[name] for name in names if facts.get(name, "") != ""}
    return [f"{name} {power(v)}" if isinstance(v, int) else str(v) for name, v in found.items()]

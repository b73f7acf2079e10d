"""Formats numbers for reports."""

from typing import Any

_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_TIMES = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def figure(value: float) -> str:
    """Formats a number with about three figures, with commas between thousands."""
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"


def power(n: int) -> str:
    """Formats a power of ten with a raised exponent, other numbers with commas."""
    digits = str(n)
    exact = digits == "1" + "0" * (len(digits) - 1) and n >= 1000
    return f"10{str(len(digits) - 1).translate(_RAISED)}" if exact else f"{n:,}"


def seconds(value: float) -> str:
    """Formats a time in the largest unit in which it is at least 1."""
    scale, unit = next(((s, u) for s, u in _TIMES if value >= s), _TIMES[-1])
    return f"{figure(value / scale)} {unit}"


def told(value: float | None, unit: str) -> str:
    """Formats a value with its unit, an integer without one, and None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return seconds(value) if unit == "s" else f"{figure(value)} {unit}"


def ratio(value: float) -> str:
    """Formats a ratio with two decimals, or two significant figures below 0.1."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def fact(value: Any) -> str:
    """Formats a fact: a size or a word."""
    return power(value) if isinstance(value, int) else str(value)


def sizes(facts: dict[str, Any], names: list[str]) -> list[str]:
    """Formats facts that are not empty: numbers with their names, words without."""
    found = {name: facts[name] for name in names if facts.get(name, "") != ""}
    return [f"{name} {power(v)}" if isinstance(v, int) else str(v) for name, v in found.items()]

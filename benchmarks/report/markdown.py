"""Formats results as Markdown tables: a row per case, a column per peer."""

from typing import Any

from . import figures

Row = dict[str, Any]
HOST = "†"
HOST_NOTE = f"{HOST} works on the host, called from Python; batches stay there unless it says so."


def section(result: Row) -> str:
    """Formats a group: its description, its table, notes on the peers, and the machine."""
    head = [f"## {result['group']}", result["about"], table(result["rows"])]
    return "\n\n".join(part for part in [*head, notes(result), machine(result)] if part)


def lead() -> str:
    """Returns the introduction, which says how to read the tables."""
    return (
        "Medians over rounds in which all programs of a row take turns. In brackets: the time of "
        "the first column over that of the peer, the median over rounds; below 1, the first column "
        "is faster."
    )


def table(rows: list[Row]) -> str:
    """Formats a table, below the facts that all its rows share.

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("table: expected some rows, got none.")
    varying, same = facts(rows)
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    hosts = {row["peer"] for row in rows if not row["on_device"]}
    heads = [f"{peer} {HOST}" if peer in hosts else peer for peer in peers]
    lines = [["", *varying, *heads], [":--"] + ["--:"] * (len(varying) + len(peers))]
    for cells in by_case(rows):
        first = next(iter(cells.values()))
        sizes = [figures.fact(first["facts"].get(name, "")) for name in varying]
        lines.append([first["what"], *sizes, *(_cell(cells.get(peer)) for peer in peers)])
    told = "; ".join(figures.sizes(same, list(same)))
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"All: {told}.\n\n{body}" if told else body


def facts(rows: list[Row]) -> tuple[list[str], dict[str, Any]]:
    """Returns the names of the facts in which rows differ, and the facts that all rows share."""
    names = list(dict.fromkeys(name for row in rows for name in row["facts"]))
    values = {name: {row["facts"].get(name, "") for row in rows} for name in names}
    varying = [name for name in names if len(values[name]) > 1]
    return varying, {name: values[name].pop() for name in names if name not in varying}


def by_case(rows: list[Row]) -> list[dict[str, Row]]:
    """Returns the rows of each case by peer."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(f"{row['what']} {row['facts']}", {})[row["peer"]] = row
    return list(found.values())


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "failed" in row:
        return "failed"
    ratio = row.get("ratio")
    value = figures.told(row["median"], row["unit"])
    return value if ratio is None else f"{value} ({figures.ratio(ratio)})"


def notes(result: Row) -> str:
    """Formats the notes on the peers of a table, and their errors, as a list."""
    rows = result["rows"]
    told = [HOST_NOTE] if any(not row["on_device"] for row in rows) else []
    names = dict.fromkeys(row["peer"] for row in rows)
    told += [
        f"{name}: {result['notes'][name]}." for name in names if name in result.get("notes", {})
    ]
    failed = [f"{row['peer']}, {row['what']}: {row['failed']}" for row in rows if "failed" in row]
    told += dict.fromkeys(failed)
    return "\n".join(f"- {line}" for line in told)


def machine(result: Row) -> str:
    """Formats the machine of a result and the versions of the libraries."""
    where = result["machine"]
    cores = f", {where['cores']} cores" if where.get("cores") else ""
    versions = where.get("versions", {"jax": where["jax"]})
    names = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    copied = f", copies {where['copy_gb_s']:.1f} GB/s" if where.get("copy_gb_s") else ""
    quick = " A quick run: figures are rough." if result.get("quick") else ""
    return (
        f"{where['device']} ({where['processor']}{cores}{copied}); Python {where['python']}, "
        f"{names}.{quick}"
    )

"""`jrb inspect`, which describes a path, and `jrb stats`, which sums up the episodes there.

jrb's own files are described without importing JAX or reading rows.

A report is the dict that `--json` prints, with the entries of `_BLANK`. Leaves are dicts with
`name`, `dtype`, `shape` and `nbytes`: dtype and shape of one item, and the bytes of all items.
"""

import importlib
import json as json_
import os
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np

from jrb._store import commits
from jrb._store.commits import Generation
from jrb._store.files import DamagedError
from jrb._util.wording import bytes_text, require
from jrb.checkpoint import manifest
from jrb.cli import console, sources

typer: Any = require("typer", "cli")

_LONGEST = 200
"""The maximum number of characters that are shown of a metadata entry."""

_ITEMS = ("storage/", "items/")
"""The beginnings of the names of arrays with items."""

_BLANK: dict[str, Any] = {
    **dict.fromkeys(("path", "kind", "description", "size", "capacity", "num_envs", "nbytes")),
    **dict.fromkeys(("disk", "episodes", "transitions")),
    **dict.fromkeys(("generations", "leaves", "others", "extra", "notes"), ()),
    "metadata": {},
    "parts": {},
}
_FACTS = ("description", "size", "capacity", "num_envs")
_NOTES = {
    "encoded": "Items are encoded by {encode}: load(path, decode=...).",
    "objects": "Items are Python objects.",
    "apart": "{count} items were left out: load(path, items=...).",
}

Report = dict[str, Any]

_BLOCKS, _BINS = "▁▂▃▄▅▆▇█", 16
_ROWS = ("count", "min", "median", "mean", "max", "std")


def inspect(
    path: Annotated[str, sources.SOURCE],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Save a plot of the buffer as PNG or SVG.",
            callback=sources.picture_path,
        ),
    ] = None,
    state: sources.State = None,
) -> None:
    """Show the contents of PATH."""
    # Only the report of a folder needs no JAX.
    kind = sources.kind_of(path)
    if kind == sources.FOLDER:
        saved = commits.open_generation(path).generation
        report = _report_folder(path, saved, saved.meta)
    else:
        report = _report_file(path) if kind == sources.FILE else _report_dataset(path)
    if plot is not None:
        _save_plot(path, kind, plot, state)
    if json:
        console.write_json(report)
    else:
        console.show(*_render(report))


def _save_plot(path: str, kind: str, file: str, number: str | None) -> None:
    jrb: Any = importlib.import_module("jrb")
    # Items of 64 bits are plotted as such.
    with importlib.import_module("jrb.authoring").enable_x64():
        if kind == sources.OTHER:
            buffer, state = sources.open_dataset(path).buffer()
        else:
            buffer, state = sources.load_buffer(path, number)
        if not isinstance(buffer, jrb.ReplayBuffer):
            raise ValueError(
                f"{path}: expected a single buffer for --plot, got several. Load them with "
                "jrb.load, and plot one with jrb.plot.state."
            )
        state = importlib.import_module("jrb.read").one_state(path, state, None)
        jrb.plot.state(buffer, state).savefig(file, dpi=150)


def bytes_on_disk(path: str) -> int:
    """Returns the number of bytes on disk of a file, or of all files in a folder."""
    # Blocks have 512 bytes; sparse files have fewer than their length needs.
    files = [os.path.join(at, name) for at, _, names in os.walk(path) for name in names] or [path]
    return sum(os.stat(file).st_blocks * 512 for file in files if os.path.exists(file))


def _leaf(name: str, dtype: str, shape: Any, nbytes: int) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": list(shape), "nbytes": int(nbytes)}


def _report_folder(path: str, saved: Generation, meta: dict[str, Any], prefix: str = "") -> Report:
    """Returns the report of a generation of a checkpoint or a store, or of a part of one."""
    facts, form, parts = meta.get("facts") or {}, meta.get("form") or {}, meta.get("parts", {})
    # List the arrays of this part, with type and bytes: small ones, then large ones in blocks.
    # Arrays without a type are a store's own records.
    arrays = {name: (it.kind, len(it.data)) for name, it in saved.small.items()}
    specs = {name: table.spec for name, table in saved.large.items()}
    arrays |= {name: (it.kind, it.rows * it.width) for name, it in specs.items()}
    own = [
        _leaf(name.removeprefix(prefix), kind[0], json_.loads(kind[1]), nbytes)
        for name, (kind, nbytes) in sorted(arrays.items())
        if name.startswith(prefix) and kind
    ]
    # Tell the arrays of items, the state and the user's own data apart by their names.
    others = [it for it in own if not it["name"].startswith((".", *_ITEMS)) and not parts]
    extra = [it for it in own if it["name"].startswith(manifest.EXTRA)]
    leaves = [_leaf(*leaf) for leaf in manifest.item_leaves(meta)]
    notes = [_NOTES[form["kind"]].format_map(form)] if form.get("kind") in _NOTES else []
    kind = str(meta.get("kind"))
    entries = {
        "path": path,
        "kind": {"buffer": "checkpoint"}.get(kind, kind),
        **{name: facts.get(name) for name in _FACTS},
        "nbytes": sum(leaf["nbytes"] for leaf in own),
        "leaves": leaves,
        "others": others,
        "extra": [leaf | {"name": leaf["name"].removeprefix(manifest.EXTRA)} for leaf in extra],
        "notes": notes,
        "metadata": {"versions": facts.get("versions")} if facts else {},
        "parts": {
            name: _report_folder(path, saved, part, manifest.prefix_of(prefix, name))
            for name, part in parts.items()
        },
    }
    # Files and generations are those of the whole folder.
    if not prefix:
        entries |= {"disk": bytes_on_disk(path), "generations": list(_generations(path))}
    return _BLANK | entries


def _generations(path: str) -> Iterator[dict[str, Any]]:
    """Yields the number, time and size of each generation, oldest first; or its damage."""
    for number in commits.list_generations(commits.open_folder(path)):
        entry = {"generation": number, "time": None, "size": None, "damage": None}
        try:
            facts = manifest.metadata(path, number)
            yield entry | {name: facts.get(name) for name in ("time", "size")}
        except (DamagedError, FileNotFoundError) as error:
            yield entry | {"damage": str(error)}


def _report_dataset(path: str) -> Report:
    # The bytes of a leaf are those of one transition times their number.
    dataset = sources.open_dataset(path)
    authoring, jax = importlib.import_module("jrb.authoring"), importlib.import_module("jax")
    names, specs = authoring.leaf_names(dataset.spec), jax.tree.leaves(dataset.spec)
    nbytes = [dataset.transitions * authoring.tree_nbytes(leaf) for leaf in specs]
    return _BLANK | {
        "path": path,
        "kind": dataset.format.name,
        "nbytes": dataset.nbytes,
        "disk": bytes_on_disk(path),
        "episodes": dataset.episodes,
        "transitions": dataset.transitions,
        "leaves": [
            _leaf(name, str(spec.dtype), spec.shape, size)
            for name, spec, size in zip(names, specs, nbytes, strict=True)
        ],
        "notes": list(dataset.notes),
        "metadata": dict(dataset.metadata),
    }


def _report_file(path: str) -> Report:
    """Returns the report of a checkpoint in one HDF5 file: that of a dataset, with more entries."""
    report = _report_dataset(path)
    facts = importlib.import_module("jrb.checkpoint").metadata(path)
    saved = {"generation": 0, "time": facts.get("time"), "size": facts.get("size"), "damage": None}
    entries = {"kind": "checkpoint in HDF5", "generations": [saved]}
    entries["metadata"] = {"versions": facts.get("versions")}
    return report | {name: facts.get(name) for name in _FACTS} | entries


def _render(report: Report, indent: str = "") -> Iterator[Any]:
    """Yields the texts and tables that show a report, from top to bottom."""
    padding = importlib.import_module("rich.padding").Padding
    shift = lambda block: padding(block, (0, 0, 0, len(indent)), expand=False)
    yield shift(console.plain(f"{report['path']}: {report['kind']}", "bold"))
    yield shift(console.fact_table(_fact_rows(report)))
    # Make the contents of all sections; those without rows are left out below.
    generations = [
        (
            str(each["generation"] or ""),
            each["damage"] or (each["time"] or "").replace("T", " ").replace("+00:00", " UTC"),
            f"{each['size']:,}" if isinstance(each["size"], int) else str(each["size"] or ""),
        )
        for each in report["generations"]
    ]
    arrays = [leaf for leaf in report["others"] if leaf["shape"]]
    numbers = len(report["others"]) - len(arrays)
    sections: dict[str, list[Any]] = {
        "description": [console.plain(report["description"])] if report["description"] else [],
        "generations": [console.table(("number", "saved", "items"), generations, 1)],
        "items": [_leaf_table(report["leaves"])],
        "state" + (f" (and {numbers} numbers)" if numbers else ""): [_leaf_table(arrays)],
        "extra": [_leaf_table(report["extra"])],
        "notes": [console.plain(note) for note in report["notes"]],
    }
    # Show each section that has a row, indented below its name, then the parts of a composite.
    for name, content in sections.items():
        if any(getattr(block, "row_count", 1) for block in content):
            yield console.plain("")
            yield shift(console.plain(name, "bold"))
            yield from (
                padding(block, (0, 0, 0, len(indent) + 2), expand=False) for block in content
            )
    for name, part in report["parts"].items():
        yield console.plain("")
        yield shift(console.plain(f"part '{name}'", "bold"))
        yield from _render(part, indent + "  ")


def _leaf_table(leaves: list[dict[str, Any]]) -> Any:
    rows = [
        (
            leaf["name"],
            f"{leaf['dtype']}[{','.join(map(str, leaf['shape']))}]",
            bytes_text(leaf["nbytes"]),
        )
        for leaf in leaves
    ]
    return console.table(("leaf", "type", "memory"), rows, numbers=1)


def _fact_rows(report: Report) -> list[tuple[str, str]]:
    """Returns names and texts of a report's numbers and metadata; texts are empty for no value."""
    size, capacity, metadata = report["size"], report["capacity"], report["metadata"]
    count = lambda name: "" if report[name] is None else f"{report[name]:,}"
    text = count("size") if isinstance(size, int) else ""
    if capacity is not None and size is not None:
        share = f" ({100 * size / capacity:.0f} %)" if isinstance(size, int) else " each"
        text = f"{text or size} of {capacity:,}{share}"
    # Shorten long metadata, and put the versions of libraries last.
    versions = (metadata.get("versions") or {}).items()
    texts = ((name, _fact_text(fact)) for name, fact in metadata.items() if name != "versions")
    facts = [(name, text) for name, text in texts if text]
    cut = lambda text: text if len(text) <= _LONGEST else text[: _LONGEST - 4] + " ..."
    return [
        ("items", text),
        ("environments", count("num_envs")),
        ("episodes", count("episodes")),
        ("transitions", count("transitions")),
        ("as arrays", bytes_text(report["nbytes"])),
        ("on disk", "" if report["disk"] is None else bytes_text(report["disk"])),
        *((name, cut(text)) for name, text in facts),
        ("versions", ", ".join(f"{name} {number}" for name, number in versions)),
    ]


def _fact_text(fact: Any) -> str:
    """Returns a metadata entry as text; a space of Minari in Gymnasium's notation."""
    # Minari stores spaces as dicts with a type; those of several spaces are shown recursively.
    kind = fact.get("type") if isinstance(fact, dict) else None
    try:
        if kind == "Box":
            low, high = np.min(fact["low"]), np.max(fact["high"])
            return f"Box({low:g}, {high:g}, {tuple(fact['shape'])}, {fact['dtype']})"
        if kind in ("Discrete", "MultiBinary"):
            start = fact.get("start", 0)
            return f"{kind}({fact['n']}{f', start={start}' if start else ''})"
        if kind in ("Dict", "Tuple"):
            inner = fact["subspaces"]
            named = kind == "Dict"
            texts = [f"{name}: {_fact_text(one)}" for name, one in inner.items()] if named else None
            return f"{kind}({', '.join(texts or map(_fact_text, inner))})"
    except (KeyError, TypeError, ValueError, AttributeError):
        # This is no space, but another program's dict with a similar "type".
        pass
    return str(fact) if fact else ""


# Statistics.


def stats(
    path: Annotated[str, sources.SOURCE],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    where: Annotated[
        str | None,
        typer.Option(help="Only episodes such as 'return > 100 and length < 500 and complete'."),
    ] = None,
    state: sources.State = None,
) -> None:
    """Show returns, lengths and rewards of the episodes at PATH."""
    # Raise for a path that does not exist; then read the numbers in their own dtypes.
    sources.kind_of(path)
    with importlib.import_module("jrb.authoring").enable_x64():
        dataset = sources.open_dataset(path, state).where(where)
        running = dataset.facts.get("running", np.zeros(len(dataset), bool))
        counts = {"episodes": dataset.episodes, "transitions": dataset.transitions}
        counts |= {"complete": int(dataset.complete.sum()), "running": int(running.sum())}
        summaries = {name: summary(values) for name, values in _read_numbers(dataset).items()}
    if json:
        empty = {"returns": None, "rewards": None}
        console.write_json({"path": path, **empty, **counts, **summaries})
        return
    blocks = [console.plain(path, "bold")]
    blocks.append(console.fact_table([(name, f"{count:,}") for name, count in counts.items()]))
    # Show a column of statistics for each group of numbers, then its histogram in a line.
    some = {name: each for name, each in summaries.items() if each["count"]}
    if some:
        rows: list[list[str]] = []
        for name in _ROWS:
            values = [each[name] for each in some.values()]
            texts = [
                "" if it is None else f"{it:,}" if name == "count" else f"{it:.5g}" for it in values
            ]
            rows.append([name, *texts])
        blocks += [console.plain(""), console.table(["", *some], rows, numbers=len(some))]
    histograms = [
        (name, f"{each['min']:.5g} {bars(each['histogram'])} {each['max']:.5g}")
        for name, each in some.items()
        if each["min"] != each["max"]
    ]
    blocks += [console.plain(""), console.fact_table(histograms)] if histograms else []
    console.show(*blocks)


def _read_numbers(dataset: Any) -> dict[str, np.ndarray]:
    """Returns the lengths and returns of complete episodes, and the rewards of all steps.

    If a reward has several leaves or numbers, each of them is a separate entry.
    """
    complete = dataset.only(dataset.numbers[dataset.complete])
    arrays = {"lengths": complete.lengths}
    if "reward" in dataset.spec["next"]:
        # Concatenate the rewards of all episodes, leaf by leaf.
        jax = importlib.import_module("jax")
        every = list(dataset.format.rewards(dataset.source, dataset.numbers.tolist()))
        rows = [
            jax.tree.map(lambda leaf, n=n: leaf[:n], reward)
            for reward, n in zip(every, dataset.lengths.tolist(), strict=True)
        ]
        concat = lambda *leaves: np.concatenate(leaves)
        rewards = jax.tree.map(concat, *rows) if rows else np.zeros(0)
        # Name each number of each leaf.
        summed = {"returns": complete.returns(), "rewards": rewards}
        for path, values in jax.tree_util.tree_leaves_with_path(summed):
            name = importlib.import_module("jrb.authoring").leaf_name(path)
            parts = values.reshape(len(values), -1) if values.ndim > 1 else values[:, None]
            for place in range(parts.shape[1]):
                arrays[name if values.ndim == 1 else f"{name}[{place}]"] = parts[:, place]
    return arrays


def summary(values: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """Returns statistics of the finite numbers, None if there are none, and a histogram."""
    array = np.asarray(values, np.float64)
    # Statistics are of the finite numbers, of which there may be none.
    fine = array[np.isfinite(array)]
    names = {"min": np.min, "median": np.median, "mean": np.mean, "max": np.max, "std": np.std}
    numbers = {name: float(of(fine)) if len(fine) else None for name, of in names.items()}
    counts = np.histogram(fine, _BINS)[0] if len(fine) else np.zeros(0, int)
    return {"count": len(array), "finite": len(fine), **numbers, "histogram": counts.tolist()}


def bars(counts: list[int]) -> str:
    """Returns a bar chart of one character per count, as high as the count; blank for 0."""
    # The highest count has the highest character, and any count above 0 at least the lowest.
    most = max(counts, default=0)
    level = lambda count: -(-count * len(_BLOCKS) // most) - 1
    return "".join(_BLOCKS[level(count)] if count else " " for count in counts)

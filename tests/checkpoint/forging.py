"""Forged metadata of checkpoints: changed values with correct checksums."""

import json
import struct
import zlib

import h5py
import numpy as np

VALUES = [
    *(None, True, False, -1, 0, 1, -5, 2**31, 2**63, 10**30, 0.5, float("nan"), float("inf")),
    *("", "3", "\0", "../x", "uint7", "float64", [], [[]], [1, 2, 3], ["x", "y"], {}, {"x": 1}),
    *({"part": "os:path", "fields": {}}, {"tuple": 3}, {"named": []}, {"leaf": ["float32", [-1]]}),
]
"""Replacements for a value."""


def places(node, where=()):
    """Yields the path of each value in a tree of JSON."""
    keys = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key, value in ((key, node[key]) for key in keys):
        yield (*where, key)
        yield from places(value, (*where, key))


def mutants(tree, rng, count):
    """Yields changed copies of a tree: one value replaced, removed, nested or enlarged."""
    every = list(places(tree))
    for _ in range(count):
        copy = json.loads(json.dumps(tree))
        *above, last = where = rng.choice(every)
        node = copy
        for key in above:
            node = node[key]
        kind = rng.choice(["value", "value", "value", "missing", "nested", "far"])
        if kind == "missing":
            del node[last]
        elif kind == "far":
            node[last] = node[last] * 1000 if isinstance(node[last], int) else [node[last]] * 2
        else:
            node[last] = [node[last]] if kind == "nested" else rng.choice(VALUES)
        if copy != tree:
            yield f"{kind} {where}: {node[last] if kind != 'missing' else ''!r}", copy


def parsed(data):
    """Returns the head, the body and the remaining bytes of a generation's file."""
    first, rest = data.split(b"\n", 1)
    head = json.loads(first)
    return head, json.loads(rest[: head["size"]]), rest[head["size"] :]


def packed(head, body, rest):
    """Returns a generation's file, with the body's length and checksum in the head."""
    text = json.dumps(body).encode() + b"\n"
    whole = {"size": len(text), "sum": zlib.crc32(text)}
    head = {**head, **whole} if isinstance(head, dict) else head
    return json.dumps(head, separators=(",", ":")).encode() + b"\n" + text + rest


def forge_h5(path, about=None, attributes=None):
    """Changes the metadata of an HDF5 checkpoint: its JSON, or attributes by group and name."""
    with h5py.File(path, "r+", locking=False) as file:
        for (group, name), value in (attributes or {}).items():
            del file[group].attrs[name]
            if value is not None:
                file[group].attrs[name] = value
        if about is not None:
            del file["jrb"]
            text = np.frombuffer(json.dumps(about).encode(), np.uint8)
            file["jrb"] = text
            file["jrb"].attrs["dtype"] = "uint8"
    seal_h5(path)


def seal_h5(path):
    """Appends a correct checksum; HDF5 has truncated the old one."""
    data = path.read_bytes()
    path.write_bytes(data + struct.pack("<8sIQ", b"jrb-crc1", zlib.crc32(data), len(data)))


def generation_at(path):
    """Returns the path of the newest generation's file in a folder."""
    return path / max(p.name for p in path.glob("generation-*"))

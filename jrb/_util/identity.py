"""A short name of a description, by which what was made with it is told from what was not."""

import dataclasses
import functools
import hashlib
import os
from typing import Any

import numpy as np


@functools.lru_cache(maxsize=1024)
def identity(description: Any, *left_out: str) -> str:
    """A text such as "ReplayBuffer(capacity=64, num_envs=4) 5f0a6c9d81e2".

    Equal descriptions have the same one, in every process and after pickling. Functions count by
    their names: a lambda that is made anew in each call of a function is the same one.

    Args:
        description: a dataclass.
        left_out: the names of its fields that do not count.
    """
    fields = {
        field.name: getattr(description, field.name)
        for field in dataclasses.fields(description)
        if field.name not in left_out
    }
    digest = hashlib.blake2b(_text(tuple(fields.values())).encode(), digest_size=6).hexdigest()
    sizes = ", ".join(f"{name}={value}" for name, value in fields.items() if type(value) is int)
    return f"{_class_name(description)}({sizes}) {digest}"


def _text(value: Any) -> str:
    """What a value says of itself, alike for values that are equal."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int | float):  # True == 1 == 1.0
        return repr(int(value) if value == value // 1 else value)
    if isinstance(value, np.dtype):
        return repr(value.name)
    if value is None or isinstance(value, str | bytes | os.PathLike):
        return repr(value)
    if isinstance(value, tuple):
        return "(" + ",".join(map(_text, value)) + ")"
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        entries = (getattr(value, field.name) for field in dataclasses.fields(value))
        return _class_name(value) + _text(tuple(entries))
    return _class_name(value)  # of no known fields; its repr may say where it lies in memory


def _class_name(value: Any) -> str:
    """The name of its class; of a private one, that of the class below which it is."""
    return next(cls.__name__ for cls in type(value).__mro__ if not cls.__name__.startswith("_"))

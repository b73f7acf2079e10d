r"""Texts for people: safe characters, sizes, and hints in errors. Nothing here needs JAX.

A terminal obeys control characters, shows text between bidirectional ones in another order, and
cannot print lone surrogates. They are shown as Python writes them: `\x1b`, `\u202e`. Text for
people that comes from files goes through `printable`, and errors of functions that read files
through `escape_errors`.
"""

import contextlib
import difflib
import importlib
import inspect
import re
import unicodedata
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, NoReturn

_MAKE = "jrb.ReplayBuffer(capacity, num_envs=..., batch_size=..., sampler=..., unit=...)"

_GROUPS = {  # flashbax, TorchRL, Stable-Baselines3, cpprb
    "capacity, the transitions over all environments": (
        "max_length max_size buffer_size maxsize replay_capacity"
    ),
    "capacity where a buffer is made, and buffer.size(state) what it holds,": "size",
    "batch_size": "sample_batch_size",
    "num_envs": "add_batch_size n_envs num_environments",
    "min_size": "min_length min_length_time_axis learning_starts",
    "unit=jrb.Sequence(length)": "sample_sequence_length sequence_length slice_len num_slices",
    "unit=jrb.NStep(n, discount)": "n_step nstep n_steps add_sequences update_horizon",
    "unit=jrb.FrameStack(k)": "frame_stack stack_size stack_compress",
    "sampler=jrb.Prioritized(alpha=..., beta=...)": "prioritized prioritised alpha beta eps",
    "stride": "period",
    "discount": "gamma",
    "alpha, of jrb.Prioritized": "priority_exponent",
    "beta, of jrb.Prioritized": "importance_sampling_exponent",
    "storage=jrb.DeviceStorage(share_next_observations=True)": "optimize_memory_usage",
    "keys=jrb.Keys(terminated=..., truncated=...)": "handle_timeout_termination",
    "init(example), which tells shapes and dtypes": "observation_space action_space env_dict",
    "transforms": "transform collate_fn",
    "jrb.prefetch": "pin_memory",
    "the device of JAX, which jax.default_device sets,": "device",
    "the key of sample(state, key)": "seed rng generator",
    "add": "push append store insert put",
    "update_priority": "update_priorities set_priorities update_tensordict_priority",
    "empty": "reset clear",
    "jrb.save and jrb.load": "state_dict load_state_dict dumps loads dump",
    "size(state)": "is_full full pos ptr current_index",
    "data": "experience",
    "a leaf of sample.data": (
        "observation action reward done next_observation observations actions rewards dones "
        "next_observations obs next_obs terminated truncated"
    ),
    "weights": "is_weights _weight importance_weights",
    "indices": "index idxs idx",
    _MAKE: (
        "make_flat_buffer make_item_buffer make_trajectory_buffer TensorDictReplayBuffer "
        "DictReplayBuffer"
    ),
    f"{_MAKE} with sampler=jrb.Prioritized()": (
        "make_prioritised_flat_buffer make_prioritised_trajectory_buffer PrioritizedReplayBuffer "
        "TensorDictPrioritizedReplayBuffer PrioritizedSampler"
    ),
    "jrb.DeviceStorage": "LazyTensorStorage TensorStorage",
    "jrb.MemmapStorage": "LazyMemmapStorage",
    "jrb.Sequence": "SliceSampler make_trajectory_queue",
    "jrb.Hindsight": "HerReplayBuffer",
    "jrb.Mix": "make_mixer ReplayBufferEnsemble",
    "jrb.WithoutReplacement": "SamplerWithoutReplacement",
    "jrb.Uniform": "RandomSampler",
}
NAMES = {name: mend for mend, names in _GROUPS.items() for name in names.split()}
"""A dict from names in other libraries to what replaces each in jrb."""


def hint(name: str, names: Iterable[str] = ()) -> str:
    """Returns a sentence on what to use instead of an unknown name; "" if there is no hint."""
    if name in NAMES:
        return f" {name} is {NAMES[name]} here."
    # Else the name may be misspelled.
    close = difflib.get_close_matches(name, names, 1)
    return f" Did you mean {close[0]}?" if close else ""


def refuse_attribute(thing: Any, name: str) -> NoReturn:
    """Raises `AttributeError` with a hint; public classes use it as their `__getattr__`."""
    text = f"{type(thing).__name__!r} object has no attribute {name!r}"
    text += f".{hint(name)}" if name in NAMES else ""
    raise AttributeError(text, name=name, obj=thing)


def wrong_arguments(cls: type, error: TypeError, names: Iterable[str]) -> TypeError:
    """Returns an error about unknown arguments of a class; `error` itself if all are known."""
    fields = list(inspect.signature(cls).parameters)
    unknown = [name for name in names if name not in fields]
    if not unknown:
        return error
    mends = "".join(hint(name, fields) for name in unknown)
    got = ", ".join(unknown)
    return TypeError(f"{cls.__name__}: expected {', '.join(fields)}, got {got}.{mends}")


def bytes_text(count: float) -> str:
    """Returns `1.5 MB` for 1500000."""
    units = ("B", "kB", "MB", "GB", "TB")
    unit = 0
    while count >= 1000 and unit < len(units) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} {units[unit]}" if unit == 0 else f"{count:.1f} {units[unit]}"


def require(module: str, extra: str) -> ModuleType:
    """Imports and returns a module that an extra of the package installs.

    Raises:
        ModuleNotFoundError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    # The missing module may be one that `module` itself imports.
    except ModuleNotFoundError as error:
        package = (error.name or module).partition(".")[0]
        raise ModuleNotFoundError(
            f"{package} is not installed. It comes with the extra '{extra}': "
            f"pip install 'jrb[{extra}]'",
            name=error.name,
        ) from error


_HIDDEN = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}  # controls, formats, surrogates, separators
_INVISIBLE = re.compile(  # of other categories, such as variation selectors and fillers
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]"
)


def printable(text: str, keep: str = "\n") -> str:
    """Returns a text in which characters that control a terminal or are invisible are escaped.

    Args:
        text: any string.
        keep: characters that are not escaped; "" for a text of one line.
    """
    # Most texts need no change.
    if text.isprintable() and not _INVISIBLE.search(text):
        return text
    # Escape each hidden character as Python does.
    characters = []
    for character in text:
        is_hidden = unicodedata.category(character) in _HIDDEN or _INVISIBLE.match(character)
        if is_hidden and character not in keep:
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)


def width_of(text: str) -> int:
    """Returns the columns of a terminal that a printable text takes."""
    # East Asian wide characters take two columns, and combining ones none.
    widths = (1 + (unicodedata.east_asian_width(character) in "WF") for character in text)
    return sum(widths) - sum(unicodedata.combining(character) > 0 for character in text)


def printable_args(args: tuple[object, ...]) -> tuple[object, ...]:
    """Returns the arguments of an error with all texts among them made printable."""
    return tuple(printable(it) if isinstance(it, str) else it for it in args)


@contextlib.contextmanager
def escape_errors() -> Iterator[None]:
    """Makes the messages of errors, and of the errors that caused them, printable."""
    try:
        yield
    except Exception as error:
        # Change the errors in place, as their classes and tracebacks must stay.
        cause: BaseException | None = error
        while cause is not None:
            cause.args = printable_args(cause.args)
            cause = cause.__cause__
        raise

r"""How text that comes from files is made fit to be shown.

A terminal obeys control characters, shows text between bidirectional ones in another order, and
cannot print lone surrogates. They are shown as Python writes them: `\x1b`, `\u202e`. Text for
people goes through `printable`, and errors of functions that read files through `escaped_errors`.
"""

import contextlib
import re
import unicodedata
from collections.abc import Iterator

_HIDDEN = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}  # controls, formats, surrogates, separators
_INVISIBLE = re.compile(  # of other categories, such as variation selectors and fillers
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]"
)


def printable(text: str, keep: str = "\n") -> str:
    """Returns a text without characters that steer a terminal or cannot be seen.

    Args:
        text: any string.
        keep: characters that stay; "" for a text of one line.
    """
    if text.isprintable() and not _INVISIBLE.search(text):
        return text
    characters = []
    for character in text:
        is_hidden = unicodedata.category(character) in _HIDDEN or _INVISIBLE.match(character)
        if is_hidden and character not in keep:
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)


def printable_args(args: tuple[object, ...]) -> tuple[object, ...]:
    """Returns the arguments of an error, the texts among them printable."""
    return tuple(printable(it) if isinstance(it, str) else it for it in args)


@contextlib.contextmanager
def escaped_errors() -> Iterator[None]:
    """Makes the messages of errors printable, also those of what caused them."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            cause.args = printable_args(cause.args)
            cause = cause.__cause__
        raise

"""Control characters in text from files are printed escaped."""

import sys
import unicodedata

import numpy as np
import pytest
from rich.cells import cell_len

import jrb
from jrb.authoring import escape_errors, printable
from jrb.checkpoint import DamagedError

HIDDEN = [
    *("\x00", "\x07", "\x1b]0;title\x07", "\x1b[2J", "\x7f", "\x9b31m", "\r", "\b"),
    *(chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F)),
    *("\u00ad", "\u061c", "\u200b", "\u2060", "\ufeff", "\ufe0f", "\u3164", "\U000e0041"),
    *("\u2028", "\u2029", "\ud800", "\udc80"),
]


@pytest.mark.parametrize("text", HIDDEN, ids=ascii)
def test_what_cannot_be_seen_is_escaped(text):
    shown = printable(f"a{text}b")
    assert shown.isascii() and shown.isprintable()
    assert shown.encode().decode("unicode_escape", "surrogatepass") == f"a{text}b"


def test_what_can_be_seen_stays():
    for text in ("a/b-1 [bold] \\x1b", "é ü 中文 ひらがな עברית العربية", "\u00a0\u3000", "🤖"):
        assert printable(text) == text
    assert (printable("a\nb"), printable("a\nb", "")) == ("a\nb", "a\\nb")


@pytest.mark.slow
def test_no_character_that_is_left_is_a_control_or_a_format():
    kept = printable("".join(map(chr, range(sys.maxunicode + 1))))
    assert {unicodedata.category(it) for it in kept} & {"Cc", "Cf", "Cs", "Co"} == {"Cc"}
    assert [it for it in kept if unicodedata.category(it) == "Cc"] == ["\n"]


def test_errors_and_what_caused_them_are_escaped():
    assert str(DamagedError("a\x1b[2J", 3).args[0]) == "a\\x1b[2J"

    @escape_errors()
    def read():
        try:
            raise OSError("no \u202e")
        except OSError as error:
            raise ValueError("leaf '\x9b'") from error

    with pytest.raises(ValueError, match=r"^leaf '\\x9b'$") as caught:
        read()
    assert str(caught.value.__cause__) == "no \\u202e"


def test_columns_are_aligned_where_characters_are_wide_or_combined():
    names = ["观察值", "ひらがな", "x", "e\u0301toile", "한국어"]
    state = jrb.ReplayBuffer(4).init({name: np.float32(0) for name in names})
    places = {
        cell_len(line[: line.index("float32[4]")])
        for line in repr(state).splitlines()
        if "float32[4]" in line
    }
    assert len(places) == 1

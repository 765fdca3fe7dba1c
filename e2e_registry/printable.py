"""Text from outside, such as names of processes and what a recipe printed, as a terminal shows and does not obey it."""

from __future__ import annotations

import re

#: Control characters but tab and line end, marks and separators that reorder or break lines, and halves of characters.
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_BREAKING = re.compile("[\t\n]")


def printable(text: str) -> str:
    r"""Return text with what would steer a terminal written as escapes (``\x1b``); lines and tabs stay."""
    return STEERING.sub(_escaped, text)


def printable_line(text: str) -> str:
    """Return text as :func:`printable` does, on one line."""
    return _BREAKING.sub(_escaped, printable(text))


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()

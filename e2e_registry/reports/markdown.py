"""Writes text from anywhere as Markdown that shows it literally.

Names of metrics, values and log lines come from whatever a pull request ran. Every character that could begin a
structure is written as a character reference, which Markdown takes as text alone.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

#: A step's summary holds 1 MiB at most; GitHub refuses a larger one whole.
MAX_CHARACTERS = 400_000
MAX_LOG_LINES = 40
LONGEST_CELL = 200
_LONGEST_LINE = 300


def text(value: object, limit: int = LONGEST_CELL) -> str:
    """Return a value as Markdown that shows it literally and on one line, clipped to ``limit`` characters."""
    shown = str(value)
    shown = shown if len(shown) <= limit else shown[: limit - 1] + "…"
    return "".join(_literal(character) for character in shown)


def code(value: object, limit: int = LONGEST_CELL) -> str:
    """Return a value as :func:`text` in the fixed-width font; nothing in it is taken for a mention or a link."""
    return f"<code>{text(value, limit)}</code>"


def _literal(character: str) -> str:
    if character.isascii() and (character.isalnum() or character in " ,="):
        return character
    category = unicodedata.category(character)
    if category[0] == "C" or category in ("Zl", "Zp"):  # control, direction, surrogate; ends of a line or paragraph
        return "".join(_literal(c) for c in character.encode("unicode_escape", "backslashreplace").decode("ascii"))
    return f"&#{ord(character)};" if character.isascii() else character


def preformatted(value: str, max_lines: int = MAX_LOG_LINES) -> str:
    """Return the last lines of a log as an HTML block, which nothing in it can end."""
    lines = [text(line, _LONGEST_LINE) for line in value.splitlines()]
    # A blank line would not end the block, but an indented one looks like code to some renderers.
    return "<pre>" + "\n".join(line or " " for line in lines[-max_lines:]) + "</pre>"


def bounded(lines: Sequence[str]) -> str:
    """Join whole lines up to the limit, so that no tag or row is cut in the middle."""
    kept, size = [], 0
    for line in lines:
        size += len(line) + 1
        if size > MAX_CHARACTERS:
            kept += ["", "… and more: the artifacts hold the whole results"]
            break
        kept.append(line)
    return "\n".join(kept) + "\n"

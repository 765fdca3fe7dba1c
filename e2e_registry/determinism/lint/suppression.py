"""Suppressions: ``# e2e: allow DET004 -- reason``, on the line of the finding or alone on the line above it."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from e2e_registry.determinism.lint.catalogue import META, find
from e2e_registry.determinism.lint.meta import BadSuppression, UnusedSuppression
from e2e_registry.errors import UsageError

_COMMENT = re.compile(r"(?<!`)#\s*e2e:\s*allow\b(?P<codes>.*?)(?:--(?P<reason>.*))?$")


@dataclass(slots=True)
class Suppression:
    """One comment.

    Attributes:
        line: The line the comment stands on, from 1.
        column: Its first character, from 1.
        end_column: The character after its last one, from 1.
        target: The line of code that it is about: its own, or the next one if it stands alone.
        codes: The codes that it allows.
        problem: Why it does not count, if it does not.
        used: The codes that it has suppressed so far.
    """

    line: int
    column: int
    end_column: int
    target: int
    codes: tuple[str, ...]
    problem: str | None
    used: set[str] = field(default_factory=set)

    def covers(self, code: str, first: int, last: int, statement_lines: Sequence[int]) -> bool:
        """Whether the suppression is about a finding of ``code``.

        Args:
            code: The finding's code.
            first: First line of the flagged code.
            last: Last line of it.
            statement_lines: First and last line of its statement, where people also put comments.
        """
        is_near = first <= self.target <= last or self.target in statement_lines
        return self.problem is None and code in self.codes and is_near


def read_suppressions(text: str, lines: Sequence[str]) -> list[Suppression]:
    """Find the suppressions in a file that parses; strings that merely look like one are not comments."""
    if "e2e:" not in text:
        return []
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [found for token in tokens if token.type == tokenize.COMMENT for found in _parse(token, lines)]


def _parse(token: tokenize.TokenInfo, lines: Sequence[str]) -> Iterator[Suppression]:
    match = _COMMENT.search(token.string)
    if match is None:
        return
    line, start = token.start
    words = [word for word in re.split(r"[,\s]+", match["codes"]) if word]
    codes, problem = _read_codes(words)
    if problem is None and not (match["reason"] or "").strip():
        problem = "has no reason"
    stands_alone = not lines[line - 1][:start].strip()
    yield Suppression(
        line=line,
        column=start + match.start() + 1,
        end_column=start + len(token.string) + 1,
        target=_next_code_line(lines, line) if stands_alone else line,
        codes=codes,
        problem=problem,
    )


def _read_codes(words: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    codes: list[str] = []
    for word in words:
        try:
            codes.append(find(word).code)
        except UsageError:
            return (), f"names {word!r}, which is no code"
    fixed = sorted({entry.code for entry in META} & set(codes))
    if fixed:
        return (), f"names {fixed[0]}, which cannot be suppressed"
    return tuple(codes), None if codes else "names no code"


def _next_code_line(lines: Sequence[str], line: int) -> int:
    for number in range(line + 1, len(lines) + 1):
        content = lines[number - 1].strip()
        if content and not content.startswith("#"):
            return number
    return line


def complaints(suppressions: Sequence[Suppression], judged: frozenset[str]) -> Iterator[tuple[Suppression, str, str]]:
    """Yield each suppression that is a finding itself, with the code and the message.

    Args:
        suppressions: All of a file's, after its findings were matched with them.
        judged: The codes of the rules that ran: only they can be unused.
    """
    for suppression in suppressions:
        if suppression.problem is not None:
            yield suppression, BadSuppression.code, f"this suppression {suppression.problem}, so it is not applied"
            continue
        unused = [code for code in suppression.codes if code in judged and code not in suppression.used]
        if unused:
            yield suppression, UnusedSuppression.code, f"no finding of {', '.join(unused)} here to suppress"

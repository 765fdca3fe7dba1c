"""What a rule is: a code, its documentation, and a check of one module."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from e2e_registry.determinism.lint.module import Module


@dataclass(frozen=True, slots=True)
class Violation:
    """A place that breaks a rule.

    Attributes:
        node: The flagged code; its first and last line decide whether a finding is new and what suppresses it.
        message: What is wrong there, naming the code in question.
    """

    node: ast.expr | ast.stmt
    message: str


class Documented:
    """A code that findings carry, and what is to be said about it.

    A code keeps its meaning for ever: suppressions in other people's files name it.

    Attributes:
        code: The stable code, such as ``DET001``.
        name: A readable alias, accepted wherever a code is.
        summary: One line that says what is flagged.
        why: What goes wrong at run time.
        fix: What to write instead.
        scope: What the rule leaves alone, and what it cannot see; empty where the summary says it all.
        flagged: An example that is reported, complete with imports.
        clean: The same intent, written so that it is not.
    """

    code: ClassVar[str]
    name: ClassVar[str]
    summary: ClassVar[str]
    why: ClassVar[str]
    fix: ClassVar[str]
    scope: ClassVar[str] = ""
    flagged: ClassVar[str]
    clean: ClassVar[str]


class Rule(Documented, ABC):
    """A kind of nondeterminism that can be seen in source.

    Attributes:
        triggers: Words of which one must occur in a file for the rule to apply: files without are not examined.
    """

    triggers: ClassVar[tuple[str, ...]]

    def applies_to(self, text: str) -> bool:
        """Whether a file's text holds any of the words without which the rule cannot find anything."""
        return any(trigger in text for trigger in self.triggers)

    @abstractmethod
    def check(self, module: Module) -> Iterator[Violation]:
        """Yield the places of ``module`` that break the rule."""

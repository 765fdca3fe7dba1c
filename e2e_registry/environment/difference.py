"""What differs between the environments of two runs, in the order in which it should be read."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from e2e_registry.environment.record import BY_WRITER, GROUPS

#: Facts that are shown beside a mismatch, and alone neither explain one nor cause a standard to be written again.
INFORMATIONAL = frozenset(
    {("source", "head"), ("source", "dirty"), ("source", "head_source_tree")}
    | {("determinism", "torch.num_interop_threads")}
    | {("platform", name) for name in ("cpu_model", "cpu_flags", "cpu_count", "cpu_affinity")}
)

#: What of the group ``recipe`` was asked for, as opposed to what the script holds.
_ARGUMENTS = ("script", "command", "args", "seed")

_LONGEST_SHOWN = 120


@dataclass(frozen=True, slots=True)
class EnvironmentDifference:
    """One fact that differs.

    Attributes:
        group: One of :data:`~e2e_registry.environment.GROUPS`.
        name: The fact; of a changed argument the option, such as ``--lr``.
        want: The value recorded with the standard; None if it holds none.
        got: The value of the run; None if it holds none.
        is_informational: Whether the fact is expected to differ, as the commit does.
    """

    group: str
    name: str
    want: Any
    got: Any
    is_informational: bool = False

    def __str__(self) -> str:
        """Render as ``recipe --lr: 0.003 -> 0.003003``."""
        return f"{self.group} {self.name}: {self.text}"

    @property
    def text(self) -> str:
        """Both values, as ``0.003 -> 0.003003``; bounded in length."""
        return f"{_shown(self.want)} -> {_shown(self.got)}"

    def to_json(self) -> dict[str, Any]:
        """Return the object that reports for machines hold."""
        return {name: getattr(self, name) for name in self.__slots__}


def difference(want: Mapping[str, Any], got: Mapping[str, Any]) -> list[EnvironmentDifference]:
    """Return what differs between two records, by group, in the order of the standard's facts.

    Args:
        want: The record of the standard, as :func:`~e2e_registry.environment.compose` returned it.
        got: The record of the run.
    """
    found: list[EnvironmentDifference] = []
    for group in (*GROUPS, *sorted({*want, *got} - set(GROUPS))):
        facts, others = want.get(group) or {}, got.get(group) or {}
        for name in dict.fromkeys([*facts, *others]):
            found += _compared(group, name, facts.get(name), others.get(name))
    return found


def software_group(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the versions that a record holds: a standard is written again if they changed."""
    return dict(environment.get("software") or {})


def software_equal(want: Mapping[str, Any], got: Mapping[str, Any]) -> bool:
    """Whether two records were made with the same software."""
    return software_group(want) == software_group(got)


def arguments(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record says was asked for: script or command, arguments, registered variables, seed."""
    recipe = environment.get("recipe") or {}
    return {name: value for name, value in recipe.items() if name in _ARGUMENTS or name.startswith("env.")}


def arguments_equal(want: Mapping[str, Any], got: Mapping[str, Any]) -> bool:
    """Whether two runs were asked for the same."""
    return arguments(want) == arguments(got)


def _compared(group: str, name: str, want: Any, got: Any) -> Iterator[EnvironmentDifference]:
    if want == got and type(want) is type(got):
        return
    if group == "recipe" and name in ("args", "command") and isinstance(want, list) and isinstance(got, list):
        for option, before, after in _changed_arguments(name, want, got):
            yield EnvironmentDifference(group, option, before, after)
        return
    if isinstance(want, list) and isinstance(got, list):
        # Of two long lists, what only one of them holds; unless they differ in order or number.
        gone, new = [item for item in want if item not in got], [item for item in got if item not in want]
        want, got = (gone, new) if gone or new else (want, got)
    yield EnvironmentDifference(group, name, want, got, (group, name) in INFORMATIONAL)


def _changed_arguments(name: str, want: Sequence[str], got: Sequence[str]) -> Iterator[tuple[str, Any, Any]]:
    before, after = _options(name, want), _options(name, got)
    if before == after:  # another order, or `--lr=1` for `--lr 1`
        yield name, list(want), list(got)
    for option in dict.fromkeys([*before, *after]):
        pairs = itertools.zip_longest(before.get(option, ()), after.get(option, ()))
        yield from ((option, old, new) for old, new in pairs if old != new)


def _options(name: str, arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return each option's values, an entry an occurrence; what stands before the first is under ``name``."""
    options: dict[str, list[str]] = {}
    current: tuple[str, list[str]] = (name, [])
    for argument in [*arguments, "--"]:
        if not re.match(r"--|-[A-Za-z]", argument):
            current[1].append(argument)
            continue
        if current != (name, []):
            options.setdefault(current[0], []).append(" ".join(current[1]))
        option, has_value, value = argument.partition("=")
        current = (option, [value] if has_value else [])
    return options


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        facts = value.get(BY_WRITER, value)
        text = "{" + ", ".join(f"{name}: {_shown(item)}" for name, item in facts.items()) + "}"
    elif isinstance(value, list):
        text = " ".join(str(item) for item in value) or "none"
    elif isinstance(value, str) and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", value):
        text = value[:12]
    else:
        text = "set" if value == "" else str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."

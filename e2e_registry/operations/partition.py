"""Splits a suite over machines: every test in exactly one part, and the parts about equally long."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from e2e_registry.errors import UsageError
from e2e_registry.registration import Registration

# More digits than any number of machines has, and fewer than Python refuses to convert.
_FORM = re.compile(r"([0-9]{1,18})/([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class Partition:
    """One part of a suite, as ``--partition 2/4`` names it.

    Attributes:
        index: Which part, counted from 1.
        count: How many parts there are.
    """

    index: int
    count: int

    def __str__(self) -> str:
        """Render as ``index/count``."""
        return f"{self.index}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> Partition:
        """Read ``i/n``.

        Raises:
            UsageError: It is not of that form, or not 1 <= i <= n.
        """
        match = _FORM.fullmatch(text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            hint = "i/n with 1 <= i <= n, such as 2/4"
            raise UsageError(f"{text[:60]!r} is no partition", where="--partition", hint=hint)
        return cls(int(match[1]), int(match[2]))

    def of(self, registrations: Sequence[Registration]) -> list[Registration]:
        """Return this part of ``registrations``."""
        # Tests go to the first of the parts that are still empty, so those beyond as many as there are tests stay so.
        parts = partition(registrations, min(self.count, max(len(registrations), 1)))
        return parts[self.index - 1] if self.index <= len(parts) else []


def partition(registrations: Sequence[Registration], count: int) -> list[list[Registration]]:
    """Split tests into ``count`` parts by ``est_time``: longest processing time first, ties by test id.

    Every test goes to the part that is shortest so far, so two parts differ by at most the longest test. The result
    depends on ids and ``est_time`` alone, never on the order given or on what was measured: every machine of a
    matrix computes the same split. A disabled test takes no time.

    Args:
        registrations: The tests; no id twice.
        count: How many parts, at least 1.

    Returns:
        The parts, each in the order in which ``registrations`` came; some are empty if there are fewer tests.

    Raises:
        ValueError: ``count`` is less than 1.
    """
    if count < 1:
        raise ValueError(f"count={count} must be at least 1")
    loads = [0.0] * count
    part_of: dict[str, int] = {}
    for registration in sorted(registrations, key=lambda test: (-_weight(test), test.test_id)):
        shortest = loads.index(min(loads))
        loads[shortest] += _weight(registration)
        part_of[registration.test_id] = shortest
    return [[test for test in registrations if part_of[test.test_id] == part] for part in range(count)]


def _weight(registration: Registration) -> float:
    return 0.0 if registration.disabled else registration.est_time

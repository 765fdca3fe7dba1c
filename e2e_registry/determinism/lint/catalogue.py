"""All codes, and the selection of some of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from e2e_registry.determinism.lint.meta import BadSuppression, Unreadable, UnusedSuppression
from e2e_registry.determinism.lint.rule import Documented, Rule
from e2e_registry.determinism.lint.rules.cudnn_benchmark import CudnnBenchmark
from e2e_registry.determinism.lint.rules.dataloader_workers import DataLoaderWorkers
from e2e_registry.determinism.lint.rules.flash_partial import FlashPartial
from e2e_registry.determinism.lint.rules.hash_seed import HashSeedInProcess
from e2e_registry.determinism.lint.rules.late_variable import LateVariable
from e2e_registry.determinism.lint.rules.loose_equality import LooseEquality
from e2e_registry.determinism.lint.rules.rounded_metric import RoundedMetric
from e2e_registry.determinism.lint.rules.scatter_reduction import ScatterReduction
from e2e_registry.determinism.lint.rules.set_order import SetOrder
from e2e_registry.determinism.lint.rules.tf32 import Tf32
from e2e_registry.determinism.lint.rules.time_seed import TimeSeed
from e2e_registry.determinism.lint.rules.unseeded import Unseeded
from e2e_registry.determinism.lint.rules.unsorted_listing import UnsortedListing
from e2e_registry.determinism.lint.rules.warn_only import WarnOnly
from e2e_registry.errors import UsageError

RULES: tuple[Rule, ...] = (
    CudnnBenchmark(),
    WarnOnly(),
    LateVariable(),
    HashSeedInProcess(),
    DataLoaderWorkers(),
    Unseeded(),
    UnsortedListing(),
    SetOrder(),
    LooseEquality(),
    RoundedMetric(),
    FlashPartial(),
    ScatterReduction(),
    Tf32(),
    TimeSeed(),
)
META: tuple[Documented, ...] = (Unreadable(), BadSuppression(), UnusedSuppression())
_ENTRIES: tuple[Documented, ...] = (*RULES, *META)
#: Every code there is, in order.
CATALOGUE: dict[str, Documented] = {entry.code: entry for entry in sorted(_ENTRIES, key=lambda entry: entry.code)}


@dataclass(frozen=True, slots=True)
class Selection:
    """The codes that one invocation reports."""

    codes: frozenset[str]

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules to run, in order of code."""
        return tuple(rule for rule in RULES if rule.code in self.codes)


def find(code_or_name: str) -> Documented:
    """Return the entry of a code or a name; case does not matter.

    Raises:
        UsageError: There is no such rule.
    """
    wanted = code_or_name.strip()
    for entry in CATALOGUE.values():
        if wanted.upper() == entry.code or wanted.lower() == entry.name:
            return entry
    raise UsageError(f"no rule is called {code_or_name!r}", hint="lint --list-rules shows the codes and their names")


def select(*, chosen: Sequence[str] = (), ignored: Sequence[str] = ()) -> Selection:
    """Return the codes that ``--select`` and ``--ignore`` leave.

    Choosing rules leaves the findings about files and suppressions on; ignoring can take those away too.

    Args:
        chosen: Codes or names, commas allowed inside; empty means all.
        ignored: Codes or names to take away from them.

    Raises:
        UsageError: A code or name is unknown, or nothing is left.
    """
    wanted = _codes(chosen)
    codes = frozenset(CATALOGUE) if not wanted else wanted | {entry.code for entry in META}
    left = codes - _codes(ignored)
    if not left:
        raise UsageError("--ignore leaves no rule to run", hint="name fewer codes")
    return Selection(left)


def _codes(names: Iterable[str]) -> frozenset[str]:
    words = [word for name in names for word in re.split(r"[,\s]+", name) if word]
    return frozenset(find(word).code for word in words)

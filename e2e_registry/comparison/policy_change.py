"""How the policies of a standard and of a checkout differ: coverage must not shrink in silence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from e2e_registry.comparison.result import SeriesResult
from e2e_registry.tolerance import UNREGISTERED, Policy, PolicyKind


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """One metric that is judged in another way than before.

    Attributes:
        metric: Its name.
        old: Its policy in the standard; unregistered where the standard does not hold it.
        new: Its policy now.
    """

    metric: str
    old: Policy
    new: Policy

    @property
    def is_weaker(self) -> bool:
        """Whether something passes now that did not before, or nothing is judged any more."""
        return not self.new.accepts_no_more_than(self.old)

    def text(self, results: Iterable[SeriesResult] = ()) -> str:
        """Say in words what changed; with what a comparison found in the metric's series, where there is one."""
        series = list(results)
        if self.new.kind is PolicyKind.UNREGISTERED:
            verb = "judged" if self.old.is_judged else "kept"
            count = sum(result.num_common + result.missing.count for result in series)
            points = f" ({count:,} point{'' if count == 1 else 's'})" if count else ""
            return f"no longer {verb}: {self.metric}{points}"
        if self.old.kind is PolicyKind.UNREGISTERED:
            return f"newly {'judged' if self.new.is_judged else 'observed'}: {self.metric}"
        change = f"{self.metric}: {self.old} → {self.new}"
        if self.new.kind is PolicyKind.OBSERVE:
            return f"{change}{_unjudged_difference(series)}"
        if PolicyKind.TOLERANCE not in (self.old.kind, self.new.kind) or self.old.kind is PolicyKind.OBSERVE:
            return change
        if str(self.old) == str(self.new):
            return f"another reason for the tolerance: {self.metric}"
        if not self.is_weaker:
            return f"tolerance narrowed: {change}"
        is_wider = self.old.accepts_no_more_than(self.new)
        return f"tolerance {'widened' if is_wider else 'changed'}: {change}"


def _unjudged_difference(series: list[SeriesResult]) -> str:
    """Say how far the values moved that nothing judges any more."""
    differing = sum(result.num_differing for result in series)
    if not differing:
        return ""
    common = sum(result.num_common for result in series)
    size = max(result.largest_rel for result in series)
    by = f", by up to {size:.3g} of the old one" if size else ""
    return f" ({differing:,} of {common:,} values differ{by})"


def policy_changes(old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Policy]) -> list[PolicyChange]:
    """Return how policies differ, the weaker ones first, each by name.

    Args:
        old: Metric name to policy, as a standard's metadata hold them; already known to be readable.
        new: Metric name to policy, of what is registered or observed now.
    """
    before = {metric: Policy.from_json(policy) for metric, policy in old.items()}
    changes = [
        PolicyChange(metric, before.get(metric, UNREGISTERED), new.get(metric, UNREGISTERED))
        for metric in sorted({*before, *new})
    ]
    return sorted((change for change in changes if change.old != change.new), key=lambda change: not change.is_weaker)

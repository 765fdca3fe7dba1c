"""Refuses policies that would judge nothing, or would judge a metric by what its type has not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Set

from e2e_registry.config import did_you_mean
from e2e_registry.registration.declaration import Registration, deciding_key
from e2e_registry.tolerance import PolicyKind, is_glob, matches

_UNANSWERED = "no metric of the run answers to it"


def check_coverage(registration: Registration) -> None:
    """Refuse names in ``tolerances``, ``observe`` and ``invariants`` that have no effect, or leave nothing judged."""
    metrics, observe, error = registration.metrics, registration.observe, registration.place.error
    for at, name in enumerate(observe):
        if name in metrics:
            raise error(
                f"observe[{at}]", f"{name!r} is also in metrics: it cannot be both judged and not", "remove it from one"
            )
    if all(any(matches(name, pattern) for pattern in observe) for name in metrics):
        raise error("observe", "covers all registered metrics: the test would judge nothing", "observe fewer")
    for name in registration.tolerances:
        argument = f"tolerances[{name!r}]"
        if not any(can_share_a_name(name, pattern) for pattern in metrics):
            raise error(argument, f"tolerance for an unregistered metric {name!r}", did_you_mean(name, metrics))
        if any(matches(name, pattern) for pattern in observe):
            raise error(argument, f"{name!r} is observed, never judged: the tolerance has no effect", "remove one")
    for name in registration.invariants:
        if not any(can_share_a_name(name, pattern) for pattern in (*metrics, *observe)):
            message = f"invariant of a metric that is neither registered nor observed: {name!r}"
            raise error(f"invariants[{name!r}]", message, did_you_mean(name, (*metrics, *observe)))


def coverage_faults(registration: Registration, emitted: Set[str]) -> list[str]:
    """Return why a run that emitted these metrics cannot stand behind a verdict, one sentence each; empty if it can.

    What a declaration names and a run does not bring would pass unseen: a registered metric, an invariant. And globs
    may register no metric that is not observed, too, which only the names of a run can tell.
    """
    policies = registration.policies()
    never = policies.never_emitted(frozenset(emitted))
    faults = [never_emitted_text(name) for name in never]
    for key in registration.invariants:
        deciding = {deciding_key(registration.invariants, name) for name in emitted if matches(name, key)}
        shadows = sorted(other for other in deciding if other is not None and is_glob(other))
        if not deciding:
            faults.append(f"invariants[{key!r}]: {_UNANSWERED}")
        elif key not in deciding and shadows:  # an exact name in its place is meant so
            faults.append(f"invariants[{key!r}] is never checked: {shadows[0]!r} stands before it")
    if not never and not any(policies.policy(name).is_judged for name in emitted):
        faults.append("nothing is judged: observe covers every registered metric that the run emitted")
    return faults


def never_emitted_text(name: str) -> str:
    """Say that a run has nothing for a registered name or glob."""
    return f"{name}: registered, but {_UNANSWERED}"


def coverage_warnings(registration: Registration, emitted: Set[str]) -> list[str]:
    """Return the tolerances and observed names that have no effect on a run that emitted these metrics."""
    keys = [(f"tolerances[{key!r}]", key) for key in registration.tolerances]
    keys += [(f"observe[{at}] {key!r}", key) for at, key in enumerate(registration.observe)]
    return [f"{label}: {_UNANSWERED}" for label, key in keys if not any(matches(name, key) for name in emitted)]


def can_share_a_name(first: str, second: str) -> bool:
    """Whether some metric name is matched by both patterns; two character classes are taken to overlap."""
    if not is_glob(first):
        return matches(first, second)
    if not is_glob(second):
        return matches(second, first)
    a, b = _glob_tokens(first), _glob_tokens(second)
    # shared[i][j]: whether a[i:] and b[j:] share a name; filled from the ends.
    shared = [[False] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in range(len(a), -1, -1):
        for j in range(len(b), -1, -1):
            more_a, more_b = i < len(a), j < len(b)
            if more_a and a[i] == "*":
                shared[i][j] = shared[i + 1][j] or (more_b and shared[i][j + 1])
            elif more_b and b[j] == "*":
                shared[i][j] = shared[i][j + 1] or (more_a and shared[i + 1][j])
            elif more_a and more_b:
                shared[i][j] = _can_share_a_character(a[i], b[j]) and shared[i + 1][j + 1]
            else:
                shared[i][j] = not more_a and not more_b
    return shared[0][0]


def _glob_tokens(pattern: str) -> list[str]:
    """Split a pattern into ``*``, ``?``, classes such as ``[!ab]``, and characters, as fnmatch does."""
    return re.findall(r"\[!?+\]?+[^\]]*\]|.", pattern, re.DOTALL)


def _can_share_a_character(a: str, b: str) -> bool:
    if "?" in (a, b) or (len(a) > 1 and len(b) > 1):
        return True
    return matches(a, b) or matches(b, a)


def check_digest_policies(registration: Registration, digest_metrics: Iterable[str]) -> None:
    """Refuse tolerances and numeric invariants of digest metrics, once a recording or standard tells which these are.

    Raises:
        RegistrationError: A digest metric is judged by one; ``where`` names it.
    """
    place = registration.place
    for metric in sorted(digest_metrics):
        key = _tolerance_key(registration, metric)
        if key is not None:
            message = f"metric {metric!r} is a digest: digests are equal or not, there is no distance between them"
            raise place.error(f"tolerances[{key!r}]", message, "remove the tolerance, or write names that leave it out")
        key = deciding_key(registration.invariants, metric)
        if key is not None and registration.invariants[key].has_bounds:
            message = f"metric {metric!r} is a digest: it has no value that equals, min or max could hold for"
            raise place.error(f"invariants[{key!r}]", message, "remove the invariant, or write names that leave it out")


def check_ulp_policies(registration: Registration, integer_metrics: Iterable[str]) -> None:
    """Refuse ``ulp`` tolerances of integer and boolean metrics, once a recording or standard tells which these are.

    Raises:
        RegistrationError: Such a metric is judged in ULPs; ``where`` names it.
    """
    for metric in sorted(integer_metrics):
        key = _tolerance_key(registration, metric)
        if key is not None and registration.tolerances[key].ulp:
            message = f"metric {metric!r} holds integers or booleans: these have no units in the last place"
            raise registration.place.error(f"tolerances[{key!r}]", message, "use atol, which is exact for them")


def _tolerance_key(registration: Registration, metric: str) -> str | None:
    if registration.policies().policy(metric).kind is not PolicyKind.TOLERANCE:
        return None
    return deciding_key(registration.tolerances, metric)

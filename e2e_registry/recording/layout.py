"""The files and names of a recording, format 1: what its writers and its reader must agree on."""

from __future__ import annotations

import re

from e2e_registry.printable import printable_line

FORMAT = 1

RUN_DIR_VARIABLE = "E2E_REGISTRY_RUN_DIR"
PLAIN_FILE_VARIABLE = "E2E_METRICS_JSONL"

#: What was launched, its outcome and times. The launcher alone writes it.
RUN_FILE = "run.json"
#: Lines of a recipe that knows nothing of this package.
PLAIN_FILE = "metrics.jsonl"

_ROLE = r"[A-Za-z0-9_-]+"
_WRITER = rf"(?P<role>{_ROLE})\.rank(?P<rank>0|[1-9][0-9]*)"

ROLE = re.compile(_ROLE)
METRICS_FILE = re.compile(rf"metrics\.{_WRITER}\.jsonl")
STATE_FILE = re.compile(rf"env\.{_WRITER}\.json")

#: Ranks are stored as int32.
RANK_MAX = (1 << 31) - 1

#: Key of the values that a JSON number cannot carry; no dtype has this name.
BITS = "bits"


def metrics_file(role: str, rank: int) -> str:
    """Return the name of the file that one writer's values go to."""
    return f"metrics.{role}.rank{rank}.jsonl"


def state_file(role: str, rank: int) -> str:
    """Return the name of the file that holds one writer's determinism state."""
    return f"env.{role}.rank{rank}.json"


def name_fault(name: object) -> str | None:
    """Return why ``name`` cannot name a metric, or None if it can."""
    if not isinstance(name, str):
        return f"a metric name must be a string, not {name!r}"
    if not name:
        return "a metric name must not be empty"
    if printable_line(name) != name:  # it would break a report's line or reorder it, or has no form in UTF-8
        return f"metric name {name!r} holds a control character, a line separator, a direction mark or a lone surrogate"
    return None

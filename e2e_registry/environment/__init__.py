"""The facts recorded with a run, grouped so that a difference between two runs explains itself.

A record is a JSON object of five groups, :data:`GROUPS`, each a flat mapping from dotted fact name to value. Facts
that are never equal twice (process ids, times, folders of the machine) are no part of it.
"""

from __future__ import annotations

from e2e_registry.environment.difference import (
    EnvironmentDifference,
    arguments,
    arguments_equal,
    difference,
    software_equal,
    software_group,
)
from e2e_registry.environment.platform_slug import may_be_platform_of, platform_slug
from e2e_registry.environment.record import (
    GROUPS,
    compose,
    launch_facts,
    platform_facts,
    recipe_facts,
    software_facts,
)
from e2e_registry.environment.redaction import redact_command, redact_text, redact_variables, without_machine_paths
from e2e_registry.environment.source import source_facts, source_paths, source_tree_of_revision

__all__ = [
    "GROUPS",
    "EnvironmentDifference",
    "arguments",
    "arguments_equal",
    "compose",
    "difference",
    "launch_facts",
    "may_be_platform_of",
    "platform_facts",
    "platform_slug",
    "recipe_facts",
    "redact_command",
    "redact_text",
    "redact_variables",
    "software_equal",
    "software_facts",
    "software_group",
    "source_facts",
    "source_paths",
    "source_tree_of_revision",
    "without_machine_paths",
]

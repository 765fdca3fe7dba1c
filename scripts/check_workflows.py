"""Checks of workflows and actions that actionlint and zizmor do not make.

    python scripts/check_workflows.py [ROOT]

Prints ``file:line: what is wrong`` and exits 1 if anything is. What is checked stands beside each rule below.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

_PIN = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
_VERSION_COMMENT = re.compile(r"#\s*v\d+(\.\d+)*\s*$")
_INPUT = re.compile(r"\binputs\.([A-Za-z_][\w-]*)")
_LINE = "__line__"

Finding = tuple[Path, int, str]


class _Loader(yaml.BaseLoader):  # type: ignore[misc]  # PyYAML has no types
    """Reads every scalar as text, so that ``on`` is no boolean, and remembers the line of every mapping."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        mapping[_LINE] = node.start_mark.line + 1
        return mapping


@dataclass(frozen=True)
class Definition:
    """A workflow or an action.

    Attributes:
        path: The file.
        text: What stands in it.
        data: The same, parsed.
    """

    path: Path
    text: str
    data: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Definition:
        """Read a file."""
        text = path.read_text(encoding="utf-8")
        return cls(path, text, yaml.load(text, _Loader) or {})  # noqa: S506  # a subclass of BaseLoader makes no objects

    @property
    def is_action(self) -> bool:
        """Whether it is an action, not a workflow."""
        return "runs" in self.data

    @cached_property
    def triggers(self) -> Mapping[str, Any]:
        """What starts the workflow."""
        on = self.data.get("on", {})
        return on if isinstance(on, dict) else dict.fromkeys([on] if isinstance(on, str) else on, "")

    @property
    def jobs(self) -> dict[str, Mapping[str, Any]]:
        """The jobs of a workflow."""
        return {name: job for name, job in self.data.get("jobs", {}).items() if name != _LINE}

    @cached_property
    def inputs(self) -> dict[str, Mapping[str, Any]]:
        """The declared inputs, of all triggers that have any."""
        tables = (
            [self.data.get("inputs")] if self.is_action else [_table(on).get("inputs") for on in self.triggers.values()]
        )
        return {name: _table(value) for table in tables for name, value in _table(table).items() if name != _LINE}

    def steps(self) -> Iterator[Mapping[str, Any]]:
        """All steps of all jobs."""
        holders = [self.data["runs"]] if self.is_action else self.jobs.values()
        for holder in holders:
            yield from holder.get("steps", ())


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def find_definitions(root: Path) -> list[Definition]:
    """Return all workflows and actions of a repository."""
    github = root / ".github"
    paths = [*github.glob("workflows/*.y*ml"), *github.glob("actions/*/action.y*ml"), *root.glob("action.y*ml")]
    return [Definition.read(path) for path in sorted(paths)]


def check(root: Path) -> list[Finding]:
    """Return what is wrong, by file and line."""
    definitions = find_definitions(root)
    found: list[Finding] = []
    for definition in definitions:
        rules = [_check_steps(definition), _check_pins(definition), _check_inputs(definition)]
        rules += [_check_calls(definition, root)]
        if not definition.is_action:
            rules += [_check_workflow(definition), _check_jobs(definition)]
        found += [(definition.path, line, message) for rule in rules for line, message in rule]
    return sorted(found)


_Found = Iterator[tuple[int, str]]


def _check_workflow(workflow: Definition) -> _Found:
    """No permission by default; runs that overlap are dealt with, except where the caller has dealt with them."""
    permissions = workflow.data.get("permissions")
    if permissions is None or set(_table(permissions)) - {_LINE}:
        yield 1, "the workflow must begin with `permissions: {}`; each job states its own"
    if "concurrency" not in workflow.data and set(workflow.triggers) - {_LINE, "workflow_call"}:
        yield 1, "no concurrency"


def _check_jobs(workflow: Definition) -> _Found:
    for name, job in workflow.jobs.items():
        line = job[_LINE]
        if "uses" not in job and "timeout-minutes" not in job:
            yield line, f"job {name} has no timeout-minutes"
        permissions = job.get("permissions")
        if not isinstance(permissions, dict):
            yield line, f"job {name} states no permissions"
        elif writing := [scope for scope, access in permissions.items() if scope != _LINE and access == "write"]:
            yield line, f"job {name} may write {', '.join(writing)}; CI commits nothing"
        if job.get("secrets") == "inherit":
            yield line, f"job {name} hands on all secrets"
        if name == "required":
            needs = job.get("needs", [])
            missing = sorted(set(workflow.jobs) - {name, *([needs] if isinstance(needs, str) else needs)})
            if missing:
                yield line, f"the required job does not need {', '.join(missing)}"
            if job.get("if") != "always()":
                yield line, "the required job must run always(): a skipped one counts as passed"


def _check_steps(definition: Definition) -> _Found:
    for step in definition.steps():
        line = step[_LINE]
        if "${{" in step.get("run", ""):
            yield line, "an expression in shell: pass it through env and quote the variable"
        if definition.is_action and "run" in step and "shell" not in step:
            yield line, "a run step of an action needs its shell"
        if step.get("uses", "").startswith("actions/upload-artifact@"):
            if "always()" not in step.get("if", ""):
                yield line, "artifacts are kept also of failures: if: always()"
            if "github.run_attempt" not in _table(step.get("with")).get("name", ""):
                yield line, "the artifact's name lacks the attempt, so a second attempt could not keep its own"


def _check_pins(definition: Definition) -> _Found:
    for number, line in enumerate(definition.text.splitlines(), start=1):
        match = re.match(r"\s*(?:-\s+)?uses:\s*['\"]?([^'\"#\s]+)", line)
        if match is None or match[1].startswith(("./", "$/")):
            continue
        if not _PIN.fullmatch(match[1]):
            yield number, f"{match[1]} is not pinned to a commit"
        elif not _VERSION_COMMENT.search(line):
            yield number, f"{match[1]}: say beside the pin which version it is"


def _check_inputs(definition: Definition) -> _Found:
    """What is read is declared, and what is declared is read."""
    read = set(_INPUT.findall(definition.text))
    for name in sorted(read - set(definition.inputs)):
        yield 1, f"inputs.{name} is read and not declared"
    for name in sorted(set(definition.inputs) - read):
        yield definition.inputs[name].get(_LINE, 1), f"the input {name} is declared and not read"


def _check_calls(definition: Definition, root: Path) -> _Found:
    """What is passed to a workflow or action of this repository is declared there, and what it requires is passed."""
    callers = [*definition.steps(), *([] if definition.is_action else definition.jobs.values())]
    for caller in callers:
        uses = caller.get("uses", "")
        if not uses.startswith(("./", "$/")):
            continue
        target = root / uses[2:]
        target = target if target.suffix in (".yml", ".yaml") else target / "action.yml"
        if not target.is_file():
            yield caller[_LINE], f"{uses} is not there"
            continue
        declared = Definition.read(target).inputs
        passed = set(_table(caller.get("with"))) - {_LINE}
        for name in sorted(passed - set(declared)):
            yield caller[_LINE], f"{uses} has no input {name}"
        required = {name for name, value in declared.items() if value.get("required") == "true"}
        for name in sorted(required - passed):
            yield caller[_LINE], f"{uses} needs the input {name}"


def main() -> int:
    """Check the repository that the script stands in, or the one that is named."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    found = check(root)
    for path, line, message in found:
        print(f"{path.relative_to(root)}:{line}: {message}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

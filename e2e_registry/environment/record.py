"""Composes the record of a run from what its writers read of themselves and what its launcher knows."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from e2e_registry.determinism.profiles import PROFILES
from e2e_registry.determinism.variables import Origin
from e2e_registry.environment.redaction import redact_command, redact_variables, without_machine_paths
from e2e_registry.environment.source import source_facts
from e2e_registry.errors import StorageError

#: In the order in which reports show them.
GROUPS = ("platform", "software", "determinism", "recipe", "source")

#: The one key of a fact on which writers disagree; below it, writers such as ``train 0-3`` to their values.
BY_WRITER = "by_writer"

Writer = tuple[str, int]
Facts = dict[str, Any]

#: Origins of variables that are not worth a line: nobody overrode the profile.
_USUAL_ORIGINS = (Origin.PROFILE.value, Origin.UNSET.value)


def launch_facts(
    root: Path,
    *,
    test: str | None = None,
    script: str | None = None,
    command: Sequence[str] | None = None,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    seed: int | None = None,
    profile: str | None = None,
    origins: Mapping[str, str] | None = None,
    exclude: Sequence[Path] = (),
    source: Mapping[str, Any] | None = None,
) -> Facts:
    """Return what the launcher knows of a run before it starts, for ``run.json`` and :func:`compose`.

    Args:
        root: The folder that ``script`` and the paths of the record are relative to.
        test: Id of the test; None for a run of no test.
        script: The recipe's script, relative to ``root``.
        command: The command that runs instead of a script.
        args: Its arguments, unexpanded: with ``${VARIABLE}`` and ``{run_dir}`` as registered.
        env: The registration's ``env``, unexpanded.
        seed: The seed that the run was given.
        profile: Name of the determinism profile.
        origins: Variable to who decided its value (:class:`~e2e_registry.determinism.variables.Origin`).
        exclude: What is no source: see :func:`~e2e_registry.environment.source_facts`.
        source: The source facts, if they are known already.

    Raises:
        StorageError: The script cannot be read.
    """
    return {
        "recipe": recipe_facts(root, test=test, script=script, command=command, args=args, env=env, seed=seed),
        "profile": profile,
        "origins": dict(origins or {}),
        "source": dict(source_facts(root, exclude) if source is None else source),
    }


def recipe_facts(
    root: Path,
    *,
    test: str | None = None,
    script: str | None = None,
    command: Sequence[str] | None = None,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    seed: int | None = None,
) -> Facts:
    """Return what was asked for, for the entry ``recipe`` of :func:`launch_facts`, whose arguments these are.

    Raises:
        StorageError: The script cannot be read.
    """
    recipe = {
        "test": test,
        "script": script,
        "script_sha256": None if script is None else _file_sha256(root / script),
        "command": None if command is None else redact_command(command),
        "args": redact_command(args),
        "env": redact_variables(env or {}),
        "seed": seed,
    }
    return {name: _without_paths(fact, root) for name, fact in recipe.items()}


def compose(
    *,
    writer_states: Mapping[Writer, Mapping[str, Any] | None],
    launch_facts: Mapping[str, Any] | None = None,
    root: Path | None = None,
) -> dict[str, Facts]:
    """Return the record of a run: for each of :data:`GROUPS` a flat mapping from fact to value.

    A fact on which the writers disagree has the value ``{"by_writer": {"rollout 0": ..., "train 0-3": ...}}``. A
    library that a writer has not loaded is no disagreement, an unset variable is.

    Args:
        writer_states: Role and rank to what :func:`~e2e_registry.determinism.state.read_state` said in that
            process; None for a writer whose state is unknown.
        launch_facts: What :func:`launch_facts` returned for the run.
        root: Paths below it become relative; all other absolute paths are masked.
    """
    launch = launch_facts or {}
    known = {writer: state for writer, state in sorted(writer_states.items()) if state is not None}
    unknown = sorted(writer for writer, state in writer_states.items() if state is None)
    variables = _merged({writer: _variable_facts(state) for writer, state in known.items()}, is_absence_a_value=True)
    record = {
        "platform": _merged({writer: platform_facts(state) for writer, state in known.items()}),
        "software": _merged({writer: software_facts(state) for writer, state in known.items()}),
        "determinism": {
            **_present({"profile": launch.get("profile"), "unknown_writers": _writers(unknown) or None}),
            **_merged({writer: _determinism_facts(state) for writer, state in known.items()}),
            **variables,
            **_origin_facts(launch.get("origins") or {}, launch.get("profile"), variables),
        },
        "recipe": _present(_flat(launch.get("recipe") or {})),
        "source": _flat(launch.get("source") or {}),
    }
    return {group: _without_paths(facts, root) for group, facts in record.items()}


def platform_facts(state: Mapping[str, Any]) -> Facts:
    """Return the facts of group ``platform`` that one process's state holds: of its machine and GPUs."""
    gpus: Sequence[Mapping[str, Any]] = state.get("gpus") or ()
    # The C library is software; the kernel's release decides no bits and often names the machine's owner.
    machine = {key: value for key, value in (state.get("platform") or {}).items() if key not in ("libc", "kernel")}
    facts = _flat(machine)
    facts["gpus"] = [gpu.get("name") for gpu in gpus] or None
    for key in ("capability", "multiprocessors", "memory_bytes", "driver"):
        found = sorted({gpu.get(key) for gpu in gpus} - {None}, key=str)
        facts[f"gpu.{key}"] = found[0] if len(found) == 1 else found or None
    return _present(facts)


def software_facts(state: Mapping[str, Any]) -> Facts:
    """Return the facts of group ``software`` that one process's state holds: versions of what it had loaded."""
    process, platform = state.get("process") or {}, state.get("platform") or {}
    return _present(
        {
            "python": process.get("python"),
            "implementation": process.get("implementation"),
            "libc": platform.get("libc"),
            **_flat(state.get("software") or {}),
        }
    )


def _determinism_facts(state: Mapping[str, Any]) -> Facts:
    process = state.get("process") or {}
    interpreter = {key: process.get(key) for key in ("optimize", "hash_randomization", "ignores_environment")}
    facts = {**_flat({"python": interpreter}), **_flat(state.get("determinism") or {})}
    return _present({**facts, "unreadable": sorted(state.get("unreadable") or ()) or None})


def _variable_facts(state: Mapping[str, Any]) -> Facts:
    """Return each captured variable as its readers saw it: the value at the start, and a later one if it changed."""
    facts: Facts = {}
    for name, entry in (state.get("variables") or {}).items():
        initial, current = entry.get("initial"), entry.get("current")
        if not entry.get("late"):
            value = initial
        elif entry.get("set_in_time"):
            value = current
        else:
            value = {"initial": initial, "set_late": current}
        facts[f"variables.{name}"] = value
    return facts


def _origin_facts(origins: Mapping[str, str], profile: str | None, variables: Facts) -> Facts:
    """Return who overrode the profile; who set a variable to what the profile says anyway is of no account."""
    known = PROFILES.get(profile or "")
    settings = {} if known is None else {variable.name: variable for variable in known.settings}
    facts: Facts = {}
    for name, origin in origins.items():
        value = variables.get(f"variables.{name}")
        is_the_profiles = name in settings and isinstance(value, str) and settings[name].accepts(value)
        if origin not in _USUAL_ORIGINS and not is_the_profiles:
            facts[f"origins.{name}"] = origin
    return facts


def _present(facts: Mapping[str, Any]) -> Facts:
    return {name: value for name, value in facts.items() if value is not None}


def _flat(value: Mapping[str, Any], prefix: str = "") -> Facts:
    """Return nested mappings as one, with dotted names; libraries in a list are named by what they are."""
    facts: Facts = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping):
            facts.update(_flat(item, f"{name}."))
        elif isinstance(item, list) and item and all(isinstance(entry, Mapping) for entry in item):
            facts.update(_flat(_libraries(item), f"{name}."))
        else:
            facts[name] = item
    return facts


def _libraries(entries: Sequence[Mapping[str, Any]]) -> Facts:
    """Key loaded libraries by their names without the build's hash and version, so that an upgrade is one change."""
    named: Facts = {}
    for entry in entries:
        library = re.sub(r"(-[0-9a-f]{8})?\.(so|dylib).*$", "", str(entry.get("library", "")))
        names = (library if number == 1 else f"{library}#{number}" for number in itertools.count(1))
        named[next(name for name in names if name not in named)] = {k: v for k, v in entry.items() if k != "library"}
    return named


def _merged(facts_of: Mapping[Writer, Facts], *, is_absence_a_value: bool = False) -> Facts:
    """Return one mapping of facts for several writers."""
    merged: Facts = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(facts_of.values())):
        values = {writer: facts.get(name) for writer, facts in facts_of.items() if is_absence_a_value or name in facts}
        first = next(iter(values.values()))
        if all(value == first and type(value) is type(first) for value in values.values()):
            merged[name] = first
        else:
            merged[name] = {BY_WRITER: _by_value(values)}
    return merged


def _by_value(values: Mapping[Writer, Any]) -> Facts:
    """Return writers to values, writers of one role and value together: ``{"rollout 0": 1, "train 0-3": 2}``."""
    groups: list[tuple[str, Any, list[int]]] = []
    for (role, rank), value in values.items():
        for known_role, known_value, ranks in groups:
            if known_role == role and known_value == value and type(known_value) is type(value):
                ranks.append(rank)
                break
        else:
            groups.append((role, value, [rank]))
    return {_writers((role, rank) for rank in ranks): value for role, value, ranks in groups}


def _writers(writers: Iterable[Writer]) -> str:
    """Name sorted writers, with ranges of ranks: ``main 0, train 0-3,5``."""
    parts = []
    for role, group in itertools.groupby(writers, key=lambda writer: writer[0]):
        parts.append(f"{role} {','.join(_ranges([rank for _, rank in group]))}")
    return ", ".join(parts)


def _ranges(ranks: Sequence[int]) -> Iterator[str]:
    for _, run in itertools.groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        numbers = [rank for _, rank in run]
        yield str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _without_paths(value: Any, root: Path | None) -> Any:
    if isinstance(value, str):
        return without_machine_paths(value, root)
    if isinstance(value, Mapping):
        return {key: _without_paths(item, root) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item, root) for item in value]
    return value


def _file_sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StorageError(f"cannot read the script: {error.strerror}", where=path) from error

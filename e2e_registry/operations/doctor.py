"""Obtains determinism states (of the shell, a kept run, a test, any command) and has them judged."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from e2e_registry.config import Settings
from e2e_registry.determinism.diagnosis import Diagnosis, grouped
from e2e_registry.determinism.doctor import Finding, Severity, judge
from e2e_registry.determinism.profiles import DEFAULT_PROFILE, Evidence, Profile, get_profile
from e2e_registry.determinism.state import SOFTWARE, read_state
from e2e_registry.determinism.variables import ChildEnvironment, at, captured_value, child_environment
from e2e_registry.environment import redact_command
from e2e_registry.errors import InvalidRunError, UsageError, usable_files
from e2e_registry.execution.gpus import WHEN_EMPTY, GpuAdmission
from e2e_registry.operations.run_facts import STATE_SHAPE, require_shape
from e2e_registry.operations.running import (
    ObservedRun,
    declared_facts,
    load_run,
    new_run_dir,
    read_facts,
    recipe_environment,
    run_command,
    run_test,
    unpinned_environment,
)
from e2e_registry.operations.standards import display_path
from e2e_registry.operations.state_hook.sitecustomize import MARKER, RUN_VARIABLE
from e2e_registry.recording.layout import RUN_FILE
from e2e_registry.recording.reader import Writer, read_state_file, state_files
from e2e_registry.registration import Registration

#: Modules whose presence means that a process may train.
_FRAMEWORKS = ("torch", "jax", "tensorflow")

#: Programs that load a framework, start the processes that train, and do not train themselves.
_LAUNCHERS = (
    *("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "accelerate.commands.launch"),
    *("deepspeed", "deepspeed.launcher.launch", "deepspeed.launcher.runner", "ray"),
)

OnLine = Callable[[str], None]


# ------------------------------------------------------------------------------------------------ shell


def diagnose_shell(profile: str = DEFAULT_PROFILE) -> Diagnosis:
    """Judge what a program would be started with from this shell.

    Raises:
        UsageError: There is no such profile.
    """
    child = unpinned_environment(profile, caller=dict(os.environ))
    child = dataclasses.replace(child, profile=_for_this_numpy(child))
    state = read_state()
    machine = {"platform": state["platform"], "process": {"initial_environment_known": True}}
    findings = [
        *(finding for finding in judge(machine, child.profile) if finding.subject in ("cpu", "libc")),
        *(_unless_absent(finding, child.profile) for finding in judge(None, child.profile, child=child)),
    ]
    known = [finding for finding in findings if finding.code != "state-unknown"]
    note = f"check, record and run set the variables of {profile!r} for what they start"
    return Diagnosis(
        subject="this shell",
        profile=child.profile.name,
        processes=grouped([("a program started here", known)]),
        notes=() if not any(finding.is_problem for finding in known) else (note,),
    )


def _for_this_numpy(child: ChildEnvironment) -> Profile:
    """Return the profile with the names of the installed NumPy, unless the shell has all names, which is right too."""
    name = "NPY_DISABLE_CPU_FEATURES"
    variable = child.profile.variable(name)
    if variable is None or variable.accepts(child.variables.get(name)):
        return child.profile
    return child.profile.for_python(sys.executable, child.variables)


def _unless_absent(finding: Finding, profile: Profile) -> Finding:
    """Turn a missing variable of a library that is not installed into a note."""
    variable = profile.variable(finding.subject)
    if not finding.is_problem or variable is None or variable.evidence is not Evidence.VARIABLE_IF_LOADED:
        return finding
    if any(find_spec(module) is not None for module in variable.modules):
        return finding
    message = f"is not {variable.setting}; {variable.reader} is not installed here"
    return Finding("not-installed", Severity.INFO, finding.subject, message)


# ------------------------------------------------------------------------------------------------ runs


def diagnose_run(path: Path, settings: Settings, *, profile: str | None = None) -> Diagnosis:
    """Judge the processes of a kept run by what they recorded.

    Args:
        path: The run directory.
        settings: The repository's settings.
        profile: The profile to judge by; that of the run by default.

    Raises:
        UsageError: There is no such run or profile.
        StorageError: A file cannot be read.
    """
    if not path.is_dir() or not (path / RUN_FILE).exists():
        raise UsageError("not a run directory: only one says how its processes were started", where=path)
    run = load_run(path.resolve(), settings)
    recorded = run.facts.get("profile")
    by = profile or (recorded if isinstance(recorded, str) else DEFAULT_PROFILE)
    return _diagnosis(str(path), run, settings, by, None)


def diagnose_command(
    command: Sequence[str],
    settings: Settings,
    *,
    profile: str = DEFAULT_PROFILE,
    timeout_s: float,
    is_pinned: bool = False,
    on_line: OnLine | None = None,
) -> Diagnosis:
    """Run a command as the caller's shell would, read the state of its Python processes from inside, and judge them.

    Args:
        command: Program and arguments.
        settings: The repository's settings.
        profile: The profile to judge by.
        timeout_s: Seconds the command may take.
        is_pinned: Start it with the variables of the profile, as ``run`` does.
        on_line: Called with each line the command prints.

    Raises:
        UsageError: There is no such profile, or no command.
        StorageError: The run cannot be kept.
    """
    run = run_command(
        command,
        settings,
        profile=profile,
        timeout_s=timeout_s,
        on_line=on_line,
        is_pinned=is_pinned,
        instrument=observing,
    )
    start = child_environment if is_pinned else unpinned_environment
    child = start(profile, caller=dict(os.environ))
    return _diagnosis(shlex.join(redact_command(command)), run, settings, profile, child)


def diagnose_test(
    registration: Registration,
    settings: Settings,
    *,
    is_fresh: bool = False,
    on_line: OnLine | None = None,
    gpus: GpuAdmission = WHEN_EMPTY,
) -> Diagnosis:
    """Judge the processes of a test: of its newest kept run that would come out the same, else of a new one.

    Args:
        registration: The test.
        settings: The repository's settings.
        is_fresh: Run it in any case.
        on_line: Called with each line the recipe prints.
        gpus: When a run may use its GPUs.

    Raises:
        RegistrationError: A variable that the registration names is not set.
        StorageError: A run cannot be read or kept.
    """
    kept = None if is_fresh else _kept_run(registration, settings)
    run = kept or run_test(registration, settings, on_line=on_line, instrument=observing, gpus=gpus)
    child = recipe_environment(registration, run.path)
    notes = [] if kept is None else ["a kept run of the same source tree and environment; --fresh runs the test again"]
    return _diagnosis(registration.test_id, run, settings, registration.profile, child, notes)


def observing(variables: Mapping[str, str], run_dir: Path) -> dict[str, str]:
    """Return the variables by which every Python process of a run leaves its state in the run directory.

    Args:
        variables: The environment that the run would have without them.
        run_dir: The run directory.
    """
    folder = str(Path(__file__).with_name("state_hook"))
    others = variables.get("PYTHONPATH")
    path = folder if not others else f"{folder}{os.pathsep}{others}"
    return {"PYTHONPATH": path, RUN_VARIABLE: str(run_dir)}


def _kept_run(registration: Registration, settings: Settings) -> ObservedRun | None:
    """Return the newest kept run that a run started now would repeat, as far as that is known before it."""
    declared = declared_facts(registration, settings)
    if declared["source"].get("source_tree") is None:
        return None
    folder = new_run_dir(settings, registration.stem).parent
    for path in sorted(folder.iterdir(), reverse=True) if folder.is_dir() else ():
        facts = read_facts(path)
        is_same = all(facts.get(key) == declared[key] for key in ("recipe", "profile"))
        if not is_same or at(facts, "source", "source_tree") != declared["source"]["source_tree"]:
            continue
        run = load_run(path, settings)
        if not run.problems and not run.unknown_writers and _is_started_as_now(registration, run):
            return run
    return None


def _is_started_as_now(registration: Registration, run: ObservedRun) -> bool:
    """Whether every writer of a run was started with the variables that it would be started with now."""
    child = recipe_environment(registration, run.path)
    wanted = {
        setting.variable.name: None if setting.value is None else captured_value(setting.value)
        for setting in child.settings
    }
    states = run.recording.writer_states.values() if run.recording is not None else ()
    return all(at(state, "variables", name, "initial") == value for state in states for name, value in wanted.items())


# ------------------------------------------------------------------------------------------------ processes


@dataclass(frozen=True, slots=True)
class _Process:
    """A process that left its state, or a writer that left none.

    Attributes:
        name: What reports call it.
        state: What it read of itself; None if it left nothing.
        observed: What the hook says of it; None for a state that a recorder left.
    """

    name: str
    state: Mapping[str, Any] | None
    observed: Mapping[str, Any] | None

    @property
    def is_root(self) -> bool:
        """Whether it is the first Python process of what was started."""
        return bool(at(self.observed, "is_root"))

    @property
    def may_train(self) -> bool:
        """Whether a framework is loaded, and it neither loads data nor only starts others."""
        return self.loads(_FRAMEWORKS) and not at(self.observed, "is_data_worker") and not self._is_launcher

    @property
    def _is_launcher(self) -> bool:
        words = list(map(str, at(self.observed, "command") or ()))[:4]
        return any(os.path.basename(word) in _LAUNCHERS or word in _LAUNCHERS for word in words)

    def loads(self, modules: Sequence[str]) -> bool:
        """Whether it has imported one of the modules."""
        software = at(self.state, "software")
        return isinstance(software, Mapping) and any(module in software for module in modules)


def _diagnosis(
    subject: str,
    run: ObservedRun,
    settings: Settings,
    profile: str,
    child: ChildEnvironment | None,
    notes: Sequence[str] = (),
) -> Diagnosis:
    known = get_profile(profile)
    processes = list(_processes(run))
    judged = list(_judged(processes, run))
    others = [process.name for process in processes if process not in judged and process.state is not None]
    failure = str((run.outcome or {}).get("explanation", "failed")) if run.has_failed else None
    return Diagnosis(
        subject=subject,
        profile=known.name,
        processes=grouped((process.name, judge(process.state, known, child=child)) for process in judged),
        unjudged=others,
        failure=failure,
        run=display_path(run.path, settings),
        notes=[*notes, *([] if run.invalid is None else [f"its recording is invalid: {run.invalid}"])],
    )


def _judged(processes: Sequence[_Process], run: ObservedRun) -> Iterator[_Process]:
    """Choose the processes that train: those that log if they left their states, else those with a framework loaded.

    In the second case nobody says who trains, so a process that left nothing may be the one.
    """
    writers = [process for process in processes if process.observed is None]
    observed = [process for process in processes if process.observed is not None]
    if any(process.state is not None for process in writers):
        yield from writers
        return
    choices = (
        [process for process in observed if process.may_train],
        [process for process in observed if process.loads(SOFTWARE) and not at(process.observed, "is_data_worker")],
        [process for process in observed if process.is_root],
    )
    yield from next((choice for choice in choices if choice), observed or writers)
    silent = sum(entry.name.startswith(MARKER) for entry in run.path.iterdir())
    is_root_missing = not any(process.is_root for process in observed)
    if is_root_missing and (observed or silent or not writers):
        yield _unknown(run)
    if silent > is_root_missing:
        others = silent - is_root_missing
        yield _Process(f"{others} other Python {'process' if others == 1 else 'processes'}", None, None)


def _unknown(run: ObservedRun) -> _Process:
    """Stand in for a first process that left nothing: it was killed, or it is no Python or hides its variables."""
    command = run.facts.get("command") or ["the program"]
    return _Process(shlex.join(redact_command(list(map(str, command)))), None, None)


def _processes(run: ObservedRun) -> Iterator[_Process]:
    """Yield the writers and observed processes of a run, from its files: an invalid recording has states too."""
    writers = {} if run.recording is None else dict.fromkeys(run.recording.writer_states)
    states = _states(run.path)
    for role, rank in {**writers, **states}:
        state = states.get((role, rank))
        observed = at(state, "observed")
        name = f"{role} rank {rank}"
        if observed is not None:
            name = shlex.join(map(str, at(observed, "command") or ())) or name
        yield _Process(name, state, observed)


def _states(path: Path) -> dict[Writer, Mapping[str, Any] | None]:
    """Return what each process left in a run directory; None of one whose file cannot be read or is foreign."""
    states: dict[Writer, Mapping[str, Any] | None] = {}
    with usable_files():
        for writer, file in state_files(path):
            states[writer] = None
            with contextlib.suppress(InvalidRunError):
                state = read_state_file(file)
                if state is not None and state.keys() != {"error"}:
                    require_shape(state, STATE_SHAPE, file)
                    states[writer] = state
    return states

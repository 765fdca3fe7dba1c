"""Runs a test's recipe, and reads a run back with all that is known about it."""

from __future__ import annotations

import datetime
import re
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from e2e_registry import __version__
from e2e_registry.comparison import TestVerdict
from e2e_registry.config import SLUG_RULE, Settings, is_slug
from e2e_registry.determinism.doctor import judge_switches, problems
from e2e_registry.determinism.relaunch import callers_environment
from e2e_registry.determinism.state import read_state
from e2e_registry.determinism.variables import (
    NO_VARIABLES,
    ChildEnvironment,
    EffectiveVariable,
    Origin,
    Profile,
    child_environment,
    get_profile,
    pin_differences,
)
from e2e_registry.environment import compose, launch_facts, platform_facts, platform_slug, recipe_facts
from e2e_registry.errors import InvalidRunError, UsageError
from e2e_registry.execution.gpus import VISIBLE_VARIABLE, WHEN_EMPTY, GpuAdmission, visible_gpus
from e2e_registry.execution.launcher import LOG_FILE, Cancellation, LaunchSpec, launch, log_tail
from e2e_registry.operations.run_facts import FACTS_SHAPE, STATE_SHAPE, duration_s, require_shape, shape_fault
from e2e_registry.recording import RunRecording, read_run
from e2e_registry.recording.layout import RUN_FILE, state_file
from e2e_registry.registration import Registration
from e2e_registry.series import SeriesBatch
from e2e_registry.storage import parse_json

#: Of series that came without a run directory.
UNKNOWN_PLATFORM = "unknown"

#: Returns variables that observe a run and are no part of its recipe, given the child's environment and run directory.
Instrument = Callable[[Mapping[str, str], Path], Mapping[str, str]]


#: What to do about a recipe that logged nothing.
_NOTHING_LOGGED = "open a MetricRecorder in it, or write lines to $E2E_METRICS_JSONL"


@dataclass(frozen=True, slots=True)
class RunFault:
    """Why a run cannot be judged, whatever its numbers are.

    Attributes:
        verdict: What is concluded: ``failed``, ``invalid`` or ``incomplete``.
        reasons: Why, one sentence each.
        hint: What to do next.
    """

    verdict: TestVerdict
    reasons: tuple[str, ...]
    hint: str | None = None


@dataclass(frozen=True)
class ObservedRun:
    """One execution, read back from its run directory.

    Attributes:
        path: The run directory.
        recording: Its series and the states of its writers; None if the recording is invalid.
        invalid: Why the recording is invalid, if it is.
        facts: ``run.json``: what was launched, and how it ended.
        environment: The facts of the run by group (:mod:`e2e_registry.environment`).
        platform: The platform slug that the run's bits belong to; ``unknown`` if no launcher said under what profile.
        pins: Pins of the profile that did not hold effectively, one text each.
        platform_fault: Why the platform is unknown, if it is.
        left_out: Files of the run that were too large to be brought back from a cluster.
    """

    path: Path
    recording: RunRecording | None
    invalid: InvalidRunError | None
    facts: Mapping[str, Any]
    environment: Mapping[str, Mapping[str, Any]]
    platform: str
    pins: tuple[str, ...]
    platform_fault: str | None = None
    left_out: tuple[str, ...] = ()

    @property
    def test(self) -> str | None:
        """Id of the test that was run; None for a run of no test."""
        test = self.environment.get("recipe", {}).get("test")
        return test if isinstance(test, str) else None

    @property
    def outcome(self) -> Mapping[str, Any] | None:
        """How the recipe ended; None if nobody saw it end."""
        return self.facts.get("outcome")

    @property
    def is_interrupted(self) -> bool:
        """Whether somebody ended the recipe."""
        return self.outcome is not None and self.outcome.get("status") == "interrupted"

    @property
    def has_failed(self) -> bool:
        """Whether the recipe is known to have ended other than by exit code 0."""
        outcome = self.outcome
        return outcome is not None and not (outcome.get("status") == "exited" and outcome.get("exit_code") == 0)

    @property
    def is_complete(self) -> bool:
        """Whether the recipe ended well and all that it wrote is there."""
        return not self.has_failed and self.recording is not None and self.recording.is_complete

    @property
    def fault(self) -> RunFault | None:
        """Why the run cannot be judged, whatever its numbers are; None if it can."""
        if self.has_failed:
            return RunFault(TestVerdict.FAILED, (f"the recipe {(self.outcome or {}).get('explanation', 'failed')}",))
        if self.invalid is not None:
            return RunFault(TestVerdict.INVALID, (str(self.invalid),))
        if self.recording is None or not self.recording.is_complete:
            reasons = ("nothing was recorded",) if self.recording is None else self.recording.incomplete_reasons
            return RunFault(TestVerdict.INCOMPLETE, tuple(reasons))
        if not self.recording.has_series:
            return RunFault(TestVerdict.FAILED, ("the recipe exited with code 0 and logged nothing",), _NOTHING_LOGGED)
        return None

    @property
    def problems(self) -> list[str]:
        """Why the run cannot be judged, one sentence each; empty if it can."""
        return [] if self.fault is None else list(self.fault.reasons)

    @property
    def metrics(self) -> frozenset[str]:
        """The names of all metrics that were recorded."""
        return frozenset(() if self.recording is None else self.recording.metrics)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What may be wrong with what was recorded, and does not keep it from being judged."""
        return () if self.recording is None else (*self.recording.warnings, *self.lax_switches)

    @property
    def duration_s(self) -> float | None:
        """Wall time of the recipe in seconds."""
        return duration_s(self.facts)

    @cached_property
    def unknown_writers(self) -> tuple[str, ...]:
        """The writers that left no readable state, as ``role rank N``; ``no writer`` if nothing was logged."""
        if self.recording is None:
            return ()
        states = self.recording.writer_states
        return tuple(f"{role} rank {rank}" for (role, rank), state in states.items() if state is None)

    @cached_property
    def lax_switches(self) -> tuple[str, ...]:
        """What the doctor finds wrong with the switches inside the writers, each once, with the writers it is true of.

        Unlike a pin, a switch keeps no run from being judged or recorded: without it the bits may hold by luck.
        """
        profile = self.facts.get("profile")
        if self.recording is None or profile is None:
            return ()
        writers: dict[str, list[str]] = {}
        for (role, rank), state in self.recording.writer_states.items():
            for finding in problems(judge_switches(state or {}, profile)):
                writers.setdefault(f"{finding.message}; {finding.fix}", []).append(f"{role} rank {rank}")
        return tuple(f"not strict in {', '.join(found)}: {message}" for message, found in writers.items())

    @property
    def source_tree(self) -> str | None:
        """Hash of the working tree that was run; None without git."""
        tree = self.environment.get("source", {}).get("source_tree")
        return tree if isinstance(tree, str) else None

    @property
    def node(self) -> str | None:
        """The node of a Ray cluster that ran it; None if no cluster did."""
        node = (self.facts.get("ray") or {}).get("node")
        return node if isinstance(node, str) else None

    @property
    def attempts(self) -> int:
        """How often the test was started for this run; more than once if Ray lost a node."""
        attempt = (self.facts.get("ray") or {}).get("attempt")
        return attempt if isinstance(attempt, int) else 1

    def batches(self) -> Iterator[SeriesBatch]:
        """Stream the recorded series; nothing for an invalid recording."""
        return iter(()) if self.recording is None else self.recording.batches()

    def log_tail(self) -> str:
        """Return the end of the recipe's output."""
        return log_tail(self.path / LOG_FILE)


def new_run_dir(settings: Settings, name: str) -> Path:
    """Return the path of a run directory that does not exist yet; sorting by name sorts by time."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%f")
    return settings.run_dir / name / f"{now}-{secrets.token_hex(2)}"


def run_test(
    registration: Registration,
    settings: Settings,
    *,
    on_line: Callable[[str], None] | None = None,
    cancellation: Cancellation | None = None,
    is_pinned: bool = True,
    instrument: Instrument | None = None,
    devices: Sequence[str] | None = None,
    gpus: GpuAdmission = WHEN_EMPTY,
) -> ObservedRun:
    """Run a test's recipe once and keep the run.

    Args:
        registration: The test.
        settings: The repository's settings.
        on_line: Called with each line the recipe prints.
        cancellation: Ends the run from another thread.
        is_pinned: Whether the profile's variables are set; without them the run is judged by the profile all the same.
        instrument: Adds variables that observe the run.
        devices: GPUs that a scheduler has given to the test, as ``CUDA_VISIBLE_DEVICES`` names them: it takes others
            only if these are not free and others are. By default the first that are free, as many as the test was
            registered with. A test without GPUs keeps the caller's variable.
        gpus: When it may use them.

    Raises:
        RefusedError: Too few GPUs are free.
        NotStartedError: It was called off before that.
        RegistrationError: A variable that the registration names is not set.
        StorageError: The run directory cannot be written.
    """
    here = visible_gpus() if registration.num_gpus else ()
    admitted = gpus.admit(
        here if devices is None else devices,
        registration.num_gpus,
        spare=() if devices is None else [device for device in here if device not in devices],
        on_wait=on_line,
        allows_start=lambda: cancellation is None or cancellation.allows_start,
    )
    with admitted as given:
        run_dir = new_run_dir(settings, registration.stem)
        child = launch_test(
            registration,
            settings,
            run_dir,
            declared_facts(registration, settings),
            caller={**callers_environment(), **({VISIBLE_VARIABLE: ",".join(given)} if given else {})},
            on_line=on_line,
            cancellation=cancellation,
            is_pinned=is_pinned,
            instrument=instrument,
        )
    return load_run(run_dir, settings, child=child)


def launch_test(
    registration: Registration,
    settings: Settings,
    run_dir: Path,
    facts: Mapping[str, Any],
    *,
    caller: Mapping[str, str],
    on_line: Callable[[str], None] | None = None,
    cancellation: Cancellation | None = None,
    is_pinned: bool = True,
    instrument: Instrument | None = None,
) -> ChildEnvironment:
    """Run a test's recipe once into ``run_dir``; return the environment that it was started with.

    Args:
        registration: The test.
        settings: Give the root, in which the recipe runs.
        run_dir: Where the run is kept.
        facts: What :func:`declared_facts` said of the test, perhaps on another machine.
        caller: The environment to inherit.
        on_line: Called with each line the recipe prints.
        cancellation: Ends the run from another thread.
        is_pinned: Whether the profile's variables are set.
        instrument: Adds variables that observe the run.

    Raises:
        RegistrationError: A variable that the registration names is not set.
        StorageError: The run directory cannot be written.
    """
    child = recipe_environment(registration, run_dir, is_pinned=is_pinned, caller=caller)
    argv = registration.argv(run_dir=run_dir, environ=child.variables)
    facts = {**facts, "num_gpus": registration.num_gpus}
    _launch(argv, child, run_dir, settings, facts, registration.timeout, on_line, cancellation, instrument)
    return child


def recipe_environment(
    registration: Registration, run_dir: Path, *, is_pinned: bool = True, caller: Mapping[str, str] | None = None
) -> ChildEnvironment:
    """Return the environment that a test's recipe would be started with now.

    Args:
        registration: The test.
        run_dir: Replaces ``{run_dir}``.
        is_pinned: Whether the profile's variables are set.
        caller: The environment to inherit; the process's own by default.

    Raises:
        RegistrationError: A variable that the registration names is not set.
    """
    environ = callers_environment() if caller is None else dict(caller)
    stated = registration.launch_env(run_dir=run_dir, environ=environ)
    if not is_pinned:
        return unpinned_environment(registration.profile, caller=environ, registration=stated)
    python = None if registration.script is None else sys.executable
    return child_environment(registration.profile, caller=environ, registration=stated, python=python)


def unpinned_environment(
    profile: str, *, caller: Mapping[str, str], registration: Mapping[str, str] = NO_VARIABLES
) -> ChildEnvironment:
    """Return the environment of a child that a profile judges, but is not applied to.

    Raises:
        UsageError: There is no such profile.
    """
    known = get_profile(profile)
    variables = {**caller, **registration}

    def origin(name: str) -> Origin:
        return Origin.REGISTRATION if name in registration else Origin.CALLER if name in caller else Origin.UNSET

    settings = (
        EffectiveVariable(variable, variables.get(variable.name), origin(variable.name)) for variable in known.settings
    )
    return ChildEnvironment(known, variables, tuple(settings), registration)


def declared_facts(
    registration: Registration, settings: Settings, *, source: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return what a test declares of its recipe, as a run of it records it, and the source tree.

    Args:
        registration: The test.
        settings: The repository's settings.
        source: The source facts that hold for the run; by default those of the tree as it is now.

    Raises:
        StorageError: The script cannot be read.
    """
    return launch_facts(
        settings.root,
        **_declaration(registration),
        profile=registration.profile,
        exclude=[settings.standards_dir, settings.run_dir],
        source=source,
    )


def declared_recipe(registration: Registration, settings: Settings) -> dict[str, Any]:
    """Return the group ``recipe`` that a run of the test would have now.

    Raises:
        StorageError: The script cannot be read.
    """
    recipe = recipe_facts(settings.root, **_declaration(registration))
    return compose(writer_states={}, launch_facts={"recipe": recipe}, root=settings.root)["recipe"]


def _declaration(registration: Registration) -> dict[str, Any]:
    argv = list(registration.recorded_argv)
    is_script = registration.script is not None
    return {
        "test": registration.test_id,
        "script": registration.script,
        "command": None if is_script else argv,
        "args": argv[2:] if is_script else (),
        "env": registration.recorded_env,
        "seed": registration.seed,
    }


def run_command(
    command: Sequence[str],
    settings: Settings,
    *,
    profile: str,
    timeout_s: float,
    seed: int | None = None,
    on_line: Callable[[str], None] | None = None,
    is_pinned: bool = True,
    instrument: Instrument | None = None,
) -> ObservedRun:
    """Run any command under a profile and keep the run; no registration is needed.

    Args:
        command: Program and arguments; ``{run_dir}``, and ``{seed}`` if a seed is given, are replaced in them.
        settings: The repository's settings.
        profile: Name of the profile.
        timeout_s: Seconds the command may take.
        seed: Recorded with the run.
        on_line: Called with each line the command prints.
        is_pinned: Whether the profile's variables are set; without them the run is judged by the profile all the same.
        instrument: Adds variables that observe the run.

    Raises:
        UsageError: There is no such profile, or no command.
        StorageError: The run directory cannot be written.
    """
    run_dir = new_run_dir(settings, "command")
    start = child_environment if is_pinned else unpinned_environment
    child = start(profile, caller=callers_environment())
    fields = {"{run_dir}": str(run_dir)} | ({} if seed is None else {"{seed}": str(seed)})
    argv = [_filled(argument, fields) for argument in command]
    excluded = [settings.standards_dir, settings.run_dir]
    facts = launch_facts(settings.root, command=list(command), seed=seed, profile=profile, exclude=excluded)
    _launch(argv, child, run_dir, settings, facts, timeout_s, on_line, None, instrument)
    return load_run(run_dir, settings, child=child)


def _filled(text: str, fields: Mapping[str, str]) -> str:
    """Replace placeholders in one pass, so that nothing is looked for in what was put in."""
    return re.sub("|".join(map(re.escape, fields)), lambda found: fields[found[0]], text)


def _launch(
    argv: Sequence[str],
    child: ChildEnvironment,
    run_dir: Path,
    settings: Settings,
    facts: Mapping[str, Any],
    timeout_s: float,
    on_line: Callable[[str], None] | None,
    cancellation: Cancellation | None,
    instrument: Instrument | None,
) -> None:
    recipe = facts["recipe"]
    spec = LaunchSpec(
        command=argv,
        # As declared and redacted: what ${VARIABLE} expanded to may be a secret, and run.json is uploaded.
        shown_command=recipe["command"] or ["python", recipe["script"], *recipe["args"]],
        cwd=settings.root,
        run_dir=run_dir,
        environment={**child.variables, **(instrument(child.variables, run_dir) if instrument else {})},
        keep_variables=frozenset(child.explicit),
        timeout_s=timeout_s,
        facts={
            **facts,
            "origins": {setting.variable.name: setting.origin.value for setting in child.settings},
            # A recipe that leaves no state file ran on this machine all the same.
            "launcher_platform": platform_facts(read_state()),
            "tool": __version__,
            # Of the machine that ran it: whoever reads the run may have another tag, or none.
            "platform_tag": settings.platform_tag,
        },
    )
    launch(spec, on_line=on_line, cancellation=cancellation)


def load_run(path: Path, settings: Settings, *, child: ChildEnvironment | None = None) -> ObservedRun:
    """Read a run directory back, or a single file of series.

    Args:
        path: A run directory or a ``.jsonl`` file.
        settings: Give the axes and the tag of the platform slug.
        child: What the run was launched with, if it was launched just now: it names who set a pin.

    Raises:
        UsageError: There is no such path.
        StorageError: A file cannot be read.
    """
    recording, invalid = None, None
    try:
        recording = read_run(path)
        _check_facts(recording)
    except InvalidRunError as error:
        recording, invalid = None, error
    facts = read_facts(path) if recording is None else recording.run or {}
    states = {} if recording is None else recording.writer_states
    profile = facts.get("profile")
    # The root that its paths are relative to is that of the machine it ran on: a CI runner's, a node's.
    root = Path(facts["cwd"]) if isinstance(facts.get("cwd"), str) else settings.root
    environment = compose(writer_states=states, launch_facts=facts, root=root)
    environment["platform"] = environment["platform"] or facts.get("launcher_platform") or {}
    platform, fault = _platform(facts, environment, settings)
    return ObservedRun(
        path=path,
        recording=recording,
        invalid=invalid,
        facts=facts,
        environment=environment,
        platform=platform,
        pins=() if profile is None else _pins(profile, states, child),
        platform_fault=fault,
    )


def _platform(
    facts: Mapping[str, Any], environment: Mapping[str, Mapping[str, Any]], settings: Settings
) -> tuple[str, str | None]:
    """Return the platform slug of a run, or :data:`UNKNOWN_PLATFORM` and why."""
    profile = facts.get("profile")
    if profile is None:
        return UNKNOWN_PLATFORM, "no launcher said under what profile it ran"
    try:
        slug = platform_slug(
            profile,
            platform=environment["platform"],
            software=environment["software"],
            gpu_count=facts.get("num_gpus") or None,  # each rank may have been shown its own GPU alone
            axes=settings.platform_axes,
            tag=_platform_tag(facts, settings),
        )
    except UsageError as error:  # such as a CUDA recipe that died before it started CUDA
        return UNKNOWN_PLATFORM, str(error)
    return slug, None


def _platform_tag(facts: Mapping[str, Any], settings: Settings) -> str | None:
    """Return the tag that a run was made under; that of this machine where the run does not say."""
    tag = facts.get("platform_tag", settings.platform_tag)
    if tag is None or (isinstance(tag, str) and is_slug(tag)):
        return tag
    raise UsageError(f"the run's platform tag {tag!r} is no slug", hint=f"a slug holds {SLUG_RULE}")


def read_facts(path: Path) -> dict[str, Any]:
    """Return ``run.json`` of a run directory; empty if there is none that can be read, or it says nonsense."""
    try:
        facts = parse_json((path / RUN_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return facts if shape_fault(facts, FACTS_SHAPE) is None else {}


def _check_facts(recording: RunRecording) -> None:
    """Refuse facts of another shape than the launcher and the recorder write."""
    if recording.run is not None:
        require_shape(recording.run, FACTS_SHAPE, recording.path / RUN_FILE)
    for (role, rank), state in recording.writer_states.items():
        if state is not None:
            require_shape(state, STATE_SHAPE, recording.path / state_file(role, rank))


def _pins(
    profile: str, states: Mapping[tuple[str, int], Mapping[str, Any] | None], child: ChildEnvironment | None
) -> tuple[str, ...]:
    """Return the pins that did not hold in some writer, each once; judged by the launch where no state is known."""
    judged: str | Profile = profile if child is None else child.profile
    found = [str(pin) for state in [*states.values()] or [None] for pin in pin_differences(judged, state, child=child)]
    return tuple(dict.fromkeys(found))

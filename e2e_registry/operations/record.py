"""Records standards: runs a recipe until it is known to repeat, shows the change, and writes only what changed."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e_registry.comparison import (
    Comparison,
    InvariantBreak,
    TestVerdict,
    Verdict,
    check_invariants,
    compare,
)
from e2e_registry.comparison.change import REPEAT_UNPROVEN, Action, StandardChange
from e2e_registry.comparison.policy_change import policy_changes
from e2e_registry.comparison.result import SeriesResult
from e2e_registry.comparison.rounding import rounded_series
from e2e_registry.config import Settings
from e2e_registry.environment import arguments_equal, difference, software_equal, source_facts
from e2e_registry.errors import (
    InvalidRunError,
    MismatchError,
    RecipeError,
    RecordingError,
    RefusedError,
)
from e2e_registry.execution.gpus import WHEN_EMPTY, GpuAdmission
from e2e_registry.operations.running import ObservedRun, declared_recipe, load_run, read_facts, run_test
from e2e_registry.operations.standards import (
    check_policies_fit,
    display_path,
    kept_batches,
    metadata_of,
    open_standard,
    pinned_metrics,
    standard_paths,
)
from e2e_registry.registration import Registration, coverage_faults, coverage_warnings
from e2e_registry.reports.values import MAX_SHOWN, listed
from e2e_registry.series import SeriesBatch, SeriesKey
from e2e_registry.standard import Standard, StandardMetadata, content_digest, write_standard
from e2e_registry.tolerance import Policy


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """How to record.

    Attributes:
        runs: How many runs must agree; at least one of them is fresh.
        refresh: Renew also the series whose old rows their tolerance accepts.
        allow_unknown_state: Record a run whose writers left no determinism state.
        reason: Why, in the author's words; kept in the standard.
    """

    runs: int = 2
    refresh: bool = False
    allow_unknown_state: bool = False
    reason: str | None = None


def record_test(
    registration: Registration,
    settings: Settings,
    options: RecordOptions,
    *,
    gpus: GpuAdmission = WHEN_EMPTY,
    on_run: Callable[[int, int], None] = lambda number, total: None,
    on_line: Callable[[str], None] | None = None,
) -> StandardChange:
    """Run a test until ``options.runs`` runs agree, and write the standard if it changed.

    Args:
        registration: The test.
        settings: The repository's settings.
        options: How to record.
        gpus: When a run may use its GPUs.
        on_run: Called before each run with its number and the total.
        on_line: Called with each line the recipe prints.

    Raises:
        RecordingError: The recipe failed, or its recording is invalid or incomplete.
        MismatchError: An invariant is broken, a registered metric was never emitted, or nothing would be judged.
        RefusedError: A pin does not hold, or a writer's state is unknown.
        StorageError: The old standard cannot be read, or the new one not written; the old one is then unchanged.
    """
    old = _old_standards(registration, settings)

    def run_fresh(number: int) -> ObservedRun:
        on_run(number, options.runs)
        run = run_test(registration, settings, on_line=on_line, gpus=gpus)
        require_recordable(registration, run, allow_unknown_state=options.allow_unknown_state)
        return run

    first = run_fresh(1)
    runs = [first]
    reused = find_kept_run(registration, settings, like=first) if options.runs > 1 else None
    if reused is not None:
        runs.append(reused)
    while len(runs) < options.runs:
        runs.append(run_fresh(len(runs) + 1))
    written = next(run for run in reversed(runs) if run is not reused)
    disagreement = first_disagreement(registration, runs)
    if disagreement is not None:
        return StandardChange(
            subject=registration.test_id,
            platform=written.platform,
            action=Action.REFUSED,
            path=display_path(settings.standard_path(registration.stem, written.platform), settings),
            disagreement=disagreement,
            run_path=display_path(written.path, settings),
            warnings=written.warnings,
        )
    agreed = len(runs) if len(runs) > 1 else None
    prepared = prepare_standard(
        registration,
        settings,
        written,
        old=old.get(written.platform),
        agreed=agreed,
        refresh=options.refresh,
        reason=options.reason,
        reused=reused,
    )
    return prepared.write()


def _old_standards(registration: Registration, settings: Settings) -> dict[str, Standard]:
    """Open what is there before minutes are spent on runs: a damaged standard must be seen first."""
    paths = standard_paths(registration, settings)
    return {platform: open_standard(path, platform) for platform, path in paths.items()}


def require_recordable(registration: Registration, run: ObservedRun, *, allow_unknown_state: bool) -> None:
    """Refuse a run that must not become a standard.

    Raises:
        RecordingError: The recipe failed, or its recording is invalid or incomplete.
        MismatchError: An invariant is broken, a registered metric was never emitted, or nothing would be judged.
        RefusedError: A pin does not hold, or a writer's state is unknown.
        RegistrationError: A tolerance does not fit the series: of what type it is, or how many steps it has.
    """
    require_complete(run)
    check_policies_fit(registration, run)
    if any(tolerance.reduce is not None for tolerance in registration.tolerances.values()):
        compare(run.batches(), run.batches(), policies=registration.policies())  # fails as every check would
    if run.platform_fault is not None:
        raise RefusedError(f"the platform of the run is unknown: {run.platform_fault}", where=run.path)
    if run.pins:
        raise RefusedError(
            f"the run is not on the profile {registration.profile!r}: {'; '.join(run.pins)}",
            hint="unset the variable, or state it in the registration's env= if this machine sets it for all",
        )
    if run.unknown_writers and not allow_unknown_state:
        raise RefusedError(
            f"the determinism state of {listed(run.unknown_writers)} is unknown: no state file was left",
            hint="log through e2e_registry.MetricRecorder, or pass --allow-unknown-state",
        )
    faults = coverage_faults(registration, run.metrics)
    if faults:
        raise MismatchError(
            listed(faults, MAX_SHOWN, separator="; "),
            where=registration.test_id,
            hint=f"the run emitted: {listed(sorted(run.metrics))}",
        )
    breaks = check_invariants(run.batches(), registration.invariant)
    if breaks:
        raise breaks_error(breaks, where=registration.test_id, hint=breaks_hint(breaks))


def require_complete(run: ObservedRun) -> None:
    """Refuse a run that did not end well.

    Raises:
        RecordingError: The recipe failed, or its recording is invalid, incomplete or empty.
    """
    fault = run.fault
    if fault is None:
        return
    if run.invalid is not None and fault.verdict is TestVerdict.INVALID:
        raise InvalidRunError(run.invalid.message, where=run.invalid.where, hint=run.invalid.hint)
    text = listed(fault.reasons, separator="; ")
    if fault.verdict is TestVerdict.INCOMPLETE:
        raise RecordingError(f"the run is incomplete: {text}", where=run.path)
    tail = run.log_tail() if run.has_failed else ""
    shown = "; the end of its output:\n" + textwrap.indent(tail, "  | ", lambda line: True) if tail else ""
    raise RecipeError(f"{text}{shown}", where=run.path, hint=fault.hint)


def breaks_error(breaks: Sequence[InvariantBreak], *, where: str, hint: str) -> MismatchError:
    """Return the error that names the invariants which do not hold."""
    texts = []
    for broken in breaks:
        what = "is not finite" if broken.what == "finite" else f"breaks {broken.invariant}"
        place = f"at {broken.count} point{'' if broken.count == 1 else 's'}, first at step {broken.step}"
        texts.append(f"{broken.key} {what} {place}: {broken.point.value!r}")
    return MismatchError(listed(texts, MAX_SHOWN, separator="; "), where=where, hint=hint)


def breaks_hint(breaks: Sequence[InvariantBreak]) -> str:
    """Return what to do about invariants that do not hold.

    Where bounds are declared, no word permits NaN: it satisfies none.
    """
    unbounded = [broken for broken in breaks if broken.what == "finite" and not broken.invariant.has_bounds]
    if not unbounded:
        return "correct the recipe, or the invariant"
    permission = f"invariants={{{unbounded[0].key.metric!r}: {{'finite': False}}}}"
    return f"correct the recipe; if NaN or infinity is right there, say so: {permission}"


# ------------------------------------------------------------------------------------------------ agreement


def find_kept_run(registration: Registration, settings: Settings, *, like: ObservedRun) -> ObservedRun | None:
    """Return the newest kept run of the same source tree, arguments and environment, other than ``like`` itself.

    Without git the source tree is null, which equals nothing: then no kept run counts.
    """
    if like.source_tree is None:
        return None
    for path in sorted(like.path.parent.iterdir(), reverse=True):
        facts = read_facts(path)
        # What the launcher wrote tells most kept runs apart without reading their series.
        if path == like.path or any(facts.get(key) != like.facts.get(key) for key in ("recipe", "profile")):
            continue
        run = load_run(path, settings)
        if is_repeat(run, of=like):
            return run
    return None


def is_repeat(run: ObservedRun, *, of: ObservedRun) -> bool:
    """Whether a run is a whole run of the same test, source tree, arguments and environment as another.

    Without git the source tree is null, which equals nothing.
    """
    if run.source_tree is None or run.source_tree != of.source_tree or run.test != of.test:
        return False
    differences = [d for d in difference(of.environment, run.environment) if not d.is_informational]
    return not (differences or run.problems or run.pins)


def first_disagreement(registration: Registration, runs: Sequence[ObservedRun]) -> Comparison | None:
    """Return the first comparison of a run with the first one that the policies do not accept; None if all agree."""
    policies = registration.policies()
    for run in runs[1:]:
        comparison = compare(run.batches(), runs[0].batches(), policies=policies)
        if comparison.verdict is Verdict.MISMATCH:
            return comparison
    return None


# ------------------------------------------------------------------------------------------------ writing


@dataclass(frozen=True, kw_only=True)
class PreparedStandard:
    """A standard as it would be written, and what that would change.

    Attributes:
        path: Where it goes.
        batches: Its rows.
        metadata: What it says about itself.
        change: What writing it does to the standard that is there.
    """

    path: Path
    batches: Sequence[SeriesBatch]
    metadata: StandardMetadata
    change: StandardChange

    def write(self) -> StandardChange:
        """Write the standard, unless that would change nothing that counts; return the change.

        Raises:
            StorageError: It cannot be written; the old one is then unchanged.
        """
        if self.change.action is not Action.UNCHANGED:
            write_standard(self.path, self.batches, self.metadata)
        return self.change


def prepare_standard(
    registration: Registration,
    settings: Settings,
    run: ObservedRun,
    *,
    old: Standard | None,
    agreed: int | None,
    refresh: bool = False,
    reason: str | None = None,
    reused: ObservedRun | None = None,
) -> PreparedStandard:
    """Make a run into the standard of its platform, without writing it.

    Args:
        registration: The test.
        settings: The repository's settings.
        run: The run to write, known to be recordable.
        old: The standard that is there.
        agreed: How many runs agreed; None for a run that nothing was compared with.
        refresh: Renew also the series whose old rows their tolerance accepts.
        reason: Why, in the author's words.
        reused: The kept run that counted as one of those that agreed.

    Raises:
        StorageError: The old standard cannot be read.
    """
    path = settings.standard_path(registration.stem, run.platform)
    metadata = metadata_of(registration, run, kind="e2e", agreed=agreed, reason=reason)
    policies = registration.policies(pinned_metrics(old))
    change = None if old is None else compare(run.batches(), old.batches(), policies=policies)
    kept_old: list[SeriesKey] = []
    if change is not None and not refresh:
        kept_old = [result.key for result in change.series if result.verdict is Verdict.WITHIN_TOLERANCE]
    batches = list(with_old_rows(kept_batches(run, registration.policies()), old, kept_old))
    action, changes = action_on(batches, metadata, old, comparison=change)
    outcome = StandardChange(
        subject=registration.test_id,
        platform=run.platform,
        action=action,
        path=display_path(path, settings),
        change=change,
        environment=() if old is None else difference(old.metadata.environment, run.environment),
        metadata_changes=changes,
        kept_old=kept_old,
        runs_agreed=agreed,
        reused_run=None if reused is None else display_path(reused.path, settings),
        run_path=display_path(run.path, settings),
        num_points=sum(len(batch) for batch in batches),
        warnings=_warnings(registration, run),
    )
    return PreparedStandard(path=path, batches=batches, metadata=metadata, change=outcome)


def _warnings(registration: Registration, run: ObservedRun) -> list[str]:
    """Return what should be known of a run that becomes a standard: what it has no values for, and rounded values."""
    policies = registration.policies()
    rounded = rounded_series(run.batches(), lambda metric: policies.policy(metric).is_judged)
    return [*run.warnings, *coverage_warnings(registration, run.metrics), *map(str, rounded)]


def with_old_rows(
    stream: Iterable[SeriesBatch], old: Standard | None, kept_old: Sequence[SeriesKey]
) -> Iterator[SeriesBatch]:
    """Yield a stream with the old standard's rows of the series in ``kept_old``, in key order."""
    old_rows: dict[SeriesKey, list[SeriesBatch]] = {key: [] for key in kept_old}
    for batch in () if old is None else old.batches():
        if batch.key in old_rows:
            old_rows[batch.key].append(batch)
    for batch in stream:
        if batch.key in kept_old:
            yield from old_rows.pop(batch.key, ())
        else:
            yield batch


def action_on(
    batches: Sequence[SeriesBatch],
    metadata: StandardMetadata,
    old: Standard | None,
    *,
    comparison: Comparison | None = None,
    is_same_software: Callable[[Mapping[str, Any], Mapping[str, Any]], bool] = software_equal,
) -> tuple[Action, list[str]]:
    """Return what writing a standard would do to the one that is there, and what changes beside the values.

    Args:
        batches: Its series.
        metadata: What it says about itself.
        old: What is there.
        comparison: The new values against those that are there.
        is_same_software: Whether two environments have the same software.

    Raises:
        StorageError: The old standard cannot be read.
    """
    if old is None:
        return Action.CREATED, []
    changes = _metadata_changes(old.metadata, metadata, comparison)
    if not is_same_software(old.metadata.environment, metadata.environment):
        changes.append("software")
    # What is judged now or was: a value that moves while its metric leaves the judged ones is a change of values.
    pinned = frozenset(metadata.policies) | frozenset(old.metadata.policies)
    unjudged = pinned - _judged(metadata) - _judged(old.metadata)
    is_same = content_digest(batches, unjudged) == content_digest(old.batches(), unjudged)
    return Action.UPDATED if not is_same else Action.VALUES_UNCHANGED if changes else Action.UNCHANGED, changes


def replace_if_changed(
    path: Path,
    batches: Sequence[SeriesBatch],
    metadata: StandardMetadata,
    old: Standard | None,
    *,
    comparison: Comparison | None = None,
    is_same_software: Callable[[Mapping[str, Any], Mapping[str, Any]], bool] = software_equal,
) -> tuple[Action, list[str]]:
    """Write a standard unless what is there holds the same; return what was done, and what changed beside the values.

    Args:
        path: The standard.
        batches: Its series.
        metadata: What it says about itself.
        old: What is there.
        comparison: The new values against those that are there.
        is_same_software: Whether two environments have the same software.

    Raises:
        StorageError: The standard cannot be read or written.
    """
    action, changes = action_on(batches, metadata, old, comparison=comparison, is_same_software=is_same_software)
    if action is not Action.UNCHANGED:
        write_standard(path, batches, metadata)
    return action, changes


def _judged(metadata: StandardMetadata) -> set[str]:
    return {*metadata.policies} - metadata.observed


def _metadata_changes(old: StandardMetadata, new: StandardMetadata, comparison: Comparison | None) -> list[str]:
    """Say what changed beside values and software, of the things that a rewrite is worth; empty if nothing.

    What is judged less strictly than before comes first.
    """
    policies = {metric: Policy.from_json(policy) for metric, policy in new.policies.items()}
    results: defaultdict[str, list[SeriesResult]] = defaultdict(list)
    for result in () if comparison is None else comparison.series:
        results[result.key.metric].append(result)
    changes = [change.text(results[change.metric]) for change in policy_changes(old.policies, policies)]
    if not arguments_equal(old.environment, new.environment):
        changes.append("arguments")
    if old.platform != new.platform or old.test != new.test or old.kind != new.kind:
        changes.append("test, platform or kind")
    was_unproven = old.recorded.get("runs_agreed") == REPEAT_UNPROVEN
    if was_unproven and new.recorded.get("runs_agreed") != REPEAT_UNPROVEN:
        changes.append(f"{REPEAT_UNPROVEN} lifted")
    return changes


# ------------------------------------------------------------------------------------------------ adopting


def adopt_run(
    registration: Registration,
    settings: Settings,
    path: Path,
    *,
    allow_other_source: bool = False,
    allow_unknown_state: bool = False,
    reason: str | None = None,
) -> StandardChange:
    """Make a past run the standard of a test, with "repeat unproven".

    Args:
        registration: The test.
        settings: The repository's settings.
        path: A run directory.
        allow_other_source: Adopt a run of other source code than the checkout's.
        allow_unknown_state: Adopt a run whose writers left no determinism state.
        reason: Why, in the author's words.

    Raises:
        RefusedError: The run is of another recipe, other arguments or other source, or may not become a standard.
        RecordingError: The run failed, or its recording is invalid or incomplete.
        StorageError: The run or the old standard cannot be read, or the new one not written.
    """
    if not path.is_dir():
        message = "only a run directory says what was run" if path.exists() else "there is no such run directory"
        raise RefusedError(message, where=path, hint="give the folder of the run")
    run = load_run(path.resolve(), settings)
    require_complete(run)
    require_declared_recipe(registration, run, settings)
    if not allow_other_source:
        excluded = [settings.standards_dir, settings.run_dir, path.resolve()]
        source_tree = source_facts(settings.root, excluded)["source_tree"]
        if source_tree is None:
            _require_same_script(registration, run, settings)
        else:
            require_same_source(run, source_tree)
    require_recordable(registration, run, allow_unknown_state=allow_unknown_state)
    old = existing_standard(registration, settings, run.platform)
    return prepare_standard(registration, settings, run, old=old, agreed=None, reason=reason).write()


def existing_standard(registration: Registration, settings: Settings, platform: str) -> Standard | None:
    """Open the standard of a test on a platform; None if there is none.

    Raises:
        StandardError: It cannot be read, or is of another platform.
    """
    path = settings.standard_path(registration.stem, platform)
    return open_standard(path, platform) if path.exists() else None


def require_declared_recipe(registration: Registration, run: ObservedRun, settings: Settings) -> None:
    """Refuse a run of something else than what the test declares now.

    Raises:
        RefusedError: The run is of another script, command, arguments, ``env``, seed or profile.
    """
    declared = {"recipe": declared_recipe(registration, settings)}
    if not arguments_equal(declared, run.environment):
        changes = [entry for entry in difference(declared, run.environment) if entry.group == "recipe"]
        raise RefusedError(
            f"the run is of another recipe or other arguments: {'; '.join(map(str, changes))}",
            where=run.path,
            hint="run the test as it is declared now, and take that run",
        )
    if run.facts.get("profile") != registration.profile:
        raise RefusedError(
            f"the run was on the profile {run.facts.get('profile')!r}, the test is on {registration.profile!r}",
            where=run.path,
            hint="run the test as it is declared now, and take that run",
        )


_OTHER_SOURCE_HINT = "check out the commit that was run, without other edits; or pass --allow-other-source"


def _require_same_script(registration: Registration, run: ObservedRun, settings: Settings) -> None:
    """Refuse a run of another version of the script, where no git says what else it was run with."""
    declared = declared_recipe(registration, settings).get("script_sha256")
    recorded = run.environment.get("recipe", {}).get("script_sha256")
    if declared != recorded:
        raise RefusedError(
            f"the run is of another version of {registration.script}: it hashed to {str(recorded)[:12]}, "
            f"and here to {str(declared)[:12]}",
            where=run.path,
            hint=_OTHER_SOURCE_HINT,
        )


def require_same_source(run: ObservedRun, source_tree: str | None) -> None:
    """Refuse a run of other code: neither what was checked out nor the pull request's head is what lies here.

    Raises:
        RefusedError: The source trees differ, or one of them is unknown.
    """
    source = run.environment.get("source", {})
    trees = [source.get("source_tree"), source.get("head_source_tree")]
    if source_tree is not None and source_tree in trees:
        return
    if source_tree is None:
        what = "the source tree here is unknown, since this is no git repository"
    elif not any(trees):
        what = "the run does not say what source tree it is of"
    else:
        shown = " or ".join(str(tree)[:12] for tree in trees if tree)
        what = f"the run is of the source tree {shown}, and here is {source_tree[:12]}"
    head = source.get("head")
    at = f" (commit {str(head)[:12]})" if head else ""
    raise RefusedError(
        f"{what}{at}",
        where=run.path,
        hint=_OTHER_SOURCE_HINT,
    )

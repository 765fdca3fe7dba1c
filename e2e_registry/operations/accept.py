"""Makes the runs of a CI artifact the standards of this checkout: what would change first, then what was accepted.

The rows come from the recordings in the artifact and everything that judges them (which tests there are, policies,
invariants, where standards lie) from the checkout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e_registry.comparison import Action, Comparison, StandardChange, TestVerdict
from e2e_registry.comparison.assessment import RepeatLabel
from e2e_registry.config import Settings
from e2e_registry.environment import source_facts
from e2e_registry.errors import (
    ExitCode,
    InvalidRunError,
    MismatchError,
    NothingSelectedError,
    RecordingError,
    RefusedError,
    RegistryError,
    StandardError,
    UsageError,
    usable_files,
)
from e2e_registry.operations.artifact import Artifact, ArtifactEntry, RunFolder
from e2e_registry.operations.record import (
    PreparedStandard,
    existing_standard,
    first_disagreement,
    is_repeat,
    prepare_standard,
    require_complete,
    require_declared_recipe,
    require_recordable,
    require_same_source,
)
from e2e_registry.operations.rejections import Rejections
from e2e_registry.operations.running import ObservedRun, load_run
from e2e_registry.registration import Registration, discover, find_test
from e2e_registry.reports.values import listed
from e2e_registry.standard import Standard

#: Verdicts of CI that accepting a run would change. None: the run was recorded, and nobody judged it.
ACCEPTABLE = frozenset(
    {None, TestVerdict.MISMATCH.value, TestVerdict.NO_STANDARD.value, TestVerdict.INCOMPARABLE.value}
)
#: Verdicts that leave nothing to accept, whatever is asked for.
_WITHOUT_A_RUN = {
    TestVerdict.FAILED.value: RecordingError,
    TestVerdict.INCOMPLETE.value: RecordingError,
    TestVerdict.INVALID.value: InvalidRunError,
    TestVerdict.ERROR.value: RecordingError,
}
#: Other runs of a test in the artifact that are compared with the one to accept.
_MAX_REPEATS = 3


class Decision(enum.Enum):
    """What became of one run of the artifact."""

    PENDING = "pending"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    SKIPPED = "skipped"
    UNCHANGED = "unchanged"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class AcceptOptions:
    """Which runs to take, and what to let pass.

    Attributes:
        tests: Only these, by path or id; also where CI's verdict asks for nothing.
        platforms: Only these; also where CI's verdict asks for nothing.
        allow_other_source: Take a run of other source code than the checkout's.
        allow_unknown_state: Take a run whose writers left no determinism state.
        refresh: Renew also the series whose old rows their tolerance accepts.
        reason: Why, in the author's words; kept in the standard.
    """

    tests: Sequence[str] = ()
    platforms: Sequence[str] = ()
    allow_other_source: bool = False
    allow_unknown_state: bool = False
    refresh: bool = False
    reason: str | None = None

    @property
    def is_named(self) -> bool:
        """Whether the user named what to take."""
        return bool(self.tests or self.platforms)


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One run of an artifact, and what accepting it does.

    Attributes:
        subject: The test's id.
        platform: The platform; of a refused run the one that CI named, if any.
        decision: What became of it; ``pending`` until somebody decides.
        run: Where the run lies in the artifact.
        run_id: What names the run wherever it lies.
        started_ns: When it was started.
        prepared: The standard that it makes; None of a run that is refused.
        error: Why it is refused.
    """

    subject: str
    platform: str | None
    decision: Decision
    run: str | None = None
    run_id: str | None = None
    started_ns: int = 0
    prepared: PreparedStandard | None = None
    error: RegistryError | None = None

    @property
    def change(self) -> StandardChange | None:
        """What accepting the run does, or did, to the standard."""
        return None if self.prepared is None else self.prepared.change

    @property
    def exit_code(self) -> ExitCode:
        """What the command answers when this is all there is: a decision is no failure, a refusal is."""
        if self.decision is Decision.PENDING:
            return ExitCode.USAGE
        return ExitCode.OK if self.error is None else self.error.exit_code

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints for this run."""
        return {
            "subject": self.subject,
            "platform": self.platform,
            "decision": self.decision.value,
            "run": self.run,
            "change": None if self.change is None else self.change.to_json(),
            "error": None if self.error is None else str(self.error),
            "exit_code": int(self.exit_code),
        }


# ------------------------------------------------------------------------------------------------ proposing


def propose(
    artifact: Artifact, settings: Settings, options: AcceptOptions, *, artifact_path: Path | None = None
) -> list[Proposal]:
    """Return what the artifact offers: changes, the largest first, then new standards, then what is refused.

    Args:
        artifact: The artifact.
        settings: The checkout's settings.
        options: Which runs to take.
        artifact_path: Where the artifact lies; inside the checkout it does not count as source.

    Raises:
        UsageError: A named test does not exist, or the standards folder leads out of the checkout.
        NothingSelectedError: Nothing in the artifact asks for a decision.
    """
    _require_inside(settings)
    registrations = {registration.test_id: registration for registration in discover(settings)}
    named = [find_test(settings, test) for test in options.tests]
    registrations |= {registration.test_id: registration for registration in named}
    entries = _selected(artifact, options, {registration.test_id for registration in named})
    exclude = [settings.standards_dir, settings.run_dir, *([] if artifact_path is None else [artifact_path.resolve()])]
    source_tree = source_facts(settings.root, exclude)["source_tree"]
    rejections = Rejections(settings)
    proposals: list[Proposal] = []
    platforms: set[str] = set()
    for entry in entries:
        try:
            with _named_places(artifact):
                registration = _registration(entry, registrations)
                prepared = _prepare(artifact, entry, registration, settings, options, source_tree)
        except RegistryError as error:
            proposals.append(_proposal(entry, Decision.REFUSED, error=error))
            continue
        platforms.add(prepared.change.platform)
        if options.platforms and prepared.change.platform not in options.platforms:
            continue
        decision = Decision.PENDING
        if prepared.change.action is Action.UNCHANGED:
            decision = Decision.UNCHANGED
        elif entry.folder is not None and entry.folder.run_id in rejections and not options.is_named:
            decision = Decision.REJECTED
        proposals.append(_proposal(entry, decision, prepared=prepared))
    if not proposals:  # what has no results says only in its recording what platform it is of
        raise _no_run_on(options.platforms, platforms, artifact)
    return sorted(_newest(proposals), key=_order)


def _no_run_on(platforms: Sequence[str], known: Set[str], artifact: Artifact) -> NothingSelectedError:
    return NothingSelectedError(
        f"it holds no run on {', '.join(platforms)}",
        where=artifact.label,
        hint=f"it holds runs on: {', '.join(sorted(known))}" if known else None,
    )


def _newest(proposals: Sequence[Proposal]) -> list[Proposal]:
    """Keep one run a test and platform, the newest: without results only the recording says of which platform it is."""
    newest: dict[tuple[str, str | None], Proposal] = {}
    for proposal in sorted(proposals, key=lambda proposal: proposal.started_ns):
        newest[proposal.subject, proposal.platform] = proposal
    return list(newest.values())


def _selected(artifact: Artifact, options: AcceptOptions, ids: Set[str]) -> list[ArtifactEntry]:
    entries = [
        entry
        for entry in artifact.entries
        if (not ids or entry.subject in ids)
        and (not options.platforms or entry.verdict is None or entry.platform in options.platforms)
    ]
    missing = ids - {entry.subject for entry in entries}
    if missing:
        raise UsageError(
            f"it holds no run of {listed(sorted(missing))}",
            where=artifact.label,
            hint=f"it holds: {listed(list(dict.fromkeys(entry.subject for entry in artifact.entries)))}",
        )
    if not options.is_named:
        entries = [entry for entry in entries if entry.verdict in ACCEPTABLE or entry.verdict in _WITHOUT_A_RUN]
    if not entries and options.platforms:
        known = {entry.platform for entry in artifact.entries if entry.platform is not None}
        raise _no_run_on(options.platforms, known, artifact)
    if not entries:
        raise NothingSelectedError(
            "nothing to accept: no result is a mismatch, or lacks a standard",
            where=artifact.label,
            hint="name a test with --test to take its run all the same",
        )
    return entries


def _prepare(
    artifact: Artifact,
    entry: ArtifactEntry,
    registration: Registration,
    settings: Settings,
    options: AcceptOptions,
    source_tree: str | None,
) -> PreparedStandard:
    """Return the standard that a run makes, or raise why it may not become one."""
    if entry.folder is None or entry.verdict in _WITHOUT_A_RUN:
        failure = _WITHOUT_A_RUN.get(entry.verdict or "", RecordingError)
        what = "holds no run of it" if entry.folder is None else "holds no whole run of it"
        raise failure(f"CI's verdict is {entry.verdict!r}, and the artifact {what}", where=entry.subject)
    run = load_run(artifact.stage(entry.folder), settings)
    require_complete(run)
    if run.test != registration.test_id:
        raise InvalidRunError(f"the run is of the test {run.test!r}", where=run.path)
    require_declared_recipe(registration, run, settings)
    if not options.allow_other_source:
        require_same_source(run, source_tree)
    require_recordable(registration, run, allow_unknown_state=options.allow_unknown_state)
    if entry.repeat == RepeatLabel.NONDETERMINISTIC.value:
        raise MismatchError("CI ran it again, and it did not repeat", where=run.path, hint=_REPEAT_HINT)
    agreed = _agreeing_runs(artifact, entry.folder, registration, run, settings)
    prepared = prepare_standard(
        registration,
        settings,
        run,
        old=existing_standard(registration, settings, run.platform),
        agreed=agreed,
        refresh=options.refresh,
        reason=options.reason,
    )
    shown = dataclasses.replace(prepared.change, run_path=entry.folder.label)
    return dataclasses.replace(prepared, change=shown)


def _registration(entry: ArtifactEntry, registrations: Mapping[str, Registration]) -> Registration:
    """Find the test that an artifact names; its id is only ever compared with ids of the checkout."""
    if entry.folder is not None and entry.folder.fault is not None:
        raise InvalidRunError(entry.folder.fault, where=entry.folder.label)
    if entry.subject in registrations:
        return registrations[entry.subject]
    raise UsageError(
        f"this checkout has no test {entry.subject!a}", hint="check out the branch that the artifact was made from"
    )


def _agreeing_runs(
    artifact: Artifact, folder: RunFolder, registration: Registration, run: ObservedRun, settings: Settings
) -> int | None:
    """Return how many runs in the artifact agree; None if there is but this one.

    Raises:
        MismatchError: Two runs of the same source, arguments and environment do not agree.
    """
    repeats = []
    for neighbour in artifact.others_beside(folder)[:_MAX_REPEATS]:
        with contextlib.suppress(RecordingError):  # a damaged neighbour proves nothing
            other = load_run(artifact.stage(neighbour), settings)
            if is_repeat(other, of=run):
                repeats.append(other)
    if first_disagreement(registration, [run, *repeats]) is not None:
        raise MismatchError(
            "the artifact holds another run of the same source and arguments, with other numbers",
            where=run.path,
            hint=_REPEAT_HINT,
        )
    return len(repeats) + 1 if repeats else None


_REPEAT_HINT = "make the recipe repeat first (e2e-registry repeat), or register a tolerance with its reason"


@contextlib.contextmanager
def _named_places(artifact: Artifact) -> Iterator[None]:
    """Let errors name places in the artifact, not those of our copies; a file that cannot be used is such an error."""
    try:
        with usable_files():
            yield
    except RegistryError as error:
        error.message = artifact.named(error.message)
        error.where = None if error.where is None else artifact.named(error.where)
        raise


def _require_inside(settings: Settings) -> None:
    # Path.resolve fails on a link to itself.
    if not Path(os.path.realpath(settings.standards_dir)).is_relative_to(settings.root.resolve()):
        raise RefusedError(
            "the standards folder is a link that leads out of the repository",
            where=settings.standards_dir,
            hint="make it a folder: what an artifact holds is written nowhere else",
        )


def _proposal(
    entry: ArtifactEntry,
    decision: Decision,
    *,
    prepared: PreparedStandard | None = None,
    error: RegistryError | None = None,
) -> Proposal:
    return Proposal(
        subject=entry.subject,
        platform=entry.platform if prepared is None else prepared.change.platform,
        decision=decision,
        run=None if entry.folder is None else entry.folder.label,
        run_id=None if entry.folder is None else entry.folder.run_id,
        started_ns=0 if entry.folder is None else entry.folder.started_ns,
        prepared=prepared,
        error=error,
    )


# ------------------------------------------------------------------------------------------------ ordering


#: After what is to decide.
_SETTLED = (Decision.UNCHANGED, Decision.REJECTED, Decision.REFUSED)


def _order(proposal: Proposal) -> tuple[Any, ...]:
    """Order changes by size, then new standards, then what is settled, each by id."""
    name = (proposal.subject, proposal.platform or "")
    if proposal.decision in _SETTLED:
        return (2 + _SETTLED.index(proposal.decision), 0.0, 0, *name)
    if proposal.change is None or proposal.change.change is None:
        return (1, 0.0, 0, *name)
    size, num_values = magnitude(proposal.change.change)
    return (0, -size, -num_values, *name)


def magnitude(comparison: Comparison) -> tuple[float, int]:
    """Return how large a change is: the largest relative error of a judged value, and how many values differ.

    Series and steps on one side only, another dtype and non-finite values are larger than any number. A digest says
    that something moved, not how far, so it counts among the values alone.
    """
    size = math.inf if comparison.never_emitted else 0.0
    count = 0
    for result in comparison.series:
        if result.policy.is_judged:
            count += result.num_differing + result.missing.count + result.extra.count
            size = max(size, result.magnitude[0])
    return size, count


# ------------------------------------------------------------------------------------------------ deciding


def decide(proposal: Proposal, decision: Decision, settings: Settings) -> Proposal:
    """Carry a decision out: accepting writes the standard, rejecting is remembered, skipping does nothing.

    Raises:
        StorageError: The standard cannot be written, or does not read back as what was written.
    """
    if decision is Decision.ACCEPTED and proposal.prepared is not None:
        proposal.prepared.write()
        _verify(proposal.prepared)
        Rejections(settings).forget(proposal.run_id)
    elif decision is Decision.REJECTED:
        Rejections(settings).add(proposal.run_id, proposal.subject)
    return dataclasses.replace(proposal, decision=decision)


def _verify(prepared: PreparedStandard) -> None:
    """Read the standard back, which holds its rows against its digest."""
    standard = Standard(prepared.path)
    count = sum(len(batch) for batch in standard.batches())
    if count != prepared.change.num_points:
        raise StandardError(f"{count} points were written of {prepared.change.num_points}", where=prepared.path)

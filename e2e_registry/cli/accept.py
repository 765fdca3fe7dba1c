"""``accept``: applies the runs of a CI artifact to the standards."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from e2e_registry.cli import options
from e2e_registry.cli.output import print_json

if TYPE_CHECKING:
    from rich.console import Console

    from e2e_registry.config import Settings
    from e2e_registry.operations.accept import Decision, Proposal
    from e2e_registry.operations.artifact import Artifact


def accept(
    artifact: Annotated[
        str,
        typer.Argument(
            help="A downloaded artifact (zip or folder), the run folder, or one run's folder; "
            "with gh installed also a run's id, a pull request's number (#12) or the address of either.",
            metavar="ARTIFACT",
        ),
    ],
    test: options.Tests = None,
    platform: Annotated[
        list[str] | None, typer.Option("--platform", help="Only this platform; may be given more than once.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Accept all that may be accepted; ask nothing.")] = False,
    allow_other_source: options.AllowOtherSource = False,
    allow_unknown_state: options.AllowUnknownState = False,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Renew also series whose old rows their tolerance accepts.")
    ] = False,
    reason: options.Reason = None,
    all_metrics: options.AllMetrics = False,
    json: options.Json = False,
) -> None:
    """Make runs of a CI artifact the standards: each change is shown first, the largest first.

    By default the tests that failed there, had no standard or were incomparable. Without a terminal, and without
    --yes, nothing is written and the exit code is 2.
    """
    from e2e_registry.errors import worst_exit_code
    from e2e_registry.operations.accept import AcceptOptions, Decision, decide, propose
    from e2e_registry.reports.acceptance import print_decisions
    from e2e_registry.reports.console import make_console

    settings = options.settings(test[0] if test else None)
    choices = AcceptOptions(
        tests=test or (),
        platforms=platform or (),
        allow_other_source=allow_other_source,
        allow_unknown_state=allow_unknown_state,
        refresh=refresh,
        reason=reason,
    )
    console = make_console()
    with _opened(artifact, settings, test or ()) as (opened, path):
        proposals = propose(opened, settings, choices, artifact_path=path)
        review = _Review(
            settings,
            console,
            all_metrics=all_metrics,
            is_quiet=json,
            default=Decision.ACCEPTED if yes else None if _is_interactive(as_json=json) else Decision.PENDING,
        )
        pending = [proposal for proposal in proposals if proposal.decision is Decision.PENDING]
        decided = []
        for proposal in proposals:
            if proposal.decision is Decision.PENDING:
                decision = review.decision(proposal, f"{pending.index(proposal) + 1} of {len(pending)}")
                proposal = decide(proposal, decision, settings)
            review.show(proposal)
            decided.append(proposal)
    if json:
        print_json({"artifact": opened.label, "tests": [proposal.to_json() for proposal in decided]})
    else:
        written = [p.change.path for p in decided if p.decision is Decision.ACCEPTED and p.change is not None]
        print_decisions([proposal.decision.value for proposal in decided], written, console)
    if any(proposal.decision is Decision.PENDING for proposal in decided):
        typer.echo("error: nothing was written: there is no terminal to ask on\n  pass --yes to accept these", err=True)
    raise typer.Exit(worst_exit_code(proposal.exit_code for proposal in decided))


@contextlib.contextmanager
def _opened(artifact: str, settings: Settings, tests: Sequence[str]) -> Iterator[tuple[Artifact, Path | None]]:
    """Open an artifact wherever it is; yield it, and its path if it lies on this machine."""
    from e2e_registry.operations.artifact import open_artifact
    from e2e_registry.operations.github_cli import downloaded, parse_reference

    reference = None if Path(artifact).exists() else parse_reference(artifact)
    if reference is None:
        with open_artifact(Path(artifact)) as opened:
            yield opened, Path(artifact)
        return

    def on_line(line: str) -> None:
        typer.echo(line, err=True)

    inputs = [f"test={test}" for test in tests] or [f"suite={suite}" for suite in settings.suites]
    with (
        downloaded(reference, root=settings.root, inputs=inputs, on_line=on_line) as (folder, label),
        open_artifact(folder, label=label) as opened,
    ):
        yield opened, None


def _is_interactive(*, as_json: bool) -> bool:
    return not as_json and sys.stdin.isatty() and sys.stdout.isatty()


@dataclasses.dataclass
class _Review:
    """Shows one proposal after the other and finds out what to do with each.

    Attributes:
        settings: The checkout's settings.
        console: Where to print.
        all_metrics: Show every series.
        is_quiet: Print nothing.
        default: What is decided without a question; None to ask.
    """

    settings: Settings
    console: Console
    all_metrics: bool
    is_quiet: bool
    default: Decision | None

    def decision(self, proposal: Proposal, place: str) -> Decision:
        """Show a proposal; return what to do with it."""
        from e2e_registry.reports.acceptance import print_proposal

        if proposal.change is not None and not self.is_quiet:
            print_proposal(proposal.change, proposal.run, place, self.console, all_metrics=self.all_metrics)
        return self._ask() if self.default is None else self.default

    def _ask(self) -> Decision:
        from rich.prompt import Prompt

        from e2e_registry.operations.accept import Decision
        from e2e_registry.reports.acceptance import KEYS, print_keys

        while True:
            keys = [*KEYS, "?"]
            try:
                answer = Prompt.ask("  accept, reject or skip?", console=self.console, choices=keys)
            except EOFError:
                self.console.print()
                answer = "q"
            if answer == "?":
                print_keys(self.console)
                continue
            decision = {"a": Decision.ACCEPTED, "A": Decision.ACCEPTED, "r": Decision.REJECTED}.get(answer)
            decision = decision or Decision.SKIPPED
            if answer in ("A", "q"):
                self.default = decision
            return decision

    def show(self, proposal: Proposal) -> None:
        """Print what became of a run."""
        from e2e_registry.operations.accept import Decision
        from e2e_registry.reports.acceptance import print_decision

        if self.is_quiet or proposal.decision is Decision.PENDING:
            return
        detail = None if proposal.error is None else str(proposal.error)
        if proposal.decision is Decision.ACCEPTED and proposal.change is not None:
            detail = f"{proposal.change.path} written ({proposal.change.num_points:,} points)"
        elif proposal.decision is Decision.UNCHANGED and proposal.change is not None:
            detail = f"{proposal.change.path} holds this already"
        elif proposal.decision is Decision.REJECTED and self.default is not None:
            detail = f"by you, before; to take it all the same: --test {proposal.subject}"
        print_decision(proposal.decision.value, proposal.subject, proposal.platform, detail, self.console)

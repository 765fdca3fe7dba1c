"""Renders assessments for a terminal: a verdict line a test, then only what differs, and bounded in length."""

from __future__ import annotations

import io
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from e2e_registry.comparison import (
    Assessment,
    Comparison,
    Divergence,
    InvariantBreak,
    Presence,
    SeriesResult,
    TestVerdict,
    Verdict,
)
from e2e_registry.comparison.assessment import Repeat, RepeatLabel
from e2e_registry.comparison.result import largest_first
from e2e_registry.printable import printable
from e2e_registry.registration import never_emitted_text
from e2e_registry.reports.values import (
    MAX_SHOWN,
    capped,
    capped_lines,
    count_text,
    error_text,
    listed,
    more_text,
    pair_text,
    ranges_text,
    ulp_text,
    value_text,
)
from e2e_registry.tolerance import PolicyKind

if TYPE_CHECKING:
    from e2e_registry.environment import EnvironmentDifference

#: Failing series that come later than those shown, and are shown for their size.
MAX_LARGEST = 3
#: Environment differences that a report shows before it only counts.
MAX_ENVIRONMENT = 24
_WIDER_THAN_ANY_TABLE = 10_000

_DIFFERING = (Verdict.MISMATCH, Verdict.WITHIN_TOLERANCE)

#: Where no terminal says otherwise: CI logs do not wrap.
LOG_WIDTH = 150

VERDICT_STYLES = {
    TestVerdict.MATCH: "green",
    TestVerdict.WITHIN_TOLERANCE: "green",
    TestVerdict.MISMATCH: "bold red",
    TestVerdict.NO_STANDARD: "yellow",
    TestVerdict.INCOMPARABLE: "yellow",
    TestVerdict.FAILED: "bold red",
    TestVerdict.INCOMPLETE: "red",
    TestVerdict.INVALID: "red",
    TestVerdict.SKIPPED: "dim",
    TestVerdict.ERROR: "bold red",
}


class _Console(Console):
    """Shows what it is given and obeys none of it: names, values and output come from whatever was run."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render as rich does, with what would steer a terminal written as escapes."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def make_console(*, stderr: bool = False) -> Console:
    """Return the console that commands print to: as wide as the terminal, or fixed where there is none."""
    # The stream of now: whoever redirects standard output later, such as to keep another library's words out of it,
    # does not mean the results.
    stream = sys.stderr if stderr else sys.stdout
    console = _Console(file=stream, highlight=False, emoji=False, markup=False)
    columns = os.environ.get("COLUMNS", "")
    is_stated = columns.isdecimal() and int(columns) > 0
    if not is_stated and not (console.is_terminal and console.width):
        console.width = LOG_WIDTH
    return console


def rendered(print_to: Callable[[Console], None]) -> str:
    """Return as plain text what is printed to a console: for logs and messages that others show."""
    file = io.StringIO()
    console = _Console(file=file, width=LOG_WIDTH, color_system=None, highlight=False, emoji=False, markup=False)
    print_to(console)
    return file.getvalue().rstrip("\n")


def assessment_text(assessment: Assessment) -> str:
    """Return what :func:`print_assessment` prints."""
    return rendered(lambda console: print_assessment(assessment, console))


def print_table(table: Table, console: Console, *, indent: int = 2) -> None:
    """Print a table as wide as its content, however narrow the terminal: a folded number cannot be read."""
    natural = Measurement.get(console, console.options.update(width=_WIDER_THAN_ANY_TABLE), table).maximum
    for line in console.render_lines(table, console.options.update(width=natural), pad=False):
        text = Text(" " * indent).append_text(Text.assemble(*((part.text, part.style or "") for part in line)))
        text.rstrip()
        console.print(text, soft_wrap=True)


def print_assessment(assessment: Assessment, console: Console, *, all_metrics: bool = False) -> None:
    """Print one test's verdict and, unless all is well, what explains it."""
    console.print(_verdictprint_line(assessment), soft_wrap=True)
    if assessment.quarantine is not None:
        print_line(console, f"quarantined, so it blocks nothing, {assessment.quarantine}", "yellow")
    limit = None if all_metrics else MAX_SHOWN
    print_lines(console, assessment.reasons, "reason", limit=limit)
    if assessment.error is not None:
        print_line(console, str(assessment.error))
    broken = [_break_text(broken) for broken in assessment.breaks]
    print_lines(console, broken, "broken invariant", style="red", limit=limit)
    comparison = assessment.comparison
    if comparison is not None and (all_metrics or _is_worth_showing(assessment, comparison)):
        if not assessment.is_judged:
            print_line(console, f"for information, compared with {assessment.compared_with}:")
        print_comparison(comparison, console, all_metrics=all_metrics)
        print_environment(assessment.environment, console)
    if assessment.repeat is not None:
        print_line(console, _repeat_text(assessment.repeat), "bold")
    print_warnings(assessment.warnings, console, limit=limit)
    print_log_tail(assessment.log_tail or "", console)
    if not assessment.verdict.is_success and assessment.run_path:
        print_line(console, f"kept run: {assessment.run_path}")
    for step in assessment.next_steps:
        print_line(console, f"next: {step}")


def print_log_tail(log_tail: str, console: Console) -> None:
    """Print the end of a recipe's output, if there is any."""
    if log_tail:
        print_line(console, "the end of its output:")
        # Not at the start of a line: a workflow's log would obey a recipe that prints "::add-mask::" and the like.
        print_line(console, textwrap.indent(log_tail, "| ", lambda line: True), "dim")


def print_summary(assessments: Sequence[Assessment], console: Console, *, num_not_run: int = 0) -> None:
    """Print one line that counts the verdicts of a suite, and the tests that were left out."""
    counts = Counter(assessment.verdict for assessment in assessments)
    text = Text(f"{count_text(len(assessments) + num_not_run, 'test')}: ")
    parts = [Text(f"{counts[verdict]} {verdict.value}", VERDICT_STYLES[verdict]) for verdict in counts]
    parts += [Text(f"{num_not_run} not run", "yellow")] if num_not_run else []
    console.print(text + Text(", ").join(parts), soft_wrap=True)


def print_warnings(warnings: Sequence[str], console: Console, *, limit: int | None = MAX_SHOWN) -> None:
    """Print what did not change a verdict, and should be known."""
    print_lines(console, [f"warning: {warning}" for warning in warnings], "warning", style="yellow", limit=limit)


def print_lines(
    console: Console, lines: Sequence[str], singular: str, *, style: str = "", limit: int | None = MAX_SHOWN
) -> None:
    """Print lines of one kind, the first few of many."""
    for line in capped_lines(lines, singular, limit=limit):
        print_line(console, line, style)


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print one indented line, wrapped by the terminal alone."""
    console.print(Text(textwrap.indent(text, "  "), style=style), soft_wrap=True)


def _verdictprint_line(assessment: Assessment) -> Text:
    text = Text(assessment.verdict.value, VERDICT_STYLES[assessment.verdict])
    text.append(f"  {assessment.subject}", "bold")
    if assessment.platform:
        text.append(f"  {assessment.platform}", "cyan")
    if assessment.node:
        text.append(f"  on {assessment.node}", "dim")
    if assessment.comparison is not None and assessment.verdict.is_success:
        points = sum(result.num_common for result in assessment.comparison.series if result.policy.is_judged)
        text.append(
            f"  {count_text(assessment.comparison.num_judged, 'series', 'series')}, {count_text(points, 'point')}"
        )
    if assessment.duration_s is not None:
        text.append(f"  {assessment.duration_s:.1f} s", "dim")
    return text


def _repeat_text(repeat: Repeat) -> str:
    runs = count_text(len(repeat.run_paths), "further run")
    if repeat.label is RepeatLabel.REPEATABLE:
        return f"repeatable: {runs} agreed with this one, so the change is in the code or its environment"
    return f"{repeat.label.value}: {repeat.reason} ({', '.join(repeat.run_paths)})"


def _break_text(broken: InvariantBreak) -> str:
    what = "is not finite" if broken.what == "finite" else f"breaks the invariant {broken.invariant}"
    return (
        f"{broken.key} {what} at {count_text(broken.count, 'point')}, first at step {broken.step}: "
        f"{value_text(broken.point)}"
    )


def _is_worth_showing(assessment: Assessment, comparison: Comparison) -> bool:
    return assessment.verdict is not TestVerdict.MATCH or any(
        result.verdict is Verdict.UNREGISTERED for result in comparison.series
    )


def print_comparison(comparison: Comparison, console: Console, *, all_metrics: bool, is_change: bool = False) -> None:
    """Print a comparison: its first divergence, then the series that differ, and what was left out.

    Args:
        comparison: What to print.
        console: Where to print.
        all_metrics: Show every series.
        is_change: The run is to become the standard, so what is shown first is the largest change. Else it is the first
            failure in emission order, for what fails later may only follow from it.
    """
    limit = None if all_metrics else MAX_SHOWN
    first = comparison.first_divergence
    if first is not None:
        print_line(console, f"first divergence: {_divergence_text(first)}", "bold")
    never = [never_emitted_text(name) for name in comparison.never_emitted]
    print_lines(console, never, "such name", style="red", limit=limit)
    failing = largest_first(comparison.failing) if is_change else comparison.failing
    shown, num_hidden = capped(failing, limit)
    accepted = largest_first(result for result in comparison.series if result.verdict is Verdict.WITHIN_TOLERANCE)
    accepted_shown, num_accepted_hidden = capped(accepted, limit)
    rest = [result for result in comparison.series if result.verdict not in _DIFFERING] if all_metrics else []
    _print_series([*shown, *accepted_shown, *rest], console, all_metrics=all_metrics)
    if num_hidden:
        _print_hidden(failing[len(shown) :], console, is_change=is_change)
    if num_accepted_hidden:
        more = more_text(num_accepted_hidden, "series within its tolerance", "series within their tolerance")
        print_line(console, f"{more}, none further off: --all-metrics shows them")
    _print_the_rest(comparison, console, all_metrics=all_metrics)


def _print_hidden(hidden: Sequence[SeriesResult], console: Console, *, is_change: bool) -> None:
    """Print the largest of the failing series that were left out, unless those shown are larger; count the rest."""
    if not is_change:
        largest, _ = capped(largest_first(hidden), MAX_LARGEST)
        print_line(console, f"the largest of the {len(hidden):,} failing series that come later:")
        _print_series(largest, console, all_metrics=False)
        hidden = [result for result in hidden if not any(result is other for other in largest)]
    if hidden:
        names = ("series that differs", "series that differ") if is_change else ("failing series", "failing series")
        num_digests = sum(result.is_digest for result in hidden)
        digests = f" ({num_digests:,} of them digests, which have no size)" if num_digests else ""
        more = more_text(len(hidden), *names)
        print_line(console, f"{more}, none larger{digests}: --all-metrics shows them")


def _print_series(results: Sequence[SeriesResult], console: Console, *, all_metrics: bool) -> None:
    in_table = [result for result in results if result.num_differing or all_metrics]
    if in_table:
        print_table(_series_table(in_table), console)
    for result in results:
        for note in _notes(result):
            print_line(console, f"{result.key}: {note}")


def _print_the_rest(comparison: Comparison, console: Console, *, all_metrics: bool) -> None:
    """Say what was not shown: how many series are equal, and which are not judged."""
    equal = [result for result in comparison.series if result.verdict is Verdict.MATCH]
    if equal and not all_metrics:
        print_line(
            console, f"{count_text(len(equal), 'series', 'series')} equal: {listed([str(r.key) for r in equal])}", "dim"
        )
    unregistered = [str(r.key) for r in comparison.series if r.verdict is Verdict.UNREGISTERED]
    if unregistered:
        print_line(console, f"not registered, so not judged: {listed(unregistered)}", "dim")


def _divergence_text(divergence: Divergence) -> str:
    at = f"{divergence.key}, step {divergence.step}"
    if divergence.occurrence:
        at += f" (value {divergence.occurrence + 1} of that step)"
    want, got = pair_text(divergence.want, divergence.got)
    if divergence.got is None:
        return f"{at}: missing in the run (want {want})"
    if divergence.want is None:
        return f"{at}: not in the standard (got {got})"
    errors = []
    if divergence.abs_error is not None:
        errors.append(f"abs {error_text(divergence.abs_error)}")
    if divergence.rel_error is not None:
        errors.append(f"rel {error_text(divergence.rel_error)}")
    if divergence.ulp_error is not None:
        errors.append(f"{ulp_text(divergence)} ULP")
    return f"{at}: want {want}, got {got}" + (f" ({', '.join(errors)})" if errors else "")


def _series_table(results: Iterable[SeriesResult]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("metric", no_wrap=True)
    table.add_column("differ", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name in ("step", "want", "got", "abs", "rel", "ULP"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("allowance", no_wrap=True)
    for result in results:
        _add_rows(table, result)
    return table


def _add_rows(table: Table, result: SeriesResult) -> None:
    style = {Verdict.MISMATCH: "red", Verdict.WITHIN_TOLERANCE: "yellow"}.get(result.verdict, "")
    is_reduced = result.aggregate is not None
    counted = result.num_differing if is_reduced or not result.num_failing else result.num_failing
    differ = f"{counted:,}/{result.num_common:,}" if result.presence is Presence.BOTH else "-"
    places = [("first", result.first), ("worst", result.worst)]
    rows = [(label, place) for label, place in places if place is not None]
    if len({(place.step, place.occurrence) for _, place in rows}) < len(rows):
        rows = [("first, worst", rows[0][1])]
    if not rows:
        table.add_row(str(result.key), differ, *[""] * 7, _allowance_text(result, None), style=style)
    for number, (label, place) in enumerate(rows):
        want, got = pair_text(place.want, place.got)
        names = (str(result.key), differ) if number == 0 else ("", "")
        errors = error_text(place.abs_error), error_text(place.rel_error), ulp_text(place)
        table.add_row(*names, label, str(place.step), want, got, *errors, _allowance_text(result, place), style=style)


def _allowance_text(result: SeriesResult, place: Divergence | None) -> str:
    tolerance = result.policy.tolerance
    if tolerance is None:
        return "strict" if result.policy.kind is PolicyKind.STRICT else result.policy.kind.value
    if place is None or place.allowance is None or tolerance.reduce is not None:
        return tolerance.bounds_text
    parts = [error_text(place.allowance)] if place.allowance else []
    return " or ".join([*parts, *([f"{tolerance.ulp} ULP"] if tolerance.ulp else [])])


def _notes(result: SeriesResult) -> list[str]:
    """Say in words what a table of values cannot hold."""
    notes = []
    if result.presence is not Presence.BOTH:
        count = result.missing.count + result.extra.count
        notes.append(f"{result.presence.value} ({count_text(count, 'point')})")
    else:
        if result.missing:
            steps = count_text(result.missing.count, "point")
            notes.append(f"{steps} missing in the run, at step {ranges_text(result.missing)}")
        if result.extra:
            steps = count_text(result.extra.count, "point")
            notes.append(f"{steps} not in the standard, at step {ranges_text(result.extra)}")
    if result.num_dtype:
        notes.append(f"the dtype differs at {count_text(result.num_dtype, 'point')}")
    if result.aggregate is not None and result.aggregate.want is not None and result.aggregate.got is not None:
        aggregate = result.aggregate
        want, got = float(result.aggregate.want), float(result.aggregate.got)
        verb = "passes" if aggregate.passes else "fails"
        allowance = error_text(aggregate.allowance)
        notes.append(f"{aggregate.reduction} {verb}: want {want!r}, got {got!r}, allowance {allowance}")
    if result.verdict is Verdict.WITHIN_TOLERANCE and result.policy.tolerance is not None:
        notes.append(f"accepted: {result.policy.tolerance.reason}")
    return notes


def print_environment(differences: Sequence[EnvironmentDifference], console: Console) -> None:
    """Print how the environments differ, by group."""
    if not differences:
        print_line(console, "environment: no recorded difference", "dim")
        return
    print_line(console, "environment, standard → run:")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    group = None
    for difference in differences[:MAX_ENVIRONMENT]:
        name = difference.group if difference.group != group else ""
        group = difference.group
        table.add_row(name, difference.name, difference.text)
    print_table(table, console, indent=4)
    if len(differences) > MAX_ENVIRONMENT:
        print_line(console, f"  … and {len(differences) - MAX_ENVIRONMENT} more")

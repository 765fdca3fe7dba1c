"""Renders results for GitHub: Markdown for a step's summary, and annotations of a workflow's log.

Names of metrics, values and log lines come from whatever a pull request ran: Markdown shows them literally
(:mod:`e2e_registry.reports.markdown`), and in a workflow command line ends and percent signs are encoded, as the
runner decodes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from e2e_registry.comparison.merged import MergedResults, MergedVerdict
from e2e_registry.reports.markdown import bounded, code, preformatted, text
from e2e_registry.reports.merged import headline, verdict_text, what_text
from e2e_registry.reports.recorded import listing, mapping, number, pair, series_name, series_of, whole_number
from e2e_registry.reports.values import count_text

MAX_DETAILS = 20
MAX_ROWS = 200
MAX_SERIES = 12
MAX_ENVIRONMENT = 12
#: A step shows ten annotations of a kind.
MAX_ANNOTATIONS = 10


def summary(merged: MergedResults, *, next_step: str | None = None) -> str:
    """Render merged results as the Markdown of a step's summary: what differs first, and bounded in length.

    Args:
        merged: The results.
        next_step: A command that makes sense if a standard is to change.
    """
    lines = [f"## {headline(merged)}", ""]
    lines += [f"- **{text(problem.message, 600)}**" for problem in merged.problems[:MAX_DETAILS]]
    lines += [f"- {text(warning, 600)}" for warning in merged.warnings[:MAX_DETAILS]]
    hidden = max(len(merged.problems) - MAX_DETAILS, 0) + max(len(merged.warnings) - MAX_DETAILS, 0)
    lines += [f"- … and {hidden} more"] if hidden else []
    fine = [verdict for verdict in merged.verdicts if _is_fine(verdict)]
    others = [verdict for verdict in merged.verdicts if not _is_fine(verdict)]
    if others:
        lines += ["", *_table(others)]
    for verdict in [verdict for verdict in others if verdict.result][:MAX_DETAILS]:
        lines += ["", *_details(verdict)]
    if next_step is not None and any(verdict.result.get("candidate") for verdict in merged.failing):
        lines += ["", f"If a change is intended: {code(next_step)}"]
    if fine:
        listed = _table(fine)
        lines += ["", f"<details><summary>{count_text(len(fine), 'verdict')} fine</summary>", "", *listed, ""]
        lines += ["</details>"]
    return bounded(lines)


def change_summary(changes: Sequence[Mapping[str, Any]], failures: Mapping[str, str]) -> str:
    """Render what recording changed, largest change first.

    Args:
        changes: The objects that ``record --json`` prints.
        failures: Test to why it was not recorded.
    """
    counts = Counter(str(change.get("action")) for change in changes)
    counts.update({"not recorded": len(failures)} if failures else {})
    lines = [f"## Standards: {', '.join(f'{count} {text(name)}' for name, count in counts.items()) or 'none'}", ""]
    for test, reason in failures.items():
        lines += [f"- {code(test)} not recorded: {text(reason, 2000)}"]
    for change in sorted(changes, key=_size_of_change, reverse=True):
        lines += ["", f"### {text(change.get('action'))}: {code(change.get('subject'))} {code(change.get('platform'))}"]
        agreed = change.get("runs_agreed")
        runs = f"{agreed} runs agree" if isinstance(agreed, int) else text(agreed)
        lines += ["", f"{code(change.get('path'))}, {change.get('points')} points, {runs}"]
        if change.get("metadata_changes"):
            lines += ["", f"Beside the values: {text('; '.join(map(str, change['metadata_changes'])), 600)}"]
        for warning in listing(change.get("warnings")):
            lines += ["", f"Warning: {text(warning, 600)}"]
        lines += _comparison(mapping(change.get("disagreement") or change.get("change")))
        lines += _environment(listing(change.get("environment")))
    return bounded(lines)


def _size_of_change(change: Mapping[str, Any]) -> tuple[int, int]:
    order = ["unchanged", "rewritten, values unchanged", "updated", "created", "refused"]
    action = str(change.get("action"))
    failing = sum(whole_number(series.get("failing")) for series in series_of(mapping(change.get("change"))))
    return order.index(action) if action in order else len(order), failing


def workflow_commands(merged: MergedResults) -> list[str]:
    """Return workflow commands that mark the failures in the log and on the files of the pull request."""
    commands = [_command("error", problem.message) for problem in merged.problems]
    for verdict in merged.failing:
        what = what_text(verdict)
        message = f"{verdict.platform}: {verdict_text(verdict)}{f': {what}' if what else ''}"
        commands.append(_command("error", message, file=verdict.test, title="e2e-registry"))
    commands = commands[:MAX_ANNOTATIONS]
    return commands + [_command("warning", warning) for warning in merged.warnings[:MAX_ANNOTATIONS]]


def _command(kind: str, message: str, **properties: str) -> str:
    def data(value: str) -> str:
        return value[:1000].replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    listed = ",".join(f"{k}={data(v).replace(':', '%3A').replace(',', '%2C')}" for k, v in properties.items())
    return f"::{kind} {listed}::{data(message)}" if listed else f"::{kind}::{data(message)}"


# --------------------------------------------------------------------------------------------------- verdicts


def _is_fine(verdict: MergedVerdict) -> bool:
    return verdict.verdict is not None and verdict.verdict.is_success


def _table(verdicts: Sequence[MergedVerdict]) -> list[str]:
    lines = ["| verdict | test | platform | what |", "|---|---|---|---|"]
    for verdict in verdicts[:MAX_ROWS]:
        cells = [text(verdict_text(verdict)), code(verdict.test), code(verdict.platform or "-")]
        cells.append(text(what_text(verdict)))
        lines.append(f"| {' | '.join(cells)} |")
    if len(verdicts) > MAX_ROWS:
        lines += ["", f"… and {len(verdicts) - MAX_ROWS} more"]
    return lines


def _details(verdict: MergedVerdict) -> list[str]:
    title = f"{text(verdict_text(verdict))}: {code(verdict.test)} {code(verdict.platform or '-')}"
    lines = [f"<details><summary>{title}</summary>", ""]
    result = verdict.result
    lines += [f"- {text(reason, 600)}" for reason in listing(result.get("reasons"))[:MAX_DETAILS]]
    repeat = mapping(result.get("repeat"))
    lines += [f"- run again: {text(repeat.get('label'))}"] if repeat else []
    if result.get("error"):
        lines += [f"- {text(result['error'], 2000)}"]
    for broken in map(mapping, listing(result.get("broken_invariants"))[:MAX_SERIES]):
        what = f"breaks {broken.get('invariant')} at {broken.get('count')} points, first at step {broken.get('step')}"
        lines += [f"- {code(series_name(broken))} {text(what)}"]
    if result.get("compared_with") and not result.get("is_judged"):
        lines += ["", f"For information, compared with {code(result['compared_with'])}:"]
    lines += _comparison(mapping(result.get("comparison")))
    lines += _environment(listing(result.get("environment")))
    if result.get("log_tail"):
        lines += ["", "The end of its output:", "", preformatted(str(result["log_tail"]))]
    return [*lines, "", "</details>"]


# ------------------------------------------------------------------------------------------------- comparison


def _comparison(comparison: Mapping[str, Any]) -> list[str]:
    """Render the series that differ: first those that fail, in emission order."""
    failing = [series for series in series_of(comparison) if series.get("verdict") in ("mismatch", "within-tolerance")]
    failing.sort(
        key=lambda series: (series.get("verdict") != "mismatch", whole_number(mapping(series.get("first")).get("seq")))
    )
    if not failing:
        return []
    lines = [
        "",
        "| metric | differ | | step | want | got | abs | rel | ULP |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for series in failing[:MAX_SERIES]:
        lines += _series_rows(series)
    if len(failing) > MAX_SERIES:
        lines += ["", f"… and {len(failing) - MAX_SERIES} more series that differ"]
    equal = sum(series.get("verdict") == "match" for series in series_of(comparison))
    return [*lines, "", f"{equal} series equal"]


def _series_rows(series: Mapping[str, Any]) -> list[str]:
    presence = str(series.get("presence"))
    counted = series.get("failing") or series.get("differing")
    differ = f"{counted}/{series.get('points')}" if presence == "both" else presence
    places = [(label, mapping(series.get(label))) for label in ("first", "worst") if series.get(label)]
    if len({f"{place.get('step')} {place.get('occurrence')}" for _, place in places}) < len(places):
        places = [("first, worst", places[0][1])]
    rows = []
    for at, (label, place) in enumerate(places or [("", {})]):
        want, got = pair(place)
        names = [code(series_name(series)), text(differ)] if at == 0 else ["", ""]
        errors = [number(place.get(name)) for name in ("abs", "rel", "ulp")]
        cells = [label, text(place.get("step", "")), code(want), code(got), *map(text, errors)]
        rows.append(f"| {' | '.join([*names, *cells])} |")
    return rows


def _environment(differences: Sequence[Any]) -> list[str]:
    """Render how the environments differ; what explains nothing alone comes last and is cut first."""
    facts = sorted(map(mapping, differences), key=lambda fact: bool(fact.get("is_informational")))
    if not facts:
        return []
    lines = []
    for fact in facts[:MAX_ENVIRONMENT]:
        names = text(fact.get("group")), code(fact.get("name"))
        lines.append(f"| {' | '.join([*names, code(fact.get('want'), 80), code(fact.get('got'), 80)])} |")
    rest = [f"… and {len(facts) - MAX_ENVIRONMENT} more"] if len(facts) > MAX_ENVIRONMENT else []
    return ["", "| environment | fact | standard | run |", "|---|---|---|---|", *lines, *(["", *rest] if rest else [])]

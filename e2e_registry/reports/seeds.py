"""Renders statistics over seeds: a table, and in plain sentences what it allows to conclude."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from e2e_registry.comparison.seed_statistics import (
    LEVEL,
    MAX_SEEDS,
    Sample,
    SeedMetric,
    SeedsResult,
    ThresholdJudgement,
)
from e2e_registry.reports.console import print_line, print_table
from e2e_registry.reports.values import count_text, listed

#: Metrics that get a sentence each; of more, only those with evidence do.
MAX_SENTENCES = 8


def print_seeds(result: SeedsResult, console: Console) -> None:
    """Print the statistics of every metric, and a sentence for what matters."""
    seeds = "unknown seeds" if result.seeds is None else f"seeds {listed([str(seed) for seed in result.seeds], 12)}"
    text = Text("seeds", "bold").append(f"  {result.subject}", "bold")
    if result.candidate is not None:
        text.append(f"  against {result.candidate}", "bold")
    text.append(f"  {seeds}", "cyan")
    console.print(text, soft_wrap=True)
    print_table(_table(result), console)
    if result.is_seed_idle:
        message = "every seed gave the same values: the seed reaches nothing that is measured here"
        print_line(console, message, "bold red")
    for sentence in _sentences(result):
        print_line(console, sentence)
    for metric in result.metrics:
        if metric.threshold is not None:
            conclusion, *reasons = threshold_lines(metric.key.metric, metric.threshold)
            print_line(console, conclusion, "green" if metric.threshold.is_supported else "bold red")
            for reason in reasons:
                print_line(console, reason)
    for key, reason in result.left_out.items():
        print_line(console, f"left out: {key}: {reason}", "dim")
    if result.changes:
        print_line(console, f"what differs between the sides: {listed(result.changes)}")
    for warning in result.warnings:
        print_line(console, f"warning: {warning}", "yellow")


def _table(result: SeedsResult) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(f"metric ({result.reduction})", no_wrap=True)
    columns = ["baseline mean", "sd"]
    columns += ["sd, 95%"] if result.candidate is None else ["candidate mean", "sd", "difference", "95% interval"]
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for metric in result.metrics:
        style = "bold" if metric.has_evidence else ""
        table.add_row(str(metric.key), *_cells(metric), style=style)
    return table


def _cells(metric: SeedMetric) -> list[str]:
    cells = [number_text(metric.baseline.mean, metric.baseline.sd), _sd_text(metric.baseline)]
    difference, interval = metric.difference, metric.interval
    if metric.candidate is None or difference is None or interval is None:
        return [*cells, " to ".join(f"{bound:.2g}" for bound in metric.baseline.sd_interval())]
    cells += [number_text(metric.candidate.mean, metric.candidate.sd), _sd_text(metric.candidate)]
    half = difference.half_width()
    return [*cells, _signed(difference.mean, half), " to ".join(_signed(bound, half) for bound in interval)]


def _sd_text(sample: Sample) -> str:
    return f"{sample.sd:.2g}"


def number_text(value: float, spread: float) -> str:
    """Write a number with one digit more than its spread leaves certain, and at least four."""
    if value == 0 or spread == 0:
        return f"{value:.6g}"
    return f"{value:#.{min(max(_digits(value, spread), 4), 15)}g}".rstrip(".")


def _signed(value: float, spread: float) -> str:
    if value == 0 or spread == 0:
        return f"{value:+.3g}"
    return f"{value:+#.{min(max(_digits(value, spread), 2), 6)}g}".rstrip(".")


def _digits(value: float, spread: float) -> int:
    """Return the significant digits of a value down to the second digit of its spread."""
    return math.floor(math.log10(abs(value))) - math.floor(math.log10(spread)) + 2


def _sentences(result: SeedsResult) -> list[str]:
    """Say in words what each comparison shows, and how many would show something by chance."""
    if result.candidate is None:
        return []
    evident = [metric for metric in result.metrics if metric.has_evidence]
    shown: Sequence[SeedMetric] = result.metrics if len(result.metrics) <= MAX_SENTENCES else evident
    sentences = [difference_sentence(metric) for metric in shown]
    if len(shown) < len(result.metrics):
        sentences.append(f"no evidence of a difference in the other {len(result.metrics) - len(evident)} series")
    if len(result.metrics) > 1:
        count = len(result.metrics)
        by_chance = f"{count * (1 - LEVEL):.2g} would show one by chance"
        sentences.append(f"{count} series at 95% each: were there no difference at all, {by_chance}")
    return sentences


def difference_sentence(metric: SeedMetric) -> str:
    """Say what the paired difference of one metric shows, and what it does not."""
    difference, interval = metric.difference, metric.interval
    if difference is None or interval is None:
        return ""
    count = len(difference.values)
    half = difference.half_width()
    if not any(difference.values):
        return f"{metric.key}: no difference: the values are equal for each of {count} seeds"
    bounds = f"95% interval {_signed(interval[0], half)} to {_signed(interval[1], half)}, {count} seeds"
    if metric.has_evidence:
        side = "higher" if difference.mean > 0 else "lower"
        size = _signed(abs(difference.mean), half).lstrip("+")
        return f"{metric.key}: evidence of a difference: the candidate is {side} by {size} ({bounds})"
    return (
        f"{metric.key}: no evidence of a difference: {_signed(difference.mean, half)} is within what seeds do by "
        f"themselves ({bounds}); differences inside that interval are not excluded"
    )


def threshold_lines(name: str, judgement: ThresholdJudgement) -> list[str]:
    """Say whether a difference of the threshold's size may be called an improvement, and how many seeds it takes."""
    size, spread = f"{judgement.threshold:g}", "a paired difference" if judgement.is_paired else "two runs' difference"
    verb = "is" if judgement.is_supported else "is not"
    return [
        f"{name}: a threshold of {size} {verb} supported by {count_text(judgement.num_seeds, 'seed')}",
        f"  noise alone moves the mean difference by up to {judgement.half_width:.2g} (95%; the standard deviation of "
        f"{spread} is {judgement.sd:.2g})",
        f"  one run of an unchanged model beats another by {size} in {judgement.single_pair_chance:.0%} of cases",
        f"  an interval of {size} to each side takes {_seeds_text(judgement.seeds_for_interval)}; to see a true "
        f"difference of {size} four times in five takes {_seeds_text(judgement.seeds_for_power)}",
    ]


def _seeds_text(count: int | None) -> str:
    return f"more than {MAX_SEEDS:,} seeds" if count is None else f"{count:,} seeds"

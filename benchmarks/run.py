"""Speed and memory of the registry, as ratios against named alternatives in one run.

``python benchmarks/run.py`` takes a few minutes; ``--quick`` compares a tenth of the points; ``--full`` runs the slow
alternatives on all points instead of scaling a share of them up; ``--json`` prints one object, whose list ``targets``
holds name, figure, bound, whether it is an upper bound, and whether it holds. Alternatives take turns, and a ratio is
the median of the ratios of the turns, so that a machine that changes its speed changes both sides.
"""

from __future__ import annotations

import json as json_module
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import workloads

HERE = Path(__file__).resolve().parent

Figures = dict[str, float]


@dataclass(frozen=True)
class Target:
    """One line to reach: ``figure`` is at most, or at least, ``bound``."""

    name: str
    figure: float
    bound: float
    at_most: bool = True

    @property
    def holds(self) -> bool:
        """Whether the bound is kept."""
        return self.figure <= self.bound if self.at_most else self.figure >= self.bound

    @property
    def line(self) -> str:
        """The target as the report shows it."""
        bound = f"{'<=' if self.at_most else '>='} {self.bound:g}"
        return f"{'holds' if self.holds else 'MISSED':>6}  {self.name}: {self.figure:.3g} ({bound})"


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        metrics: Series of the large standards.
        steps: Points of each of them.
        share: The slow alternatives get one point in so many, and their time is scaled up.
        repeats: Turns.
        small: How many small standards.
        calls: ``log()`` calls of ten scalars.
    """

    metrics: int
    steps: int
    share: int
    repeats: int
    small: int
    calls: int


SIZES = {
    "usual": Size(200, 100_000, 20, 5, 200, 20_000),
    "quick": Size(200, 10_000, 4, 3, 200, 5_000),
    "smoke": Size(4, 400, 2, 1, 3, 50),
}


def measure(name: str, *arguments: object) -> Figures:
    """Run one measurement in a process of its own."""
    command = [sys.executable, str(HERE / "measures.py"), name, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed: {done.stderr or done.stdout}")
    found: Figures = json_module.loads(done.stdout)
    return found


class Turns:
    """Measurements that took turns, each in a process of its own.

    Args:
        repeats: Turns.
        measurements: Name to the measurement's name in ``measures.py`` and its arguments.
    """

    def __init__(self, repeats: int, measurements: dict[str, tuple[object, ...]]) -> None:
        self.rounds = [
            {name: measure(*map(str, arguments)) for name, arguments in measurements.items()} for _ in range(repeats)
        ]

    @property
    def medians(self) -> dict[str, Figures]:
        """Name to the median of each figure."""
        first = self.rounds[0]
        return {
            name: {figure: statistics.median(turn[name][figure] for turn in self.rounds) for figure in first[name]}
            for name in first
        }

    def ratio(self, over: str, under: str) -> float:
        """Return the median over the turns of the time of one over that of the other."""
        return statistics.median(turn[over]["seconds"] / turn[under]["seconds"] for turn in self.rounds)


class Benchmark:
    """All measurements at one size, in one temporary folder."""

    def __init__(self, size: Size, folder: Path, *, is_full: bool) -> None:
        self.size, self.folder = size, folder
        self.share = 1 if is_full else size.share
        self.flip = size.metrics * 3 // 4
        self.figures: dict[str, Any] = {
            "points": size.metrics * size.steps,
            "points_of_slow_alternatives": size.metrics * (size.steps // self.share),
            "cpus": os.cpu_count(),
            "load_before": os.getloadavg()[0],
        }
        self.targets: list[Target] = []

    def run(self) -> None:
        """Measure everything."""
        self.large()
        self.recorder()
        self.cold()
        self.small()
        self.figures["load_after"] = os.getloadavg()[0]

    def path(self, name: str) -> Path:
        """Return where a file of the benchmark lies."""
        return self.folder / f"{name}.parquet"

    def turns(self, measurements: dict[str, tuple[object, ...]], repeats: int | None = None) -> Turns:
        """Let measurements take turns and keep the medians."""
        found = Turns(repeats or self.size.repeats, measurements)
        self.figures |= found.medians
        return found

    def large(self) -> None:
        """The large comparison, its alternatives, its memory and its variants."""
        size = self.size
        want = workloads.write(self.path("want"), size.metrics, size.steps)
        got = workloads.write(self.path("got"), size.metrics, size.steps, flip=self.flip)
        found = self.turns({"compare": ("compare", got, want, "1,0"), "read_both": ("read_both", got, want)})
        self.slow_alternatives(found.medians["compare"]["seconds"])
        ratio = found.ratio("compare", "read_both")
        self.targets.append(Target("comparison: time over reading both files whole", ratio, 1))
        self.memory(found.medians["compare"]["peak_mb"])
        self.variants(got, want)

    def slow_alternatives(self, seconds: float) -> None:
        """Measure pandas and a JSON loop on a share of the points, scaled up, unless ``--full``."""
        metrics, steps = self.size.metrics, self.size.steps // self.share
        want = workloads.write(self.path("share_want"), metrics, steps)
        got = workloads.write(self.path("share_got"), metrics, steps, flip=self.flip)
        golden = [
            workloads.write_json(self.folder / f"{name}.json", metrics, steps, flip=flip)
            for name, flip in (("got", self.flip), ("want", None))
        ]
        measurements: dict[str, tuple[object, ...]] = {
            "pandas_values": ("pandas_exact", got, want, "values"),
            "pandas_all_columns": ("pandas_exact", got, want, "all"),
            "pandas_equal_files": ("pandas_exact", want, want, "values"),
            "json_loop": ("json_loop", *golden),
        }
        medians = self.turns(measurements, 1 if self.share == 1 else min(self.size.repeats, 3)).medians
        times = {name: medians[name]["seconds"] * self.share / seconds for name in measurements}
        self.figures["times_faster_than"] = times
        for name, alternative in (("pandas_values", "pandas.testing.assert_frame_equal"), ("json_loop", "a JSON loop")):
            bound = 80 if name == "pandas_values" else 1
            target = Target(f"comparison: times faster than {alternative}", times[name], bound, at_most=False)
            self.targets.append(target)

    def memory(self, peak: float) -> None:
        """Peak memory: at all points, at a quarter of them, and with all of them in one series."""
        metrics, steps = self.size.metrics, self.size.steps
        quarter = [workloads.write(self.path(f"quarter{side}"), metrics, steps // 4) for side in "ab"]
        single = [workloads.write(self.path(f"single{side}"), 1, metrics * steps) for side in "ab"]
        measurements: dict[str, tuple[object, ...]] = {
            "compare_quarter": ("compare", *quarter, "0,0"),
            "compare_one_series": ("compare", *single, "0,0"),
        }
        medians = self.turns(measurements, min(self.size.repeats, 3)).medians
        base, longest = (medians[name]["peak_mb"] for name in measurements)
        self.targets += [
            Target("comparison: peak memory, MB", peak, 400),
            Target("comparison: peak memory with all points in one series, MB", longest, 400),
            Target("comparison: peak memory over that at a quarter of the points", max(peak, longest) / base, 1.25),
        ]

    def variants(self, got: Path, want: Path) -> None:
        """The same rows in other layouts, against the aligned comparison."""
        metrics, steps = self.size.metrics, self.size.steps
        missing = workloads.write(self.path("missing"), metrics, steps, flip=self.flip, is_missing=True)
        found = {"a missing step": (missing, f"1,{metrics}")}
        for rows in (1_000, 10_000, metrics * steps):
            found[f"row groups of {rows:,}"] = workloads.rewrite_row_groups(got, self.path(f"rows{rows}"), rows), "1,0"
        found["permuted dictionaries"] = workloads.rewrite_dictionaries(got, self.path("permuted")), "1,0"
        measurements: dict[str, tuple[object, ...]] = {"aligned": ("compare", got, want, "1,0")}
        measurements |= {name: ("compare", path, want, expected) for name, (path, expected) in found.items()}
        turns = self.turns(measurements, min(self.size.repeats, 3))
        for name in found:
            self.targets.append(Target(f"{name}: time over the aligned one", turns.ratio(name, "aligned"), 3))

    def recorder(self) -> None:
        """The recorder against what people use."""
        figures = self.turns({"recorder": ("recorder", self.size.calls)}, min(self.size.repeats, 3)).medians["recorder"]
        ratio = figures["summary_writer_us"] / figures["recorder_us"]
        self.targets += [
            Target("recorder: microseconds a torch scalar", figures["recorder_us"], 3),
            Target("recorder: times faster than SummaryWriter", ratio, 1, at_most=False),
        ]

    def cold(self) -> None:
        """A whole ``compare`` of two small standards, against importing pyarrow.parquet and nothing else."""
        want = workloads.write(self.path("cold_want"), 20, 4)
        got = workloads.write(self.path("cold_got"), 20, 4, flip=10)
        arguments = ["compare", str(got), "--against", str(want)]
        ours = [sys.executable, "-m", "e2e_registry", *arguments]
        bare = [sys.executable, "-c", "import pyarrow.parquet"]
        times = [(wall_seconds(ours, 1), wall_seconds(bare, 0)) for _ in range(4 * self.size.repeats + 1)]
        self.figures["cold_compare_s"], self.figures["bare_import_s"] = (
            statistics.median(column) for column in zip(*times, strict=True)
        )
        ratio = statistics.median(one / other for one, other in times)
        loads_pandas = "pandas" in loaded_packages(arguments)
        self.targets += [
            Target("cold compare: time over importing pyarrow.parquet", ratio, 2.6),
            Target("cold compare: packages loaded that are pandas", int(loads_pandas), 0),
        ]

    def small(self) -> None:
        """Many small standards in one process."""
        for number in range(self.size.small):
            for side in "ab":
                workloads.write(self.path(f"{side}{number}"), 20, 4)
        turns = self.turns({"small": ("small", self.folder, self.size.small)}, min(self.size.repeats, 3))
        seconds = turns.medians["small"]["seconds"]
        self.targets.append(Target(f"{self.size.small} small standards: seconds in one process", seconds, 1.5))


def wall_seconds(command: list[str], exit_code: int) -> float:
    """Return the wall time of one process."""
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode != exit_code:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return seconds


def loaded_packages(arguments: list[str]) -> set[str]:
    """Return the top-level modules that a command of this package has loaded at its end."""
    code = "import sys; from e2e_registry.cli.app import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    return {name.split(".")[0] for name in done.stderr.split()}


def main(
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of the points; under a minute or so.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Run the slow alternatives on all points too.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Next to nothing: only that it runs.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure, print ratios, and end with 1 if a target is missed (not with --smoke, which measures nothing)."""
    size = SIZES["smoke" if smoke else "quick" if quick else "usual"]
    with tempfile.TemporaryDirectory() as folder:
        benchmark = Benchmark(size, Path(folder), is_full=full)
        benchmark.run()
    targets = [{**asdict(target), "holds": target.holds} for target in benchmark.targets]
    if json:
        typer.echo(json_module.dumps({"figures": benchmark.figures, "targets": targets}, indent=1))
    else:
        for target in benchmark.targets:
            typer.echo(target.line)
        typer.echo(json_module.dumps(benchmark.figures, indent=1))
    if not smoke and not all(target.holds for target in benchmark.targets):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

"""Speed and memory of the registry, as ratios against named alternatives in one run.

``python benchmarks/run.py`` takes a few minutes; ``--quick`` a fraction of the points; ``--full`` runs the slow
alternatives on all points instead of scaling a share of them up; ``--json`` prints one object whose list ``targets``
holds name, figure, bound and whether it holds. Figures are medians of runs that alternate with those of the
alternative, so that a machine that changes its speed changes both.
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


@dataclass(frozen=True)
class Size:
    """How much is compared."""

    metrics: int
    steps: int
    share: int
    repeats: int
    small: int
    calls: int


SIZES = {
    "usual": Size(200, 100_000, 20, 5, 200, 20_000),
    "quick": Size(200, 10_000, 4, 3, 200, 5_000),
    "smoke": Size(4, 400, 1, 1, 3, 50),
}


def measure(name: str, *arguments: object) -> dict[str, float]:
    """Run one measurement in a process of its own."""
    command = [sys.executable, str(HERE / "measures.py"), name, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed: {done.stderr or done.stdout}")
    found: dict[str, float] = json_module.loads(done.stdout)
    return found


def alternating(repeats: int, *measurements: tuple[object, ...]) -> list[dict[str, float]]:
    """Run several measurements in turn and return the medians of each one's figures."""
    rounds = [[measure(*map(str, arguments)) for arguments in measurements] for _ in range(repeats)]
    return [
        {figure: statistics.median(found[at][figure] for found in rounds) for figure in rounds[0][at]}
        for at in range(len(measurements))
    ]


class Benchmark:
    """All measurements at one size, in one temporary folder."""

    def __init__(self, size: Size, folder: Path, *, is_full: bool) -> None:
        self.size, self.folder, self.is_full = size, folder, is_full
        self.figures: dict[str, Any] = {"points": size.metrics * size.steps}
        self.targets: list[Target] = []

    def run(self) -> None:
        """Measure everything."""
        self.large()
        self.recorder()
        self.cold()
        self.small()

    def path(self, name: str) -> Path:
        """Return where a file of the benchmark lies."""
        return self.folder / f"{name}.parquet"

    def large(self) -> None:
        """The large comparison, its alternatives, its variants and its memory."""
        size, last = self.size, self.size.metrics * 3 // 4
        want = workloads.write(self.path("want"), size.metrics, size.steps)
        got = workloads.write(self.path("got"), size.metrics, size.steps, flip=last)
        ours, both = alternating(size.repeats, ("compare", got, want, "mismatch"), ("read_both", got, want))
        pandas, plain = self.slow_alternatives(last)
        seconds = ours["seconds"]
        self.figures |= {"compare": ours, "read_both": both, "pandas_s": pandas, "json_s": plain}
        self.targets += [
            Target("times faster than pandas.testing.assert_frame_equal", pandas / seconds, 80, at_most=False),
            Target("times faster than a JSON load-and-loop", plain / seconds, 1, at_most=False),
            Target("time over reading both files whole", seconds / both["seconds"], 1),
        ]
        self.memory(ours["peak_mb"])
        self.variants(got, want, last)

    def slow_alternatives(self, last: int) -> tuple[float, float]:
        """Return seconds of pandas and of the JSON loop; of a share of the points, scaled up, unless ``--full``."""
        size = self.size
        share = 1 if self.is_full else size.share
        steps = size.steps // share
        want = workloads.write(self.path("share_want"), size.metrics, steps)
        got = workloads.write(self.path("share_got"), size.metrics, steps, flip=last)
        golden = [
            workloads.write_json(self.folder / f"{name}.json", size.metrics, steps, flip=flip)
            for name, flip in (("got", last), ("want", None))
        ]
        self.figures["share_of_points_for_slow_alternatives"] = 1 / share
        pandas, plain = alternating(1, ("pandas_exact", got, want), ("json_loop", *golden))
        return pandas["seconds"] * share, plain["seconds"] * share

    def memory(self, peak: float) -> None:
        """Peak memory: at all points, at a quarter of them, and with all of them in one series."""
        size = self.size
        quarter = [workloads.write(self.path(f"quarter{i}"), size.metrics, size.steps // 4) for i in range(2)]
        single = [workloads.write(self.path(f"single{i}"), 1, size.metrics * size.steps) for i in range(2)]
        (small,) = alternating(1, ("compare", *quarter, "match"))
        (long,) = alternating(1, ("compare", *single, "match"))
        self.figures |= {"quarter": small, "one_series": long}
        self.targets += [
            Target("peak memory, MB", max(peak, long["peak_mb"]), 400),
            Target("peak memory over that at a quarter of the points", peak / small["peak_mb"], 1.25),
        ]

    def variants(self, got: Path, want: Path, last: int) -> None:
        """The same rows in other layouts, against the aligned comparison."""
        size = self.size
        found = {"missing step": workloads.write(self.path("missing"), size.metrics, size.steps, flip=last, drop=0)}
        for rows in (1_000, 10_000, size.metrics * size.steps):
            target = self.path(f"rows{rows}")
            found[f"row groups of {rows:,}"] = workloads.rewrite_row_groups(got, target, rows)
        found["permuted dictionaries"] = workloads.rewrite_dictionaries(got, self.path("permuted"))
        measurements = [("compare", path, want, "mismatch") for path in (got, *found.values())]
        aligned, *others = alternating(min(size.repeats, 3), *measurements)
        for name, figures in zip(found, others, strict=True):
            self.figures[name] = figures
            self.targets.append(
                Target(f"{name}: time over the aligned one", figures["seconds"] / aligned["seconds"], 3)
            )

    def recorder(self) -> None:
        """The recorder against what people use."""
        (figures,) = alternating(min(self.size.repeats, 3), ("recorder", self.size.calls))
        self.figures["recorder"] = figures
        self.targets.append(Target("recorder, microseconds a torch scalar", figures["recorder_us"], 3))
        ratio = figures["summary_writer_us"] / figures["recorder_us"]
        self.targets.append(Target("recorder: times faster than SummaryWriter", ratio, 1, at_most=False))

    def cold(self) -> None:
        """A whole ``compare`` of two small standards, against importing pyarrow.parquet and nothing else."""
        a, b = (workloads.write(self.path(f"cold_{side}"), 20, 4) for side in "ab")
        compare = [sys.executable, "-m", "e2e_registry", "compare", str(a), "--against", str(b)]
        bare = [sys.executable, "-c", "import pyarrow.parquet"]
        rounds = 4 * self.size.repeats + 1
        times = [(wall_seconds(compare), wall_seconds(bare)) for _ in range(rounds)]
        ours, theirs = (statistics.median(column) for column in zip(*times, strict=True))
        self.figures |= {"cold_compare_s": ours, "bare_import_s": theirs}
        self.targets.append(Target("cold compare over importing pyarrow.parquet", ours / theirs, 2.6))
        loaded = loaded_modules(compare[2:])
        self.targets.append(Target("pandas modules loaded by a cold compare", float("pandas" in loaded), 0))

    def small(self) -> None:
        """Many small standards in one process."""
        for number in range(self.size.small):
            for side in "ab":
                workloads.write(self.path(f"{side}{number}"), 20, 4)
        (figures,) = alternating(min(self.size.repeats, 3), ("small", self.folder, self.size.small))
        self.figures["small"] = figures
        self.targets.append(Target(f"{self.size.small} small standards, seconds", figures["seconds"], 1.5))


def wall_seconds(command: list[str]) -> float:
    """Return the wall time of one process."""
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begin


def loaded_modules(arguments: list[str]) -> set[str]:
    """Return the top-level modules that a command of this package has loaded at its end."""
    code = "import sys; from e2e_registry.cli.app import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", code, *arguments[1:]]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
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
    load = os.getloadavg()[0]
    if json:
        typer.echo(json_module.dumps({"load": load, "figures": benchmark.figures, "targets": targets}, indent=1))
    else:
        typer.echo(f"{benchmark.figures['points']:,} points, load {load:.1f}")
        for target in benchmark.targets:
            sign = "<=" if target.at_most else ">="
            mark = "holds" if target.holds else "MISSED"
            typer.echo(f"{mark:>6}  {target.name}: {target.figure:.3g} ({sign} {target.bound:g})")
        typer.echo(json_module.dumps(benchmark.figures, indent=1))
    if not smoke and not all(target.holds for target in benchmark.targets):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

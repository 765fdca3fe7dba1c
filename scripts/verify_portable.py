"""Checks that the profile ``cpu-portable`` gives one set of bits on every x86-64 CPU.

Runs the operation table (``portability_probes.py``) and the digits recipe natively and under qemu-user as several CPU
models, under the profile's variables and portable operators, and compares digests of the raw results. Exits with 1 if
anything differs that ``UNREMEDIED_OPERATORS`` does not name, and with 2 if qemu is missing.

    python scripts/verify_portable.py                      # all models, about two minutes each with the recipe
    python scripts/verify_portable.py --small              # the CI case: a few operations, one model
    python scripts/verify_portable.py --without MKL_CBWR   # what a pin is good for
    python scripts/verify_portable.py --trace              # which vendor-specific instructions run, if any

What an emulation cannot show: qemu offers no AVX-512, so only a native AVX-512 machine tests what libraries choose by
those instructions; and qemu computes ``rcpps`` and ``rsqrtps`` exactly, which is one more vendor, not Intel's. That is
why ``--trace`` looks for the instructions themselves: where none runs, no vendor's approximation can show. A program
that forks worker threads may abort under qemu-user 7.2, so the recipe runs without loader workers.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from e2e_registry.cli.output import print_json, progress
from e2e_registry.determinism.portable import PORTABLE_OPERATORS, UNREMEDIED_OPERATORS, UnremediedOperator
from e2e_registry.determinism.profiles import get_profile
from e2e_registry.errors import ExitCode, RecipeError, RegistryError, UsageError
from e2e_registry.storage import replacing

#: No SSE4.2 successor at all, FMA and AVX2 from Intel, from AMD, and a later Intel. qemu's Skylake-Server offers no
#: AVX-512, so it would repeat Haswell.
MODELS = ("Nehalem", "Haswell", "EPYC", "Skylake-Client")
SMALL_MODELS = ("Nehalem",)
TRACED_MODEL = "Haswell"
QEMU = ("qemu-x86_64", "qemu-x86_64-static")
RECIPE = Path(__file__).with_name("run_digits_classifier.py")
RECIPE_ARGUMENTS = ("--deterministic-mode", "--num-workers", "0", "--steps", "20")
BEGIN, END = "<!-- verify_portable.py: begin -->", "<!-- verify_portable.py: end -->"

#: Instructions whose results the architecture bounds but does not define.
APPROXIMATE = re.compile(
    r"\b(v?rcp(?:14|28)?[ps][sdh]|v?rsqrt(?:14|28)?[ps][sdh]|f(?:sin|cos|sincos|ptan|patan|yl2x|yl2xp1)|f2xm1)\b"
)
_DIGEST = re.compile(r"[0-9a-f]{16,}")
_MARK = "@@ "

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the table runs: the CPU at hand, or an emulated one."""

    name: str
    prefix: tuple[str, ...] = ()

    @staticmethod
    def emulated(model: str, qemu: str, *options: str) -> Machine:
        """Return a CPU model of qemu, run with low priority."""
        return Machine(model, ("nice", "-n", "10", qemu, *options, "-cpu", model))


@dataclass(frozen=True, slots=True)
class Row:
    """One computation and its outcome on each machine: a digest, or how it failed."""

    name: str
    group: str
    outcomes: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        """Whether it was computed everywhere, with one result."""
        return len(set(self.outcomes)) == 1 and _DIGEST.fullmatch(self.outcomes[0]) is not None

    @property
    def reason(self) -> UnremediedOperator | None:
        """The known reason why it may differ."""
        return known_reason(self.name)


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured.

    Attributes:
        machines: Their names; the first is the CPU at hand.
        rows: One a computation, in the order of the table.
        host: The CPU and the versions, for people.
        without: The pins that were left out, and ``operators`` if the portable operators were.
        approximate: Probe to the vendor-specific instructions that ran first in it; None if not traced.
    """

    machines: tuple[str, ...]
    rows: tuple[Row, ...]
    host: Mapping[str, str]
    without: tuple[str, ...] = ()
    approximate: Mapping[str, Sequence[str]] | None = None

    @property
    def unequal(self) -> list[Row]:
        """The rows that differ."""
        return [row for row in self.rows if not row.is_equal]

    @property
    def faults(self) -> list[str]:
        """The computations that differ, or run vendor-specific instructions, for no known reason."""
        traced = [name for name in self.approximate or () if known_reason(name) is None]
        return list(dict.fromkeys([*(row.name for row in self.unequal if row.reason is None), *traced]))

    def to_json(self) -> dict[str, Any]:
        """Return the report for ``--json``."""
        return {
            "machines": list(self.machines),
            "host": dict(self.host),
            "without": list(self.without),
            "computations": len(self.rows),
            "unequal": [
                {
                    "name": row.name,
                    "outcomes": dict(zip(self.machines, row.outcomes, strict=True)),
                    "known": None if row.reason is None else row.reason.name,
                }
                for row in self.unequal
            ],
            "approximate_instructions": self.approximate,
            "faults": self.faults,
        }


def known_reason(probe: str) -> UnremediedOperator | None:
    """Return the operator without remedy that a probe exercises."""
    matching = (o for o in UNREMEDIED_OPERATORS if any(fnmatch.fnmatchcase(probe, pattern) for pattern in o.probes))
    return next(matching, None)


# ---- Running -----------------------------------------------------------------------------------------------------


def find_qemu() -> str:
    """Return the user-mode emulator.

    Raises:
        UsageError: It is not installed.
    """
    for name in QEMU:
        if path := shutil.which(name):
            return path
    raise UsageError(f"{QEMU[0]} is not on PATH", hint="install it: apt-get install qemu-user")


def check_models(qemu: str, models: Sequence[str]) -> None:
    """Refuse models that the emulator does not have.

    Raises:
        UsageError: There is none of that name.
    """
    # In user mode qemu answers and exits with 1.
    listed = subprocess.run([qemu, "-cpu", "help"], capture_output=True, text=True).stdout
    known = set(re.findall(r"^(?:x86)?\s+(\S+)", listed, re.MULTILINE))
    for model in models:
        if model not in known:
            raise UsageError(f"qemu has no CPU model {model!r}", hint=f"see `{qemu} -cpu help`")


def environment(without: Sequence[str]) -> dict[str, str]:
    """Return the environment of the profile, whatever the shell has set, less some of its pins.

    Raises:
        UsageError: The profile sets no such variable.
    """
    profile = get_profile("cpu-portable").for_python(sys.executable)
    for name in without:
        if name not in profile.variables:
            raise UsageError(f"cpu-portable does not set {name}", hint=f"it sets {', '.join(profile.variables)}")
    own = {variable.name for variable in profile.settings}
    kept = {name: value for name, value in os.environ.items() if name not in own}
    return {**kept, **{name: value for name, value in profile.variables.items() if name not in without}}


@dataclass(frozen=True, slots=True)
class Session:
    """How every machine is to run: the environment and the options of the worker."""

    environment: Mapping[str, str]
    is_small: bool
    has_operators: bool

    def worker(self, *options: str) -> list[str]:
        """Return the command that prints a line at the start and at the end of each probe."""
        small = ["--small"] if self.is_small else []
        operators = [] if self.has_operators else ["--without-operators"]
        return [sys.executable, str(Path(__file__).resolve()), "probes", *small, *operators, *options]

    def probe(self, machine: Machine, *options: str) -> dict[str, tuple[str, str]]:
        """Return name to (group, outcome) of every probe. One that kills the process is noted, and the rest still run.

        Raises:
            RecipeError: The worker ended by itself with an error, or without a probe to blame.
        """
        results: dict[str, tuple[str, str]] = {}
        with progress(machine.name) as show:
            skipped: list[str] = []
            while True:
                dead, code, stderr = self._run(machine, results, show, *options, *skipped)
                if code == 0:
                    return results
                if dead is None or code > 0:
                    raise RecipeError(f"the probes ended with exit code {code} on {machine.name}", hint=stderr[-2000:])
                results[dead[0]] = (dead[1], f"died of {signal.Signals(-code).name}")
                skipped = ["--after", dead[0]]

    def _run(
        self, machine: Machine, results: dict[str, tuple[str, str]], show: Callable[[str], None], *options: str
    ) -> tuple[tuple[str, str] | None, int, str]:
        running: tuple[str, str] | None = None
        with tempfile.TemporaryFile("w+") as errors:
            command = [*machine.prefix, *self.worker(*options)]
            with subprocess.Popen(
                command, env=self.environment, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as process:
                for line in process.stdout or ():
                    name, group, outcome = json.loads(line)
                    running = (name, group) if outcome is None else None
                    if outcome is not None:
                        results[name] = (group, outcome)
                        show(f"{len(results)} {name}")
            errors.seek(0)
            return running, process.returncode, errors.read()

    def recipe(self, machine: Machine) -> str:
        """Return the content digest of what the digits recipe records, or how it failed."""
        from e2e_registry.recording import read_run
        from e2e_registry.standard import content_digest

        with tempfile.TemporaryDirectory() as folder, progress(f"{machine.name}: {RECIPE.stem}") as show:
            command = [*machine.prefix, sys.executable, str(RECIPE), *RECIPE_ARGUMENTS]
            variables = {**self.environment, "E2E_REGISTRY_RUN_DIR": folder}
            variables["E2E_METRICS_JSONL"] = str(Path(folder, "metrics.jsonl"))
            show(" ".join(RECIPE_ARGUMENTS))
            done = subprocess.run(command, env=variables, capture_output=True, text=True)
            if done.returncode:
                return f"ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
            return content_digest(read_run(folder).batches()).removeprefix("sha256:")


def measure(session: Session, machines: Sequence[Machine], *, has_recipe: bool) -> list[Row]:
    """Run everything on every machine, one after the other, and return the rows."""
    measured = [session.probe(machine) for machine in machines]
    rows = [
        Row(name, group, tuple(results.get(name, (group, "missing"))[1] for results in measured))
        for name, (group, _) in measured[0].items()
    ]
    if has_recipe:
        outcomes = tuple(session.recipe(machine) for machine in machines)
        rows.append(Row(f"recipe {RECIPE.stem} {' '.join(RECIPE_ARGUMENTS)}", "recipes", outcomes))
    return rows


def trace(session: Session, qemu: str) -> dict[str, list[str]]:
    """Return the vendor-specific instructions that run, under the probe in which each ran first.

    qemu logs every block of code when it translates it, that is, once. The log goes through a named pipe into which
    the worker also writes the names of the probes.
    """
    found: dict[str, Counter[str]] = {}

    def read(pipe: Path) -> None:
        probe = "start of the process"
        with pipe.open(errors="replace") as lines:
            for line in lines:
                if line.startswith(_MARK):
                    probe = line.removeprefix(_MARK).strip()
                elif line.startswith("0x") and (match := APPROXIMATE.search(line)):
                    found.setdefault(probe, Counter())[match[1]] += 1

    with tempfile.TemporaryDirectory() as folder:
        pipe = Path(folder, "log")
        os.mkfifo(pipe)
        reader = threading.Thread(target=read, args=(pipe,), daemon=True)
        reader.start()
        machine = Machine.emulated(TRACED_MODEL, qemu, "-d", "in_asm", "-D", str(pipe))
        session.probe(dataclasses.replace(machine, name=f"{machine.name}, traced"), "--mark", str(pipe))
        reader.join(timeout=60)
    return {probe: [f"{name} x{count}" for name, count in sorted(counts.items())] for probe, counts in found.items()}


def describe_host(qemu: str) -> dict[str, str]:
    """Return the CPU at hand and the versions that decide bits."""
    import numpy as np
    import torch

    text = Path("/proc/cpuinfo").read_text()
    first = dict(re.findall(r"^(.+?)\s*: (.*)$", text.split("\n\n")[0], re.MULTILINE))
    version = subprocess.run([qemu, "--version"], capture_output=True, text=True, check=True).stdout
    return {
        "CPU": f"{first['model name']} (family {first['cpu family']}, model {first['model']})",
        "AVX-512": "yes" if "avx512f" in first["flags"].split() else "no",
        "torch": torch.__version__,
        "NumPy": np.__version__,
        "C library": " ".join(platform.libc_ver()),
        "qemu": (re.search(r"version (\S+)", version) or ["", "unknown"])[1],
    }


# ---- Showing -----------------------------------------------------------------------------------------------------


def render(report: Report) -> str:
    """Return the report as Markdown: counts by group, and by name what differs."""
    return "\n".join([*_measured(report), "", *_counts(report), "", *_differences(report)]) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def _measured(report: Report) -> Iterator[str]:
    host = ", ".join(f"{name} {value}" for name, value in report.host.items())
    yield f"Measured natively ({host}) and under qemu-user as {', '.join(report.machines[1:])}."
    if report.approximate is not None:
        count = sum(known_reason(name) is None for name in report.approximate)
        yield (
            f"Under the profile, {'no computation' if count == 0 else f'{count} computations'} outside the list of "
            "operators without remedy ran an instruction whose low bits are vendor-specific "
            "(`rcpps`, `rsqrtps`, x87 transcendentals)."
        )


def _counts(report: Report) -> list[str]:
    groups: dict[str, list[Row]] = {}
    for row in report.rows:
        groups.setdefault(row.group, []).append(row)
    lines = []
    for group, rows in groups.items():
        equal = [sum(row.outcomes[i] == row.outcomes[0] for row in rows) for i in range(1, len(report.machines))]
        lines.append([group, str(len(rows)), *("all" if n == len(rows) else f"{n} of {len(rows)}" for n in equal)])
    return _table(["equal to native", "computations", *report.machines[1:]], lines)


def _differences(report: Report) -> list[str]:
    if not report.unequal:
        return ["No computation differs."]
    rows = []
    for row in report.unequal:
        cells = ["=" if o == row.outcomes[0] else o if o.startswith("died") else "differs" for o in row.outcomes[1:]]
        rows.append([f"`{row.name}`", *cells, row.reason.name if row.reason else "**not known**"])
    return _table(["differs", *report.machines[1:], "because of"], rows)


def render_operators() -> str:
    """Return the replaced operators and those without remedy as Markdown."""
    replaced = [[f"`{o.name}`", ", ".join(o.dtypes), o.formulation, o.error, o.covers] for o in PORTABLE_OPERATORS]
    header = ("replaced operator", "dtypes", "formulation", "rounding error", "also reached by")
    unremedied = [[o.name, o.why, o.instead] for o in UNREMEDIED_OPERATORS]
    return "\n".join([*_table(header, replaced), "", *_table(("without remedy", "why", "instead"), unremedied)]) + "\n"


def write_docs(path: Path, text: str) -> None:
    """Put ``text`` between the markers of a Markdown file, or into a new file.

    Raises:
        UsageError: The file has no markers.
        StorageError: The file cannot be written.
    """
    block = f"{BEGIN}\n{text}{END}"
    old = path.read_text(encoding="utf-8") if path.exists() else f"{BEGIN}{END}\n"
    start, end = old.find(BEGIN), old.find(END)
    if not 0 <= start < end:
        raise UsageError("there are no markers to write between", where=path, hint=f"add {BEGIN} and {END}")
    with replacing(path) as temporary:
        temporary.write_text(old[:start] + block + old[end + len(END) :], encoding="utf-8")


# ---- Command line ------------------------------------------------------------------------------------------------

Small = Annotated[bool, typer.Option("--small", help="A few operations on one model: the CI case.")]
Bare = Annotated[bool, typer.Option("--without-operators", help="Leave torch's own kernels in place.")]


@contextmanager
def _reported_errors() -> Iterator[None]:
    try:
        yield
    except RegistryError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from None


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    models: Annotated[str, typer.Option(help="CPU models of qemu, comma-separated.")] = ",".join(MODELS),
    small: Small = False,
    recipe: Annotated[bool, typer.Option(help="Also run the digits recipe, 20 steps; not with --small.")] = True,
    without: Annotated[list[str] | None, typer.Option(help="A variable of the profile to leave unset.")] = None,
    without_operators: Bare = False,
    trace_instructions: Annotated[bool, typer.Option("--trace", help="Look for vendor-specific instructions.")] = False,
    write_docs_to: Annotated[
        Path | None, typer.Option("--write-docs", metavar="PATH", help="Write the tables into a Markdown file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Compare the bits of the operation table between this CPU and emulated ones, under cpu-portable."""
    if context.invoked_subcommand is not None:
        return
    with _reported_errors():
        qemu = find_qemu()
        chosen = SMALL_MODELS if small and models == ",".join(MODELS) else tuple(models.split(","))
        check_models(qemu, chosen)
        session = Session(environment(without or ()), small, not without_operators)
        machines = [Machine("native"), *(Machine.emulated(model, qemu) for model in chosen)]
        report = Report(
            tuple(machine.name for machine in machines),
            tuple(measure(session, machines, has_recipe=recipe and not small)),
            describe_host(qemu),
            (*(without or ()), *(["operators"] if without_operators else [])),
            trace(session, qemu) if trace_instructions else None,
        )
        if write_docs_to is not None:
            write_docs(write_docs_to, f"{render(report)}\n{render_operators()}")
    print_json(report.to_json()) if as_json else typer.echo(render(report))
    if report.faults:
        typer.echo(f"error: {len(report.faults)} computations differ for no known reason", err=True)
        raise typer.Exit(ExitCode.MISMATCH)


@app.command(hidden=True)
def probes(
    small: Small = False,
    without_operators: Bare = False,
    after: Annotated[str, typer.Option(help="Start behind this probe.")] = "",
    mark: Annotated[Path | None, typer.Option(help="Append the name of each probe to this file.")] = None,
) -> None:
    """Run the operation table in this process; print ``[name, group, null]`` and then ``[name, group, outcome]``."""
    import portability_probes as table

    from e2e_registry.determinism.portable import enable_portable_operators

    warnings.simplefilter("ignore")
    if not without_operators:
        enable_portable_operators()
    is_due = not after
    for probe in table.all_probes():
        if is_due and (not small or any(fnmatch.fnmatchcase(probe.name, pattern) for pattern in table.SMALL)):
            typer.echo(json.dumps([probe.name, probe.group, None]))
            if mark is not None:
                with mark.open("a") as file:
                    file.write(f"{_MARK}{probe.name}\n")
            typer.echo(json.dumps([probe.name, probe.group, _outcome(probe.run, table.digest)]))
        is_due = is_due or probe.name == after


def _outcome(run: Callable[[], Any], digest: Callable[[Any], str]) -> str:
    try:
        return digest(run())
    except Exception as error:  # noqa: BLE001  # whatever a library raises is this probe's outcome
        return f"raised {type(error).__name__}: {str(error).splitlines()[:1]}"


if __name__ == "__main__":
    app()

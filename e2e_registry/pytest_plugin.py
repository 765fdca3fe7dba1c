"""The pytest plugin: registered tests as items, and standards that ordinary tests keep beside themselves.

pytest loads it wherever this package is installed, so it imports nothing heavy, and leaves a repository that does not
use the registry as it is: it claims only files that call ``register_e2e_ci`` below a test folder, and gives way where
a ``conftest.py`` has options of the same names.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from e2e_registry import assertion
from e2e_registry.config import Settings, load_settings
from e2e_registry.errors import RegistryError
from e2e_registry.registration import Registration, declares_test, find_test, test_locations
from e2e_registry.registration.place import Location, locate

if TYPE_CHECKING:
    from e2e_registry.comparison import Assessment
    from e2e_registry.execution.gpus import GpuAdmission
    from e2e_registry.operations.results import Ending, Results
    from e2e_registry.recording import MetricRecorder

#: Where a report carries what this plugin has to say; a worker of pytest-xdist sends plain values and bytes only.
OUTCOME = "e2e_registry_outcome"
#: Where such a worker says in the end which registered tests it had selected.
_SELECTED = "e2e_registry_selected"

_OPTIONS = {
    "--e2e": "run the registered tests: their recipes are launched, and compared with their standards",
    "--e2e-nightly": "run also the registered tests that are nightly",
    "--e2e-record": "run the registered tests until they repeat, and record their standards",
    "--e2e-allow-busy-gpus": "let registered tests share their GPUs with whatever else computes there",
    "--record-assertions": "write the standards of assert_matches_standard() rather than compare with them",
    "--unused-assertions": "list the standards of assert_matches_standard() that no test of this session used",
}
_GPU_WAIT = "--e2e-gpu-wait"


# ------------------------------------------------------------------------------------------------ options


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what must be known before conftest files are imported."""
    text = "determinism profile that this pytest process holds, for assert_matches_standard(); it starts over for it"
    group = parser.getgroup("e2e_registry", "training regressions (e2e-registry)")
    group.addoption("--determinism-profile", metavar="NAME", help=text)
    parser.addini("determinism_profile", text)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser) -> Generator[None, None, None]:
    """Start over under the profile; after the conftest files have added theirs, add the other options.

    ``--e2e`` is a common option of repositories. Two of one name end pytest, so theirs stands; what it holds then
    counts for the registered tests too.
    """
    # Before anything is imported that reads the variables, and before pytest redirects the output: this hook is first.
    profile = _profile(early_config)
    if profile is not None:
        from e2e_registry.determinism.relaunch import bootstrap

        try:
            bootstrap(profile)
        except RegistryError as error:
            raise pytest.UsageError(str(error)) from None
    yield
    for option, text in _OPTIONS.items():
        # In the group that conftest files use: pytest before version 9 looks for a conflict in no other.
        with contextlib.suppress(ValueError, argparse.ArgumentError):
            parser.addoption(option, action="store_true", help=f"{text} (e2e-registry)")
    with contextlib.suppress(ValueError, argparse.ArgumentError):
        parser.addoption(
            _GPU_WAIT,
            type=_seconds,
            metavar="SECONDS",
            help="how long a registered test waits for a GPU that others use: 600 by default (e2e-registry)",
        )


def _profile(config: pytest.Config) -> str | None:
    asked = config.known_args_namespace.determinism_profile or config.getini("determinism_profile")
    return None if not asked else str(asked)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds >= 0:  # NaN is no number either
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds


def _is_given(config: pytest.Config, option: str) -> bool:
    return bool(config.getoption(option, default=False))


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and begin what a session remembers."""
    config.addinivalue_line(
        "markers",
        "e2e(suite, label, nightly): a registered training test; select with -m \"e2e(suite='short-cpu')\"",
    )
    config.stash[_CLAIMS] = Claims()
    # Workers of pytest-xdist send their reports to the controller.
    is_worker = hasattr(config, "workerinput")
    config.pluginmanager.register(WorkerSelection() if is_worker else SessionOutcomes(config))


# ------------------------------------------------------------------------------------------------ collecting


class Claims:
    """Tells which files declare tests; reads the settings of a folder, and lists its tests, once a session."""

    def __init__(self) -> None:
        self._settings: dict[Path, Settings] = {}
        self._locations: dict[Path, list[Location]] = {}

    def settings(self, file: Path) -> Settings:
        """Return the settings that hold for a file."""
        if file.parent not in self._settings:
            self._settings[file.parent] = load_settings(file)
        return self._settings[file.parent]

    def is_registered(self, file: Path) -> bool:
        """Whether a file is a test of the registry, or tries to be one.

        Raises:
            RegistryError: It may be one, but the settings cannot be accepted.
        """
        if not (file.name.startswith("test_") and file.suffix == ".py"):
            return False
        try:
            if not declares_test(file.read_bytes()):
                return False
        except OSError:  # pytest says so
            return False
        settings = self.settings(file)
        absolute = file.parent.resolve() / file.name
        if not any(absolute.is_relative_to(folder.resolve()) for folder in settings.test_dirs):
            return False
        location = locate(file, settings)  # may refuse the name
        return location in self._all(settings)

    def registration(self, file: Path) -> Registration:
        """Read the test of a file that is one.

        Raises:
            RegistryError: It cannot be accepted.
        """
        settings = self.settings(file)
        return find_test(settings, file, locations=self._all(settings))

    def _all(self, settings: Settings) -> list[Location]:
        if settings.root not in self._locations:
            self._locations[settings.root] = test_locations(settings)
        return self._locations[settings.root]


_CLAIMS = pytest.StashKey[Claims]()
_RUNNING = pytest.StashKey[assertion.RunningTest]()
_HAS_PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collect_file(
    file_path: Path, parent: pytest.Collector
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Put the registered test of a file in the place of the module, which would be imported to be collected.

    What other plugins make of the file stays, unless it is a module too, as that of ``--doctest-modules``. None of
    them has imported anything yet: that happens when a collector collects.
    """
    collectors = yield
    refusal = None
    try:
        if not parent.config.stash[_CLAIMS].is_registered(file_path):
            return collectors
    except RegistryError as error:
        refusal = error
    kept = [collector for collector in collectors if not isinstance(collector, pytest.Module)]
    file: pytest.Collector = RegisteredFile.from_parent(parent, path=file_path, refusal=refusal)
    return [file, *kept]


class RegisteredFile(pytest.File):
    """A file that declares a test: read, never imported."""

    def __init__(self, *, refusal: RegistryError | None, **node: Any) -> None:
        super().__init__(**node)
        self.refusal = refusal

    def collect(self) -> Iterator[pytest.Item]:
        """Yield the one test."""
        if self.refusal is not None:
            raise self.refusal
        claims = self.config.stash[_CLAIMS]
        registration = claims.registration(self.path)
        yield RegisteredTest.from_parent(
            self, name=registration.stem, registration=registration, settings=claims.settings(self.path)
        )

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Say what cannot be accepted, and where, without a traceback through this package."""
        if isinstance(excinfo.value, RegistryError):
            return str(excinfo.value)
        return super().repr_failure(excinfo)


# ------------------------------------------------------------------------------------------------ running


class RegisteredTest(pytest.Item):
    """A registered test: its recipe is run, and judged as ``e2e-registry check`` judges it."""

    def __init__(self, *, registration: Registration, settings: Settings, **node: Any) -> None:
        super().__init__(**node)
        self.registration = registration
        self.settings = settings
        self.outcome: dict[str, Any] | None = None
        self.add_marker(pytest.mark.e2e(suite=registration.suite, nightly=registration.nightly))
        for label in registration.labels:
            self.add_marker(pytest.mark.e2e(label=label))
        self.extra_keyword_matches.update((registration.suite, *registration.labels))
        reason = self._skip_reason()
        self.is_checked = reason is None and not _is_given(self.config, "--e2e-record")
        if reason is not None:
            self.add_marker(pytest.mark.skip(reason=reason))

    def _skip_reason(self) -> str | None:
        if not (_is_given(self.config, "--e2e") or _is_given(self.config, "--e2e-record")):
            return "runs a training recipe: give --e2e"
        is_named = self.session.isinitpath(self.path)
        if self.registration.nightly and not is_named and not _is_given(self.config, "--e2e-nightly"):
            return "nightly: give --e2e-nightly, or name the file"
        return None

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return file and line of the registration."""
        return self.path, self.registration.line - 1, self.name

    def runtest(self) -> None:
        """Run the recipe; whatever is wrong is shown as the registry shows it, without a traceback."""
        __tracebackhide__ = True
        if _is_given(self.config, "--e2e-record"):
            self._record()
        else:
            self._check()

    def _on_line(self) -> Any:
        return print if self.config.getoption("capture") == "no" else None

    def _gpus(self) -> GpuAdmission:
        from e2e_registry.cli.options import gpu_admission

        return gpu_admission(
            self.config.getoption(_GPU_WAIT, default=None),
            allow_busy_gpus=_is_given(self.config, "--e2e-allow-busy-gpus"),
        )

    def _check(self) -> None:
        from e2e_registry.comparison import TestVerdict
        from e2e_registry.operations.check import check_test
        from e2e_registry.operations.machines import LocalMachine
        from e2e_registry.reports.console import assessment_text

        machine = LocalMachine(self._gpus())
        assessment = check_test(self.registration, self.settings, on_line=self._on_line(), machine=machine)
        self.outcome = {"root": str(self.settings.root), "assessment": pickle.dumps(assessment)}
        self._add_properties(assessment)
        text = assessment_text(assessment)
        if assessment.verdict.is_success:
            self.add_report_section("call", "e2e-registry", text)
            return
        if assessment.verdict is TestVerdict.SKIPPED:
            pytest.skip("; ".join(assessment.reasons))
        if assessment.quarantine is not None:
            self.add_report_section("call", "e2e-registry", text)
            # Known to fail, and blocks nothing: what pytest calls xfail. A quarantined test that passes just passes.
            pytest.xfail(f"{assessment.verdict.value}, quarantined {assessment.quarantine}")
        pytest.fail(text, pytrace=False)

    def _add_properties(self, assessment: Assessment) -> None:
        """Have ``--junitxml`` say what pytest's outcome cannot."""
        self.user_properties.append(("verdict", assessment.verdict.value))
        for name in ("platform", "run_path", "candidate", "quarantine"):
            value = getattr(assessment, name)
            if value is not None:
                self.user_properties.append((name, value))

    def _record(self) -> None:
        from e2e_registry.comparison import Action
        from e2e_registry.operations.machines import LocalMachine, skip_reason
        from e2e_registry.operations.record import RecordOptions, record_test
        from e2e_registry.reports.recording import change_text

        reason = skip_reason(self.registration, LocalMachine())
        if reason is not None:
            pytest.skip(reason)
        try:
            change = record_test(
                self.registration, self.settings, RecordOptions(), on_line=self._on_line(), gpus=self._gpus()
            )
        except RegistryError as error:
            pytest.fail(str(error), pytrace=False)
        text = change_text(change)
        if change.action is Action.REFUSED:
            pytest.fail(text, pytrace=False)
        self.outcome = {"changes": [text]}


# ------------------------------------------------------------------------------------------------ assertions


@pytest.fixture
def metric_recorder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MetricRecorder]:
    """A recorder of this test's own, to log to and to give to ``assert_matches_standard``."""
    from e2e_registry.recording import MetricRecorder

    with MetricRecorder(run_dir=tmp_path_factory.mktemp("metrics")) as recorder:
        yield recorder


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Tell assertions which test runs, from its first fixture on."""
    item.stash[_RUNNING] = running = _running_test(item)
    assertion.enter(running)
    yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    """End that after the last fixture."""
    try:
        yield
    finally:
        assertion.leave()


def _running_test(item: pytest.Item) -> assertion.RunningTest:
    # From the names of the nodes and not from the node id, which pytest-xdist extends by a group.
    chain = item.listchain()
    file_at = next((at for at, node in enumerate(chain) if isinstance(node, pytest.File)), len(chain) - 1)
    names = tuple(node.name for node in chain[file_at + 1 :])

    def still_exists(others: tuple[str, ...]) -> bool:
        found: Any = getattr(chain[file_at], "obj", None)
        for name in others:
            found = getattr(found, name.partition("[")[0], None)
        return found is not None

    return assertion.RunningTest(
        file=item.path,
        names=names,
        node_id="::".join([item.nodeid.partition("::")[0], *names]),
        profile=_profile(item.config),
        must_record=_is_given(item.config, "--record-assertions"),
        still_exists=still_exists,
    )


# ------------------------------------------------------------------------------------------------ reporting


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put what was concluded on the report, which is what a worker sends home."""
    report = yield
    outcome: dict[str, Any] = {}
    running = item.stash.get(_RUNNING, None)
    if isinstance(item, RegisteredTest) and isinstance(report.longrepr, tuple):  # skipped; not in this file, as it says
        report.longrepr = (str(item.path), item.registration.line, report.longrepr[2])
    if call.when == "call":
        outcome = (item.outcome or {}) if isinstance(item, RegisteredTest) else {}
        item.stash[_HAS_PASSED] = report.passed
    elif call.when == "teardown" and running is not None:
        outcome = {"changes": running.changes}
        if _is_given(item.config, "--unused-assertions"):
            has_passed = item.stash.get(_HAS_PASSED, False)
            outcome["finished"] = [str(running.file), "::".join(running.names), has_passed, sorted(running.used)]
    if any(outcome.values()):
        setattr(report, OUTCOME, outcome)
    return report


class SessionOutcomes:
    """Gathers what reports carry, from the workers of pytest-xdist too, and writes it out.

    ``results.json`` is kept as a check keeps it: current while tests run, and marked partial until they have.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.selected: dict[str, list[str]] = {}
        self.results: dict[str, Results] = {}
        self.changes: list[str] = []
        self.finished: list[tuple[str, str, bool, list[str]]] = []
        self.fault: RegistryError | None = None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note which registered tests are about to run."""
        self.selected = {} if self.config.getoption("collectonly") else _selected(session)
        for root, tests in self.selected.items():
            self._results(root).select(tests)
            with self._keeping():
                self.results[root].write()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Note what a worker of pytest-xdist had collected; all collect the same."""
        self.selected = getattr(node, "workeroutput", {}).get(_SELECTED, self.selected)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take what a report carries."""
        outcome = getattr(report, OUTCOME, {})
        self.changes += outcome.get("changes", ())
        if "finished" in outcome:
            self.finished.append(outcome["finished"])
        if "assessment" in outcome:
            # Made by this session, in this process or in a worker.
            assessment = pickle.loads(outcome["assessment"])  # noqa: S301
            with self._keeping():
                self._results(outcome["root"]).add(assessment)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the results for the last time; nothing if no registered test was run."""
        for root, results in self.results.items():
            concluded = {assessment.subject for assessment in results.assessments}
            results.select(sorted({*results.not_run, *concluded, *self.selected.get(root, ())}))
            with self._keeping():
                results.end(self._ending(session) if results.not_run else None)
        if self.fault is not None:  # what relies on the results must not take this session for a good one
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[None]:
        """Go on where results cannot be written; the summary and the exit code tell."""
        try:
            yield
        except RegistryError as error:
            self.fault = error

    def _results(self, root: str) -> Results:
        from e2e_registry.operations.results import Results

        if root not in self.results:
            self.results[root] = Results(load_settings(Path(root)), (), {"tests": ()})
        return self.results[root]

    def _ending(self, session: pytest.Session) -> Ending:
        from e2e_registry.operations.results import Ending

        if session.exitstatus == pytest.ExitCode.INTERNAL_ERROR:
            return Ending.INTERNAL_ERROR
        limit = self.config.getoption("maxfail")
        return Ending.FAIL_FAST if limit and session.testsfailed >= limit else Ending.INTERRUPTED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show what was recorded, which passes and would not be seen else, and where the results are."""
        unused = self._unused() if self.finished else None
        if self.changes or self.results or unused is not None:
            terminalreporter.section("e2e-registry")
        for text in self.changes:
            terminalreporter.write_line(text)
        for results in self.results.values() if self.fault is None else ():
            terminalreporter.write_line(f"results: {os.path.relpath(results.path)}")
        if self.fault is not None:
            terminalreporter.write_line(f"error: the results were not kept: {self.fault}", red=True)
        if unused is not None:
            terminalreporter.write_line(f"standards that no test of this session used: {len(unused)}")
            for standard, test in unused:
                terminalreporter.write_line(f"  {standard}  recorded by {test}")

    def _unused(self) -> list[tuple[str, str | None]]:
        from e2e_registry.operations.assertion import FinishedTest, unused_standards

        tests = (FinishedTest(Path(file), name, passed, frozenset(used)) for file, name, passed, used in self.finished)
        return [(os.path.relpath(path), test) for path, test in unused_standards(tests)]


class WorkerSelection:
    """Tells the controller of pytest-xdist which registered tests were selected: it collects nothing itself."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note them for the end of the worker."""
        session.config.workeroutput[_SELECTED] = _selected(session)  # type: ignore[attr-defined]  # by pytest-xdist


def _selected(session: pytest.Session) -> dict[str, list[str]]:
    """Return the ids of the registered tests that this session is to check, by root."""
    found: dict[str, list[str]] = {}
    for item in session.items:
        if isinstance(item, RegisteredTest) and item.is_checked:
            found.setdefault(str(item.settings.root), []).append(item.registration.test_id)
    return found

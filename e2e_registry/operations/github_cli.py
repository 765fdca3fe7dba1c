"""Fetches a workflow run's artifacts through GitHub's own command line, `gh`, which holds the user's login."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e_registry.errors import ArtifactError, UsageError

#: How action.yml begins the names of run folders that it uploads.
ARTIFACT_PREFIX = "e2e-results-"
#: The workflow that records standards in CI.
RECORDING_WORKFLOW = "record-e2e-standards.yml"

_URL = re.compile(
    r"https?://(?P<host>[\w.-]+)/(?P<repository>[\w.-]+/[\w.-]+)/"
    r"(?:actions/runs/(?P<run>\d+)|pull/(?P<pull>\d+))(?:[/?#].*)?"
)
_LONGEST_DOWNLOAD = 2 << 30
_BLOCK = 1 << 20
#: Runs of a pull request's head commit that are asked for artifacts, newest first.
_MAX_RUNS = 20
_MAX_PAGES, _PAGE = 10, 100
_NOT_FOUND, _GONE = 404, 410


@dataclass(frozen=True)
class Reference:
    """A workflow run or a pull request, as somebody wrote it down.

    Attributes:
        number: The run's id or the pull request's number.
        kind: ``run``, ``pull``, or ``number`` where only GitHub can say which of the two.
        host: The GitHub server; None for that of the checkout.
        repository: ``owner/name``; None for that of the checkout.
    """

    number: int
    kind: str
    host: str | None = None
    repository: str | None = None

    @property
    def api(self) -> str:
        """The beginning of the repository's address in the API; gh fills the placeholders in."""
        return f"repos/{self.repository or '{owner}/{repo}'}"


def parse_reference(text: str) -> Reference | None:
    """Return what ``123``, ``#12``, or the address of a run or pull request refers to; None for anything else."""
    if re.fullmatch(r"#?[0-9]{1,18}", text):
        return Reference(int(text.removeprefix("#")), "pull" if text.startswith("#") else "number")
    match = _URL.fullmatch(text)
    if match is None:
        return None
    kind = "run" if match["run"] else "pull"
    return Reference(int(match["run"] or match["pull"]), kind, match["host"], match["repository"])


@dataclass(frozen=True)
class _Listed:
    """An artifact as GitHub lists it; its name comes from a workflow and becomes no path."""

    number: int
    name: str
    is_expired: bool


@dataclass(frozen=True)
class _Run:
    """A workflow run.

    Attributes:
        number: Its id.
        branch: What it was made from.
        workflow: The file of its workflow.
        artifacts: Its end-to-end artifacts.
    """

    number: int
    branch: str | None
    workflow: str | None
    artifacts: Sequence[_Listed]


@contextlib.contextmanager
def downloaded(
    reference: Reference,
    *,
    root: Path,
    inputs: Sequence[str] = (),
    on_line: Callable[[str], None] = lambda line: None,
) -> Iterator[tuple[Path, str]]:
    """Download the end-to-end artifacts of a run as zips; yield their folder and what to call it.

    Args:
        reference: The run, or the pull request whose head's newest run with artifacts is taken.
        root: The checkout.
        inputs: What the recording workflow is to be asked for if the artifacts have expired, as ``suite=NAME``.
        on_line: Called with what is being done.

    Raises:
        UsageError: gh is not installed, or there is no such run or pull request.
        ArtifactError: gh fails, or the artifacts are absent or expired.
    """
    github = _GitHub(root, reference)
    run = github.find_run()
    live = [artifact for artifact in run.artifacts if not artifact.is_expired]
    expired = _expired(run, root, inputs)
    if not live:
        raise expired
    with tempfile.TemporaryDirectory(prefix="e2e-registry-") as folder:
        for number, artifact in enumerate(live):
            on_line(f"downloading {artifact.name!a} of run {run.number}")
            github.download(artifact, Path(folder, f"{number}.zip"), expired=expired)
        yield Path(folder), f"run {run.number}"


def _expired(run: _Run, root: Path, inputs: Sequence[str]) -> ArtifactError:
    """Return an error that says how to get new ones: by the recording workflow, or by the one that made these."""
    at = "" if run.branch is None else f" --ref {shlex.quote(run.branch)}"
    folders = (folder / ".github/workflows" for folder in (root, *root.parents))
    if any((folder / RECORDING_WORKFLOW).is_file() for folder in folders):
        start = f"gh workflow run {RECORDING_WORKFLOW}{at} -f"
        commands = [f"{start} {shlex.quote(given)}" for given in inputs or ["suite=NAME"]]
    else:
        commands = [f"gh workflow run {shlex.quote(run.workflow or 'WORKFLOW')}{at}"]
    return ArtifactError(
        "its artifacts have expired", where=f"run {run.number}", hint="\n  ".join(["make new ones:", *commands])
    )


class _GitHub:
    """Calls of gh for one reference."""

    def __init__(self, root: Path, reference: Reference) -> None:
        program = shutil.which("gh")
        if program is None:
            raise UsageError(
                "gh, GitHub's command line, is not installed",
                hint="install it (https://cli.github.com), or download the artifact and give its zip",
            )
        self._program = program
        self._root = root
        self._reference = reference

    def find_run(self) -> _Run:
        """Return the run that is meant, with its end-to-end artifacts."""
        reference = self._reference
        if reference.kind in ("run", "number"):
            answer = self._json(f"{reference.api}/actions/runs/{reference.number}", may_be_absent=True)
            if answer is not None:
                run = self._with_artifacts(answer, reference.number)
                if run is None:
                    raise _without_artifacts(f"run {reference.number}")
                return run
        pull = None
        if reference.kind in ("pull", "number"):
            pull = self._json(f"{reference.api}/pulls/{reference.number}", may_be_absent=True)
        if pull is None:
            what = {"run": "run", "pull": "pull request", "number": "run or pull request"}[reference.kind]
            raise UsageError(f"GitHub knows no {what} {reference.number} of this repository")
        return self._newest_run_of(pull)

    def _newest_run_of(self, pull: Any) -> _Run:
        sha = _text(pull.get("head") if isinstance(pull, dict) else None, "sha") or ""
        answer = self._json(f"{self._reference.api}/actions/runs?head_sha={sha}&per_page={_MAX_RUNS}")
        for entry in _entries(answer, "workflow_runs"):  # newest first
            number = entry.get("id")
            run = self._with_artifacts(entry, number) if isinstance(number, int) else None
            if run is not None:
                return run
        raise _without_artifacts(f"pull request {self._reference.number}, commit {sha[:12]}")

    def _with_artifacts(self, answer: Any, number: int) -> _Run | None:
        listed = self._listed(number)
        workflow = (_text(answer, "path") or "").split("@")[0].rsplit("/", 1)[-1]
        return _Run(number, _text(answer, "head_branch"), workflow or None, listed) if listed else None

    def _listed(self, run: int) -> list[_Listed]:
        found: list[_Listed] = []
        for page in range(1, _MAX_PAGES + 1):
            answer = self._json(f"{self._reference.api}/actions/runs/{run}/artifacts?per_page={_PAGE}&page={page}")
            entries = _entries(answer, "artifacts")
            for entry in entries:
                number, name = entry.get("id"), _text(entry, "name")
                if isinstance(number, int) and name is not None and name.startswith(ARTIFACT_PREFIX):
                    found.append(_Listed(number, name, bool(entry.get("expired"))))
            if len(entries) < _PAGE:
                break
        return found

    def download(self, artifact: _Listed, target: Path, *, expired: ArtifactError) -> None:
        """Download one artifact's zip.

        Raises:
            ArtifactError: ``expired`` if it is gone, else what gh says.
        """
        command = self._command(f"{self._reference.api}/actions/artifacts/{artifact.number}/zip")
        with (
            target.open("xb") as file,
            tempfile.TemporaryFile() as errors,
            subprocess.Popen(command, **self._settings(), stdout=subprocess.PIPE, stderr=errors) as gh,
        ):
            size = 0
            while gh.stdout is not None and (block := gh.stdout.read(_BLOCK)):
                size += len(block)
                if size > _LONGEST_DOWNLOAD:
                    gh.kill()
                    raise ArtifactError(f"it is larger than {_LONGEST_DOWNLOAD:,} bytes", where=artifact.name)
                file.write(block)
            code = gh.wait()
            errors.seek(0)
            said = errors.read().decode(errors="replace")
        if code != 0 and _http_status(said) == _GONE:
            raise expired
        if code != 0:
            raise _failure(said)

    def _json(self, address: str, *, may_be_absent: bool = False) -> Any:
        """Return what GitHub answers, as JSON; None for what it does not know, where that may be."""
        done = subprocess.run(self._command(address), **self._settings(), capture_output=True, check=False)
        said = done.stderr.decode(errors="replace")
        if done.returncode != 0:
            if may_be_absent and _http_status(said) == _NOT_FOUND:
                return None
            raise _failure(said)
        try:
            return json.loads(done.stdout)
        except (ValueError, RecursionError):
            raise ArtifactError("its answer is not JSON", where="gh") from None

    def _command(self, address: str) -> Sequence[str]:
        host = [] if self._reference.host is None else ["--hostname", self._reference.host]
        return [self._program, "api", *host, address]

    def _settings(self) -> dict[str, Any]:
        environment = {**os.environ, "GH_PROMPT_DISABLED": "1", "NO_COLOR": "1"}
        return {"cwd": self._root, "env": environment, "stdin": subprocess.DEVNULL}


def _without_artifacts(where: str) -> ArtifactError:
    return ArtifactError(
        f"it has no artifact whose name begins with {ARTIFACT_PREFIX!r}",
        where=where,
        hint="wait until its end-to-end jobs have ended; they upload their run folders, whatever the verdict",
    )


def _entries(answer: Any, name: str) -> list[dict[str, Any]]:
    entries = answer.get(name) if isinstance(answer, dict) else None
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _text(data: Any, name: str) -> str | None:
    value = data.get(name) if isinstance(data, dict) else None
    return value if isinstance(value, str) and value.isprintable() else None


def _http_status(said: str) -> int | None:
    """Return the status that GitHub answered with, as gh says it: ``gh: Not Found (HTTP 404)``; None if it says none.

    gh also repeats the address that it asked for, and a run's id may hold any three digits.
    """
    found = re.search(r"\bHTTP (\d{3})\b", said)
    return None if found is None else int(found[1])


def _failure(said: str) -> ArtifactError:
    line = next((line for line in said.splitlines() if line.strip()), "it says nothing")
    return ArtifactError(f"it fails: {line.strip()!a:.200}", where="gh", hint="is it logged in? gh auth status")

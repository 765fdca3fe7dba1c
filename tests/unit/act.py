"""A scratch repository with this repository's workflows and stub recipes, run under ``act`` without a network.

What is not the real thing: the actions of GitHub (setup-python, upload-artifact, download-artifact) are replaced by
composite actions that copy files, the Makefile by one whose environment is the test's own interpreter, and
``uses: $/path``, which act does not know yet, by ``uses: ./path``, which means the same in a checkout of the
workflow's own commit. Host mode is no sandbox: what a workflow runs, this machine runs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from repositories import Repository

ROOT = Path(__file__).resolve().parents[2]
ACT = Path(sys.executable).with_name("act")
RUNNER = "ubuntu-24.04"

UPLOAD = """
import glob, os, shutil
from pathlib import Path

found = []
for pattern in os.environ["FILES"].split("\\n"):
    for match in map(Path, glob.glob(pattern.strip(), include_hidden=True)) if pattern.strip() else ():
        found += [path for path in match.rglob("*") if path.is_file()] if match.is_dir() else [match]
single = Path(os.environ["FILES"].strip())
# As the real action: the least common ancestor of the paths is the root of the artifact, a single folder its own.
root = single if single.is_dir() else Path(os.path.commonpath([path.parent for path in found])) if found else single
if os.environ["HIDDEN"] != "true":
    found = [path for path in found if not any(part.startswith(".") for part in path.relative_to(root).parts)]
if not found and os.environ["MISSING"] == "error":
    raise SystemExit("no files found")
target = Path(os.environ["ACT_STORE"], os.environ["NAME"])
if found and target.exists():
    raise SystemExit(f"an artifact {target.name} is there already")
for path in found:
    destination = target / path.relative_to(root)
    destination.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, destination)
"""

DOWNLOAD = """
import fnmatch, os, shutil
from pathlib import Path

store, target = Path(os.environ["ACT_STORE"]), Path(os.environ["TARGET"])
if os.environ["RUN_ID"]:
    store = store.parent / ("run-" + os.environ["RUN_ID"])
name, pattern = os.environ["NAME"], os.environ["PATTERN"]
if name:
    shutil.copytree(store / name, target, dirs_exist_ok=True)
for artifact in sorted(store.iterdir()) if store.is_dir() and not name else ():
    if fnmatch.fnmatchcase(artifact.name, pattern):
        folder = target if os.environ["MERGE"] == "true" else target / artifact.name
        shutil.copytree(artifact, folder, dirs_exist_ok=True)
"""


def _action(inputs: Mapping[str, str], env: Mapping[str, str], script: str) -> str:
    step = {"shell": "bash", "env": dict(env), "run": f"{sys.executable} - <<'PYTHON'\n{script}\nPYTHON\n"}
    return yaml.safe_dump(
        {
            "name": "stand-in",
            "description": "stand-in",
            "inputs": {name: {"default": default} for name, default in inputs.items()},
            "runs": {"using": "composite", "steps": [step]},
        }
    )


STAND_INS = {
    "actions/setup-python": _action({"python-version": ""}, {}, "pass"),
    "actions/upload-artifact": _action(
        {"name": "", "path": "", "include-hidden-files": "false", "if-no-files-found": "warn"},
        {
            "NAME": "${{ inputs.name }}",
            "FILES": "${{ inputs.path }}",
            "HIDDEN": "${{ inputs.include-hidden-files }}",
            "MISSING": "${{ inputs.if-no-files-found }}",
        },
        UPLOAD,
    ),
    "actions/download-artifact": _action(
        {"name": "", "pattern": "*", "path": ".", "merge-multiple": "false", "run-id": "", "github-token": ""},
        {
            "NAME": "${{ inputs.name }}",
            "PATTERN": "${{ inputs.pattern }}",
            "TARGET": "${{ inputs.path }}",
            "MERGE": "${{ inputs.merge-multiple }}",
            "RUN_ID": "${{ inputs.run-id }}",
        },
        DOWNLOAD,
    ),
}

MAKEFILE = """
.venv/installed .venv/core:
\tmkdir -p .venv/bin
\tprintf '#!/bin/sh\\nexec {python} "$$@"\\n' > .venv/bin/python
\tchmod +x .venv/bin/python
\ttouch $@

lint test repeat:
\tmkdir -p .e2e_runs/$@
\techo ran > .e2e_runs/$@/ran
"""


@dataclass(frozen=True)
class ActRun:
    """What act did.

    Attributes:
        jobs: Each job that ended, by the name that act shows, with its result.
        output: All messages, a line each.
        code: act's exit code.
    """

    jobs: Mapping[str, str]
    output: str
    code: int

    @property
    def explanation(self) -> str:
        """The results, and the lines of the log that say what went wrong."""
        wrong = [line for line in self.output.splitlines() if re.search(r"❌|❗|[Ee]rror|exit status|no files", line)]
        return "\n".join([str(dict(self.jobs)), *wrong])


class ActRepository(Repository):
    """The scratch repository, with the workflows of this one."""

    def __init__(self, root: Path, home: Path) -> None:
        super().__init__(root)
        self.home = home
        self.local: dict[str, Path] = {}
        self.store = home / "artifacts"
        (root / "pyproject.toml").write_text(
            '[tool.e2e_registry]\nsuites = ["short-cpu"]\nlabels = ["slow"]\n'
            f'[tool.e2e_registry.platforms]\ncpu-x86_64-portable = ["{RUNNER}"]\n'
        )
        (root / "Makefile").write_text(MAKEFILE.format(python=sys.executable))
        self.git("init", "-q")
        (root / ".gitignore").write_text(".e2e_runs/\n.venv/\n__pycache__/\n")
        shutil.copytree(ROOT / ".github", root / ".github")
        shutil.copy(ROOT / "action.yml", root)
        for path in [*root.glob(".github/**/*.yml"), root / "action.yml"]:
            path.write_text(path.read_text().replace("uses: $/", "uses: ./"))
        for name, definition in STAND_INS.items():
            folder = home / name
            folder.mkdir(parents=True)
            (folder / "action.yml").write_text(definition)
            _commit_all(folder)

    def offer_action(self, reference: str) -> None:
        """Let workflows use this repository's action from elsewhere, as ``owner/name@commit``."""
        folder = self.home / "action"
        shutil.copytree(ROOT / ".github", folder / ".github")
        shutil.copy(ROOT / "action.yml", folder)
        _commit_all(folder)
        self.local[reference] = folder

    def python(self) -> Path:
        """Return a program that is the test's own interpreter, with its packages."""
        path = self.home / "python"
        path.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        path.chmod(0o755)
        return path

    def act(
        self, event: str, workflow: str, payload: Mapping[str, Any], environ: Mapping[str, str] | None = None
    ) -> ActRun:
        """Run a workflow to its end, with nothing of the environment but ``PATH`` and what is given."""
        event_file = self.home / "event.json"
        event_file.write_text(json.dumps(payload))
        command = [ACT, event, "-W", f".github/workflows/{workflow}.yml", "-e", event_file, "--json"]
        command += ["-P", f"{RUNNER}=-self-hosted", "--rm", "--no-cache-server", "--concurrent-jobs", "1"]
        command += ["--env", f"ACT_STORE={self.store}"]
        for pin in self.pins():
            command += ["--local-repository", f"{pin}={self.home / pin.split('@')[0]}"]
        for reference, folder in self.local.items():
            command += ["--local-repository", f"{reference}={folder}"]
        environment = {"HOME": str(self.home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8", **(environ or {})}
        done = subprocess.run(
            [str(part) for part in command],
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        return _read(done)

    def end_run(self, run_id: int) -> None:
        """Put the artifacts where another run finds them by the run's id, and begin with none."""
        self.store.rename(self.store.parent / f"run-{run_id}")

    def unpack(self, artifact: Path) -> None:
        """Unpack an artifact over the checkout, as ``gh run download --name`` does at the root."""
        shutil.copytree(artifact, self.root, dirs_exist_ok=True)

    def pins(self) -> set[str]:
        """The actions that workflows and actions use from elsewhere, with their pins."""
        lines = [
            line.split("uses:")[1].split("#")[0].strip()
            for path in [*(ROOT / ".github").glob("**/*.yml"), ROOT / "action.yml"]
            for line in path.read_text().splitlines()
            if "uses:" in line
        ]
        return {line for line in lines if line.split("@")[0] in STAND_INS}


def _commit_all(folder: Path) -> None:
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run(["git", *command], cwd=folder, check=True)


def _read(done: subprocess.CompletedProcess[str]) -> ActRun:
    jobs: dict[str, str] = {}
    output = []
    for line in (done.stdout + done.stderr).splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            output.append(line)
            continue
        if "jobResult" in entry:
            jobs[entry["job"]] = entry["jobResult"]
        output.append(f"{entry.get('job', '')}: {entry.get('msg', '').rstrip()}")
    return ActRun(jobs, "\n".join(output), done.returncode)

"""That the host decides no test: its variables, its git settings, a signal that its shell ignores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from e2e_registry.determinism.profiles import PROFILES

#: Records and commits in a scratch repository as tests do, and prints what is left of the host.
CODE = """
import os, signal, sys
from pathlib import Path
import conftest
from repositories import Repository
made = Repository(Path(sys.argv[1]))
made.record()
made.commit()
print(made.git("ls-files", "scripts").strip(), made.git("log", "--format=%an %s").strip())
print(sorted(name for name, value in os.environ.items() if value == sys.argv[2]))
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def test_variables_git_settings_and_ignored_signals_of_the_host_reach_no_test(tmp_path: Path) -> None:
    mark, other, root = "of-the-host", tmp_path / "other", tmp_path / "root"
    root.mkdir()
    subprocess.run(["git", "init", "-q", str(other)], check=True)
    (other / "ignored").write_text("*.py\n")
    settings = other / "settings"
    settings.write_text(
        f"[user]\nname = Host\nemail = h@example.invalid\n[commit]\ngpgsign = true\n[gpg]\nprogram = false\n"
        f"[core]\nhooksPath = {other}\nexcludesFile = {other / 'ignored'}\n"
    )
    (other / "pre-commit").write_text("#!/bin/sh\nexit 1\n")
    (other / "pre-commit").chmod(0o755)
    marked = {
        *(variable.name for profile in PROFILES.values() for variable in profile.settings),
        *("E2E_REGISTRY_PLATFORM_TAG", "E2E_REGISTRY_HEAD_SOURCE_TREE", "E2E_REGISTRY_RUN_DIR", "E2E_METRICS_JSONL"),
        *("GIT_AUTHOR_NAME", "RAY_ADDRESS", "OMP_PROC_BIND", "GITHUB_RUN_ID", "FORCE_COLOR", "TTY_COMPATIBLE"),
        *("COLUMNS", "NO_COLOR", "TMUX", "OPENBLAS_L2_SIZE"),
    } - {"PYTHONHASHSEED", "CUDA_VISIBLE_DEVICES"}  # an interpreter would not start; tests on GPUs need the other
    git = {"GIT_CONFIG_GLOBAL": str(settings), "GIT_DIR": str(other / ".git"), "GIT_WORK_TREE": str(other)}
    hostile = {**dict.fromkeys(marked, mark), **git, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(root), mark],
        cwd=Path(__file__).parent,
        env={**os.environ, **hostile},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["scripts/recipe.py Test change", "[]", "True"]
    assert not list((other / ".git/objects").glob("??"))

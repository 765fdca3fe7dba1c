#!/usr/bin/env bash
# The one step of action.yml that runs the command line. Whatever comes from outside is a variable, never code.
# Ends with 0 unless it cannot start; the command's own exit code is an output, for the steps after the uploads.
set -euo pipefail

arguments=()
while IFS= read -r test; do
    if [ -n "$test" ]; then arguments+=("--test=$test"); fi
done <<<"$TESTS"
if [ "${#arguments[@]}" -eq 0 ]; then
    if [ -n "$SUITE" ]; then arguments+=("--suite=$SUITE"); else arguments+=(--all); fi
    if [ -n "$LABELS" ]; then arguments+=("--labels=$LABELS"); fi
    if [ "$NIGHTLY" = true ]; then arguments+=(--nightly); fi
fi
if [ -n "$PARTITION" ]; then arguments+=("--partition=$PARTITION"); fi

case "$COMMAND" in
    check)
        if [ "$ALLOW_EMPTY" = true ]; then arguments+=(--allow-empty); fi
        ;;
    record)
        rm -rf "$EXPORT"
        arguments+=("--export=$EXPORT")
        if [ -n "$REASON" ]; then arguments+=("--reason=$REASON"); fi
        ;;
    *)
        echo "::error::the command of e2e-registry is 'check' or 'record'"
        exit 2
        ;;
esac

# What `merge` is told of this job beside its results: before the run that it has not ended, then how it did.
note_job() {
    STATUS="$1" "$PYTHON" - <<'PYTHON'
import os, sys
from pathlib import Path

from e2e_registry.config import load_settings
from e2e_registry.errors import RegistryError
from e2e_registry.operations.merge import JOB_FILE
from e2e_registry.operations.results import JUNIT_FILE, RESULTS_FILE
from e2e_registry.storage import append_text, write_json

try:
    settings = load_settings(Path.cwd())
    code = int(os.environ["STATUS"]) if os.environ["STATUS"] else None
    if code is None:
        # A command that cannot begin leaves those of the job before it, on a machine that keeps its workspace.
        for name in (RESULTS_FILE, JUNIT_FILE):
            (settings.run_dir / name).unlink(missing_ok=True)
    job = {
        "name": os.environ["NAME"] or os.environ["ARTIFACT"],
        "artifact": os.environ["ARTIFACT"],
        "command": os.environ["COMMAND"],
        "platform": os.environ["PLATFORM"] or None,
        "attempt": int(os.environ.get("GITHUB_RUN_ATTEMPT") or 1),
        "exit_code": code,
    }
    write_json(settings.run_dir / JOB_FILE, job)
    # The uploads ask for the folder: it is said first, since a step that is killed says nothing at its end.
    output = f"run-folder={settings.run_folder}\n" if code is None else f"exit-code={code}\n"
    append_text(Path(os.environ["GITHUB_OUTPUT"]), output)
except RegistryError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(int(error.exit_code))
PYTHON
}

note_job ""

# A runner that cancels signals this shell alone. The command is told, so that it ends its recipes and keeps what it
# knows, and is waited for. It is a process group of its own, since the shell has others ignore SIGINT.
told=
tell() {
    told=yes
    kill -s "$1" "$child" 2>/dev/null || true
}

# A recipe's output is not obeyed by the log.
token="$("$PYTHON" -c 'import secrets; print(secrets.token_hex(16))')"
echo "::stop-commands::$token"
set -m
"$PYTHON" -m e2e_registry "$COMMAND" "${arguments[@]}" </dev/null &
child=$!
set +m
trap 'tell INT' INT
trap 'tell TERM' TERM
while :; do
    told=
    status=0
    wait "$child" || status=$?
    if [ -z "$told" ]; then break; fi # else the wait was interrupted, and the command has yet to end
done
echo "::$token::"

note_job "$status"

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

# A recipe's output is not obeyed by the log.
token="$("$PYTHON" -c 'import secrets; print(secrets.token_hex(16))')"
echo "::stop-commands::$token"
status=0
"$PYTHON" -m e2e_registry "$COMMAND" "${arguments[@]}" || status=$?
echo "::$token::"

# What `merge` is told of this job beside its results.
STATUS="$status" "$PYTHON" - <<'PYTHON'
import os

from e2e_registry.config import load_settings
from e2e_registry.operations.merge import JOB_FILE
from e2e_registry.storage import append_text, write_json
from pathlib import Path

settings = load_settings(Path.cwd())
job = {
    "name": os.environ["NAME"],
    "command": os.environ["COMMAND"],
    "platform": os.environ["PLATFORM"] or None,
    "attempt": int(os.environ.get("GITHUB_RUN_ATTEMPT") or 1),
    "exit_code": int(os.environ["STATUS"]),
}
write_json(settings.run_dir / JOB_FILE, job)
outputs = f"exit-code={job['exit_code']}\nrun-folder={settings.run_folder}\n"
append_text(Path(os.environ["GITHUB_OUTPUT"]), outputs)
PYTHON

"""Lays out what was recorded so that it can be unpacked over a checkout: what CI brings back to an author."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from e2e_registry.comparison import Action, StandardChange
from e2e_registry.config import Settings
from e2e_registry.errors import RegistryError, UsageError
from e2e_registry.operations.running import new_run_dir
from e2e_registry.reports.github import change_summary
from e2e_registry.storage import replacing, write_json

#: Folder of the reports, in the run folder: unpacked over a checkout they change nothing that git sees.
CHANGES_FOLDER = "changes"


def export_changes(
    folder: Path, changes: Sequence[StandardChange], failures: Mapping[str, RegistryError], settings: Settings
) -> Path:
    """Copy the standards that were written into a folder, each in its path from the root, beside a report.

    Several exports may share a folder: each has a report of its own.

    Args:
        folder: Where to; made if it is not there.
        changes: What was recorded.
        failures: Test to why it was not recorded.
        settings: The repository's settings.

    Returns:
        The report in Markdown; the same in JSON lies beside it.

    Raises:
        UsageError: The folder is the root, where the standards lie already.
        StorageError: A file cannot be read or written.
    """
    if os.path.realpath(folder) == os.path.realpath(settings.root):  # Path.resolve fails on a link to itself
        raise UsageError("the standards are there already", where="--export", hint="name another folder")
    for change in changes:
        if change.action not in (Action.REFUSED, Action.UNCHANGED):
            with replacing(folder / change.path) as temporary:
                shutil.copyfile(settings.root / change.path, temporary)
    name = new_run_dir(settings, CHANGES_FOLDER).name
    report = folder / settings.run_folder / CHANGES_FOLDER / f"{name}.md"
    reasons = {test: str(error) for test, error in failures.items()}
    listed = [change.to_json() for change in changes]
    write_json(report.with_suffix(".json"), {"tests": listed, "failures": reasons})
    with replacing(report) as temporary:
        temporary.write_text(change_summary(listed, reasons), encoding="utf-8")
    return report

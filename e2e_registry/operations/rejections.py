"""Remembers which runs their author rejected, so that they are not proposed as news again."""

from __future__ import annotations

import datetime
from typing import Any

from e2e_registry.config import Settings
from e2e_registry.storage import parse_json, write_json

_FORMAT = 1
_FILE = "rejected.json"


class Rejections:
    """The rejected runs of a checkout, in its run folder: local to it, and gone with its kept runs.

    Args:
        settings: Say where the run folder is.
    """

    def __init__(self, settings: Settings) -> None:
        self._path = settings.run_dir / _FILE
        self._runs = self._read()

    def __contains__(self, run_id: str | None) -> bool:
        return run_id in self._runs

    def add(self, run_id: str | None, test: str) -> None:
        """Note that a run was rejected.

        Raises:
            StorageError: The note cannot be written.
        """
        if run_id is not None:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            self._write({**self._runs, run_id: {"test": test, "time": now}})

    def forget(self, run_id: str | None) -> None:
        """Take back that a run was rejected.

        Raises:
            StorageError: The note cannot be written.
        """
        if run_id in self._runs:
            self._write({name: note for name, note in self._runs.items() if name != run_id})

    def _read(self) -> dict[str, Any]:
        """Return the notes; a file that cannot be read holds none, since they only spare a question."""
        try:
            data = parse_json(self._path.read_bytes())
            runs = data["runs"] if data["format"] == _FORMAT else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return runs if isinstance(runs, dict) else {}

    def _write(self, runs: dict[str, Any]) -> None:
        write_json(self._path, {"format": _FORMAT, "runs": runs})
        self._runs = runs

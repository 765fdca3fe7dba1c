"""Leaves the determinism state of a Python process that is observed, at its end, in the run directory.

Python imports a module of this name by itself when it starts. So programs that know nothing of this package can be
read from inside: their state is nowhere else. But for a few environment variables the program finds all as it was:
this folder leaves ``sys.path`` again, the ``sitecustomize`` that would have been imported is imported next, nothing is
printed, and no thread is started. The state is read when the interpreter has run the program's own exit handlers, or
in ``os._exit``. A process that is killed leaves a marker alone, which it makes when it starts; one that was forked
rather than started leaves nothing.

Needs the standard library alone. In a Python too old for the rest of the package it leaves nothing, and does no harm.
"""

from __future__ import annotations

import atexit
import os
import sys

TYPE_CHECKING = False  # as typing has it, which a process that does not need it should not load
if TYPE_CHECKING:
    from collections.abc import Iterator

#: The run directory; set by the one who observes.
RUN_VARIABLE = "E2E_REGISTRY_OBSERVED_RUN"
#: Process id of the first observed process of a program; its children inherit it. ``exec`` keeps the id.
ROOT_VARIABLE = "E2E_REGISTRY_OBSERVED_ROOT"

#: Begins the name of a marker; the process id ends it.
MARKER = ".observed."

#: A program that starts processes without end must not fill the run directory.
MAX_STATES = 256


class _Observer:
    """What is to be left of this process."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir
        self.pid = os.getpid()
        self.is_root = os.environ.setdefault(ROOT_VARIABLE, str(self.pid)) == str(self.pid)
        self.is_done = False
        self.exit = os._exit
        self.marker = os.path.join(run_dir, f"{MARKER}{self.pid}")

    def install(self) -> None:
        """Arrange for the state to be left at whichever end the process chooses."""
        try:
            os.close(os.open(self.marker, os.O_CREAT | os.O_WRONLY, 0o644))
        except OSError:
            return  # the run directory is not there: another machine's, or gone
        atexit.register(self.leave_state)  # the first to register is the last to run

        def _exit(status: int) -> None:
            self.leave_state()
            self.exit(status)

        _exit.__doc__ = self.exit.__doc__
        os._exit = _exit  # type: ignore[assignment]

    def leave_state(self) -> None:
        """Write the state once; whatever fails in that must not change how the program ends."""
        if self.is_done or os.getpid() != self.pid:
            return
        self.is_done = True
        try:
            self._write(self._state())
            os.unlink(self.marker)
        except Exception:  # noqa: BLE001 - there is nobody to tell: the reader finds no state
            return

    def _state(self) -> dict[str, object]:
        # At the end of the list the package's folder shadows nothing.
        root = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))
        sys.path.append(root)
        try:
            from e2e_registry.determinism.state import read_state

            observed = {"is_root": self.is_root, "command": _command(root), "is_data_worker": _is_data_worker()}
            return dict(read_state(), observed=observed)
        finally:
            sys.path.remove(root)

    def _write(self, state: dict[str, object]) -> None:
        import json

        if any(known == self.pid for known in self._known_pids()):
            return  # its recorder has left the state already
        text = json.dumps(state, indent=1, sort_keys=True) + "\n"
        temporary = os.path.join(self.run_dir, f".state.{self.pid}.tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        try:
            self._claim(temporary)
        finally:
            os.unlink(temporary)

    def _known_pids(self) -> Iterator[object]:
        import json

        for name in sorted(os.listdir(self.run_dir)):
            if name.startswith("env.") and name.endswith(".json"):
                with open(os.path.join(self.run_dir, name), encoding="utf-8") as file:
                    yield (json.load(file).get("process") or {}).get("pid")

    def _claim(self, temporary: str) -> None:
        """Give the file a name that no writer of the run has; a link, unlike a rename, replaces nothing."""
        names = ["env.main.rank0.json"] if self.is_root else []
        for name in names + [f"env.subprocess.rank{number}.json" for number in range(MAX_STATES)]:
            try:
                os.link(temporary, os.path.join(self.run_dir, name))
            except FileExistsError:
                continue
            return


def _command(root: str) -> list[str]:
    """Return the command line without secrets.

    The one module is loaded by its file: its package imports ``concurrent.futures``, which raises this late.
    """
    import importlib.util

    path = os.path.join(root, "e2e_registry", "environment", "redaction.py")
    spec = importlib.util.spec_from_file_location("_e2e_registry_redaction", path)
    if spec is None or spec.loader is None:
        return []
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    command: list[str] = module.redact_command(getattr(sys, "orig_argv", sys.argv))
    return command


def _is_data_worker() -> bool:
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def _import_next(folder: str) -> None:
    """Import the ``sitecustomize`` that this one stands before, as if it had been found first."""
    import importlib.machinery
    import importlib.util

    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None or os.path.dirname(spec.origin or "") == folder:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    _folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _folder]
    if RUN_VARIABLE in os.environ:
        _Observer(os.environ[RUN_VARIABLE]).install()
    _import_next(_folder)

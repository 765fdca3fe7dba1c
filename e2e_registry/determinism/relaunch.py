"""Variables that came too late, and the way to start over with them.

A program cannot change what its interpreter, libc and loaded libraries have read. It can replace itself, early, by
the same program with another environment: :func:`bootstrap`.
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from e2e_registry.determinism.profiles import NO_VARIABLES, PROFILES, Profile, Variable, When, get_profile
from e2e_registry.determinism.state import initial_environment, was_set_in_time
from e2e_registry.determinism.switches import DeterminismError
from e2e_registry.determinism.variables import Origin, child_environment

#: Holds the process id that was started over. ``exec`` keeps the id and a child has another, so that a program
#: starts over once, and so may each of its children.
MARKER = "E2E_REGISTRY_RELAUNCHED"

#: Names the variables that starting over added, because nobody had set them.
ADDED = "E2E_REGISTRY_RELAUNCHED_WITH"


#: What pytest and pytest-xdist say of the process that runs a test: untrue of the programs that the test launches.
SET_BY_PYTEST = frozenset(
    {
        "PYTEST_CURRENT_TEST",
        "PYTEST_VERSION",
        "PYTEST_XDIST_TESTRUNUID",
        "PYTEST_XDIST_WORKER",
        "PYTEST_XDIST_WORKER_COUNT",
    }
)


@dataclass(frozen=True, slots=True)
class LateVariable:
    """A variable that was set inside this process after its reader had read it.

    Attributes:
        name: The variable.
        initial: What the process was started with; None if unset.
        current: What ``os.environ`` says now; None if unset.
        when: The moment that has passed.
        reason: How that is known.
    """

    name: str
    initial: str | None
    current: str | None
    when: When
    reason: str

    def __str__(self) -> str:
        """Render as one line."""
        return f"{self.name} was set to {self.current!r} too late: {self.reason} (it was {self.initial!r})"


def late_variables(profile: str | Profile | None = None) -> list[LateVariable]:
    """Return the variables that were changed inside this process too late to matter; callable at any time.

    Compares ``os.environ`` with the environment that the process was started with, for the variables of one
    profile or of all. A variable whose reader has not started yet is not late. Empty where the system does not
    tell the initial environment.

    Raises:
        UsageError: There is no such profile.
    """
    initial = initial_environment()
    if initial is None:
        return []
    profiles = PROFILES.values() if profile is None else [get_profile(profile)]
    known = {variable.name: variable for each in profiles for variable in each.settings}
    late = []
    for name, variable in sorted(known.items()):
        before, now = initial.get(name), os.environ.get(name)
        reason = None if before == now or was_set_in_time(name) else _why_late(variable)
        if reason is not None:
            late.append(LateVariable(name, before, now, variable.when, reason))
    return late


def _why_late(variable: Variable) -> str | None:
    """Return how it is known that a variable's moment has passed; None if it has not."""
    torch = sys.modules.get("torch")
    match variable.when:
        case When.PROCESS_START:
            return "it is read at process start"
        case When.LIBRARY_LOAD:
            loaded = [module for module in variable.modules if module in sys.modules]
            return f"{loaded[0]} is loaded" if loaded else None
        case When.CUDA_START:
            return "CUDA has been started" if torch is not None and torch.cuda.is_initialized() else None
        case When.NCCL_INIT:
            distributed = sys.modules.get("torch.distributed")
            is_up = distributed is not None and distributed.is_available() and distributed.is_initialized()
            return "torch.distributed is initialised" if is_up else None
        case When.CALL:
            return None


def bootstrap(profile: str | Profile, *, train_env_vars: Mapping[str, str] = NO_VARIABLES) -> None:
    """Start this program over with a profile's variables, unless it has them; the first statement of a script.

    ::

        from e2e_registry.determinism import bootstrap
        bootstrap("cpu-portable")   # returns only in a process that was started with the variables
        import torch

    The process keeps its id, arguments, interpreter flags and working directory. A variable that is set by now,
    in the caller's environment or by the script, keeps its value. Programs that a launcher starts with the
    variables pay nothing.

    Args:
        profile: The profile or its name.
        train_env_vars: Variables that go before the caller's.

    Raises:
        UsageError: There is no such profile.
        DeterminismError: The process cannot be replaced without loss: it runs threads, has started CUDA, is
            interactive, reads its program from standard input, or is another program's worker. Or it was started
            over already and still lacks a variable.
    """
    initial = initial_environment()
    child = child_environment(profile, caller=os.environ, train_env_vars=train_env_vars)
    missing = [
        f"{setting.variable.name}={setting.value}"
        for setting in child.settings
        if setting.value is not None and (initial or {}).get(setting.variable.name) != setting.value
    ]
    if initial is not None and not missing:
        return
    hint = f"start it with: env {shlex.join(missing)} ..."
    obstacle = _obstacle() if initial is not None else "this system does not tell a process what it was started with"
    if obstacle is not None:
        raise DeterminismError(f"this process cannot be started over with other variables: {obstacle}", hint=hint)
    if os.environ.get(MARKER) == str(os.getpid()):
        raise DeterminismError(
            f"this process was started over, but still lacks {', '.join(missing)}",
            hint="something between here and the interpreter (a wrapper script?) removes variables; " + hint,
        )
    # Asked only now, because it costs a subprocess: the names that this interpreter's NumPy knows.
    child = child_environment(profile, caller=os.environ, train_env_vars=train_env_vars, python=sys.executable)
    added = " ".join(setting.variable.name for setting in child.settings if setting.origin is Origin.PROFILE)
    _replace_process({**child.variables, MARKER: str(os.getpid()), ADDED: added})


def callers_environment() -> dict[str, str]:
    """Return ``os.environ`` without what starting over added to it, and without what pytest says of a test.

    What a program was started over with is nobody's choice for the programs that it launches in turn: these may be
    under another profile, which must not take it for the caller's wish. And a recipe must not depend on whether pytest
    has launched it.
    """
    initial = initial_environment() or {}
    added = os.environ.get(ADDED, "").split()
    own = {name for name in added if os.environ.get(name) == initial.get(name)} | {ADDED, MARKER} | SET_BY_PYTEST
    return {name: value for name, value in os.environ.items() if name not in own}


def _replace_process(environment: Mapping[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], dict(environment))  # noqa: S606 - no shell wanted


def _obstacle() -> str | None:
    """Return why this process cannot be replaced by a fresh one without losing something; None if it can."""
    torch = sys.modules.get("torch")
    multiprocessing = sys.modules.get("multiprocessing.process")
    checks = (
        (os.name != "posix", "only POSIX systems replace a process in place"),
        (not sys.executable, "the interpreter's path is not known (Python is embedded)"),
        (_is_interactive(), "it is interactive"),
        (sys.argv[:1] in ([], [""], ["-"]), "its program came from standard input, which is read by now"),
        (_runs_a_test(), "it runs a test"),
        (
            multiprocessing is not None and multiprocessing.parent_process() is not None,
            "it is a multiprocessing worker",
        ),
        (any(Path(argument).name == "default_worker.py" for argument in sys.orig_argv), "it is a Ray worker"),
        (torch is not None and torch.cuda.is_initialized(), "CUDA has been started"),
        (_thread_count() > 1, f"it runs {_thread_count()} threads (NumPy and torch start some when imported)"),
    )
    return next((reason for is_so, reason in checks if is_so), None)


def _runs_a_test() -> bool:
    """Whether pytest runs a test here: a program that a test has started was started with the variable."""
    name = "PYTEST_CURRENT_TEST"
    return os.environ.get(name) != (initial_environment() or {}).get(name)


def _is_interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or "ipykernel" in sys.modules


def _thread_count() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()

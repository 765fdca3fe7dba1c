"""What is run several times: a test, or any command, under one seed or another."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from e2e_registry.config import Settings
from e2e_registry.environment import redact_command
from e2e_registry.errors import UsageError
from e2e_registry.execution.gpus import WHEN_EMPTY, GpuAdmission
from e2e_registry.operations.running import ObservedRun, run_command, run_test
from e2e_registry.registration import Registration
from e2e_registry.tolerance import Policies

#: Stands in a command where its seed goes.
SEED_FIELD = "{seed}"

OnLine = Callable[[str], None]


class Workload(Protocol):
    """A test or a command."""

    @property
    def label(self) -> str:
        """What reports call it."""

    @property
    def seed(self) -> int | None:
        """The seed that it runs under by default; None if it is given none."""

    def run(self, *, seed: int | None, is_pinned: bool = True, on_line: OnLine | None = None) -> ObservedRun:
        """Run it once in a fresh process and keep the run.

        Args:
            seed: The seed; None for a workload that is given none.
            is_pinned: Whether the profile's variables are set.
            on_line: Called with each line it prints.
        """

    def with_arguments(self, arguments: Sequence[str]) -> Self:
        """Return it with more arguments at the end."""

    def without_arguments(self, arguments: Sequence[str]) -> Self:
        """Return it without some of its arguments.

        Raises:
            UsageError: The arguments do not stand in it, in this order and side by side.
        """

    def policies(self, metrics: Iterable[str]) -> Policies:
        """Return the policies that judge bit for bit whatever is judged at all.

        Args:
            metrics: The names that the compared runs emitted.
        """


@dataclass(frozen=True)
class TestWorkload:
    """A test: what it registers is judged, without its tolerances."""

    __test__ = False  # the name is the field's; pytest must not collect it

    registration: Registration
    settings: Settings
    gpus: GpuAdmission = WHEN_EMPTY

    @property
    def label(self) -> str:
        """The test's id."""
        return self.registration.test_id

    @property
    def seed(self) -> int | None:
        """The registered seed."""
        return self.registration.seed

    def run(self, *, seed: int | None, is_pinned: bool = True, on_line: OnLine | None = None) -> ObservedRun:
        """Run the test's recipe; see :class:`Workload`."""
        registration = self.registration if seed is None else self.registration.with_seed(seed)
        return run_test(registration, self.settings, on_line=on_line, is_pinned=is_pinned, gpus=self.gpus)

    def with_arguments(self, arguments: Sequence[str]) -> TestWorkload:
        """Return the test with more arguments at the end."""
        return self._with(args=(*self.registration.args, *arguments))

    def without_arguments(self, arguments: Sequence[str]) -> TestWorkload:
        """Return the test without some of its arguments, or some of its command's."""
        registration = self.registration
        if _position(registration.args, arguments) is None and registration.command is not None:
            return self._with(command=_without(registration.command, arguments, self.label))
        return self._with(args=_without(registration.args, arguments, self.label))

    def policies(self, metrics: Iterable[str]) -> Policies:
        """Judge the registered metrics, leave the observed ones, and ask for none that was never emitted."""
        registered = self.registration.policies()
        judged = frozenset(name for name in metrics if registered.policy(name).is_judged)
        return Policies(observe=self.registration.observe, pinned=judged)

    def _with(self, **changes: tuple[str, ...]) -> TestWorkload:
        return dataclasses.replace(self, registration=dataclasses.replace(self.registration, **changes))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class CommandWorkload:
    """Any command: everything it logs is judged.

    Attributes:
        command: Program and arguments; ``{seed}`` and ``{run_dir}`` are replaced in them.
        settings: The repository's settings.
        profile: Name of the profile it runs under.
        timeout_s: Seconds one run may take.
        base_seed: What ``{seed}`` stands for by default.
        observe: Names and globs of metrics that are not judged, such as throughput.
    """

    command: tuple[str, ...]
    settings: Settings
    profile: str
    timeout_s: float
    base_seed: int = 0
    observe: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The command line, without secrets."""
        return shlex.join(redact_command(self.command))

    @property
    def seed(self) -> int | None:
        """The base seed; None if ``{seed}`` stands nowhere in the command."""
        return self.base_seed if any(SEED_FIELD in argument for argument in self.command) else None

    def run(self, *, seed: int | None, is_pinned: bool = True, on_line: OnLine | None = None) -> ObservedRun:
        """Run the command; see :class:`Workload`."""
        return run_command(
            self.command,
            self.settings,
            profile=self.profile,
            timeout_s=self.timeout_s,
            seed=seed,
            on_line=on_line,
            is_pinned=is_pinned,
        )

    def with_arguments(self, arguments: Sequence[str]) -> CommandWorkload:
        """Return the command with more arguments at the end."""
        return dataclasses.replace(self, command=(*self.command, *arguments))

    def without_arguments(self, arguments: Sequence[str]) -> CommandWorkload:
        """Return the command without some of its arguments."""
        return dataclasses.replace(self, command=_without(self.command, arguments, self.label))

    def policies(self, metrics: Iterable[str]) -> Policies:
        """Judge everything but the observed metrics."""
        return Policies(judge_all=True, observe=self.observe)


def _position(tokens: Sequence[str], part: Sequence[str]) -> int | None:
    places = range(len(tokens) - len(part) + 1)
    return next((at for at in places if list(tokens[at : at + len(part)]) == list(part)), None)


def _without(tokens: Sequence[str], part: Sequence[str], label: str) -> tuple[str, ...]:
    at = _position(tokens, part)
    if at is None:
        raise UsageError(
            f"{shlex.join(part)!r} is no part of the arguments of {label}",
            hint=f"its arguments are: {shlex.join(tokens) or 'none'}",
        )
    return (*tokens[:at], *tokens[at + len(part) :])

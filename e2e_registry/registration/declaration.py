"""A test as its file declares it: what it runs, and how its metrics are judged."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Required, TypedDict, TypeGuard

from e2e_registry.errors import UsageError
from e2e_registry.registration.place import Place
from e2e_registry.tolerance import Invariant, Policies, Tolerance, matches


class InvariantKeywords(TypedDict, total=False):
    """One entry of ``invariants=``: what must hold for every value of a metric."""

    equals: float
    min: float
    max: float
    finite: bool


class QuarantineKeywords(TypedDict):
    """``quarantine=``: why a test may fail for now, and from which ISO date on it blocks again."""

    reason: str
    until: str


class RegistrationKeywords(TypedDict, total=False):
    """The keywords of :func:`register_e2e_ci`, for editors and type checkers; :class:`Registration` explains them."""

    est_time: Required[float]
    suite: Required[str]
    metrics: Required[Sequence[str]]
    script: str | None
    command: Sequence[str] | None
    args: Sequence[str]
    env: Mapping[str, str]
    profile: str | None
    tolerances: Mapping[str, Tolerance]
    observe: Sequence[str]
    invariants: Mapping[str, InvariantKeywords]
    labels: Sequence[str]
    nightly: bool
    disabled: str | None
    timeout: float | None
    num_cpus: int
    num_gpus: int
    platforms: Sequence[str]
    seed: int | None
    quarantine: QuarantineKeywords | None


# `{run_dir}`, `{seed}` and `${VARIABLE}` in one pattern, so that one pass replaces them and nothing that came out of a
# variable is looked at again. Other braces, as of JSON in an argument, stay as they are.
_PLACEHOLDER = re.compile(r"\$\{(?P<variable>[A-Za-z_][A-Za-z0-9_]*)\}|\{(?P<field>run_dir|seed)\}")


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A test that runs and reports, but may fail until a date.

    Attributes:
        reason: Why.
        until: The first day on which a failure blocks again.
    """

    reason: str
    until: datetime.date

    def blocks_on(self, day: datetime.date) -> bool:
        """Whether a failure on ``day`` blocks."""
        return day >= self.until


@dataclass(frozen=True, kw_only=True)
class Registration:
    """One test, as its file declares it. Made by :func:`read_registration` and :func:`register_e2e_ci` alone.

    Attributes:
        test_id: The file's path from the root, with ``/`` on every system.
        file: The test file, absolute.
        line: The line of the call.
        est_time: Expected duration in seconds, for partitioning a suite and for the default timeout.
        suite: The suite the test belongs to.
        script: The recipe, a Python file, relative to the root; None if ``command`` is given.
        command: The command to run instead of a script.
        args: Arguments after the script or command. Like ``command`` and ``env`` they may hold ``{run_dir}``,
            ``{seed}`` and ``${VARIABLE}``, which are replaced at launch.
        env: Variables set for the recipe; they go before the caller's environment and the profile.
        metrics: Registered metric names and globs.
        profile: Name of the determinism profile. If the call leaves it out: ``cpu-portable`` for a test without
            GPUs, ``cuda`` for one with.
        tolerances: Name or glob to tolerance; what none covers is strict.
        observe: Names and globs that are kept and shown, never judged.
        invariants: Name or glob to what must hold for every value.
        labels: Labels that select the test.
        nightly: Whether the test belongs to nightly runs only.
        disabled: Why the test does not run at all; None if it does.
        timeout: Seconds after which the recipe is ended; three times ``est_time``, at least 60, by default.
        num_cpus: CPU cores the scheduler reserves.
        num_gpus: GPUs the scheduler reserves.
        platforms: Globs of the platform slugs where a verdict is required.
        seed: Put where ``{seed}`` stands in ``command``, ``args`` or ``env``, else appended as ``--seed N``.
        quarantine: Until when failures do not block.
        argument_lines: Argument to the line of its expression, if the registration was read from source.
    """

    test_id: str
    file: Path
    line: int
    est_time: float
    suite: str
    script: str | None
    command: tuple[str, ...] | None
    args: tuple[str, ...]
    env: Mapping[str, str]
    metrics: tuple[str, ...]
    profile: str
    tolerances: Mapping[str, Tolerance]
    observe: tuple[str, ...]
    invariants: Mapping[str, Invariant]
    labels: tuple[str, ...]
    nightly: bool
    disabled: str | None
    timeout: float
    num_cpus: int
    num_gpus: int
    platforms: tuple[str, ...]
    seed: int | None
    quarantine: Quarantine | None
    argument_lines: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)

    def __hash__(self) -> int:
        """Hash by id: the mappings cannot be hashed."""
        return hash(self.test_id)

    @property
    def stem(self) -> str:
        """The stem of the test file, which names its standards."""
        return self.file.stem

    @property
    def place(self) -> Place:
        """Where the registration stands."""
        return Place(self.test_id, self.line, self.argument_lines)

    def policies(self, pinned: frozenset[str] = frozenset()) -> Policies:
        """Return how each metric is judged; ``pinned`` are the names that a standard expanded the globs to."""
        return Policies(self.metrics, self.tolerances, self.observe, pinned)

    def invariant(self, metric: str) -> Invariant:
        """Return what must hold for every value of ``metric``; an exact name goes before the first matching glob.

        What no key names must be finite if it is judged: a metric that is observed, or not registered, may be anything.
        """
        key = deciding_key(self.invariants, metric)
        return Invariant(finite=self.policies().policy(metric).is_judged) if key is None else self.invariants[key]

    def requires_verdict(self, platform: str) -> bool:
        """Whether the test must be judged on ``platform``; elsewhere it is compared for information."""
        return any(matches(platform, pattern) for pattern in self.platforms)

    def with_seed(self, seed: int) -> Registration:
        """Return the same test under another seed.

        Raises:
            UsageError: The seed is not one that :func:`is_seed` accepts.
            RegistrationError: ``args`` or ``command`` hold a literal ``--seed``, which the seed would contradict.
        """
        if not is_seed(seed):
            raise UsageError(f"seed={seed!r} must be {SEED_RULE}")
        refuse_literal_seed(self.command, self.args, self.place)
        return dataclasses.replace(self, seed=seed)

    def argv(
        self,
        *,
        run_dir: Path | str,
        seed: int | None = None,
        python: str = sys.executable,
        environ: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Return the command to launch in the root folder.

        Args:
            run_dir: Replaces ``{run_dir}``.
            seed: Replaces the registered seed.
            python: The interpreter that runs ``script``.
            environ: Where ``${VARIABLE}`` is looked up: the environment that the recipe will get; by default the
                process's own.

        Raises:
            RegistrationError: A variable is not set.
        """
        if seed is not None:
            return self.with_seed(seed).argv(run_dir=run_dir, python=python, environ=environ)
        expand = self._expander(run_dir, os.environ if environ is None else environ)
        return [*self._program(python), *(expand(argument, token) for argument, token in self._tokens())]

    @property
    def recorded_argv(self) -> tuple[str, ...]:
        """The command as recordings and standards keep and compare it.

        ``{run_dir}`` and ``${VARIABLE}`` stay as written, and the interpreter is ``python``, because these differ
        between machines that run the same recipe. The seed is written out, because another seed is another recipe.
        """
        return (*self._program("python"), *(_write_seed(token, self.seed) for _, token in self._tokens()))

    def launch_env(self, *, run_dir: Path | str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return ``env`` with placeholders replaced as :meth:`argv` does.

        Raises:
            RegistrationError: A variable is not set.
        """
        expand = self._expander(run_dir, os.environ if environ is None else environ)
        return {name: expand(f"env[{name!r}]", value) for name, value in self.env.items()}

    @property
    def recorded_env(self) -> dict[str, str]:
        """``env`` as recordings and standards keep and compare it; see :attr:`recorded_argv`."""
        return {name: _write_seed(value, self.seed) for name, value in self.env.items()}

    @property
    def expanded_variables(self) -> frozenset[str]:
        """Names of the variables whose values the recipe's command or environment is made with at launch."""
        texts = [*(text for _, text in self._tokens()), *self.env.values()]
        found = (match["variable"] for text in texts for match in _PLACEHOLDER.finditer(text))
        return frozenset(name for name in found if name is not None)

    def _program(self, python: str) -> list[str]:
        return [] if self.script is None else [python, self.script]

    def _tokens(self) -> Iterator[tuple[str, str]]:
        """Yield (argument, text) of all that may hold placeholders, in command-line order."""
        yield from indexed("command", self.command or ())
        yield from indexed("args", self.args)
        if self.seed is not None and not _places_seed(self.command, self.args, self.env):
            yield "seed", "--seed"
            yield "seed", str(self.seed)

    def _expander(self, run_dir: Path | str, environ: Mapping[str, str]) -> Callable[[str, str], str]:
        fields = {"run_dir": str(run_dir), "seed": str(self.seed)}

        def expand(argument: str, text: str) -> str:
            def replacement(found: re.Match[str]) -> str:
                variable = found["variable"]
                if variable is None:
                    return fields[found["field"]]
                if variable not in environ:
                    raise self.place.error(argument, f"variable {variable} is not set", f"export {variable}=...")
                return environ[variable]

            return _PLACEHOLDER.sub(replacement, text)

        return expand


#: What :func:`is_seed` accepts; ``torch.manual_seed`` takes no more.
SEED_RULE = "a whole number from 0 to 2**64 - 1"


def is_seed(value: object) -> TypeGuard[int]:
    """Whether every generator that a recipe may seed can take ``value``, before it narrows it itself."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64


def indexed(argument: str, tokens: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (``args[0]``, token) and so on: each item of a list with its place in the call."""
    return ((f"{argument}[{at}]", token) for at, token in enumerate(tokens))


def deciding_key(patterns: Iterable[str], metric: str) -> str | None:
    """Return which of ``patterns`` decides about ``metric``: its own name, else the first glob, as in Policies."""
    keys = list(patterns)
    return metric if metric in keys else next((key for key in keys if matches(metric, key)), None)


def has_seed_field(text: str) -> bool:
    """Whether ``{seed}`` stands in ``text``; ``${seed}`` is a variable."""
    return any(found["field"] == "seed" for found in _PLACEHOLDER.finditer(text))


def _places_seed(command: Sequence[str] | None, args: Sequence[str], env: Mapping[str, str]) -> bool:
    return any(has_seed_field(text) for text in (*(command or ()), *args, *env.values()))


def _write_seed(text: str, seed: int | None) -> str:
    return _PLACEHOLDER.sub(lambda found: str(seed) if found["field"] == "seed" else found[0], text)


def refuse_literal_seed(command: Sequence[str] | None, args: Sequence[str], place: Place) -> None:
    """Refuse a seed beside a ``--seed`` that is written out: recipes differ in which of two they take.

    Raises:
        RegistrationError: ``--seed`` stands in ``command`` or ``args`` and is not followed by ``{seed}``.
    """
    tokens = [*indexed("command", command or ()), *indexed("args", args), ("", "")]
    for (argument, token), (_, following) in itertools.pairwise(tokens):
        option, _, value = token.partition("=")
        if option == "--seed" and not has_seed_field(value or following):
            raise place.error(argument, f"{token!r} and seed= both set the seed", "remove one of the two")

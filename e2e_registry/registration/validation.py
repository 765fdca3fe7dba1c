"""The one validation of registrations, executed or read from source."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from e2e_registry.config import Settings, did_you_mean, escape_from_root
from e2e_registry.errors import RegistrationError
from e2e_registry.registration.coverage import check_coverage
from e2e_registry.registration.declaration import (
    SEED_RULE,
    InvariantKeywords,
    Quarantine,
    QuarantineKeywords,
    Registration,
    RegistrationKeywords,
    has_seed_field,
    indexed,
    is_seed,
    refuse_literal_seed,
)
from e2e_registry.registration.place import Location, Place, blaming
from e2e_registry.tolerance import Invariant, Tolerance

_KEYWORDS = tuple(RegistrationKeywords.__annotations__)
_REQUIRED = ("est_time", "suite", "metrics")

# Seconds; far below where the timers of some systems overflow.
_LONGEST = 366 * 24 * 3600


def validate(
    keywords: Mapping[str, object], location: Location, line: int, lines: Mapping[str, int], settings: Settings
) -> Registration:
    """Return the registration if all of its keywords can be accepted.

    Raises:
        RegistrationError: One cannot be.
    """
    call = _Call(keywords, Place(location.test_id, line, lines), settings)
    call.check_names()
    est_time = call.seconds("est_time", None)
    num_gpus = call.whole("num_gpus", 0, minimum=0)
    script, command = call.program()
    registration = Registration(
        test_id=location.test_id,
        file=location.file,
        line=line,
        est_time=est_time,
        suite=call.suite(),
        script=script,
        command=command,
        args=call.tokens("args"),
        env=call.env(),
        metrics=call.names("metrics"),
        profile=call.profile("cuda" if num_gpus else "cpu-portable"),
        tolerances=call.tolerances(),
        observe=call.names("observe"),
        invariants=call.invariants(),
        labels=call.labels(),
        nightly=call.flag("nightly"),
        disabled=call.reason("disabled"),
        timeout=call.seconds("timeout", max(60.0, 3 * est_time)),
        num_cpus=call.whole("num_cpus", 1, minimum=1),
        num_gpus=num_gpus,
        platforms=call.platforms(),
        seed=call.seed(),
        quarantine=call.quarantine(),
        argument_lines=lines,
    )
    check_coverage(registration)
    _check_seed(registration)
    return registration


class _Call:
    """The keywords of one call, being checked one by one."""

    def __init__(self, keywords: Mapping[str, object], place: Place, settings: Settings) -> None:
        self.keywords = keywords
        self.place = place
        self.error = place.error
        self.settings = settings

    def check_names(self) -> None:
        for name in self.keywords:
            if name not in _KEYWORDS:
                raise self.error(name, "unknown keyword", did_you_mean(name, _KEYWORDS))
        for name in _REQUIRED:
            if name not in self.keywords:
                raise self.error(name, f"{name} is missing", f"register_e2e_ci(..., {name}=...)")
        if self.keywords["metrics"] in ([], ()):
            raise self.error(
                "metrics", "no metrics: the test would judge nothing", 'name at least one: metrics=["train/loss"]'
            )

    def wrong_type(self, argument: str, value: object, expected: str) -> RegistrationError:
        return self.error(argument, f"must be {expected}, not {_shown(value)}")

    # Scalars

    def check_name(self, argument: str, value: object) -> str:
        if not isinstance(value, str):
            raise self.wrong_type(argument, value, "a string")
        if not value.strip():
            raise self.error(argument, "is an empty name")
        if value != value.strip() or not value.isprintable():
            raise self.error(argument, f"{value!r} has spaces around it, or holds characters that cannot be printed")
        return value

    def name(self, argument: str) -> str:
        return self.check_name(argument, self.keywords[argument])

    def suite(self) -> str:
        suite = self.name("suite")
        self.check_known("suite", "suite", suite, self.settings.suites)
        return suite

    def check_known(self, argument: str, kind: str, name: str, known: Sequence[str]) -> None:
        """Refuse a name that is not among those the settings list; settings that list none allow any."""
        if known and name not in known:
            listed = f"{did_you_mean(name, known)} ({kind}s are listed in {self.settings.source or 'the settings'})"
            raise self.error(argument, f"unknown {kind} {name!r}", listed)

    def reason(self, argument: str) -> str | None:
        value = self.keywords.get(argument)
        if value is None:
            return None
        if not isinstance(value, str) or not value.strip():
            raise self.wrong_type(argument, value, "the reason, as a string")
        return value

    def flag(self, argument: str) -> bool:
        value = self.keywords.get(argument, False)
        if not isinstance(value, bool):
            raise self.wrong_type(argument, value, "True or False")
        return value

    def whole(self, argument: str, default: int, *, minimum: int) -> int:
        value = self.keywords.get(argument, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.wrong_type(argument, value, f"a whole number from {minimum} on")
        return value

    def seed(self) -> int | None:
        value = self.keywords.get("seed")
        if value is not None and not is_seed(value):
            raise self.wrong_type("seed", value, SEED_RULE)
        return value

    def seconds(self, argument: str, default: float | None) -> float:
        value = self.keywords.get(argument)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong_type(argument, value, "a number of seconds")
        if not 0 < value <= _LONGEST:
            raise self.error(argument, f"must be above 0 and at most a year of seconds, not {_shown(value)}")
        return float(value)

    def profile(self, default: str) -> str:
        from e2e_registry.determinism.variables import PROFILES

        if self.keywords.get("profile") is None:
            return default
        name = self.name("profile")
        if name not in PROFILES:
            raise self.error("profile", f"unknown profile {name!r}", did_you_mean(name, list(PROFILES)))
        return name

    # Lists

    def sequence(self, argument: str) -> Sequence[object]:
        value = self.keywords.get(argument, ())
        if not isinstance(value, list | tuple):
            raise self.wrong_type(argument, value, "a list of strings")
        return value

    def names(self, argument: str) -> tuple[str, ...]:
        """Return a list of distinct names."""
        found: dict[str, int] = {}
        for at, value in enumerate(self.sequence(argument)):
            name = self.check_name(f"{argument}[{at}]", value)
            if name in found:
                raise self.error(
                    f"{argument}[{at}]", f"{name!r} is listed twice", f"remove it here or at {argument}[{found[name]}]"
                )
            found[name] = at
        return tuple(found)

    def tokens(self, argument: str) -> tuple[str, ...]:
        """Return a list of command-line arguments, which may repeat and may be empty."""
        return tuple(self.token(f"{argument}[{at}]", value) for at, value in enumerate(self.sequence(argument)))

    def token(self, argument: str, value: object) -> str:
        if not isinstance(value, str):
            hint = f"write {str(value)!r}" if isinstance(value, int | float) else None
            raise self.error(argument, f"must be a string, not {_shown(value)}", hint)
        if "\0" in value or not _is_encodable(value):
            raise self.error(
                argument, f"{value!r} holds a NUL or half of a surrogate pair: no process can be given that"
            )
        return value

    def labels(self) -> tuple[str, ...]:
        labels = self.names("labels")
        for at, label in enumerate(labels):
            self.check_known(f"labels[{at}]", "label", label, self.settings.labels)
        return labels

    def platforms(self) -> tuple[str, ...]:
        if "platforms" not in self.keywords:
            return ("*",)
        patterns = self.names("platforms")
        if not patterns:
            raise self.error(
                "platforms", "is empty: no verdict would ever be required", "leave it out for all platforms"
            )
        for at, pattern in enumerate(patterns):
            if not re.fullmatch(r"[A-Za-z0-9._*?\[\]!-]+", pattern):
                raise self.error(f"platforms[{at}]", f"{pattern!r} can match no platform slug", 'e.g. "cpu-x86_64-*"')
        return patterns

    # What is run

    def program(self) -> tuple[str | None, tuple[str, ...] | None]:
        script, command = self.keywords.get("script"), self.keywords.get("command")
        if script is None and command is None:
            raise self.error("script", "nothing to run", "give script= or command=")
        if script is not None and command is not None:
            raise self.error("command", "script and command exclude each other", "remove one of the two")
        if script is not None:
            return self.script(script), None
        tokens = self.tokens("command")
        if not tokens or not tokens[0]:
            raise self.error("command", "names no program", 'e.g. command=["bash", "train.sh"]')
        return None, tokens

    def script(self, value: object) -> str:
        """Return the script's path from the root, normalised."""
        text = self.check_name("script", value)
        problem = escape_from_root(text)
        if problem is not None:
            raise self.error("script", f"{text!r} {problem}", f"write the path from the root, {self.settings.root}")
        path = self.settings.root / text
        if not path.is_file():
            kind = "is a folder" if path.is_dir() else "does not exist"
            raise self.error("script", f"{text!r} {kind} (looked for {path})", "write the path from the root")
        if not path.resolve().is_relative_to(self.settings.root.resolve()):
            raise self.error(
                "script", f"{text!r} is a link that leaves the root", "the recipe must belong to the repository"
            )
        return PurePosixPath(text).as_posix()

    def mapping(self, argument: str, expected: str) -> Mapping[object, object]:
        value = self.keywords.get(argument, {})
        if not isinstance(value, Mapping):
            raise self.wrong_type(argument, value, f"a dict, {expected}")
        return value

    def env(self) -> dict[str, str]:
        env: dict[str, str] = {}
        for name, value in self.mapping("env", 'e.g. {"NAME": "value"}').items():
            argument = f"env[{name!r}]"
            if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise self.error(argument, f"{_shown(name)} is not the name of a variable")
            if name.startswith("E2E_REGISTRY_") or name == "E2E_METRICS_JSONL":
                raise self.error(argument, f"{name} belongs to the launcher, which sets it", "remove it")
            env[name] = self.token(argument, value)
        return env

    # How it is judged

    def tolerances(self) -> dict[str, Tolerance]:
        tolerances: dict[str, Tolerance] = {}
        for name, value in self.mapping("tolerances", 'e.g. {"train/loss": Tolerance(...)}').items():
            argument = f"tolerances[{name!r}]"
            if not isinstance(value, Tolerance):
                raise self.error(
                    argument, f"must be a Tolerance, not {_shown(value)}", 'e.g. Tolerance(atol=1e-7, reason="...")'
                )
            tolerances[self.check_name(argument, name)] = value
        return tolerances

    def invariants(self) -> dict[str, Invariant]:
        invariants: dict[str, Invariant] = {}
        for name, value in self.mapping("invariants", 'e.g. {"train/kl": {"min": 0.0}}').items():
            argument = f"invariants[{name!r}]"
            invariants[self.check_name(argument, name)] = self.invariant(argument, value)
        return invariants

    def invariant(self, argument: str, value: object) -> Invariant:
        known = tuple(InvariantKeywords.__annotations__)
        if not isinstance(value, Mapping) or not value:
            raise self.wrong_type(argument, value, f"a dict with some of {', '.join(known)}")
        for key in value:
            if key not in known:
                raise self.error(f"{argument}[{key!r}]", f"unknown key {_shown(key)}", did_you_mean(str(key), known))
        with blaming(self.place, argument):
            return Invariant(**{str(key): item for key, item in value.items()})

    def quarantine(self) -> Quarantine | None:
        value = self.keywords.get("quarantine")
        if value is None:
            return None
        known = tuple(QuarantineKeywords.__annotations__)
        if not isinstance(value, Mapping) or set(value) != set(known):
            raise self.wrong_type("quarantine", value, 'a dict, {"reason": "...", "until": "2030-01-31"}')
        for key in known:
            if not isinstance(value[key], str) or not value[key].strip():
                raise self.wrong_type(f"quarantine[{key!r}]", value[key], "a string that is not empty")
        return Quarantine(value["reason"], self.date("quarantine['until']", value["until"]))

    def date(self, argument: str, text: str) -> datetime.date:
        try:
            # fromisoformat also takes 20300131 and 2030-W05-4, which few readers can tell from a typing error.
            if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text, re.ASCII):
                raise ValueError("not YYYY-MM-DD")
            return datetime.date.fromisoformat(text)
        except ValueError as error:
            raise self.error(argument, f"{text!r} is not a date: {error}", 'write it as "2030-01-31"') from error


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return "an integer of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_seed(registration: Registration) -> None:
    place = registration.place
    if registration.seed is not None:
        refuse_literal_seed(registration.command, registration.args, place)
        return
    env = ((f"env[{name!r}]", value) for name, value in registration.env.items())
    for argument, text in (*indexed("command", registration.command or ()), *indexed("args", registration.args), *env):
        if has_seed_field(text):
            raise place.error(argument, "{seed} is used, but no seed is registered", "add seed=0")

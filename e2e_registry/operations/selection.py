"""Chooses which tests a command works on."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypedDict, Unpack

from e2e_registry.config import Settings, did_you_mean
from e2e_registry.errors import NothingSelectedError, UsageError
from e2e_registry.operations.partition import Partition
from e2e_registry.registration import Registration, discover, find_test
from e2e_registry.storage import parse_json

#: What a label of a pull request begins with that asks for tests: ``run-ci-sft`` asks for those labelled ``sft``.
REQUEST_PREFIX = "run-ci-"
#: The label of a pull request that asks for the tests of all labels.
REQUEST_ALL = "run-ci-all"


class Selection(TypedDict, total=False):
    """How tests are chosen; what is left out is as if it was not asked for.

    Attributes:
        tests: Test files by path or id. Of this, ``suite`` and ``everything`` exactly one is given.
        suite: A suite's name.
        everything: Select all tests.
        labels: Of a suite or of all, take the tests that have one of these labels and those that have none at all;
            ``run-ci-<label>`` is read as ``<label>``. An empty sequence takes those without a label alone, None
            looks at no label.
        match_all_labels: Take the tests of all labels, whatever ``labels`` says.
        nightly: Take also the tests that are registered as nightly.
        partition: Of what is selected, take this part.
    """

    tests: Sequence[str]
    suite: str | None
    everything: bool
    labels: Sequence[str] | None
    match_all_labels: bool
    nightly: bool
    partition: Partition | None


def select(settings: Settings, **selection: Unpack[Selection]) -> list[Registration]:
    """Return the selected tests: named ones in the order given, a suite or all of them by id.

    Args:
        settings: The repository's settings.
        selection: See :class:`Selection`.

    Raises:
        UsageError: No or more than one way to select, an unknown test, suite or label.
        RegistrationError: A registration cannot be accepted.
        NothingSelectedError: No test is left.
    """
    tests, suite = selection.get("tests", ()), selection.get("suite")
    labels, takes_all_labels = selection.get("labels"), selection.get("match_all_labels", False)
    if sum([bool(tests), suite is not None, selection.get("everything", False)]) != 1:
        raise UsageError("say what to work on: --test FILE, --suite NAME or --all (one of them)")
    if tests:
        if labels is not None or takes_all_labels:
            raise UsageError("labels choose from a suite or from all tests, and --test names its tests already")
        found = list(dict.fromkeys(find_test(settings, test) for test in tests))
    else:
        everything = discover(settings)
        found = _of_suite(everything, suite, settings)
        if labels is not None:
            wanted = _known_labels(labels, settings, found_in=everything)
            takes_all_labels |= REQUEST_ALL in labels
            found = [test for test in found if takes_all_labels or not test.labels or wanted & set(test.labels)]
        found = [test for test in found if selection.get("nightly", False) or not test.nightly]
    part = selection.get("partition")
    found = found if part is None else part.of(found)
    if not found:
        raise NothingSelectedError("no test is selected", hint=_why_nothing(settings, part))
    return found


def selection_to_json(selection: Selection) -> dict[str, Any]:
    """Return what ``results.json`` says of how its tests were chosen."""
    labels = selection.get("labels")
    return {
        "tests": list(selection.get("tests", ())),
        "suite": selection.get("suite"),
        "all": selection.get("everything", False),
        "labels": None if labels is None else list(labels),
        "match_all_labels": selection.get("match_all_labels", False),
        "nightly": selection.get("nightly", False),
    }


def parse_labels(values: Iterable[str]) -> list[str]:
    """Return the labels that ``--labels`` was given.

    A value is a list of labels with commas or blanks between them, or the JSON array of a pull request's labels as
    ``toJSON(github.event.pull_request.labels.*.name)`` gives it. Of an array only ``run-ci-`` labels count: a pull
    request has others, which are not about tests.

    Raises:
        UsageError: A value begins like a JSON array and is none of strings.
    """
    labels: list[str] = []
    for value in values:
        labels += _parse_array(value) if value.lstrip().startswith("[") else re.split(r"[\s,]+", value)
    return list(dict.fromkeys(label for label in labels if label))


def _parse_array(value: str) -> list[str]:
    try:
        names = parse_json(value)
    except ValueError as error:
        raise UsageError(f"not a JSON array: {error}", where="--labels", hint='such as ["run-ci-sft"]') from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError("not an array of strings", where="--labels", hint='such as ["run-ci-sft"]')
    return [name for name in names if name.startswith(REQUEST_PREFIX)]


def _of_suite(registrations: Sequence[Registration], suite: str | None, settings: Settings) -> list[Registration]:
    if suite is None:
        return list(registrations)
    known = sorted({*settings.suites, *(registration.suite for registration in registrations)})
    if suite not in known:
        hint = did_you_mean(suite, known) if known else f"there is no test in {', '.join(settings.test_folders)}"
        raise UsageError(f"there is no suite {suite!r}", where="--suite", hint=hint)
    return [registration for registration in registrations if registration.suite == suite]


def _known_labels(labels: Sequence[str], settings: Settings, *, found_in: Sequence[Registration]) -> set[str]:
    """Return the labels without ``run-ci-``; refuse those that no test could have."""
    known = {*settings.labels, *(label for registration in found_in for label in registration.labels)}
    return {_known_label(label, known) for label in labels if label != REQUEST_ALL}


def _known_label(label: str, known: Collection[str]) -> str:
    for name in (label, label.removeprefix(REQUEST_PREFIX)):
        if name in known:
            return name
    hint = did_you_mean(label.removeprefix(REQUEST_PREFIX), known) if known else "no test has a label"
    raise UsageError(f"there is no label {label!r}", where="--labels", hint=hint)


def _why_nothing(settings: Settings, part: Partition | None) -> str:
    if part is not None:
        return f"partition {part} is empty: there are fewer tests than partitions, or none at all"
    where = f"tests are test_*.py in {', '.join(settings.test_folders)}"
    if settings.source is None:
        return f"{where} of {settings.root}, for want of settings: run it in the repository, or e2e-registry init"
    return where

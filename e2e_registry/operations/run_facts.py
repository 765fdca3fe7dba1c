"""Checks the shape of what a run says about itself, once: a run may come from another machine, or from a stranger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from e2e_registry.errors import InvalidRunError

#: Any key of a mapping.
ANY = "*"
#: The keys that a mapping must hold, each with a value; no JSON has this key.
REQUIRED = object()

_TEXT = (str,)
_NUMBER = (int,)
_SCALAR = (str, int, float, bool)
_TEXTS = [_TEXT]

_LEFT_BEHIND = {REQUIRED: ("pid", "command"), "pid": _NUMBER, "command": _TEXT, ANY: _SCALAR}
_GPU = {REQUIRED: ("name",), "name": _TEXT, ANY: _SCALAR}
_PLATFORM = {ANY: _SCALAR, "cpu_flags": _TEXTS, "gpus": _TEXTS}

#: ``run.json``, as the launcher writes it. A mapping holds shapes by key, a list one shape of its items, and a tuple
#: the types of a value. A fact may be absent or null, and one that is not named is not looked at.
FACTS_SHAPE: Mapping[Any, Any] = {
    "recipe": {
        **dict.fromkeys(("test", "script", "script_sha256"), _TEXT),
        "command": _TEXTS,
        "args": _TEXTS,
        "env": {ANY: _TEXT},
        "seed": _NUMBER,
    },
    "profile": _TEXT,
    "origins": {ANY: _TEXT},
    "source": {ANY: _SCALAR},
    "num_gpus": _NUMBER,
    "launcher_platform": _PLATFORM,
    "platform_tag": _TEXT,
    "outcome": {"status": _TEXT, "exit_code": _NUMBER, "explanation": _TEXT, "left_behind": [_LEFT_BEHIND]},
    "cwd": _TEXT,
    "command": _TEXTS,
    "ray": {"node": _TEXT, "attempt": _NUMBER},
    "started_ns": _NUMBER,
    "ended_ns": _NUMBER,
}

#: What a writer leaves of its process: :func:`~e2e_registry.determinism.state.read_state`.
STATE_SHAPE: Mapping[Any, Any] = {
    "process": {ANY: _SCALAR},
    "platform": _PLATFORM,
    "software": {},
    "gpus": [_GPU],
    "determinism": {"torch": {}, "numpy": {}, "openblas": [{ANY: _SCALAR}], "openmp": [{ANY: _SCALAR}]},
    "variables": {ANY: {"initial": _TEXT, "current": _TEXT, "late": (bool,), "set_in_time": (bool,)}},
    "unreadable": {},
    "observed": {"command": _TEXTS},
}


def duration_s(facts: Mapping[str, Any]) -> float | None:
    """Return the wall time of a run's recipe in seconds, by ``run.json``; None if that does not say."""
    started, ended = facts.get("started_ns"), facts.get("ended_ns")
    return None if started is None or ended is None else (ended - started) / 1e9


def require_shape(document: Any, shape: Any, file: Path) -> None:
    """Refuse a document of another shape than the launcher and the recorder write.

    Raises:
        InvalidRunError: It is one; names the file and the place in it.
    """
    fault = shape_fault(document, shape)
    if fault is not None:
        raise InvalidRunError(fault, where=file, hint="the file was edited or is foreign; run again")


def shape_fault(value: Any, shape: Any, name: str = "") -> str | None:
    """Say where a document has another shape than it should, as ``outcome.status is a list``; None if nowhere.

    Args:
        value: The document, or a part of it.
        shape: What it should be; see :data:`FACTS_SHAPE`.
        name: The part's name.
    """
    expected = dict if isinstance(shape, Mapping) else list if isinstance(shape, list) else shape
    is_bool_unasked = isinstance(value, bool) and isinstance(shape, tuple) and bool not in shape
    if is_bool_unasked or not isinstance(value, expected):
        return f"{name or 'it'} is {_kind(value)}"
    if isinstance(shape, Mapping) and isinstance(value, Mapping):
        missing = [key for key in shape.get(REQUIRED, ()) if value.get(key) is None]
        if missing:
            return f"{name or 'it'} has no {missing[0]}"
    faults = (shape_fault(item, part, path) for path, item, part in _parts(value, shape, name))
    return next((fault for fault in faults if fault is not None), None)


def _parts(value: Any, shape: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, value and shape of what is to be looked at inside a value."""
    if isinstance(shape, list):
        yield from ((f"{name}[{at}]", item, shape[0]) for at, item in enumerate(value))
    elif isinstance(shape, Mapping):
        for key, item in value.items():
            part = shape.get(key, shape.get(ANY))
            # A null says that a fact is unknown; an entry that is there at all holds its facts.
            is_entry = key not in shape and isinstance(part, Mapping)
            if part is not None and (item is not None or is_entry):
                yield f"{name}.{key}".lstrip("."), item, part


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")

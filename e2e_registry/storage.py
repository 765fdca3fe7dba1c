"""Files that are either whole or absent: the one way in which this package replaces a file.

The bytes go to a temporary file in the same folder, which is synced and renamed over the target, and then the
folder is synced too. A reader, a crash or a kill at any moment sees the whole old file or the whole new one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from e2e_registry.errors import StorageError

_SUFFIX = ".tmp"

#: Levels of a JSON document that is read; those of this package have fewer than ten.
DEEPEST = 64


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; on leaving without an error it becomes ``path``, else it is removed.

    The name starts with a dot and ends in ``.tmp``, so that no reader takes it for the file. Temporaries that
    killed processes left behind are removed on the way.

    Raises:
        StorageError: The folder cannot be made or written, or the disk is full. ``path`` is then unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{_SUFFIX}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path)
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    except OSError as error:
        raise StorageError(
            f"cannot write: {error.strerror or error}", where=path, hint="the file there, if any, is unchanged"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    """Write ``data`` as strict JSON, atomically."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def parse_json(raw: str | bytes) -> Any:
    """Return a JSON document that somebody else may have written: what this returns can be walked and written again.

    Raises:
        ValueError: It is no JSON, is nested deeper than :data:`DEEPEST`, or holds a number that is not finite or has
            more than 64 bits.
    """
    try:
        data = json.loads(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level, depth = [data], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise ValueError("it is nested too deeply")
        for value in level:
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{value} is no number")
            if isinstance(value, int) and value.bit_length() > 64:
                raise ValueError("a number in it has more than 64 bits")
        level = [part for value in level for part in _parts(value)]
    return data


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def read_json_object(path: Path, *, max_bytes: int, hint: str | None = None) -> dict[str, Any]:
    """Read a file of any origin that should hold one JSON object.

    Args:
        path: The file.
        max_bytes: A larger one is not read.
        hint: What to do if it holds something else.

    Raises:
        StorageError: It cannot be read, is too large, or holds no JSON object.
    """
    try:
        if path.stat().st_size > max_bytes:
            raise StorageError(f"is larger than {max_bytes >> 20} MiB", where=path)
        data = parse_json(path.read_bytes())
    except OSError as error:
        raise StorageError(f"cannot be read: {error.strerror}", where=path) from error
    except ValueError as error:
        raise StorageError(f"is not JSON: {error}", where=path, hint=hint) from error
    if not isinstance(data, dict):
        raise StorageError("is no JSON object", where=path, hint=hint)
    return data


def append_text(path: Path, text: str) -> None:
    """Append to a file that others append to as well, such as the files that GitHub gives a step; never replace it.

    Raises:
        StorageError: It cannot be written.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StorageError(f"cannot append: {error.strerror or error}", where=path) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(path: Path) -> None:
    pattern = re.compile(re.escape(f".{path.name}.") + r"(\d+)\.[0-9a-f]{8}" + re.escape(_SUFFIX))
    for entry in path.parent.iterdir():
        match = pattern.fullmatch(entry.name)
        if match and not _is_alive(int(match[1])):
            with contextlib.suppress(OSError):
                entry.unlink()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's process, or no way to ask: leave its file alone
        return True
    return True

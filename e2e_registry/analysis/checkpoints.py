"""Finds the checkpoints of a run and reads them as entries, without executing what is in them.

Torch files are loaded with ``weights_only=True`` onto the CPU, safetensors and NumPy files by their own readers, and
nested mappings and lists are taken apart into entries with dotted names. Whatever cannot be read that way, and every
other kind of file, is compared as it lies.
"""

from __future__ import annotations

import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from e2e_registry.comparison.checkpoints import BYTE, CheckpointComparison, Entry, FileComparison, compare_file
from e2e_registry.errors import StorageError, UsageError
from e2e_registry.execution.launcher import LOG_FILE
from e2e_registry.recording.layout import METRICS_FILE, PLAIN_FILE, RUN_FILE, STATE_FILE

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: What counts as a checkpoint unless the caller says otherwise; relative to the run directory.
DEFAULT_GLOBS = ("checkpoints/**/*", "**/*.pt", "**/*.pth", "**/*.ckpt", "**/*.safetensors", "**/*.npz", "**/*.npy")

_TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
_LONGEST_TEXT = 40
_SCALARS = (bool, int, float, complex, str, bytes, type(None))


class _UnreadableError(Exception):
    """A file's entries cannot be told apart; the text says why."""


@dataclass(frozen=True, slots=True)
class _Read:
    format: str
    entries: Sequence[Entry]


def find_checkpoints(run_dir: Path, globs: Sequence[str] = DEFAULT_GLOBS) -> dict[str, Path]:
    """Return the checkpoint files of a run by their paths in it, numbers in them in numeric order.

    Args:
        run_dir: The run directory; what the registry itself keeps there is no checkpoint.
        globs: Patterns relative to the run directory.

    Raises:
        UsageError: A pattern is absolute or empty.
    """
    found: dict[str, Path] = {}
    for pattern in globs:
        try:
            paths = [path for path in run_dir.glob(pattern) if path.is_file()]
        except (NotImplementedError, ValueError) as error:
            raise UsageError(
                f"not a pattern below the run directory: {pattern!r}", hint="such as 'checkpoints/**/*.pt'"
            ) from error
        found |= {path.relative_to(run_dir).as_posix(): path for path in paths}
    return {name: found[name] for name in sorted(found, key=_numeric_order) if not _is_registrys(name)}


def _is_registrys(name: str) -> bool:
    is_temporary = name.rpartition("/")[2].startswith(".") and name.endswith(".tmp")
    is_own = name in (RUN_FILE, LOG_FILE, PLAIN_FILE) or METRICS_FILE.fullmatch(name) or STATE_FILE.fullmatch(name)
    return bool(is_own) or is_temporary


def _numeric_order(name: str) -> list[tuple[bool, int, str]]:
    parts = re.split(r"(\d+)", name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def compare_checkpoints(got: Mapping[str, Path], want: Mapping[str, Path]) -> CheckpointComparison:
    """Compare the checkpoints of two runs, file by file.

    Args:
        got: Of the run that is judged, as :func:`find_checkpoints` returned them.
        want: Of the first run.

    Raises:
        StorageError: A file cannot be read.
        UsageError: Torch is needed to read a file and is not installed.
    """
    names = sorted({*got, *want}, key=_numeric_order)
    return CheckpointComparison(tuple(_compare(name, got.get(name), want.get(name)) for name in names))


def _compare(name: str, got: Path | None, want: Path | None) -> FileComparison:
    try:
        sides = [None if path is None else _read(path) for path in (got, want)]
        formats = {side.format for side in sides if side is not None}
        if len(formats) > 1:
            raise _UnreadableError(f"one side is {' and the other '.join(sorted(formats))}")
        entries = [() if side is None else side.entries for side in sides]
        return compare_file(name, formats.pop(), *entries)
    except _UnreadableError as error:
        result = compare_file(name, "bytes", *([] if path is None else [_whole(path)] for path in (got, want)))
        note = None if result.is_equal else str(error)
        return FileComparison(result.path, result.format, result.num_entries, result.differences, note=note)
    except OSError as error:
        raise StorageError(f"cannot read: {error.strerror or error}", where=error.filename or name) from error


def _read(path: Path) -> _Read:
    """Read one file by what it holds rather than by what it is called."""
    if path.suffix == ".safetensors":
        return _Read("safetensors", list(_safetensors(path)))
    if path.suffix == ".npy":
        return _Read("numpy", [_array((), _load_array(path))])
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
        if any(member.endswith("/data.pkl") for member in members):
            return _Read("torch", list(_flattened(_load_torch(path, mmap=True))))
        if members and all(member.endswith(".npy") for member in members):
            with _load_array(path) as arrays:
                return _Read("numpy", list(_arrays(arrays)))
    elif path.suffix in _TORCH_SUFFIXES and _is_pickle(path):
        return _Read("torch", list(_flattened(_load_torch(path, mmap=False))))
    return _Read("bytes", [_whole(path)])


def _is_pickle(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(2)
    return len(head) == 2 and head[0] == 0x80 and head[1] <= 5


def _whole(path: Path) -> Entry:
    size = path.stat().st_size
    # A mapping of no bytes is refused by the system.
    return Entry((), BYTE, (size,), lambda: np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8))


# ------------------------------------------------------------------------------------------------ NumPy, safetensors


def _load_array(path: Path) -> Any:
    try:
        return np.load(path, mmap_mode="r" if path.suffix == ".npy" else None, allow_pickle=False)
    except ValueError as error:
        raise _UnreadableError(f"NumPy cannot read it without unpickling: {error}") from None


def _arrays(arrays: Any) -> Iterator[Entry]:
    for key in arrays:
        try:
            yield _array((key,), arrays[key])
        except ValueError as error:
            raise _UnreadableError(f"NumPy cannot read {key!r} without unpickling: {error}") from None


def _array(path: tuple[object, ...], array: NDArray[Any]) -> Entry:
    dtype = array.dtype.name if array.dtype.isnative and array.dtype.kind in "biufc" else array.dtype.str

    def load() -> NDArray[np.uint8]:
        flat = np.ascontiguousarray(array).reshape(-1)
        return flat.view(np.uint8) if flat.nbytes else np.empty(0, np.uint8)

    return Entry(path, dtype, array.shape, load)


#: The names of the safetensors format to those of torch and NumPy, for the dtypes that have both.
_SAFETENSORS_DTYPES = {
    "BF16": "bfloat16",
    "BOOL": "bool",
    **{f"F{width}": f"float{width}" for width in (16, 32, 64)},
    **{f"I{width}": f"int{width}" for width in (8, 16, 32, 64)},
    **{f"U{width}": f"uint{width}" for width in (8, 16, 32, 64)},
}


def _safetensors(path: Path) -> Iterator[Entry]:
    """Read tensors as raw bytes: its NumPy loader lacks bfloat16 and float8. The file's metadata are no parameters."""
    try:
        safetensors = import_module("safetensors")
    except ImportError:
        raise _UnreadableError("the package safetensors is not installed, which would name its tensors") from None
    try:
        tensors = safetensors.deserialize(path.read_bytes())
    except safetensors.SafetensorError as error:
        raise _UnreadableError(f"not a readable safetensors file: {error}") from None
    for name, tensor in sorted(tensors):
        dtype = _SAFETENSORS_DTYPES.get(tensor["dtype"], tensor["dtype"])
        yield Entry((name,), dtype, tuple(tensor["shape"]), _constant(tensor["data"]))


# ------------------------------------------------------------------------------------------------ torch


def _load_torch(path: Path, *, mmap: bool) -> Any:
    try:
        torch = import_module("torch")
    except ImportError:
        raise UsageError(
            "torch is not installed, and is needed to read this checkpoint",
            where=path,
            hint="install it (pip install 'e2e-registry[recipes]'), or compare other files: --checkpoints GLOB",
        ) from None
    try:
        with torch.serialization.safe_globals(_numpy_globals()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle protocols; what cannot be read says so by itself
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - unpickling a foreign file may raise anything
        raise _UnreadableError(f"torch cannot read it with weights_only=True: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Return the line that says what was refused: torch writes an essay around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    telling = next((line for line in lines if "WeightsUnpickler error:" in line), lines[0])
    telling = telling.rpartition("WeightsUnpickler error:")[2].partition(". Please")[0]
    return re.sub(r"\x1b\[[0-9;]*m", "", telling).strip()[:200]


def _numpy_globals() -> list[Any]:
    """Return what the pickle of an array calls: NumPy's generator states are often saved beside torch's."""
    multiarray = import_module("numpy._core.multiarray")
    classes = dict.fromkeys(type(np.dtype(code)) for code in np.typecodes["All"] if code not in "OSUVMm")
    allowed: list[Any] = [multiarray._reconstruct, multiarray.scalar, np.ndarray, np.dtype, *classes]
    # Pickles of NumPy 1 name the same functions by their former place.
    older = [(function, f"numpy.core.multiarray.{function.__name__}") for function in allowed[:2]]
    return [*allowed, *older, import_module("_codecs").encode]


def _flattened(value: Any, path: tuple[object, ...] = ()) -> Iterator[Entry]:
    """Yield the leaves of nested mappings and sequences; an empty one is a leaf, so that its absence shows."""
    try:
        yield from _leaves(value, path)
    except RecursionError:
        raise _UnreadableError("it is nested too deeply, or holds itself") from None


def _leaves(value: Any, path: tuple[object, ...]) -> Iterator[Entry]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list | tuple) and not all(isinstance(item, _SCALARS) for item in value):
        for at, item in enumerate(value):
            yield from _leaves(item, (*path, at))
    elif hasattr(value, "untyped_storage") and hasattr(value, "layout"):
        yield from _tensor(path, value)
    elif isinstance(value, np.ndarray | np.generic):
        yield _array(path, np.asarray(value))
    else:
        yield _plain(path, value)


def _tensor(path: tuple[object, ...], tensor: Any) -> Iterator[Entry]:
    torch = import_module("torch")
    if tensor.layout is torch.sparse_coo:
        yield from _tensor((*path, "indices"), tensor._indices())
        yield from _tensor((*path, "values"), tensor._values())
        return
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise _UnreadableError(f"{'.'.join(map(str, path))} is a {tensor.layout} tensor without plain bytes")

    def load() -> NDArray[np.uint8]:
        # Flat first: a tensor of no dimensions cannot be viewed as bytes.
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        raw: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
        return raw

    yield Entry(path, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), load)


def _plain(path: tuple[object, ...], value: Any) -> Entry:
    """Return a value that is no tensor as an entry; a list of numbers, as generators keep their state in, as one."""
    text = repr(value)
    shown = text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
    return Entry(path, type(value).__name__, None, _constant(_exact_bytes(value)), shown)


def _exact_bytes(value: Any) -> bytes:
    """Return bytes that are equal exactly for equal values of one type."""
    if isinstance(value, float):
        return b"float:" + struct.pack("<d", value)  # repr() hides the payload of a NaN
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, list | tuple):
        parts = map(_exact_bytes, value)
        return b"".join(b"%d:%s" % (len(part), part) for part in parts)
    if isinstance(value, set | frozenset):
        return repr(sorted(map(repr, value))).encode()
    return f"{type(value).__name__}:{value!r}".encode("utf-8", "surrogatepass")


def _constant(raw: bytes | bytearray) -> Callable[[], NDArray[np.uint8]]:
    return lambda: np.frombuffer(raw, np.uint8)

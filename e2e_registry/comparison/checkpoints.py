"""Compares checkpoints entry by entry, by raw bytes. Pure: the entries were read by somebody else.

``torch.equal`` is no bitwise test: it tells NaN from itself, takes -0.0 for 0.0 and float32 1.0 for bfloat16 1.0, and
raises on float8. Here the key sets, dtypes and shapes are compared first, then the bytes.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from e2e_registry.dtypes import DTYPES
from e2e_registry.series import Point

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

#: The dtype of a file that is compared as it lies.
BYTE = "byte"


@dataclass(frozen=True, slots=True)
class Entry:
    """One leaf of a checkpoint: a tensor, an array, or a plain value.

    Attributes:
        path: The keys from the root of the file to the leaf; empty for a file that is compared as it lies.
        dtype: Of a tensor or array, such as ``bfloat16``; of another value the name of its type.
        shape: Of a tensor or array; None for another value.
        load: Returns the raw bytes, uint8, shape ``(n,)``: the elements in row-major order. A callable, because the
            tensors of a large checkpoint need not be in memory all at once.
        text: A plain value as people read it.
    """

    path: tuple[object, ...]
    dtype: str
    shape: tuple[int, ...] | None
    load: Callable[[], Bytes]
    text: str | None = None

    @property
    def name(self) -> str:
        """The path with dots, as ``state_dict`` names are written."""
        return ".".join(map(str, self.path))

    @property
    def description(self) -> str:
        """What it is: ``float32 [8, 4]``, or the value itself."""
        if self.shape is not None:
            return f"{self.dtype} {list(self.shape)}"
        return self.dtype if self.text is None else f"{self.dtype} {self.text}"


class EntryFault(enum.Enum):
    """How an entry differs."""

    ONLY_GOT = "not in the first run"
    ONLY_WANT = "missing"
    DTYPE = "another dtype"
    SHAPE = "another shape"
    BITS = "other bits"


@dataclass(frozen=True, slots=True)
class EntryDifference:
    """One entry that differs between two checkpoints.

    Attributes:
        name: The entry.
        fault: How it differs.
        dtype: See :class:`Entry`.
        want: What the first run has; None if it has none.
        got: What the other run has; None if it has none.
        num_elements: Of a tensor whose bits differ.
        num_differing: How many of them differ.
        index: Where the first differing element lies.
        want_point: That element, where its dtype is one that a series may have.
        got_point: The same of the other run.
    """

    name: str
    fault: EntryFault
    dtype: str
    want: str | None
    got: str | None
    num_elements: int = 0
    num_differing: int = 0
    index: tuple[int, ...] | None = None
    want_point: Point | None = None
    got_point: Point | None = None

    @property
    def is_in_weights(self) -> bool:
        """Whether what differs may be a result of training, and is no counter, generator state or setting."""
        return self.dtype == BYTE or self.dtype.casefold().startswith(("float", "bfloat", "complex", "f8"))

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints for the entry."""
        return {
            "name": self.name,
            "fault": self.fault.value,
            "want": self.want,
            "got": self.got,
            "elements": self.num_elements,
            "differing": self.num_differing,
            "index": None if self.index is None else list(self.index),
            "want_element": None if self.want_point is None else self.want_point.to_json(),
            "got_element": None if self.got_point is None else self.got_point.to_json(),
        }


@dataclass(frozen=True, slots=True)
class FileComparison:
    """One checkpoint file of two runs.

    Attributes:
        path: The file, relative to the run directory.
        format: ``torch``, ``safetensors``, ``numpy``, or ``bytes`` for a file that was compared as it lies.
        num_entries: Entries that at least one run has.
        differences: The entries that differ, in the order of the first run's file.
        groups: Of a nested file, first key to how many of its entries differ and how many there are.
        note: Why the entries could not be told apart, of a file that was compared as it lies and differs.
    """

    path: str
    format: str
    num_entries: int
    differences: tuple[EntryDifference, ...] = ()
    groups: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    note: str | None = None

    @property
    def is_equal(self) -> bool:
        """Whether every entry is there on both sides with the same bits."""
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints for the file."""
        return {
            "path": self.path,
            "format": self.format,
            "entries": self.num_entries,
            "differences": [difference.to_json() for difference in self.differences],
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class CheckpointComparison:
    """The checkpoints of two runs.

    Attributes:
        files: The files that at least one run has, numbers in their names in numeric order.
    """

    files: tuple[FileComparison, ...]

    @property
    def is_equal(self) -> bool:
        """Whether every file is equal."""
        return all(file.is_equal for file in self.files)

    @property
    def num_entries(self) -> int:
        """Entries of all files."""
        return sum(file.num_entries for file in self.files)

    @property
    def differing(self) -> tuple[FileComparison, ...]:
        """The files that differ."""
        return tuple(file for file in self.files if not file.is_equal)

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints for the checkpoints."""
        return {"equal": self.is_equal, "files": [file.to_json() for file in self.files]}


def compare_file(path: str, file_format: str, got: Iterable[Entry], want: Iterable[Entry]) -> FileComparison:
    """Compare the entries of one file of two runs.

    Args:
        path: The file, relative to the run directory.
        file_format: See :class:`FileComparison`.
        got: The entries of the run that is judged.
        want: The entries of the first run.
    """
    wanted = {entry.path: entry for entry in want}
    found = {entry.path: entry for entry in got}
    everything = {**wanted, **found}
    differences: list[EntryDifference] = []
    totals: Counter[str] = Counter(_group(path) for path in everything)
    failed: Counter[str] = Counter()
    for key, entry in everything.items():
        difference = _difference(entry.name, found.get(key), wanted.get(key))
        if difference is not None:
            differences.append(difference)
            failed[_group(key)] += 1
    is_nested = any(len(key) > 1 for key in everything)
    groups = {name: (failed[name], total) for name, total in totals.items()} if is_nested else {}
    return FileComparison(path, file_format, len(everything), tuple(differences), groups)


def _group(path: Sequence[object]) -> str:
    return str(path[0]) if path else ""


def _difference(name: str, got: Entry | None, want: Entry | None) -> EntryDifference | None:
    if got is None or want is None:
        fault = EntryFault.ONLY_WANT if got is None else EntryFault.ONLY_GOT
        dtype = want.dtype if want is not None else got.dtype if got is not None else ""
        return EntryDifference(name, fault, dtype, _description(want), _description(got))
    if got.dtype != want.dtype:
        return EntryDifference(name, EntryFault.DTYPE, want.dtype, want.description, got.description)
    if got.shape != want.shape:
        return EntryDifference(name, EntryFault.SHAPE, want.dtype, want.description, got.description)
    got_bytes, want_bytes = got.load(), want.load()
    if np.array_equal(got_bytes, want_bytes):
        return None
    if want.shape is None:
        return EntryDifference(name, EntryFault.BITS, want.dtype, want.description, got.description)
    return _element_difference(name, want, got_bytes, want_bytes)


def _description(entry: Entry | None) -> str | None:
    return None if entry is None else entry.description


def _element_difference(name: str, want: Entry, got_bytes: Bytes, want_bytes: Bytes) -> EntryDifference:
    shape = want.shape or ()
    count = int(np.prod(shape, dtype=np.int64))
    elements = got_bytes.reshape(count, -1), want_bytes.reshape(count, -1)
    differing = (elements[0] != elements[1]).any(axis=1)
    first = int(differing.argmax())
    points = [_point(want.dtype, side[first]) for side in elements]
    return EntryDifference(
        name,
        EntryFault.BITS,
        want.dtype,
        want.description,
        want.description,
        num_elements=count,
        num_differing=int(differing.sum()),
        index=tuple(int(at) for at in np.unravel_index(first, shape)) if shape else (),
        got_point=points[0],
        want_point=points[1],
    )


def _point(dtype: str, element: Bytes) -> Point | None:
    known = DTYPES.get(dtype)
    if known is None or known.is_digest:
        return None
    return Point(known, int.from_bytes(element.tobytes(), "little"))

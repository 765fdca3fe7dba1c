"""A folder of encoded samples: each rank writes a shard, and training reads all of them back in order.

A cache that is whole is used as it is, whichever encoder and data it was made with. That is what makes caches fast, and
what makes a stale one train on without a word: the digest of what was read, logged as a metric, is what tells.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from e2e_registry.errors import StorageError
from e2e_registry.storage import parse_json, replacing, write_json

#: Written last: a folder without it is no cache yet.
MANIFEST = "cache.json"


def is_complete(folder: Path) -> bool:
    """Whether a cache was finished in ``folder``."""
    return (folder / MANIFEST).is_file()


def write_shard(folder: Path, index: int, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write one shard: arrays of equally many rows, by name.

    Raises:
        StorageError: The folder cannot be written.
    """
    with replacing(folder / _shard(index)) as temporary, temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def finish(folder: Path, shards: int) -> None:
    """Declare the cache whole, once ``shards`` shards are written.

    Raises:
        StorageError: The folder cannot be written.
    """
    write_json(folder / MANIFEST, {"shards": shards})


def read(folder: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of all shards, joined in the order of the shards.

    Raises:
        StorageError: The cache was never finished, or a file of it is missing or damaged.
    """
    try:
        count = int(parse_json((folder / MANIFEST).read_bytes())["shards"])
        shards = []
        for index in range(count):
            with np.load(folder / _shard(index)) as shard:
                shards.append({name: shard[name] for name in shard.files})
        return {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0]}
    except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile) as error:
        raise StorageError(
            f"cannot read the cache: {error}", where=folder, hint="remove the folder, and it is encoded again"
        ) from error


def _shard(index: int) -> str:
    return f"shard_{index:05}.npz"

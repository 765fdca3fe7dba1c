"""Seeds for every random generator of a training process, its data workers and its ranks.

One seed makes all: :func:`make_deterministic` at the very start of a process, :func:`seed_worker` for a
``DataLoader``, :func:`worker_rng` and :func:`sample_rng` for augmentation with NumPy's generators, which neither
torch nor ``np.random.seed`` reaches, and :func:`derive_seed` for whatever needs a seed of its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import operator
import os
import random
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from e2e_registry.determinism.profiles import PROFILES
from e2e_registry.determinism.state import set_in_process
from e2e_registry.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import torch

SEED_MAX = (1 << 63) - 1

#: The generator of each (process, worker seed, rank); emptied whenever this module seeds the process.
_RNGS: dict[tuple[int, int, int], np.random.Generator] = {}

#: The rank that :func:`seed_worker` was given in this process.
_worker_rank = 0


def check_seed(seed: object) -> int:
    """Return ``seed`` as an int in [0, 2**63).

    Raises:
        UsageError: It is not a whole number, or out of range.
    """
    hint = "give a whole number from 0 to 2**63 - 1"
    if isinstance(seed, bool):
        raise UsageError(f"seed must be a whole number, not {seed!r}", hint=hint)
    try:
        value = operator.index(seed)  # type: ignore[arg-type]  # refuses floats and strings, takes NumPy's integers
    except TypeError:
        raise UsageError(f"seed must be a whole number, not {seed!r}", hint=hint) from None
    if not 0 <= value <= SEED_MAX:
        raise UsageError(f"seed {value} is out of range", hint=hint)
    return value


def derive_seed(seed: int, rank: int = 0, worker: int = 0, stream: str = "") -> int:
    """Return a seed in [0, 2**63) for one (seed, rank, worker, stream): distinct streams from one number.

    The first eight bytes of a SHA-256 over the arguments, so neighbouring seeds, ranks and workers share nothing.
    The function is part of the contract: it gives the same number on every platform and in every version.

    Args:
        seed: The run's seed.
        rank: The rank whose draws must differ from other ranks'. Ranks that must draw alike (tensor parallelism)
            take the same one.
        worker: The data worker.
        stream: A name that keeps uses apart, such as ``"augment"``.

    Raises:
        UsageError: A number is not a whole number in [0, 2**63).
    """
    numbers = ":".join(str(check_seed(value)) for value in (seed, rank, worker))
    digest = hashlib.sha256(f"e2e_registry.derive_seed/1:{numbers}:{stream}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & SEED_MAX


def seed_everything(seed: int) -> None:
    """Seed Python's ``random``, NumPy's global generator, and torch on the CPU and all CUDA devices.

    NumPy and torch are seeded if they are installed. Generators that were made before keep their state. CUDA is
    not started: torch seeds its devices when it starts.

    Raises:
        UsageError: ``seed`` is not a whole number in [0, 2**63).
    """
    seed = check_seed(seed)
    _RNGS.clear()
    random.seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        _seed_numpy(seed)
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.manual_seed(torch_seed(seed))
        torch.cuda.manual_seed_all(torch_seed(seed))


def torch_seed(seed: int) -> int:
    """Return what :func:`seed_everything` seeds torch with."""
    # torch's CPU generator looks at 32 bits of its seed, so that 1 and 1 + 2**40 would draw alike.
    return seed if seed < 1 << 32 else derive_seed(seed, stream="torch")


def _seed_numpy(seed: int) -> None:
    import numpy as np

    # The legacy generator takes 32 bits, or an array of them; small seeds give what np.random.seed(seed) gives.
    np.random.seed(seed if seed < 1 << 32 else [seed & 0xFFFFFFFF, seed >> 32])


def make_deterministic(seed: int) -> torch.Generator:
    """Make this process repeat: seeds, cuBLAS workspace, deterministic algorithms. Call it before anything else.

    In a process that was started under ``cpu-portable`` it replaces the operators whose bits depend on the vendor.

    Call it before the model is built and before anything touches CUDA. It sets ``CUBLAS_WORKSPACE_CONFIG`` if it
    is unset, but the variable belongs in the environment that the process is started with, as do the others of
    the profile: this function cannot set what a library has read by now
    (:func:`~e2e_registry.determinism.relaunch.bootstrap` can).

    Args:
        seed: The run's seed. Seeds below 2**32 are given to each library as they are. For draws that differ by
            rank give ``derive_seed(seed, rank)``.

    Returns:
        A CPU generator with that seed, for ``DataLoader(generator=...)``: from it each epoch draws its order and
        the base seed of its workers.

    Raises:
        UsageError: ``seed`` is not a whole number in [0, 2**63).
        DeterminismError: A switch does not hold after it was set.

    Warns:
        RuntimeWarning: CUDA was up already when ``CUBLAS_WORKSPACE_CONFIG`` was found unset.
    """
    seed = check_seed(seed)
    import torch

    from e2e_registry.determinism import switches

    _set_cublas_workspace(torch)
    switches.apply(switches.Switches.for_this_process())
    seed_everything(seed)
    generator = torch.Generator()
    generator.manual_seed(torch_seed(seed))
    return generator


def _set_cublas_workspace(torch: Any) -> None:
    name = "CUBLAS_WORKSPACE_CONFIG"
    if os.environ.get(name):
        return
    is_up = torch.cuda.is_initialized()
    set_in_process(name, PROFILES["cuda"].variables[name], in_time=not is_up)
    if is_up:
        warnings.warn(
            f"CUDA was started before {name} was set, so cuBLAS may not be deterministic in this process: "
            f"start it with {name}={os.environ[name]}, or call make_deterministic before anything touches CUDA",
            RuntimeWarning,
            stacklevel=3,
        )


def seed_worker(worker_id: int, *, rank: int = 0) -> None:
    """Seed Python, NumPy and torch in a ``DataLoader`` worker: ``DataLoader(worker_init_fn=seed_worker)``.

    The seeds follow from the worker's base seed, which the loader draws from its ``generator`` at each epoch, so
    epochs and workers differ and the same generator seed repeats. Persistent workers are seeded once and go on
    with their generators. Another ``num_workers`` gives other draws; :func:`sample_rng` does not depend on it.

    Args:
        worker_id: The worker, as the loader passes it.
        rank: For ranks whose generators share a seed: ``functools.partial(seed_worker, rank=rank)``.
    """
    import torch

    global _worker_rank
    base = _worker_base_seed()
    _RNGS.clear()
    _worker_rank = rank
    random.seed(derive_seed(base, rank, worker_id, "random"))
    torch.manual_seed(derive_seed(base, rank, worker_id, "torch"))
    if importlib.util.find_spec("numpy") is not None:
        _seed_numpy(derive_seed(base, rank, worker_id, "numpy"))


def _worker_base_seed() -> int:
    """Return what the loader seeded this worker with; the process's own torch seed outside of workers."""
    import torch

    info = torch.utils.data.get_worker_info()
    return (torch.initial_seed() if info is None else info.seed) & SEED_MAX


def worker_rng() -> np.random.Generator:
    """Return this worker's NumPy generator, the same object at every call, so that its stream goes on.

    For datasets that augment with NumPy: ``np.random.default_rng()`` draws its seed from the system, and one made
    when the dataset is built is copied into every worker and epoch. This one differs by seed, rank, worker and
    epoch. Outside of workers (``num_workers=0``) it follows torch's seed and goes on over epochs;
    :func:`seed_everything` and :func:`make_deterministic` start it anew, ``torch.manual_seed`` alone does not. The
    rank is the one that :func:`seed_worker` was given.
    """
    import numpy as np
    import torch

    info = torch.utils.data.get_worker_info()
    base = _worker_base_seed()
    key = (os.getpid(), base, _worker_rank)  # a forked worker inherits its parent's generators
    if key not in _RNGS:
        worker = 0 if info is None else info.id
        _RNGS[key] = np.random.default_rng(derive_seed(base, _worker_rank, worker, "worker_rng"))
    return _RNGS[key]


def sample_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return a NumPy generator for one sample of one epoch, whichever worker or rank loads it.

    Augmentation by it does not change with ``num_workers`` or the number of ranks. Costs about 20 microseconds.

    Raises:
        UsageError: A number is not a whole number in [0, 2**63).
    """
    import numpy as np

    return np.random.default_rng(derive_seed(seed, epoch, index, "sample_rng"))


def sample_id_digest(ids: Iterable[object]) -> str:
    """Return the SHA-256 of a sequence of sample ids, as 64 hexadecimal digits; the order counts.

    Log it as a series of its own (``log_digest``): it tells a change of data from a change of numerics.

    Args:
        ids: Strings, bytes or whole numbers, also as a one-dimensional tensor or array. ``1`` and ``"1"`` differ.

    Raises:
        UsageError: An id is of another type.
    """
    digest = hashlib.sha256()
    for value in ids.tolist() if hasattr(ids, "tolist") else ids:
        kind, data = _id_bytes(value)
        # Lengths keep ["ab", "c"] apart from ["a", "bc"].
        digest.update(b"%s%d:%s" % (kind, len(data), data))
    return digest.hexdigest()


def _id_bytes(value: Any) -> tuple[bytes, bytes]:
    if isinstance(value, str):
        return b"s", value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return b"b", value
    try:
        if isinstance(value, bool):
            raise TypeError
        return b"i", str(operator.index(value)).encode()
    except TypeError:
        raise UsageError(
            f"a sample id must be a string, bytes or a whole number, not {type(value).__name__}",
            hint="log the dataset's index or key of each sample",
        ) from None

"""DET005: DataLoader workers that nobody seeds."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from e2e_registry.determinism.lint.module import UNKNOWN, Module, argument, has_unpacking
from e2e_registry.determinism.lint.rule import Rule, Violation

_LOADERS = frozenset({"torch.utils.data.DataLoader", "torchdata.stateful_dataloader.StatefulDataLoader"})
_NUM_WORKERS_POSITION = 5
_WORKER_INIT_POSITION = 10


class DataLoaderWorkers(Rule):
    """A ``DataLoader`` that starts workers with neither a ``worker_init_fn`` nor a ``generator``."""

    code = "DET005"
    name = "dataloader-workers"
    summary = "a DataLoader starts workers with neither a `worker_init_fn` nor a `generator`"
    why = (
        "Each worker is a process with random states of its own. The base seed is drawn from torch's global stream, "
        "so it moves with every random number drawn before, such as one more layer's initial weights. What torch "
        "seeds in a worker has grown over its versions: recent ones seed `random` and `numpy.random` too, none seeds "
        "`numpy.random.default_rng()`, a generator made at import, or another library's. Augmentations then differ "
        "while the sample ids agree."
    )
    fix = (
        "Pass `generator=` with a seed of its own, which fixes the order and the base seed, and a `worker_init_fn` "
        "that seeds every library the dataset draws from by `torch.initial_seed()`."
    )
    scope = (
        "Either argument ends the finding: a dataset may need only one. A worker count that the source does not spell "
        "out counts as workers; `**settings` may hold anything and is left alone."
    )
    flagged = """
from torch.utils.data import DataLoader


def loader(dataset):
    return DataLoader(dataset, batch_size=256, shuffle=True, num_workers=8)
"""
    clean = """
import numpy as np
import torch
from torch.utils.data import DataLoader


def seed_worker(worker_id):
    np.random.seed(torch.initial_seed() % 2**32)


def loader(dataset, seed):
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(
        dataset, batch_size=256, shuffle=True, num_workers=8, worker_init_fn=seed_worker, generator=generator
    )
"""
    triggers = ("DataLoader",)

    def check(self, module: Module) -> Iterator[Violation]:
        """Report calls whose arguments are all visible: ``**settings`` may hold what is missing."""
        for call in module.nodes(ast.Call):
            if module.qualified(call.func) not in _LOADERS or has_unpacking(call):
                continue
            workers = argument(call, "num_workers", _NUM_WORKERS_POSITION)
            if workers is None or module.constant(workers) == 0:
                continue
            has_init = _is_given(module, argument(call, "worker_init_fn", _WORKER_INIT_POSITION))
            has_generator = _is_given(module, argument(call, "generator"))
            if not has_init and not has_generator:
                shown = ast.unparse(workers)
                yield Violation(
                    call, f"`num_workers={shown}` with neither `worker_init_fn` nor `generator`: workers are not seeded"
                )


def _is_given(module: Module, value: ast.expr | None) -> bool:
    constant = module.constant(value)
    return value is not None and (constant is UNKNOWN or constant is not None)

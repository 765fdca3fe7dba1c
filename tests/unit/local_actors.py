"""Recipes with their actors in this process: the driver and the actors are the recipe's own, only Ray is replaced.

So many faults can be planted in little time. What one process cannot show (dying actors, environments, two ranks) the
slow tests of ``test_recipes_on_ray.py`` show.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import distributed

from e2e_registry import MetricRecorder
from e2e_registry.comparison import Comparison, compare
from e2e_registry.recipes.actor import ActorContext, GroupSpec
from e2e_registry.recipes.train_actor import TrainActor
from e2e_registry.recording import read_run
from e2e_registry.series import decode_values
from e2e_registry.tolerance import Policies

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


class LocalGroup:
    """An :class:`ActorGroup` of one rank in this process; as with Ray, one call of a group runs at a time."""

    def __init__(self, spec: GroupSpec, actor: Any) -> None:
        self.spec = spec
        self.actor = actor
        self.thread = ThreadPoolExecutor(max_workers=1)

    def call(self, method: str, *args: Any, ref: Any = None) -> list[Any]:
        return [self.call_kept(method, *args, ref=ref)]

    def call_kept(self, method: str, *args: Any, ref: Any = None) -> Any:
        return self.wait_kept(self.submit_kept(method, *args, ref=ref))

    def submit_kept(self, method: str, *args: Any, ref: Any = None) -> Future[Any]:
        return self.thread.submit(getattr(self.actor, method), *args, *(() if ref is None else (ref,)))

    def wait_kept(self, submitted: Future[Any]) -> Any:
        return submitted.result(timeout=120)


@contextlib.contextmanager
def process_group(folder: Path) -> Iterator[None]:
    """A process group of one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for equal bits, and because threads that wait for each other crawl on a busy machine
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
    torch.set_num_threads(threads)


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(script: ModuleType, run_dir: Path, **options: Any) -> Path:
    """Run the recipe's driver with its actors in this process, and return where they recorded."""

    @contextlib.contextmanager
    def launch(specs: Sequence[GroupSpec], *, address: str) -> Iterator[tuple[LocalGroup, ...]]:
        with contextlib.ExitStack() as stack:
            groups = []
            for spec in specs:
                torch.manual_seed(spec.seed)
                recorder = stack.enter_context(MetricRecorder(role=spec.role, run_dir=run_dir))
                module, _, name = spec.actor.partition(":")
                factory = getattr(importlib.import_module(module), name)
                context = ActorContext(spec, 0, recorder, torch.device("cpu"))
                groups.append(LocalGroup(spec, factory(context, **spec.kwargs)))
                stack.callback(groups[-1].thread.shutdown)
            yield tuple(groups)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "launch", launch)
        patch.setattr("ray.put", lambda value: value)
        script.run(script.ScriptArgs(**options))
    return run_dir


def compare_runs(got: Path, want: Path) -> Comparison:
    return compare(read_run(got).batches(), read_run(want).batches(), policies=Policies(judge_all=True))


def values(run_dir: Path, metric: str) -> list[float]:
    return [
        value
        for batch in read_run(run_dir).batches()
        if batch.key.metric == metric
        for value in decode_values(batch.dtype, batch.bits).tolist()
    ]


# --- faults that are planted --------------------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch, ModuleType], None]


def other_options(**options: Any) -> Plant:
    """Run the script with options that differ from those it is given."""

    def plant(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
        original = script.ScriptArgs
        monkeypatch.setattr(script, "ScriptArgs", lambda **given: original(**{**given, **options}))

    return plant


def skip_the_second_sync(monkeypatch: pytest.MonkeyPatch, engine: type[Any]) -> None:
    """Have an engine keep its weights at the second sync."""
    original = engine.load_weights
    calls: list[int] = []

    def load(self: Any, weights: Any) -> None:
        calls.append(0)
        if len(calls) != 2:
            original(self, weights)

    monkeypatch.setattr(engine, "load_weights", load)


def skip_an_optimizer_step(number: int) -> Plant:
    """Have the trainer keep its weights at one of its optimizer steps, counted from 1 with those of the warm-up."""

    def plant(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
        original = TrainActor._step
        calls: list[int] = []

        def step(self: TrainActor) -> None:
            calls.append(0)
            if len(calls) != number:
                original(self)

        monkeypatch.setattr(TrainActor, "_step", step)

    return plant


def shift_groups(monkeypatch: pytest.MonkeyPatch, module: ModuleType, function: str) -> None:
    """Have a function of rewards take groups that are off by one sample."""
    original = getattr(module, function)
    monkeypatch.setattr(module, function, lambda rewards, *rest: original(rewards.roll(-1), *rest).roll(1))

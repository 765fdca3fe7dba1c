"""The Flow-GRPO recipe: its command line, the agreement of trainer and engine, and faults that must show.

The driver and the actors are the recipe's own; only Ray is replaced, by calls in one process, so that many faults can
be planted in little time. What one process cannot show (dying actors, environments, two ranks) the slow tests of
``test_recipes_on_ray.py`` show.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import distributed

from e2e_registry import MetricRecorder
from e2e_registry.comparison import Comparison, compare
from e2e_registry.errors import UsageError
from e2e_registry.recipes import digits_policy, flow_grpo, train_actor
from e2e_registry.recipes.actor import ActorContext, GroupSpec
from e2e_registry.recording import read_run
from e2e_registry.series import decode_values
from e2e_registry.tolerance import Policies

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "run_flow_grpo_digits.py"
SMALL = {"num_rollout": 2, "prompts": 4, "group_size": 4, "denoise_steps": 3, "warm_up_steps": 3, "train_ranks": 1}

Plant = Callable[[pytest.MonkeyPatch, ModuleType], None]


class LocalGroup:
    """An :class:`ActorGroup` of one rank in this process."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def call(self, method: str, *args: Any, ref: Any = None) -> list[Any]:
        return [self.call_kept(method, *args, ref=ref)]

    def call_kept(self, method: str, *args: Any, ref: Any = None) -> Any:
        return getattr(self.actor, method)(*args, *(() if ref is None else (ref,)))


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for equal bits, and because threads that wait for each other crawl on a busy machine
    store = tmp_path_factory.mktemp("store") / "store"
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_flow_grpo_digits", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(script: ModuleType, run_dir: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Path:
    """Run the recipe's driver with its actors in this process."""

    @contextlib.contextmanager
    def launch(specs: Sequence[GroupSpec], *, address: str) -> Iterator[tuple[LocalGroup, ...]]:
        with contextlib.ExitStack() as stack:
            groups = []
            for spec in specs:
                torch.manual_seed(spec.seed)
                recorder = stack.enter_context(MetricRecorder(role=spec.role, run_dir=run_dir))
                factory = getattr(flow_grpo, spec.actor.partition(":")[2])
                context = ActorContext(spec, 0, recorder, torch.device("cpu"))
                groups.append(LocalGroup(factory(context, **spec.kwargs)))
            yield tuple(groups)

    def export(self: Any, step: int, precision: Any) -> tuple[str, list[Any]]:
        with monkeypatch.context() as patch:
            patch.setattr("ray.put", lambda value: value)
            return original(self, step, precision)

    original = train_actor.TrainActor.export_weights
    with monkeypatch.context() as patch:
        patch.setattr(script, "launch", launch)
        patch.setattr(train_actor.TrainActor, "export_weights", export)
        script.run(script.ScriptArgs(**{**SMALL, **options}))
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


@pytest.fixture(scope="module")
def baseline(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield run(script, tmp_path_factory.mktemp("runs") / "baseline", monkeypatch)


def test_the_same_seed_repeats(
    script: ModuleType, baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = compare_runs(run(script, tmp_path / "again", monkeypatch), baseline)
    assert comparison.failing == ()
    assert comparison.num_judged == 34


def test_trainer_and_engine_agree_to_the_bit_in_equal_precision(baseline: Path) -> None:
    assert values(baseline, "train/log_prob_mean_abs_diff") == [0.0, 0.0]
    assert values(baseline, "train/model_output_mean_abs_diff") == [0.0, 0.0]
    assert values(baseline, "rollout/weights_match") == [1.0, 1.0]
    assert values(baseline, "train/ratio_max")[::2] == [1.0, 1.0]
    assert values(baseline, "train/ratio_max")[1] > 1.0, "a second update that does not move the policy shows nothing"


def test_an_engine_in_bfloat16_holds_the_rounded_weights_and_is_measured(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded = run(script, tmp_path / "bf16", monkeypatch, rollout_precision="bf16", allow_dtype_mismatch=True)
    assert values(rounded, "rollout/weights_match") == [1.0, 1.0]
    assert all(1e-5 < value < 0.1 for value in values(rounded, "train/model_output_mean_abs_diff"))


def _other_options(**options: Any) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
        original = script.ScriptArgs
        monkeypatch.setattr(script, "ScriptArgs", lambda **given: original(**{**given, **options}))

    return plant


def _change_rewards(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
        original = digits_policy.read_probability
        monkeypatch.setattr(digits_policy, "read_probability", lambda *args: change(original(*args)))

    return plant


def _swap(rewards: torch.Tensor) -> torch.Tensor:
    return rewards[[1, 0, *range(2, len(rewards))]]


def _shift_groups(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
    original = flow_grpo.group_advantages
    monkeypatch.setattr(flow_grpo, "group_advantages", lambda rewards, size: original(rewards.roll(-1), size).roll(1))


def _drop_a_sample(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
    original = digits_policy.reward_statistics
    monkeypatch.setattr(digits_policy, "reward_statistics", lambda rewards: original(rewards[:-1]))


def _skip_the_sync(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
    original = flow_grpo.FlowGrpoEngine.load_weights
    calls: list[int] = []

    def load_once(self: Any, weights: Any) -> None:
        calls.append(0)
        if len(calls) == 1:
            original(self, weights)

    monkeypatch.setattr(flow_grpo.FlowGrpoEngine, "load_weights", load_once)


@pytest.mark.parametrize(
    ("plant", "first", "step"),
    [
        pytest.param(_other_options(seed=1), "rollout/reward_model", 0, id="another seed"),
        pytest.param(_other_options(rollout_seed=1), "rollout/reward_model", 0, id="another rollout seed"),
        pytest.param(_other_options(lr=3e-4 * 1.001), "train/grad_norm", 1, id="learning rate 0.1% higher"),
        pytest.param(_change_rewards(_swap), "rollout/rewards", 0, id="two rewards swapped"),
        pytest.param(_shift_groups, "train/advantages", 0, id="groups off by one"),
        pytest.param(_drop_a_sample, "rollout/reward/raw_mean", 0, id="a sample dropped"),
        pytest.param(_skip_the_sync, "rollout/weights", 1, id="second weight sync skipped"),
    ],
)
def test_a_planted_fault_shows(
    script: ModuleType,
    baseline: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: Plant,
    first: str,
    step: int,
) -> None:
    with monkeypatch.context() as patch:
        plant(patch, script)
        faulty = run(script, tmp_path / "faulty", monkeypatch)
    divergence = compare_runs(faulty, baseline).first_divergence
    assert divergence is not None
    assert (divergence.key.metric, divergence.step) == (first, step)
    if plant is _skip_the_sync:
        assert values(faulty, "rollout/weights_match") == [1.0, 0.0]
        assert values(faulty, "train/log_prob_mean_abs_diff")[1] > 0.0


def test_samples_that_ranks_cannot_share_evenly_are_refused(script: ModuleType) -> None:
    args = dataclasses.replace(script.ScriptArgs(), prompts=3, group_size=3)
    with pytest.raises(UsageError, match="--train-ranks: 9 samples"):
        script.group_specs(args)


def test_a_nondeterministic_attention_backend_fails_before_ray_and_diffusers_are_imported() -> None:
    command = [sys.executable, "-X", "importtime", str(SCRIPT), "--deterministic-mode", "--fsdp-attention-backend"]
    result = subprocess.run([*command, "sage"], capture_output=True, text=True, timeout=60, check=False)
    imports = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if "import time:" in line}
    assert result.returncode == 2
    assert "--fsdp-attention-backend: attention backend 'sage' cannot run deterministically" in result.stderr
    assert "e2e_registry.recipes.actor_group" in imports, "the imports were not seen"
    assert not imports & {"ray", "diffusers", "torch"}

"""The Flow-GRPO recipe: its command line, the agreement of trainer and engine, and faults that must show."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import local_actors
import pytest
import torch
from local_actors import (
    Plant,
    compare_runs,
    load_script,
    other_options,
    shift_groups,
    skip_an_optimizer_step,
    skip_the_second_sync,
    values,
)

from e2e_registry.errors import UsageError
from e2e_registry.recipes import digits_policy, flow_grpo

pytestmark = pytest.mark.usefixtures("group_of_one")

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "run_flow_grpo_digits.py"
SMALL = {"num_rollout": 2, "prompts": 4, "group_size": 4, "denoise_steps": 3, "warm_up_steps": 3, "train_ranks": 1}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("run_flow_grpo_digits")


def run(script: ModuleType, run_dir: Path, **options: Any) -> Path:
    return local_actors.run(script, run_dir, **{**SMALL, **options})


@pytest.fixture(scope="module")
def baseline(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(script, tmp_path_factory.mktemp("runs") / "baseline")


def test_the_same_seed_repeats(script: ModuleType, baseline: Path, tmp_path: Path) -> None:
    comparison = compare_runs(run(script, tmp_path / "again"), baseline)
    assert comparison.failing == ()
    assert comparison.num_judged == 35


def test_trainer_and_engine_agree_to_the_bit_in_equal_precision(baseline: Path) -> None:
    assert values(baseline, "train/log_prob_mean_abs_diff") == [0.0, 0.0]
    assert values(baseline, "train/model_output_mean_abs_diff") == [0.0, 0.0]
    assert values(baseline, "rollout/weights_match") == [1.0, 1.0]
    assert values(baseline, "train/ratio_max")[::2] == [1.0, 1.0]
    assert values(baseline, "train/ratio_max")[1] > 1.0, "a second update that does not move the policy shows nothing"


@pytest.mark.parametrize("size", [5, 7, 100])
def test_each_sample_counts_alike_in_forward_passes_of_any_size(
    script: ModuleType, baseline: Path, tmp_path: Path, size: int
) -> None:
    run_dir = run(script, tmp_path / "run", micro_batch_size=size)
    for metric in ("train/loss", "train/grad_norm"):
        assert values(run_dir, metric) == pytest.approx(values(baseline, metric), rel=1e-4, abs=1e-6)
    assert values(run_dir, "train/model_output_mean_abs_diff") == [0.0, 0.0]


def test_the_reward_depends_on_no_policy(
    script: ModuleType, baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digits_policy.DigitsPolicy.__init__, "__defaults__", (64, 4, 1))
    failing = {series.key.metric for series in compare_runs(run(script, tmp_path / "run"), baseline).failing}
    assert "rollout/weights" in failing, "the policy is the same"
    assert not failing & {"rollout/reward_model", "rollout/reward_model_accuracy", "data/warm_up", "rollout/prompts"}


def test_an_engine_that_was_never_given_weights_shows_even_before_anything_was_learned(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow_grpo.FlowGrpoEngine, "load_weights", lambda self, weights: None)
    faulty = run(script, tmp_path / "faulty", warm_up_steps=0, num_rollout=1)
    assert values(faulty, "rollout/weights_match") == [0.0]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_trainer_and_engine_agree_to_the_bit_in_equal_lower_precision(
    script: ModuleType, tmp_path: Path, dtype: str
) -> None:
    lower = run(script, tmp_path / dtype, forward_dtype=dtype, dtype_override=["*.norm1.*=fp32"])
    assert values(lower, "train/log_prob_mean_abs_diff") == [0.0, 0.0]
    assert values(lower, "train/model_output_mean_abs_diff") == [0.0, 0.0]
    assert values(lower, "rollout/weights_match") == [1.0, 1.0]
    assert set(values(lower, "train/loss_scale")) == ({65536.0} if dtype == "fp16" else set())


def test_an_engine_in_bfloat16_holds_the_rounded_weights_and_is_measured(script: ModuleType, tmp_path: Path) -> None:
    rounded = run(script, tmp_path / "bf16", rollout_precision="bf16", allow_dtype_mismatch=True)
    assert values(rounded, "rollout/weights_match") == [1.0, 1.0]
    assert all(1e-5 < value < 0.1 for value in values(rounded, "train/model_output_mean_abs_diff"))


def _change_rewards(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
        original = digits_policy.read_probability
        monkeypatch.setattr(digits_policy, "read_probability", lambda *args: change(original(*args)))

    return plant


def _swap(rewards: torch.Tensor) -> torch.Tensor:
    return rewards[[1, 0, *range(2, len(rewards))]]


def _shift_groups(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
    shift_groups(monkeypatch, flow_grpo, "group_advantages")


def _drop_a_sample(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
    original = digits_policy.reward_statistics
    monkeypatch.setattr(digits_policy, "reward_statistics", lambda rewards: original(rewards[:-1]))


def _skip_the_sync(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
    skip_the_second_sync(monkeypatch, flow_grpo.FlowGrpoEngine)


@pytest.mark.parametrize(
    ("plant", "first", "step"),
    [
        pytest.param(other_options(seed=1), "rollout/reward_model", 0, id="another seed"),
        pytest.param(other_options(rollout_seed=1), "rollout/reward_model", 0, id="another rollout seed"),
        pytest.param(other_options(lr=3e-4 * 1.001), "train/grad_norm", 1, id="learning rate 0.1% higher"),
        pytest.param(_change_rewards(_swap), "rollout/rewards", 0, id="two rewards swapped"),
        pytest.param(_shift_groups, "train/advantages", 0, id="groups off by one"),
        pytest.param(_drop_a_sample, "rollout/reward/raw_mean", 0, id="a sample dropped"),
        pytest.param(_skip_the_sync, "rollout/weights", 1, id="second weight sync skipped"),
        pytest.param(skip_an_optimizer_step(7), "model/parameters", 3, id="last optimizer step skipped"),
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
        faulty = run(script, tmp_path / "faulty")
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
    result = subprocess.run([*command, "sage"], capture_output=True, text=True, timeout=180, check=False)
    imports = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if "import time:" in line}
    assert result.returncode == 2
    assert "--fsdp-attention-backend: attention backend 'sage' cannot run deterministically" in result.stderr
    assert "e2e_registry.recipes.actor_group" in imports, "the imports were not seen"
    assert not imports & {"ray", "diffusers", "torch"}

"""The DiffusionNFT recipe: its objective by hand and against another implementation, overlap, and planted faults."""

from __future__ import annotations

import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import local_actors
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
from numpy.typing import NDArray

from e2e_registry.errors import UsageError
from e2e_registry.recipes import diffusion_nft, digits_policy
from e2e_registry.recipes.diffusion_nft_config import DiffusionNftConfig
from e2e_registry.recipes.nft_objective import nft_loss, optimality_probability

pytestmark = pytest.mark.usefixtures("group_of_one")

SMALL = {"num_rollout": 3, "prompts": 4, "group_size": 4, "denoise_steps": 3, "warm_up_steps": 3, "train_ranks": 1}

# --- the objective ----------------------------------------------------------------------------------------------------


def image(*pixels: float) -> torch.Tensor:
    return torch.tensor(pixels, dtype=torch.float64).view(1, 1, 1, -1)


def test_the_loss_and_its_gradient_by_hand() -> None:
    """One pixel: x0 = 2, noisy = 1, sigma = 1/2, old v = 1, v = 3, beta = 1/2.

    Positive v = 2 predicts 0, off by 2: 4 / 2 = 2. Negative v = 0 predicts 1, off by 1: 1 / 1 = 1.
    """
    velocity = image(3.0).requires_grad_()
    sigma, optimality = torch.tensor([0.5], dtype=torch.float64), torch.tensor([0.75], dtype=torch.float64)
    result = nft_loss(velocity, image(1.0), image(1.0), image(2.0), sigma, optimality, beta=0.5)
    assert result.positive.tolist() == [2.0]
    assert result.negative.tolist() == [1.0]
    assert result.loss.item() == 0.75 * 2.0 + 0.25 * 1.0
    result.loss.backward()
    # The normalisation has no gradient: r * 2 * -2 * (-sigma * beta) / 2 + (1 - r) * 2 * -1 * (sigma * beta) / 1
    assert velocity.grad is not None
    assert velocity.grad.item() == 0.375 - 0.125


def test_an_even_chance_teaches_nothing_where_policies_are_equal_and_good_and_bad_pull_apart() -> None:
    def gradient(optimality: float) -> torch.Tensor:
        velocity = image(0.5, -1.0).requires_grad_()
        r, sigma = torch.tensor([optimality], dtype=torch.float64), torch.tensor([0.25], dtype=torch.float64)
        nft_loss(velocity, velocity.detach(), image(1.0, 0.0), image(0.5, 2.0), sigma, r, beta=1.0).loss.backward()
        assert velocity.grad is not None
        return velocity.grad

    assert gradient(0.5).abs().max() == 0.0
    assert torch.equal(gradient(1.0), -gradient(0.0))
    assert gradient(1.0).abs().min() > 0.0


def reference_loss(
    v: NDArray[Any],
    old: NDArray[Any],
    noisy: NDArray[Any],
    x0: NDArray[Any],
    t: NDArray[Any],
    r: NDArray[Any],
    b: float,
) -> float:
    """Written sample by sample, in terms of displacements from the old policy's image."""
    total = 0.0
    for i in range(len(v)):
        base = noisy[i] - t[i] * old[i] - x0[i]
        move = b * t[i] * (v[i] - old[i])
        for weight, error in ((r[i], base - move), (1.0 - r[i], base + move)):
            total += weight * np.mean(error**2) / max(np.mean(np.abs(error)), 1e-5)
    return total / len(v)


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.floats(0.05, 2.0), st.integers(1, 5))
def test_the_loss_agrees_with_another_implementation(seed: int, beta: float, count: int) -> None:
    generator = np.random.default_rng(seed)
    v, old, noisy, x0 = generator.normal(size=(4, count, 1, 3, 5))
    t, r = generator.uniform(size=(2, count))
    got = nft_loss(*map(torch.from_numpy, (v, old, noisy, x0, t, r)), beta)
    assert got.loss.item() == pytest.approx(reference_loss(v, old, noisy, x0, t, r, beta), rel=1e-12)


def test_optimality_by_hand() -> None:
    """Groups (0, 1) and (2, 4): deviations -1/2, 1/2, -1, 1; variance of all 8.75 / 3; clipped at half a std."""
    rewards = torch.tensor([0.0, 1.0, 2.0, 4.0], dtype=torch.float64)
    got = optimality_probability(rewards, 2, 0.5, epsilon=0.0)
    half = 0.5 / (0.5 * (8.75 / 3) ** 0.5) / 2
    assert got.tolist() == pytest.approx([0.5 - half, 0.5 + half, 0.0, 1.0], rel=1e-12)


@given(st.lists(st.floats(0, 1, width=32), min_size=12, max_size=12), st.floats(0.1, 5))
def test_optimality_is_a_probability_in_the_order_of_rewards_and_even_for_equal_ones(
    rewards: list[float], clip: float
) -> None:
    got = optimality_probability(torch.tensor(rewards, dtype=torch.float64), 4, clip)
    assert 0.0 <= got.min() <= got.max() <= 1.0
    for group in range(0, 12, 4):
        order = np.argsort(rewards[group : group + 4], kind="stable")
        assert (np.diff(got[group : group + 4].numpy()[order]) >= 0.0).all()
    assert optimality_probability(torch.full((6,), 0.7), 3, clip).sub(0.5).abs().max() < 1e-3
    with pytest.raises(UsageError, match="not whole groups of 5"):
        optimality_probability(torch.tensor(rewards), 5, clip)


def config(**options: Any) -> DiffusionNftConfig:
    sizes = {"seed": 0, "denoise_steps": 2, "prompts": 1, "group_size": 2, "micro_batch_size": 2}
    return DiffusionNftConfig(
        **{
            **sizes,
            "train_ranks": 1,
            "precision": "fp32",
            "beta": 1.0,
            "advantage_clip": 1.0,
            "decay_growth": 0.25,
            "decay_limit": 0.6,
            **options,
        }
    )


def test_the_old_policys_decay_grows_to_its_limit() -> None:
    assert [config().decay(rollout) for rollout in range(5)] == [0.0, 0.25, 0.5, 0.6, 0.6]
    for wrong, flag in (
        ({"beta": 0.0}, "--beta"),
        ({"advantage_clip": -1.0}, "--adv"),
        ({"decay_limit": 2.0}, "--dec"),
    ):
        with pytest.raises(UsageError, match=flag):
            config(**wrong)


# --- the recipe -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("run_diffusion_nft_digits")


def run(script: ModuleType, run_dir: Path, **options: Any) -> Path:
    return local_actors.run(script, run_dir, **{**SMALL, **options})


@pytest.fixture(scope="module")
def baseline(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(script, tmp_path_factory.mktemp("runs") / "baseline")


@pytest.fixture(scope="module")
def overlapping(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(script, tmp_path_factory.mktemp("runs") / "overlapping", async_rollout=True)


def test_rollouts_in_turns_repeat_and_come_from_the_policy_that_the_trainer_holds(
    script: ModuleType, baseline: Path, tmp_path: Path
) -> None:
    assert compare_runs(run(script, tmp_path / "again"), baseline).failing == ()
    assert values(baseline, "train/model_output_mean_abs_diff") == [0.0, 0.0, 0.0]
    assert values(baseline, "train/rollout_lag") == [0.0, 0.0, 0.0]
    assert values(baseline, "rollout/weights_match") == [1.0, 1.0, 1.0]
    assert values(baseline, "train/old_policy_decay") == [0.0, 0.02, 0.04]


@pytest.mark.parametrize("size", [5, 7])
def test_each_sample_counts_alike_in_forward_passes_of_any_size(
    script: ModuleType, baseline: Path, tmp_path: Path, size: int
) -> None:
    run_dir = run(script, tmp_path / "run", micro_batch_size=size)
    for metric in ("train/nft_loss", "train/grad_norm"):
        assert values(run_dir, metric) == pytest.approx(values(baseline, metric), rel=1e-4, abs=1e-6)
    assert values(run_dir, "train/model_output_mean_abs_diff") == [0.0, 0.0, 0.0]


def test_the_old_policy_is_where_the_schedule_leaves_it(baseline: Path) -> None:
    deviation = values(baseline, "train/old_policy_deviation")
    # The first update on a rollout: with a decay of 0 the old policy is the new one, later it lags behind.
    assert deviation[0] == deviation[2] == 0.0
    assert 0.0 < deviation[4] < deviation[5]
    assert values(baseline, "train/positive_loss")[0] == values(baseline, "train/negative_loss")[0]


def test_overlapping_rollouts_repeat_and_come_from_older_weights(
    script: ModuleType, baseline: Path, overlapping: Path, tmp_path: Path
) -> None:
    assert compare_runs(run(script, tmp_path / "again", async_rollout=True), overlapping).failing == ()
    assert values(overlapping, "train/rollout_lag") == [0.0, 1.0, 1.0]
    gap = values(overlapping, "train/model_output_mean_abs_diff")
    assert gap[0] == 0.0
    assert min(gap[1:]) > 0.0
    divergence = compare_runs(overlapping, baseline).first_divergence
    assert divergence is not None
    assert divergence.step == 1, "the first rollout and the training on it are the same in both modes"


@pytest.mark.parametrize("is_async", [True, False], ids=["overlapping", "in turns"])
def test_a_rollout_and_the_training_on_the_one_before_it_run_at_the_same_time(
    script: ModuleType, overlapping: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """Each waits inside for the other to be inside too: in turns, that would be forever."""
    meetings = [threading.Barrier(2) for _ in range(2)]
    generate, train_on = diffusion_nft.DiffusionNftEngine.generate, diffusion_nft.DiffusionNftTrainer.train_on

    def meet(index: int) -> None:
        if 0 <= index < len(meetings):
            meetings[index].wait(timeout=60 if is_async else 0.1)

    def meeting_generate(self: Any, rollout: int) -> Any:
        meet(rollout - 1)
        return generate(self, rollout)

    def meeting_train_on(self: Any, rollout: int, *args: Any) -> Any:
        meet(rollout)
        return train_on(self, rollout, *args)

    monkeypatch.setattr(diffusion_nft.DiffusionNftEngine, "generate", meeting_generate)
    monkeypatch.setattr(diffusion_nft.DiffusionNftTrainer, "train_on", meeting_train_on)
    if is_async:
        met = run(script, tmp_path / "run", async_rollout=True)
        assert compare_runs(met, overlapping).failing == ()
    else:
        with pytest.raises(threading.BrokenBarrierError):
            run(script, tmp_path / "run")


# --- faults that must show --------------------------------------------------------------------------------------------


def _swap_rewards(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
    original = digits_policy.read_probability
    order = [1, 0, *range(2, 16)]
    monkeypatch.setattr(digits_policy, "read_probability", lambda *args: original(*args)[order])


def _shift_groups(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
    shift_groups(monkeypatch, diffusion_nft, "optimality_probability")


def _drop_a_sample(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
    original = digits_policy.reward_statistics
    monkeypatch.setattr(digits_policy, "reward_statistics", lambda rewards: original(rewards[:-1]))


def _skip_the_second_sync(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
    skip_the_second_sync(monkeypatch, diffusion_nft.DiffusionNftEngine)


def _swap_the_branches(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
    original = diffusion_nft.nft_loss
    monkeypatch.setattr(diffusion_nft, "nft_loss", lambda *args: original(*args[:5], 1.0 - args[5], args[6]))


def _keep_the_old_policy_at_last(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
    original = diffusion_nft.DiffusionNftTrainer.follow

    def follow(self: Any, *, decay: float) -> None:
        if decay != 0.04:
            original(self, decay=decay)

    monkeypatch.setattr(diffusion_nft.DiffusionNftTrainer, "follow", follow)


@pytest.mark.parametrize(
    ("plant", "first", "step"),
    [
        pytest.param(other_options(seed=1), "rollout/reward_model", 0, id="another seed"),
        pytest.param(other_options(lr=1e-3 * 1.001), "train/grad_norm", 1, id="learning rate 0.1% higher"),
        pytest.param(other_options(beta=1.001), "train/grad_norm", 0, id="beta 0.1% higher"),
        pytest.param(other_options(decay_growth=0.021), "train/old_policy_decay", 1, id="another decay"),
        pytest.param(_swap_rewards, "rollout/rewards", 0, id="two rewards swapped"),
        pytest.param(_shift_groups, "train/optimality", 0, id="groups off by one"),
        pytest.param(_drop_a_sample, "rollout/reward/raw_mean", 0, id="a sample dropped"),
        pytest.param(_swap_the_branches, "train/grad_norm", 0, id="positive and negative swapped"),
        pytest.param(_skip_the_second_sync, "rollout/weights", 1, id="second weight sync skipped"),
        pytest.param(skip_an_optimizer_step(9), "model/parameters", 5, id="last optimizer step skipped"),
        pytest.param(_keep_the_old_policy_at_last, "model/old_parameters", 5, id="last move of the old policy skipped"),
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
    if plant is _skip_the_second_sync:
        assert values(faulty, "rollout/weights_match") == [1.0, 0.0, 1.0]
        assert values(faulty, "train/model_output_mean_abs_diff")[1] > 0.0

"""The mathematics of the recipes: worked by hand, against torch.distributions, and two ranks against one."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import nn

from e2e_registry import MetricRecorder
from e2e_registry.errors import UsageError
from e2e_registry.recipes.actor import ActorContext, AttentionOptions, GroupSpec
from e2e_registry.recipes.algorithms import clipped_policy_loss, group_advantages
from e2e_registry.recipes.command_line import parse_env_vars
from e2e_registry.recipes.flow_matching import SdeStep, noise_schedule, training_pair
from e2e_registry.recipes.rollout_config import RolloutConfig
from e2e_registry.recipes.train_actor import TrainActor, clip_grad_norm


def test_advantages_are_relative_to_the_group() -> None:
    # Group 1: mean 2, deviations -1, 0, 1, unbiased std 1. Group 2: mean 5, deviations -4, 2, 2, variance 24 / 2.
    rewards = torch.tensor([1.0, 2.0, 3.0, 1.0, 7.0, 7.0], dtype=torch.float64)
    expected = [-1.0, 0.0, 1.0, -4 / math.sqrt(12), 2 / math.sqrt(12), 2 / math.sqrt(12)]
    assert group_advantages(rewards, 3, epsilon=0.0).tolist() == pytest.approx(expected, rel=1e-12)


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    assert group_advantages(torch.full((8,), 0.7), 4).abs().max() < 1e-2 * 0.7
    assert group_advantages(torch.tensor([0.5, 0.25]), 1).tolist() == [0.0, 0.0]


def test_rewards_that_are_no_whole_groups_are_refused() -> None:
    with pytest.raises(UsageError, match="not whole groups of 4"):
        group_advantages(torch.zeros(6), 4)


@given(st.lists(st.floats(-10, 10, width=32), min_size=8, max_size=8), st.floats(0.5, 4), st.floats(-3, 3))
def test_advantages_ignore_shift_and_scale_of_rewards(rewards: list[float], scale: float, shift: float) -> None:
    original = torch.tensor(rewards, dtype=torch.float64)
    if original.view(2, 4).std(dim=1).min() < 1e-3:
        return
    moved = group_advantages(original * scale + shift, 4, epsilon=0.0)
    assert torch.allclose(moved, group_advantages(original, 4, epsilon=0.0), atol=1e-9)


def test_clipping_by_hand() -> None:
    """Ratios 0.5, 1.5, 0.5, 1.5 with advantages 1, 1, -1, -1 at clip range 0.2."""
    ratio = torch.tensor([0.5, 1.5, 0.5, 1.5], dtype=torch.float64)
    log_prob = ratio.log().requires_grad_()
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    result = clipped_policy_loss(log_prob, torch.zeros(4, dtype=torch.float64), advantage, 0.2)
    # max(-0.5, -0.8), max(-1.5, -1.2), max(0.5, 0.8), max(1.5, 1.2)
    assert result.loss.item() == pytest.approx((-0.5 - 1.2 + 0.8 + 1.5) / 4, rel=1e-12)
    assert result.ratio.tolist() == pytest.approx(ratio.tolist(), rel=1e-12)
    assert result.is_clipped.tolist() == [False, True, True, False]
    result.loss.backward()
    # Where the clipped term counts there is no gradient; elsewhere it is -A * ratio / n.
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == pytest.approx([-0.5 / 4, 0.0, 0.0, 1.5 / 4], rel=1e-12)


def test_on_policy_gradient_is_that_of_the_log_prob() -> None:
    log_prob = torch.tensor([-1.0, -2.0], requires_grad=True)
    clipped_policy_loss(log_prob, log_prob.detach().clone(), torch.tensor([3.0, -1.0]), 0.2).loss.backward()
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == [-1.5, 0.5]


@given(st.integers(2, 20), st.floats(0.05, 2.0), st.integers(0, 2**31))
def test_transition_log_prob_is_the_density_of_a_normal(steps: int, noise_level: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sample, velocity, following = torch.randn(3, 4, 1, 8, 8, generator=generator, dtype=torch.float64)
    sigmas = noise_schedule(steps)
    for index in range(steps):
        step = SdeStep.at(index, sigmas, noise_level)
        mean = step.mean(sample, velocity)
        expected = torch.distributions.Normal(mean, step.std).log_prob(following).flatten(1).mean(dim=1)
        assert torch.allclose(step.log_prob(following, mean), expected, rtol=1e-12, atol=1e-12)


def test_an_sde_step_by_hand() -> None:
    """Sigma from 0.5 to 0.25 at noise level 1: diffusion sqrt(0.5 / 0.5) = 1, drift 1 / (2 * 0.5) = 1, dt -0.25."""
    step = SdeStep.at(2, (1.0, 0.75, 0.5, 0.25, 0.0), 1.0)
    assert step.sample_scale == pytest.approx(1 - 0.25)
    assert step.velocity_scale == pytest.approx((1 + 0.5) * -0.25)
    assert step.std == pytest.approx(0.5)


def test_a_vanishing_noise_gives_the_ode_which_ends_at_the_data() -> None:
    generator = torch.Generator().manual_seed(0)
    data, noise = torch.randn(2, 5, 1, 8, 8, generator=generator, dtype=torch.float64)
    sample, velocity = training_pair(data, noise, torch.ones(5, dtype=torch.float64))
    sigmas = noise_schedule(10)
    for index in range(10):
        sample = SdeStep.at(index, sigmas, 1e-9).mean(sample, velocity)
    assert torch.allclose(sample, data, atol=1e-9)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_sampler_of_one_step_is_refused(steps: int) -> None:
    with pytest.raises(UsageError, match="no step between noise and data"):
        noise_schedule(steps)


def test_clip_grad_norm_agrees_with_torch() -> None:
    models = [nn.Linear(30, 20), nn.Linear(30, 20)]
    for model in models:
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape)
    expected = nn.utils.clip_grad_norm_(models[0].parameters(), 1.0).item()
    assert clip_grad_norm(models[1].parameters(), 1.0) == pytest.approx(expected, rel=1e-6)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(one.grad, other.grad, rtol=1e-5)


def test_env_vars_keep_what_follows_the_first_equals_sign() -> None:
    given_twice = ["A=1", "GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX2", "A=2"]
    assert parse_env_vars(given_twice, flag="--x") == {"A": "2", "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2"}
    with pytest.raises(UsageError, match="--train-env-vars: 'MKL_CBWR' is not NAME=VALUE"):
        parse_env_vars(["MKL_CBWR"], flag="--train-env-vars")


# --- micro-batches ------------------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 20))
def test_the_engines_forward_passes_are_the_ranks_micro_batches_and_each_sample_counts_alike(
    ranks: int, share: int, size: int
) -> None:
    config = RolloutConfig(
        seed=0, prompts=ranks, group_size=share, micro_batch_size=size, train_ranks=ranks, precision="fp32"
    )
    samples = list(range(ranks * share))
    assert [sample for rows in config.forward_passes for sample in samples[rows]] == samples
    for rank in range(ranks):
        own = samples[rank * share : (rank + 1) * share]
        mine = [samples[rows] for rows in config.forward_passes if samples[rows][0] in own]
        assert mine == [own[rows] for rows in config.micro_batches], "another shape in the engine than on the rank"
    for rows, weight in zip(config.micro_batches, config.sample_shares, strict=True):
        assert 1 <= rows.stop - rows.start <= size
        assert weight / (rows.stop - rows.start) == pytest.approx(1 / share)


# --- FSDP over two ranks against one process ---------------------------------------------------------------------

STEPS = 20
SAMPLES = 16
#: Measured over 20 steps: losses 2e-7, gradient norms 4e-7 relative, weights 9e-8 absolute: float32 rounding.
RELATIVE_ERROR = 5e-6


class _Regression(TrainActor):
    def __init__(self, context: ActorContext) -> None:
        layers = [nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1)]
        super().__init__(context, lambda: nn.Sequential(*layers), shard=(nn.Linear,), lr=1e-2)

    def train(self) -> list[tuple[float, float]]:
        history = []
        for step in range(STEPS):
            inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(step))
            targets = inputs.sin().sum(dim=1, keepdim=True)
            part = self.share(SAMPLES)
            # Micro-batches of 5, 5, 5 and 1 in one process, of 5 and 3 on each of two ranks.
            pairs = list(zip(inputs[part].split(5), targets[part].split(5), strict=True))
            losses = ((self.model(x) - y).square().mean() for x, y in pairs)
            history.append(self.update(losses, weights=[len(x) / len(inputs[part]) for x, _ in pairs]))
        return history


def _train(rank: int, folder: Path, world_size: int, results: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    spec = GroupSpec(role="train", actor="", world_size=world_size, attention=AttentionOptions(library=None))
    with MetricRecorder(role="train", rank=rank, run_dir=folder) as recorder:
        actor = _Regression(ActorContext(spec, rank, recorder, torch.device("cpu")))
        history = actor.train()
        weights = {name: value.tolist() for name, value in actor.weights(actor.model).items()}
        noise = (random.random(), float(np.random.random()), torch.rand(()).item())
    results.put((rank, (history, weights, noise)))
    torch.distributed.destroy_process_group()


def _train_over(world_size: int, folder: Path) -> list[Any]:
    folder.mkdir()
    return run_ranks(_train, world_size, folder, world_size)


def test_two_fsdp_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    ((alone, weights_alone, noise_alone),) = _train_over(1, tmp_path / "one")
    (first, weights, noise), (second, other_weights, other_noise) = _train_over(2, tmp_path / "two")
    assert first == second  # both ranks report what holds over all ranks
    assert weights == other_weights
    # Dropout and the like must not do to one rank's samples what it does to another's, and must repeat.
    assert noise == noise_alone
    assert not set(noise) & set(other_noise)
    assert alone[-1][0] < 0.5 * alone[0][0]
    for (loss, norm), (loss_alone, norm_alone) in zip(first, alone, strict=True):
        assert loss == pytest.approx(loss_alone, rel=RELATIVE_ERROR)
        assert norm == pytest.approx(norm_alone, rel=RELATIVE_ERROR)
    for name, value in weights_alone.items():
        assert torch.allclose(torch.tensor(weights[name]), torch.tensor(value), rtol=0, atol=RELATIVE_ERROR)

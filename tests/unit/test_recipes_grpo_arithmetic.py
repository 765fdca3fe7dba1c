"""The arithmetic GRPO recipe: its task and mathematics, trainer against engine, and faults that must show."""

from __future__ import annotations

import dataclasses
import math
import statistics
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from local_actors import (
    Plant,
    compare_runs,
    load_script,
    other_options,
    run,
    shift_groups,
    skip_an_optimizer_step,
    skip_the_second_sync,
    values,
)
from torch import distributed
from torch.distributions import Categorical, kl_divergence

from e2e_registry import MetricRecorder
from e2e_registry.config import load_settings
from e2e_registry.errors import UsageError
from e2e_registry.recipes import grpo_arithmetic, train_actor
from e2e_registry.recipes.actor import ActorContext
from e2e_registry.recipes.algorithms import clipped_policy_terms
from e2e_registry.recipes.arithmetic import ArithmeticTask, CharacterTokenizer, Problem
from e2e_registry.recipes.causal_lm import (
    build_causal_lm,
    chosen,
    decode,
    response_log_probs,
    response_mask,
)
from e2e_registry.recipes.gradients import gradient_norms, parameter_group
from e2e_registry.recipes.token_objective import entropy, k3_divergence, token_sum
from e2e_registry.recording import read_run
from e2e_registry.registration import read_registration
from e2e_registry.series import decode_values

pytestmark = pytest.mark.usefixtures("group_of_one")

TEST = Path(__file__).resolve().parents[1] / "e2e/short/test_grpo_arithmetic_2xCPU.py"
PAD, END = CharacterTokenizer.PAD, CharacterTokenizer.END

# --- The task -----------------------------------------------------------------------------------------------------


@given(st.text(CharacterTokenizer.CHARACTERS, max_size=12))
def test_texts_survive_the_tokenizer(text: str) -> None:
    tokenizer = CharacterTokenizer()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode([*ids, END, PAD, 3]) == text
    assert tokenizer.decode(ids) is None, "a response that does not end"
    assert tokenizer.decode([*ids, PAD, END]) is None


def test_a_character_without_a_token_is_named() -> None:
    with pytest.raises(UsageError, match=r"no token for \['x'\] in '3x4='"):
        CharacterTokenizer().encode("3x4=")


def test_prompts_end_and_answers_begin_in_one_column() -> None:
    task = ArithmeticTask(19)
    problems = [Problem(7, 5), Problem(12, 19)]
    assert task.encode_prompts(problems).tolist() == [[PAD, PAD, 7, 10, 5, 11], [1, 2, 10, 1, 9, 11]]
    assert task.encode_answers(problems).tolist() == [[1, 2, END], [3, 1, END]]
    assert task.encode_answers([Problem(1, 2)]).tolist() == [[3, END, PAD]]


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ([1, 2, END], 1.0),
        ([1, 3, END], 0.5),
        ([9, END, PAD], 0.25),
        ([1, 2, 0], 0.0),  # no end
        ([END, PAD, PAD], 0.0),
        ([0, 9, END], 0.0),  # a leading zero
        ([10, 9, END], 0.0),  # a sign
        ([1, PAD, END], 0.0),
    ],
)
def test_the_reward_of_an_answer_to_7_plus_5(response: list[int], reward: float) -> None:
    assert ArithmeticTask(19).reward(Problem(7, 5), response) == reward
    assert ArithmeticTask(19).rewards([Problem(7, 5)], torch.tensor([response])).tolist() == [reward]


def test_problems_are_drawn_from_all_sums() -> None:
    drawn = ArithmeticTask(3).draw(500, torch.Generator().manual_seed(0))
    assert set(drawn) == {Problem(left, right) for left in range(4) for right in range(4)}


# --- The mathematics ----------------------------------------------------------------------------------------------


@given(st.integers(0, 2**31))
def test_entropy_is_that_of_the_distribution(seed: int) -> None:
    logits = 3.0 * torch.randn(5, 7, 14, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = Categorical(logits=logits).entropy()
    assert torch.allclose(entropy(torch.log_softmax(logits, dim=-1)), expected, rtol=1e-12, atol=1e-12)


@given(st.integers(0, 2**31))
def test_the_expectation_of_k3_is_the_divergence(seed: int) -> None:
    """Exactly: the expectation over the policy is a sum over all tokens."""
    policy, reference = torch.randn(2, 4, 14, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    policy, reference = torch.log_softmax(policy, -1), torch.log_softmax(reference, -1)
    estimates = k3_divergence(policy, reference)
    assert estimates.min() >= -torch.finfo(torch.float64).eps
    expected = kl_divergence(Categorical(logits=policy), Categorical(logits=reference))
    assert torch.allclose((policy.exp() * estimates).sum(-1), expected, rtol=1e-10, atol=1e-12)


def test_k3_over_samples_comes_close_to_the_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    policy = torch.log_softmax(torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64), -1)
    reference = torch.log_softmax(torch.tensor([0.0, 0.5, -0.5], dtype=torch.float64), -1)
    tokens = torch.multinomial(policy.exp(), 200_000, replacement=True, generator=generator)
    estimates = k3_divergence(policy[tokens], reference[tokens])
    expected = kl_divergence(Categorical(logits=policy), Categorical(logits=reference))
    standard_error = estimates.std() / math.sqrt(len(tokens))
    assert abs(estimates.mean() - expected) < 4 * standard_error


def test_the_mask_ends_with_the_first_end() -> None:
    responses = torch.tensor([[1, END, PAD, PAD], [1, 2, 3, 4], [END, 5, END, 1], [PAD, 1, END, END]])
    expected = [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]]
    assert response_mask(responses, END).int().tolist() == expected


def test_token_sums_by_hand_ignore_what_does_not_count() -> None:
    """Two responses of 1 and 3 tokens: the mean over tokens is 16 / 4, that of the responses' means would be 3.3."""
    nan = math.nan
    values = torch.tensor([[2.0, nan, nan], [3.0, 5.0, 6.0]], requires_grad=True)
    mask = torch.tensor([[True, False, False], [True, True, True]])
    total = token_sum(values, mask)
    assert total.item() / mask.sum().item() == 4.0
    total.backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]


def test_asymmetric_clipping_by_hand() -> None:
    """Ratios 0.7 and 1.4 with advantages 1 and -1, clipped to 0.8 and 1.3."""
    ratio = torch.tensor([[0.7, 1.4], [0.7, 1.4]], dtype=torch.float64)
    terms = clipped_policy_terms(ratio.log(), torch.zeros_like(ratio), torch.tensor([[1.0], [-1.0]]), 0.2, 0.3)
    assert terms.losses.flatten().tolist() == pytest.approx([-0.7, -1.3, 0.8, 1.4], rel=1e-12)
    assert terms.is_clipped.tolist() == [[False, True], [True, False]]


# --- The model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sampled() -> dict[str, Any]:
    """A policy with pronounced preferences, problems of all lengths, and what it decodes."""
    task = ArithmeticTask(19)
    torch.manual_seed(0)
    model = build_causal_lm(task)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    generator = torch.Generator().manual_seed(1)
    prompts = task.encode_prompts(task.draw(64, generator))
    noise = torch.empty(64, task.response_width, task.tokenizer.SIZE).exponential_(generator=generator)
    decoded = decode(model, prompts, noise)
    return {"model": model, "prompts": prompts, "noise": noise, **decoded._asdict()}


def test_decoding_computes_what_a_full_pass_does_up_to_rounding(sampled: dict[str, Any]) -> None:
    mask = response_mask(sampled["tokens"], END)
    assert 0 < mask.logical_not().sum() < mask.numel(), "no response ends early, so nothing is masked"
    assert set(sampled["tokens"][~mask].tolist()) == {PAD}
    with torch.no_grad():
        full = chosen(response_log_probs(sampled["model"], sampled["prompts"], sampled["tokens"]), sampled["tokens"])
    assert (full - sampled["log_probs"])[mask].abs().max() < 1e-4
    with_gradient = response_log_probs(sampled["model"], sampled["prompts"], sampled["tokens"])
    assert torch.equal(chosen(with_gradient, sampled["tokens"]), full), "the same pass rounds otherwise with a gradient"


def test_a_sample_depends_neither_on_its_batch_nor_on_padding(sampled: dict[str, Any]) -> None:
    rows = slice(8, 16)
    alone = decode(sampled["model"], sampled["prompts"][rows], sampled["noise"][rows])
    assert torch.equal(alone.tokens, sampled["tokens"][rows])
    padded = torch.nn.functional.pad(sampled["prompts"], (3, 0), value=PAD)
    more = response_log_probs(sampled["model"], padded, sampled["tokens"])
    less = response_log_probs(sampled["model"], sampled["prompts"], sampled["tokens"])
    assert (more - less).abs().max() < 1e-4


def test_tokens_are_drawn_from_the_distribution_of_the_policy(sampled: dict[str, Any]) -> None:
    count = 20_000
    prompts = sampled["prompts"][:1].expand(count, -1)
    noise = torch.empty(count, 1, CharacterTokenizer.SIZE).exponential_(generator=torch.Generator().manual_seed(2))
    drawn = decode(sampled["model"], prompts, noise).tokens[:, 0]
    with torch.no_grad():
        expected = response_log_probs(sampled["model"], prompts[:1], drawn[:1, None])[0, 0].exp()
    shares = torch.bincount(drawn, minlength=len(expected)) / count
    error = (expected * (1 - expected) / count).sqrt()
    assert ((shares - expected).abs() < 5 * error + 1e-6).all()


def test_gradient_norms_of_groups_make_up_the_whole() -> None:
    torch.manual_seed(0)
    model = build_causal_lm(ArithmeticTask(19))
    prompts, responses = torch.randint(12, (4, 6)), torch.randint(12, (4, 3))
    chosen(response_log_probs(model, prompts, responses), responses).sum().backward()
    norms = gradient_norms(model)
    assert list(norms) == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
    assert norms["lm_head"] == pytest.approx(model.lm_head.weight.grad.norm().item(), rel=1e-6)
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()
    assert math.hypot(*norms.values()) == pytest.approx(total, rel=1e-6)
    assert parameter_group("transformer.time_text_embed.timestep_embedder.linear_1.weight") == (
        "transformer.time_text_embed"
    )
    assert parameter_group("weight") == "weight"


# --- The recipe ---------------------------------------------------------------------------------------------------

SMALL = {
    "num_rollout": 2,
    "prompts": 6,
    "group_size": 4,
    "warm_up_steps": 6,
    "warm_up_batch_size": 32,
    "train_ranks": 1,
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("run_grpo_arithmetic")


@pytest.fixture(scope="module")
def baseline(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(script, tmp_path_factory.mktemp("runs") / "baseline", **SMALL)


def test_the_same_seed_repeats_all_that_is_registered(script: ModuleType, baseline: Path, tmp_path: Path) -> None:
    comparison = compare_runs(run(script, tmp_path / "again", **SMALL), baseline)
    assert comparison.failing == ()
    registered = read_registration(TEST, load_settings(TEST)).metrics
    logged = {series.key.metric for series in comparison.series}
    assert logged == {name for name in logged if name in registered or name.startswith("train/grad_norm/")}
    assert {name for name in registered if not name.endswith("*")} <= logged


def test_the_loss_is_the_sum_of_its_terms(baseline: Path) -> None:
    names = ("loss", "policy_loss", "kl_loss", "entropy")
    steps = list(zip(*(values(baseline, f"train/{name}") for name in names), strict=True))
    assert len(steps) == 4
    for loss, policy, divergence, spread in steps:
        assert loss == pytest.approx(policy + 0.001 * divergence - 0.001 * spread, rel=1e-5, abs=1e-7)
    assert values(baseline, "train/kl_loss")[0] == 0.0, "the policy starts as the reference"
    assert values(baseline, "train/kl_loss")[1] > 0.0


def test_trainer_and_engine_score_alike_and_decoding_is_close(baseline: Path) -> None:
    assert values(baseline, "train/train_rescored_logprob_abs_diff_max") == [0.0, 0.0]
    assert values(baseline, "rollout/weights_match") == [1.0, 1.0]
    assert all(value < 1e-4 for value in values(baseline, "train/train_rollout_logprob_abs_diff_max"))
    assert values(baseline, "train/ratio_max")[::2] == values(baseline, "train/ratio_min")[::2] == [1.0, 1.0]
    assert values(baseline, "train/ppo_kl")[::2] == [0.0, 0.0]
    assert values(baseline, "train/ratio_max")[1] > 1.0 > values(baseline, "train/ratio_min")[1]


def test_an_engine_in_bfloat16_is_measured(script: ModuleType, tmp_path: Path) -> None:
    rounded = run(script, tmp_path / "bf16", **SMALL, rollout_precision="bf16", allow_dtype_mismatch=True)
    assert values(rounded, "rollout/weights_match") == [1.0, 1.0]
    assert all(1e-5 < value < 0.1 for value in values(rounded, "train/train_rescored_logprob_abs_diff_max"))
    assert values(rounded, "train/ratio_max")[0] > 1.0


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"forward_dtype": "bf16"}, id="bf16"),
        pytest.param({"forward_dtype": "bf16", "dtype_override": ["*norm*=fp32"]}, id="bf16, norms in fp32"),
        pytest.param({"attn_implementation": "eager"}, id="eager attention"),
    ],
)
def test_trainer_and_engine_agree_whatever_both_compute_in(
    script: ModuleType, baseline: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    other = run(script, tmp_path / "other", **SMALL, **options)
    assert values(other, "train/train_rescored_logprob_abs_diff_max") == [0.0, 0.0]
    assert compare_runs(other, baseline).failing != (), "the option changes nothing"


@pytest.mark.parametrize("size", [8, 7])
def test_smaller_forward_passes_draw_the_same_responses(
    script: ModuleType, baseline: Path, tmp_path: Path, size: int
) -> None:
    smaller = run(script, tmp_path / "smaller", **SMALL, micro_batch_size=size)
    failing = {series.key.metric for series in compare_runs(smaller, baseline).failing}
    assert not failing & {"rollout/prompts", "rollout/rewards", "train/advantages"}
    assert values(smaller, "train/train_rescored_logprob_abs_diff_max") == [0.0, 0.0]
    assert values(smaller, "train/loss") == pytest.approx(values(baseline, "train/loss"), rel=1e-3, abs=1e-6)


def _train_rank(rank: int, world_size: int, folder: Path) -> None:
    """Two supervised steps and two updates on responses of unequal lengths, as one of the train ranks."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=world_size)
    script = load_script("run_grpo_arithmetic")
    spec, _ = script.group_specs(script.ScriptArgs(prompts=4, group_size=4, train_ranks=world_size))
    with MetricRecorder(role="train", rank=rank, run_dir=folder) as recorder:
        trainer = grpo_arithmetic.GrpoTrainer(ActorContext(spec, rank, recorder, torch.device("cpu")), **spec.kwargs)
        trainer.warm_up(2, 32, 3e-3)
        generator = torch.Generator().manual_seed(0)
        problems = trainer.task.draw(16, generator)
        responses = torch.full((16, 3), PAD)
        for row in range(16):  # the first rank has 8 tokens, the second 24
            responses[row, 0 if row < 8 else 2] = END
            responses[row, : 0 if row < 8 else 2] = 1
        rewards = torch.rand(16, generator=generator)
        old = torch.full((16, 3), -2.0)
        prompts = trainer.task.encode_prompts(problems)
        batch = {"prompts": prompts, "responses": responses, "rewards": rewards}
        trainer.train_on(0, 2, batch | {"decoded_log_probs": old, "rescored_log_probs": old})
    distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_with_unequal_numbers_of_tokens_train_as_one_does(tmp_path: Path) -> None:
    for world_size in (1, 2):
        arguments = (world_size, tmp_path / str(world_size))
        torch.multiprocessing.spawn(_train_rank, args=arguments, nprocs=world_size)
    names = ("warm_up_loss", "warm_up_grad_norm", "loss", "policy_loss", "kl_loss", "entropy", "ppo_kl", "grad_norm")
    for name in names:
        (alone,) = series(tmp_path / "1", f"train/{name}")
        for rank in series(tmp_path / "2", f"train/{name}"):
            assert rank == pytest.approx(alone, rel=1e-4, abs=1e-6), name


def series(run_dir: Path, metric: str) -> list[list[float]]:
    """The values of a metric, by rank."""
    found = [batch for batch in read_run(run_dir).batches() if batch.key.metric == metric]
    return [decode_values(batch.dtype, batch.bits).tolist() for batch in found]


def _swap_rewards(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
    original = ArithmeticTask.rewards

    def swapped(self: ArithmeticTask, problems: Any, responses: torch.Tensor) -> torch.Tensor:
        rewards = original(self, problems, responses)
        first = int((rewards != rewards[0]).nonzero()[0])  # swapping equal rewards changes nothing
        rewards[[0, first]] = rewards[[first, 0]]
        return rewards

    monkeypatch.setattr(ArithmeticTask, "rewards", swapped)


def _shift_groups(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
    shift_groups(monkeypatch, grpo_arithmetic, "group_advantages")


def _drop_a_sample(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
    original = grpo_arithmetic.GrpoEngine._log

    def log(self: Any, rollout: int, batch: Any) -> None:
        original(self, rollout, {name: tensor[:-1] for name, tensor in batch.items()})

    monkeypatch.setattr(grpo_arithmetic.GrpoEngine, "_log", log)


def _skip_the_sync(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
    skip_the_second_sync(monkeypatch, grpo_arithmetic.GrpoEngine)


def _count_padding(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
    """A mask that is one token too long, in the trainer alone."""
    original = grpo_arithmetic.GrpoTrainer._own

    def own(self: Any, batch: Any, part: slice) -> Any:
        mine = original(self, batch, part)
        if "rewards" in mine:
            mine["mask"] = mine["mask"] | mine["mask"].roll(1, dims=1)
        return mine

    monkeypatch.setattr(grpo_arithmetic.GrpoTrainer, "_own", own)


def _forget_the_reference(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
    original = grpo_arithmetic.GrpoTrainer._reference_log_probs
    monkeypatch.setattr(
        grpo_arithmetic.GrpoTrainer, "_reference_log_probs", lambda *args: original(*args) + torch.tensor(1e-4)
    )


def _skip_the_copy(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
    """The reference keeps its random weights: what the warm-up is copied to is a copy."""
    original = grpo_arithmetic.local_part

    def part(tensor: Any) -> Any:
        return original(tensor) if tensor.requires_grad else original(tensor).clone()

    monkeypatch.setattr(grpo_arithmetic, "local_part", part)


def _scale_a_block(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
    """The first block's gradient a thousandth too large, in the policy updates."""
    measure, train_on = train_actor.gradient_norms, grpo_arithmetic.GrpoTrainer.train_on

    def scaled(model: Any) -> dict[str, float]:
        for parameter in model.model.layers[0].parameters():
            parameter.grad.mul_(1.001)
        return measure(model)

    def train_on_scaled(self: Any, *args: Any) -> Any:
        monkeypatch.setattr(train_actor, "gradient_norms", scaled)
        return train_on(self, *args)

    monkeypatch.setattr(grpo_arithmetic.GrpoTrainer, "train_on", train_on_scaled)


@pytest.mark.parametrize(
    ("plant", "first", "step"),
    [
        pytest.param(other_options(seed=1), "data/warm_up", 0, id="another seed"),
        pytest.param(other_options(rollout_seed=1), "rollout/prompts", 0, id="another rollout seed"),
        pytest.param(other_options(lr=5e-4 * 1.001), "train/entropy", 1, id="learning rate 0.1% higher"),
        pytest.param(other_options(clip_high=0.01, clip_low=0.01), "train/clip_fraction", 1, id="another clip range"),
        pytest.param(other_options(kl_coefficient=0.0011), "train/grad_norm", 1, id="divergence weighted otherwise"),
        pytest.param(other_options(entropy_coefficient=0.0), "train/grad_norm", 0, id="no entropy bonus"),
        pytest.param(_swap_rewards, "rollout/rewards", 0, id="two rewards swapped"),
        pytest.param(_shift_groups, "train/advantages", 0, id="groups off by one"),
        pytest.param(_drop_a_sample, "rollout/prompts", 0, id="a sample dropped"),
        pytest.param(_skip_the_sync, "rollout/weights", 1, id="second weight sync skipped"),
        pytest.param(_count_padding, "train/train_rollout_logprob_abs_diff", 0, id="a mask one token too long"),
        pytest.param(_forget_the_reference, "train/grad_norm", 0, id="another reference"),
        pytest.param(_scale_a_block, "train/grad_norm", 0, id="a block's gradient scaled"),
        pytest.param(_skip_the_copy, "train/reference_weights", 0, id="reference not copied"),
        pytest.param(skip_an_optimizer_step(10), "model/parameters", 3, id="last optimizer step skipped"),
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
        faulty = run(script, tmp_path / "faulty", **SMALL)
    comparison = compare_runs(faulty, baseline)
    divergence = comparison.first_divergence
    assert divergence is not None
    assert (divergence.key.metric, divergence.step) == (first, step)
    if plant is _skip_the_sync:
        assert values(faulty, "rollout/weights_match") == [1.0, 0.0]
        assert values(faulty, "train/train_rescored_logprob_abs_diff_max")[1] > 1e-4
    if plant is _scale_a_block:  # the sum hides which one it was
        at_once = {series.key.metric for series in comparison.failing if series.first and series.first.step == 0}
        assert {name for name in at_once if "grad_norm/" in name} == {"train/grad_norm/model.layers.0"}


def test_what_ranks_cannot_share_evenly_is_refused(script: ModuleType) -> None:
    args = dataclasses.replace(script.ScriptArgs(), prompts=3, group_size=3)
    with pytest.raises(UsageError, match="--train-ranks: 9 samples"):
        script.group_specs(args)


@pytest.mark.slow
def test_it_learns(script: ModuleType, tmp_path: Path) -> None:
    options = {"num_rollout": 30, "train_ranks": 1}
    rewards = values(run(script, tmp_path / "run", **options), "rollout/reward/raw_mean")
    assert statistics.mean(rewards[-6:]) > statistics.mean(rewards[:6]) + 0.03

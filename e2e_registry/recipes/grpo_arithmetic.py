"""GRPO on arithmetic: the train actor and the rollout engine of that recipe."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from e2e_registry.recipes.actor import ActorContext
from e2e_registry.recipes.algorithms import clipped_policy_terms, group_advantages
from e2e_registry.recipes.arithmetic import ArithmeticTask
from e2e_registry.recipes.causal_lm import (
    build_causal_lm,
    chosen,
    decode,
    response_log_probs,
    response_mask,
)
from e2e_registry.recipes.dtype_policy import DtypeOverride, DtypePolicy
from e2e_registry.recipes.gradients import local_part
from e2e_registry.recipes.grpo_config import GrpoConfig
from e2e_registry.recipes.rewards import reward_statistics
from e2e_registry.recipes.rollout_engine import RolloutEngine
from e2e_registry.recipes.token_objective import entropy, k3_divergence, token_sum
from e2e_registry.recipes.train_actor import TrainActor

Batch = Mapping[str, Tensor]

UNITS = (LlamaDecoderLayer,)


class GrpoTrainer(TrainActor):
    """One of the train ranks."""

    def __init__(
        self, context: ActorContext, config: GrpoConfig, *, lr: float, max_grad_norm: float, dtypes: DtypePolicy
    ) -> None:
        self.config = config
        self.task = ArithmeticTask(config.largest)
        attention = context.spec.attention.backend
        super().__init__(
            context,
            lambda: build_causal_lm(self.task, attention),
            shard=UNITS,
            lr=lr,
            max_grad_norm=max_grad_norm,
            dtypes=dtypes,
        )
        self.reference = self.sharded(lambda: build_causal_lm(self.task, attention), UNITS).requires_grad_(False)

    def warm_up(self, steps: int, batch_size: int, lr: float) -> None:
        """Train on problems with their answers, then keep the weights as the reference of the divergence.

        Args:
            steps: Optimizer steps.
            batch_size: Problems a step, over all ranks.
            lr: Learning rate of this phase alone.
        """
        generator = self.config.generator("warm-up")
        part = self.share(batch_size)
        with self.warming_up(lr):
            for step in range(steps):
                problems = self.task.draw(batch_size, generator)
                batch = {"prompts": self.task.encode_prompts(problems), "responses": self.task.encode_answers(problems)}
                self.recorder.log_digest("data/warm_up", batch, step=step)
                tokens = self._count_tokens(batch["responses"])
                own = self._own(batch, part)
                log_probs = response_log_probs(self.model, own["prompts"], own["responses"])
                losses = -chosen(log_probs, own["responses"])
                scale = self.context.world_size / tokens
                loss, grad_norm = self.update([token_sum(losses, own["mask"])], weights=[scale])
                self.recorder.log({"train/warm_up_loss": loss, "train/warm_up_grad_norm": grad_norm}, step=step)
        with torch.no_grad():
            for frozen, trained in zip(self.reference.parameters(), self.model.parameters(), strict=True):
                local_part(frozen).copy_(local_part(trained))
        self.recorder.log_digest("train/reference_weights", self.weights(self.reference), step=0)

    def train_on(self, rollout: int, updates: int, batch: Batch) -> dict[str, float]:
        """Take ``updates`` optimizer steps on one rollout, each over all of its tokens.

        Returns:
            Mean reward and share of right answers of the rollout, loss and gradient norm of the last update.
        """
        advantages = group_advantages(batch["rewards"], self.config.group_size)
        self.recorder.log_digest("train/advantages", advantages, step=rollout)
        own = self._own({**batch, "advantages": advantages}, self.share(self.config.samples))
        own["reference"] = torch.cat([self._reference_log_probs(own, rows) for rows in self.config.micro_batches])
        scale = self.context.world_size / self._count_tokens(batch["responses"])
        loss, grad_norm = 0.0, 0.0
        for update in range(updates):
            seen = _Tokens(own["mask"])
            losses = (self._loss(own, rows, seen) for rows in self.config.micro_batches)
            step = self.steps_done
            loss, grad_norm = self.update(losses, weights=[scale] * len(self.config.micro_batches))
            if update == 0:  # the trainer still had the engine's weights
                self.recorder.log(seen.agreement(own), step=step)
            over_ranks = {name: self.mean_over_ranks(value * scale) for name, value in seen.sums.items()}
            norms = {"train/grad_norm": grad_norm, **self.grad_norm_metrics, **self.scaling_metrics}
            self.recorder.log({"train/loss": loss, **over_ranks, **norms, **seen.movement()}, step=step)
        reward, accuracy = batch["rewards"].mean().item(), _accuracy(batch["rewards"]).item()
        return {"reward": reward, "accuracy": accuracy, "loss": loss, "grad_norm": grad_norm}

    def _loss(self, own: Batch, rows: slice, seen: _Tokens) -> Tensor:
        """Return the loss of a micro-batch, a sum over its tokens."""
        config = self.config
        mask, old = own["mask"][rows], own[f"{config.old_log_probs}_log_probs"][rows]
        log_probs = response_log_probs(self.model, own["prompts"][rows], own["responses"][rows])
        log_prob = chosen(log_probs, own["responses"][rows])
        policy = clipped_policy_terms(
            log_prob, old, own["advantages"][rows].unsqueeze(1), config.clip_low, config.clip_high
        )
        policy_loss = token_sum(policy.losses, mask)
        divergence = token_sum(k3_divergence(log_prob, own["reference"][rows]), mask)
        spread = token_sum(entropy(log_probs), mask)
        seen.add(log_prob.detach(), old, policy.ratio, policy.is_clipped)
        seen.add_sums(
            {
                "train/policy_loss": policy_loss,
                "train/kl_loss": divergence,
                "train/entropy": spread,
                "train/ppo_kl": token_sum(old - log_prob, mask),
            }
        )
        return policy_loss + config.kl_coefficient * divergence - config.entropy_coefficient * spread

    @torch.no_grad()
    def _reference_log_probs(self, own: Batch, rows: slice) -> Tensor:
        log_probs = response_log_probs(self.reference, own["prompts"][rows], own["responses"][rows])
        return chosen(log_probs, own["responses"][rows])

    def _own(self, batch: Batch, part: slice) -> dict[str, Tensor]:
        """Return this rank's samples on its device, with the mask of the tokens that count."""
        own = {name: tensor[part].to(self.device) for name, tensor in batch.items()}
        own["mask"] = response_mask(own["responses"], self.task.tokenizer.END)
        return own

    def _count_tokens(self, responses: Tensor) -> int:
        """Return how many tokens of all ranks' responses count."""
        return int(response_mask(responses, self.task.tokenizer.END).sum())


class _Tokens:
    """What one pass over a rollout saw of this rank's tokens; turned into metrics afterwards."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self.sums: dict[str, Tensor] = {}
        self._seen: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, new: Tensor, old: Tensor, ratio: Tensor, is_clipped: Tensor) -> None:
        for name, tensor in (("new", new), ("old", old), ("ratio", ratio), ("is_clipped", is_clipped)):
            self._seen[name].append(tensor)

    def add_sums(self, sums: Mapping[str, Tensor]) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, torch.zeros_like(value, dtype=torch.float64)) + value.detach()

    def _counting(self, name: str) -> Tensor:
        return torch.cat(self._seen[name])[self.mask]

    def agreement(self, own: Batch) -> dict[str, object]:
        """Return how far trainer and engine are apart on the same tokens under the same weights."""
        new = torch.cat(self._seen["new"])
        differences = {name: (new - own[f"{name}_log_probs"]).abs()[self.mask] for name in ("decoded", "rescored")}
        return {
            "train/train_rollout_logprob_abs_diff": differences["decoded"].mean(),
            "train/train_rollout_logprob_abs_diff_max": differences["decoded"].max(),
            "train/train_rescored_logprob_abs_diff_max": differences["rescored"].max(),
        }

    def movement(self) -> dict[str, object]:
        """Return how far the policy has moved since the rollout."""
        ratio = self._counting("ratio")
        return {
            "train/log_prob_old_idx_0": self._seen["old"][0][0, 0],
            "train/log_prob_new_idx_0": self._seen["new"][0][0, 0],
            "train/ratio_mean": ratio.mean(),
            "train/ratio_min": ratio.min(),
            "train/ratio_max": ratio.max(),
            "train/clip_fraction": self._counting("is_clipped").float().mean(),
        }


class GrpoEngine(RolloutEngine):
    """Draws groups of responses to prompts, checks the answers, and scores what it drew."""

    def __init__(self, context: ActorContext, config: GrpoConfig, *, overrides: tuple[DtypeOverride, ...]) -> None:
        self.config = config
        self.task = ArithmeticTask(config.largest)
        attention = context.spec.attention.backend
        super().__init__(
            context,
            lambda: build_causal_lm(self.task, attention),
            precision=config.precision,
            overrides=overrides,
        )

    @torch.no_grad()
    def generate(self, rollout: int) -> dict[str, Tensor]:
        """Return one rollout of ``n`` responses, on the CPU.

        Returns:
            ``prompts`` (n, p), ``responses`` (n, r), ``decoded_log_probs`` (n, r) of the decoding loop,
            ``rescored_log_probs`` (n, r) of one forward pass over the sequences, ``rewards`` (n,); the responses to a
            prompt are neighbours.
        """
        config, task = self.config, self.task
        generator = config.generator(f"rollout {rollout}")
        drawn = task.draw(config.prompts, generator)
        problems = [problem for problem in drawn for _ in range(config.group_size)]
        prompts = task.encode_prompts(problems)
        # All noise of the rollout at once: what a sample draws does not depend on how samples are batched.
        noise = torch.empty(config.samples, task.response_width, task.tokenizer.SIZE)
        noise.exponential_(generator=generator)
        chunks = [self._sample(prompts[rows], noise[rows]) for rows in config.forward_passes]
        batch = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
        batch["rewards"] = task.rewards(problems, batch["responses"])
        self._log(rollout, batch)
        return batch

    def _sample(self, prompts: Tensor, noise: Tensor) -> dict[str, Tensor]:
        on_device = prompts.to(self.device)
        drawn = decode(self.model, on_device, noise.to(self.device))
        # The cached decoding above rounds otherwise than a pass over whole sequences, as the trainer takes it. So the
        # engine scores its responses once more, as the trainer will: these two agree to the bit.
        rescored = chosen(response_log_probs(self.model, on_device, drawn.tokens), drawn.tokens)
        return {
            "prompts": prompts,
            "responses": drawn.tokens.cpu(),
            "decoded_log_probs": drawn.log_probs.cpu(),
            "rescored_log_probs": rescored.cpu(),
        }

    def _log(self, rollout: int, batch: Batch) -> None:
        mask = response_mask(batch["responses"], self.task.tokenizer.END)
        rewards = batch["rewards"]
        for name in ("prompts", "responses", "rewards"):
            self.recorder.log_digest(f"rollout/{name}", batch[name], step=rollout)
        self.recorder.log_digest("rollout/log_probs", batch["decoded_log_probs"][mask], step=rollout)
        statistics = reward_statistics(rewards) | {
            "rollout/accuracy": _accuracy(rewards),
            "rollout/response_length_mean": mask.sum(dim=1).double().mean(),
        }
        self.recorder.log(statistics, step=rollout)


def _accuracy(rewards: Tensor) -> Tensor:
    """Return the share of right answers: only they are given all of the reward."""
    return (rewards == 1.0).double().mean()

"""Flow-GRPO on handwritten digits: the train actor and the rollout engine of that recipe."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from e2e_registry.recipes.algorithms import clipped_policy_loss, group_advantages
from e2e_registry.recipes.digits_policy import Batch, DigitsEngine, DigitsTrainer
from e2e_registry.recipes.flow_grpo_config import FlowGrpoConfig


class FlowGrpoTrainer(DigitsTrainer):
    """One of the train ranks."""

    config: FlowGrpoConfig

    def train_on(self, rollout: int, updates: int, clip_range: float, batch: Batch) -> dict[str, float]:
        """Take ``updates`` optimizer steps on one rollout, each over all transitions of all samples.

        Returns:
            The rollout's mean reward, and loss and gradient norm of the last of them.
        """
        advantages = group_advantages(batch["rewards"], self.config.group_size)
        self.recorder.log_digest("train/advantages", advantages, step=rollout)
        part = self.share(self.config.samples)
        own = {name: tensor[part].to(self.device) for name, tensor in batch.items()}
        own["advantages"] = advantages[part].to(self.device)
        # Each micro-batch once for each transition.
        transitions = self.config.denoise_steps
        weights = [share / transitions for share in self.config.sample_shares for _ in range(transitions)]
        loss, grad_norm = 0.0, 0.0
        for update in range(updates):
            seen = _Transitions()
            losses = self._losses(own, clip_range, seen)
            step = self.steps_done
            loss, grad_norm = self.update(losses, weights=weights)
            if update == 0:  # the trainer still had the engine's weights
                self.recorder.log(seen.agreement(own), step=step)
            norms = {"train/grad_norm": grad_norm, **self.grad_norm_metrics, **self.scaling_metrics}
            self.recorder.log({**seen.movement(own), "train/loss": loss, **norms}, step=step)
        return {"reward": batch["rewards"].mean().item(), "loss": loss, "grad_norm": grad_norm}

    def _losses(self, own: Batch, clip_range: float, seen: _Transitions) -> Iterator[Tensor]:
        """Yield the loss of each micro-batch at each transition."""
        for rows, (index, (sigma, step)) in product(self.config.micro_batches, enumerate(self.config.steps())):
            sample, following = own["latents"][rows, index], own["latents"][rows, index + 1]
            sigmas = torch.full((len(sample),), sigma, device=self.device)
            velocity = self.model(sample, sigmas, own["prompts"][rows])
            log_prob = step.log_prob(following, step.mean(sample, velocity))
            old = own["log_probs"][rows, index]
            objective = clipped_policy_loss(log_prob, old, own["advantages"][rows], clip_range)
            seen.add(
                new=log_prob.detach(),
                old=old,
                output_difference=(velocity.detach() - own["velocities"][rows, index]).abs(),
                ratio=objective.ratio,
                is_clipped=objective.is_clipped,
            )
            yield objective.loss


class _Transitions:
    """What one pass over a rollout saw, as tensors; turned into metrics afterwards."""

    def __init__(self) -> None:
        self._seen: dict[str, list[Tensor]] = {}

    def add(self, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            self._seen.setdefault(name, []).append(tensor)

    def _all(self, name: str) -> Tensor:
        return torch.cat(self._seen[name])

    def agreement(self, own: Batch) -> dict[str, object]:
        """Return how far trainer and engine are apart on the same samples under the same weights."""
        return {
            "train/log_prob_mean_abs_diff": (self._all("new") - self._all("old")).abs().mean(),
            "train/model_output_mean_abs_diff": self._all("output_difference").mean(),
        }

    def movement(self, own: Batch) -> dict[str, object]:
        """Return how far the policy has moved since the rollout."""
        ratio = self._all("ratio")
        return {
            "train/log_prob_old_idx_0": self._seen["old"][0][0],
            "train/log_prob_new_idx_0": self._seen["new"][0][0],
            "train/ratio_mean": ratio.mean(),
            "train/ratio_min": ratio.min(),
            "train/ratio_max": ratio.max(),
            "train/clip_fraction": self._all("is_clipped").float().mean(),
        }


class FlowGrpoEngine(DigitsEngine):
    """Draws by the SDE, with a log-prob for each transition."""

    config: FlowGrpoConfig

    def generate(self, rollout: int) -> dict[str, Tensor]:
        """Return one rollout of ``n`` samples with ``t`` transitions, on the CPU.

        Returns:
            ``prompts`` (n,), ``latents`` (n, t + 1, 1, 8, 8) from noise to image, ``velocities`` (n, t, 1, 8, 8),
            ``log_probs`` (n, t), ``rewards`` (n,); the samples of a prompt are neighbours.
        """
        return self.draw(rollout, draws=self.config.denoise_steps + 1)

    def sample(self, noise: Tensor, prompts: Tensor) -> dict[str, Tensor]:
        """Draw a micro-batch; see :meth:`generate` for what is kept."""
        sample = noise[:, 0]
        latents, velocities, log_probs = [sample], [], []
        for index, (sigma, step) in enumerate(self.config.steps()):
            velocity = self.model(sample, torch.full((len(sample),), sigma, device=self.device), prompts)
            mean = step.mean(sample, velocity)
            sample = mean + step.std * noise[:, index + 1]
            latents.append(sample)
            velocities.append(velocity)
            log_probs.append(step.log_prob(sample, mean))
        kept = {"latents": latents, "velocities": velocities, "log_probs": log_probs}
        return {name: torch.stack(parts, dim=1) for name, parts in kept.items()}

    def images(self, batch: Batch) -> Tensor:
        """Return the last latents."""
        return batch["latents"][:, -1]

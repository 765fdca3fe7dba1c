"""Flow-GRPO on handwritten digits: the policy, the train actor and the rollout engine of that recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from diffusers.models.attention import JointTransformerBlock
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from torch import Tensor, nn

from e2e_registry.recipes import digits
from e2e_registry.recipes.actor import ActorContext
from e2e_registry.recipes.algorithms import clipped_policy_loss, group_advantages
from e2e_registry.recipes.flow_grpo_config import FlowGrpoConfig
from e2e_registry.recipes.flow_matching import training_pair
from e2e_registry.recipes.rewards import read_probability, reward_statistics, train_reader
from e2e_registry.recipes.rollout_engine import RolloutEngine
from e2e_registry.recipes.train_actor import TrainActor

Batch = Mapping[str, Tensor]


class DigitsPolicy(nn.Module):
    """Stable Diffusion 3's transformer in small (about 200,000 weights), prompted with a digit instead of a text."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.prompt_embedding = nn.Embedding(digits.CLASSES, width)
        self.transformer = SD3Transformer2DModel(
            sample_size=digits.SIDE,
            patch_size=2,
            in_channels=1,
            out_channels=1,
            num_layers=layers,
            attention_head_dim=width // heads,
            num_attention_heads=heads,
            joint_attention_dim=width,
            caption_projection_dim=width,
            pooled_projection_dim=width,
            pos_embed_max_size=digits.SIDE // 2,
        )
        for module in self.transformer.modules():
            if isinstance(module, Attention):
                for linear in (module.to_out[0], module.to_add_out):
                    if isinstance(linear, nn.Linear):  # the last block has no output for the prompt
                        linear.register_forward_pre_hook(_contiguous)

    def forward(self, images: Tensor, sigma: Tensor, prompted: Tensor) -> Tensor:
        """Return the velocity, float32 of the shape of ``images``.

        Args:
            images: Noisy, shape ``(batch, 1, 8, 8)``.
            sigma: Shape ``(batch,)``, from 0 to 1.
            prompted: Digits, int64 of shape ``(batch,)``.
        """
        embedded = self.prompt_embedding(prompted)
        (velocity,) = self.transformer(
            hidden_states=images.to(embedded.dtype),
            encoder_hidden_states=embedded.unsqueeze(1),
            pooled_projections=embedded,
            timestep=sigma * 1000.0,
            return_dict=False,
        )
        return velocity.float()  # type: ignore[no-any-return]


def _contiguous(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Make the parts that joint attention splits its output into contiguous before their projections.

    Over an input that is not, torch's ``linear`` multiplies as one matrix if a gradient is wanted and as a batch of
    matrices if none is; the two round differently, so that trainer and engine would disagree by 1e-7.
    """
    return tuple(tensor.contiguous() for tensor in inputs)


class FlowGrpoTrainer(TrainActor):
    """One of the train ranks."""

    def __init__(self, context: ActorContext, config: FlowGrpoConfig, *, lr: float, max_grad_norm: float) -> None:
        super().__init__(context, DigitsPolicy, shard=(JointTransformerBlock,), lr=lr, max_grad_norm=max_grad_norm)
        self.config = config

    def warm_up(self, steps: int, batch_size: int, lr: float) -> None:
        """Train by flow matching on real digits, so that the policy draws something that rewards can tell apart.

        Args:
            steps: Optimizer steps.
            batch_size: Images a step, over all ranks.
            lr: Learning rate of this phase alone.
        """
        images, labels = digits.load()
        generator = self.config.generator("warm-up")
        part = self.share(batch_size)
        with self.warming_up(lr):
            for step in range(steps):
                rows = torch.randint(digits.TRAINING_IMAGES, (batch_size,), generator=generator)
                noise = torch.randn(images[rows].shape, generator=generator)
                sigma = torch.rand(batch_size, generator=generator)
                self.recorder.log_digest("data/warm_up", {"rows": rows, "noise": noise, "sigma": sigma}, step=step)
                noisy, velocity = training_pair(images[rows], noise, sigma)
                inputs = (tensor[part].to(self.device) for tensor in (noisy, sigma, labels[rows]))
                loss = (self.model(*inputs) - velocity[part].to(self.device)).square().mean()
                mean_loss, grad_norm = self.update([loss], count=1)
                self.recorder.log({"train/warm_up_loss": mean_loss, "train/warm_up_grad_norm": grad_norm}, step=step)

    def train_on(self, rollout: int, updates: int, clip_range: float, batch: Batch) -> dict[str, float]:
        """Take ``updates`` optimizer steps on one rollout, each over all transitions of all samples.

        Returns:
            Loss and gradient norm of the last of them.
        """
        advantages = group_advantages(batch["rewards"], self.config.group_size)
        self.recorder.log_digest("train/advantages", advantages, step=rollout)
        part = self.share(self.config.samples)
        own = {name: tensor[part].to(self.device) for name, tensor in batch.items()}
        own["advantages"] = advantages[part].to(self.device)
        micro_batches = -(-len(own["rewards"]) // self.config.micro_batch_size)
        loss, grad_norm = 0.0, 0.0
        for update in range(updates):
            seen = _Transitions()
            losses = self._losses(own, clip_range, seen)
            step = self.steps_done
            loss, grad_norm = self.update(losses, count=micro_batches * self.config.denoise_steps)
            if update == 0:  # the trainer still had the engine's weights
                self.recorder.log(seen.agreement(own), step=step)
            norms = {"train/grad_norm": grad_norm, **self.grad_norm_metrics}
            self.recorder.log({**seen.movement(own), "train/loss": loss, **norms}, step=step)
        return {"loss": loss, "grad_norm": grad_norm}

    def _losses(self, own: Batch, clip_range: float, seen: _Transitions) -> Iterator[Tensor]:
        """Yield the loss of each micro-batch at each transition."""
        size = self.config.micro_batch_size
        for start in range(0, len(own["rewards"]), size):
            rows = slice(start, start + size)
            for index, (sigma, step) in enumerate(self.config.steps()):
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


class FlowGrpoEngine(RolloutEngine):
    """Draws groups of digits for prompts, and rewards them."""

    def __init__(self, context: ActorContext, config: FlowGrpoConfig) -> None:
        super().__init__(context, DigitsPolicy, precision=config.precision)
        self.config = config
        self.mean_reward = 0.0
        self.reader, accuracy = train_reader(config.seed)
        self.recorder.log_digest("rollout/reward_model", self.reader.state_dict(), step=0)
        self.recorder.log({"rollout/reward_model_accuracy": accuracy}, step=0)

    @torch.no_grad()
    def generate(self, rollout: int) -> dict[str, Tensor]:
        """Return one rollout of ``n`` samples with ``t`` transitions, on the CPU.

        Returns:
            ``prompts`` (n,), ``latents`` (n, t + 1, 1, 8, 8) from noise to image, ``velocities`` (n, t, 1, 8, 8),
            ``log_probs`` (n, t), ``rewards`` (n,); the samples of a prompt are neighbours.
        """
        config = self.config
        generator = config.generator(f"rollout {rollout}")
        digit = torch.randint(digits.CLASSES, (config.prompts,), generator=generator)
        prompts = digit.repeat_interleave(config.group_size)
        # All noise of the rollout at once: what a sample gets does not depend on how samples are batched.
        noise = torch.randn(config.samples, config.denoise_steps + 1, 1, digits.SIDE, digits.SIDE, generator=generator)
        size = config.micro_batch_size
        chunks = [self._sample(noise[i : i + size], prompts[i : i + size]) for i in range(0, config.samples, size)]
        batch = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
        batch["rewards"] = read_probability(self.reader, batch["latents"][:, -1], prompts)
        self._log(rollout, batch)
        self.mean_reward = batch["rewards"].mean().item()
        return batch

    def last_mean_reward(self) -> float:
        """Return the mean reward of the last rollout, for people."""
        return self.mean_reward

    def _sample(self, noise: Tensor, prompts: Tensor) -> dict[str, Tensor]:
        sample = noise[:, 0].to(self.device)
        on_device = prompts.to(self.device)
        latents, velocities, log_probs = [sample], [], []
        for index, (sigma, step) in enumerate(self.config.steps()):
            velocity = self.model(sample, torch.full((len(sample),), sigma, device=self.device), on_device)
            mean = step.mean(sample, velocity)
            sample = mean + step.std * noise[:, index + 1].to(self.device)
            latents.append(sample)
            velocities.append(velocity)
            log_probs.append(step.log_prob(sample, mean))
        stacked = {"latents": latents, "velocities": velocities, "log_probs": log_probs}
        return {"prompts": prompts, **{name: torch.stack(parts, dim=1).cpu() for name, parts in stacked.items()}}

    def _log(self, rollout: int, batch: Batch) -> None:
        self.recorder.log_digest("rollout/prompts", batch["prompts"], step=rollout)
        self.recorder.log_digest("rollout/samples", batch["latents"][:, -1], step=rollout)
        self.recorder.log_digest("rollout/rewards", batch["rewards"], step=rollout)
        self.recorder.log(reward_statistics(batch["rewards"]), step=rollout)

"""The policy that draws handwritten digits, and what every recipe that improves it has in common.

A trainer that is warmed up on real digits, and an engine that draws groups of digits for prompts and rewards them; a
recipe adds its objective to the one and its sampler to the other.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from diffusers.models.attention import JointTransformerBlock
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from torch import Tensor, nn

from e2e_registry.recipes import digits
from e2e_registry.recipes.actor import ActorContext
from e2e_registry.recipes.digits_config import DigitsConfig
from e2e_registry.recipes.dtype_policy import DtypeOverride, DtypePolicy
from e2e_registry.recipes.flow_matching import training_pair
from e2e_registry.recipes.rewards import read_probability, reward_statistics, train_reader
from e2e_registry.recipes.rollout_engine import RolloutEngine
from e2e_registry.recipes.train_actor import TrainActor

Batch = Mapping[str, Tensor]

#: What FSDP2 shards one by one.
UNITS = (JointTransformerBlock,)


class DigitsPolicy(nn.Module):
    """Stable Diffusion 3's transformer in small (287,492 weights), prompted with a digit instead of a text."""

    #: Of one image: channels, height, width.
    SHAPE = (1, digits.SIDE, digits.SIDE)

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


class DigitsTrainer(TrainActor):
    """A train rank; a subclass has the objective."""

    def __init__(
        self, context: ActorContext, config: DigitsConfig, *, lr: float, max_grad_norm: float, dtypes: DtypePolicy
    ) -> None:
        super().__init__(context, DigitsPolicy, shard=UNITS, lr=lr, max_grad_norm=max_grad_norm, dtypes=dtypes)
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
                mean_loss, grad_norm = self.update([loss])
                self.recorder.log({"train/warm_up_loss": mean_loss, "train/warm_up_grad_norm": grad_norm}, step=step)


class DigitsEngine(RolloutEngine):
    """Draws groups of digits for prompts, and rewards them; a subclass has the sampler."""

    def __init__(self, context: ActorContext, config: DigitsConfig, *, overrides: tuple[DtypeOverride, ...]) -> None:
        super().__init__(context, DigitsPolicy, precision=config.precision, overrides=overrides)
        self.config = config
        self.reader, accuracy = train_reader(config.seed, self.device)
        self.recorder.log_digest("rollout/reward_model", self.reader.state_dict(), step=0)
        self.recorder.log({"rollout/reward_model_accuracy": accuracy}, step=0)

    @torch.no_grad()
    def draw(self, rollout: int, *, draws: int) -> dict[str, Tensor]:
        """Return one rollout of ``n`` samples on the CPU: prompts, rewards, and what the sampler keeps.

        Args:
            rollout: Its number.
            draws: Images of noise that the sampler takes for each sample.

        Returns:
            ``prompts`` (n,), ``rewards`` (n,) and what :meth:`sample` returned; the samples of a prompt are
            neighbours.
        """
        config = self.config
        generator = config.generator(f"rollout {rollout}")
        digit = torch.randint(digits.CLASSES, (config.prompts,), generator=generator)
        prompts = digit.repeat_interleave(config.group_size)
        # All noise of the rollout at once: what a sample gets does not depend on how samples are batched.
        noise = torch.randn(config.samples, draws, *DigitsPolicy.SHAPE, generator=generator)
        kept = [
            self.sample(noise[rows].to(self.device), prompts[rows].to(self.device)) for rows in config.forward_passes
        ]
        batch = {name: torch.cat([chunk[name] for chunk in kept]).cpu() for name in kept[0]}
        images = self.images(batch)
        rewards = read_probability(self.reader, images.to(self.device), prompts.to(self.device)).cpu()
        batch |= {"prompts": prompts, "rewards": rewards}
        self.recorder.log_digest("rollout/prompts", prompts, step=rollout)
        self.recorder.log_digest("rollout/samples", images, step=rollout)
        self.recorder.log_digest("rollout/rewards", batch["rewards"], step=rollout)
        self.recorder.log(reward_statistics(batch["rewards"]), step=rollout)
        return batch

    def sample(self, noise: Tensor, prompts: Tensor) -> dict[str, Tensor]:
        """Draw a micro-batch.

        Args:
            noise: Shape ``(n, draws, 1, 8, 8)``.
            prompts: Digits, int64 of shape ``(n,)``.

        Returns:
            What the trainer needs, each of shape ``(n, ...)``.
        """
        raise NotImplementedError

    def images(self, batch: Batch) -> Tensor:
        """Return the images in what :meth:`sample` returned, shape ``(n, 1, 8, 8)``."""
        raise NotImplementedError

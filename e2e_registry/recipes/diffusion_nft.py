"""DiffusionNFT on handwritten digits: the train actor and the rollout engine of that recipe."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from e2e_registry.recipes.actor import ActorContext
from e2e_registry.recipes.diffusion_nft_config import DiffusionNftConfig
from e2e_registry.recipes.digits_policy import UNITS, Batch, DigitsEngine, DigitsPolicy, DigitsTrainer
from e2e_registry.recipes.dtype_policy import DtypePolicy, Precision
from e2e_registry.recipes.flow_matching import noise_schedule, training_pair
from e2e_registry.recipes.gradients import local_part
from e2e_registry.recipes.nft_objective import nft_loss, optimality_probability


class DiffusionNftTrainer(DigitsTrainer):
    """One of the train ranks: the policy that is trained, and the old one, which the engine samples from."""

    config: DiffusionNftConfig

    def __init__(
        self, context: ActorContext, config: DiffusionNftConfig, *, lr: float, max_grad_norm: float, dtypes: DtypePolicy
    ) -> None:
        super().__init__(context, config, lr=lr, max_grad_norm=max_grad_norm, dtypes=dtypes)
        self.old = self.sharded(DigitsPolicy, UNITS).requires_grad_(False)
        self.exported = self.old
        self.rollouts_done = 0
        self._rollouts_at_sync: dict[int, int] = {}
        self.follow(decay=0.0)

    @torch.no_grad()
    def follow(self, *, decay: float) -> None:
        """Move the old policy: ``decay`` times what it is, the rest the policy that is trained."""
        # Without a backward pass nothing frees the weights that FSDP2 gathered for the root's last forward pass.
        if isinstance(self.old, FSDPModule):
            self.old.reshard()
        for old, new in zip(self.old.parameters(), self.model.parameters(), strict=True):
            local_part(old).mul_(decay).add_(local_part(new), alpha=1.0 - decay)

    def warm_up(self, steps: int, batch_size: int, lr: float) -> None:
        """Train on real digits, and let the old policy begin there too."""
        super().warm_up(steps, batch_size, lr)
        self.follow(decay=0.0)

    def export_weights(self, step: int, precision: Precision) -> tuple[str, list[Any]]:
        """Export the old policy, and note how much it had been trained by then."""
        self._rollouts_at_sync[step] = self.rollouts_done
        return super().export_weights(step, precision)

    def log_parameters(self) -> None:
        """Log the digest of the policy that was trained, and that of the old one."""
        super().log_parameters()
        self.recorder.log_digest("model/old_parameters", self.weights(self.old), step=self.steps_done - 1)

    def train_on(self, rollout: int, updates: int, batch: Batch) -> dict[str, float]:
        """Take ``updates`` optimizer steps on one rollout, each with noise of its own, then move the old policy.

        Returns:
            The rollout's mean reward, and loss and gradient norm of the last update.
        """
        config = self.config
        optimality = optimality_probability(batch["rewards"], config.group_size, config.advantage_clip)
        self.recorder.log_digest("train/optimality", optimality, step=rollout)
        part = self.share(config.samples)
        own = {name: batch[name][part].to(self.device) for name in ("prompts", "images", "noise", "velocities")}
        own["optimality"] = optimality[part].to(self.device)
        lag = self.rollouts_done - self._rollouts_at_sync[int(batch["synced_at"])]
        agreement = {"train/rollout_lag": lag, "train/model_output_mean_abs_diff": self._engine_difference(own)}
        self.recorder.log(agreement, step=rollout)
        loss, grad_norm = 0.0, 0.0
        for update in range(updates):
            seen = _Samples()
            step = self.steps_done
            losses = self._losses(own | self._forward_process(rollout, update, part), seen)
            loss, grad_norm = self.update(losses, weights=config.sample_shares)
            norms = {"train/grad_norm": grad_norm, **self.grad_norm_metrics, **self.scaling_metrics}
            self.recorder.log({**seen.means(), "train/nft_loss": loss, **norms}, step=step)
        decay = config.decay(self.rollouts_done)
        self.follow(decay=decay)
        self.recorder.log({"train/old_policy_decay": decay}, step=rollout)
        self.rollouts_done += 1
        return {"reward": batch["rewards"].mean().item(), "loss": loss, "grad_norm": grad_norm}

    @torch.no_grad()
    def _engine_difference(self, own: Batch) -> Tensor:
        """Return the mean absolute difference between the old policy here and the engine's, where sampling began."""
        differences = []
        for rows in self.config.micro_batches:
            sigma = torch.ones(len(own["prompts"][rows]), device=self.device)
            velocity = self.old(own["noise"][rows], sigma, own["prompts"][rows])
            differences.append((velocity - own["velocities"][rows]).abs())
        return torch.cat(differences).mean()

    def _forward_process(self, rollout: int, update: int, part: slice) -> dict[str, Tensor]:
        """Return this rank's share of the noise and the noise levels of an update: all ranks draw all of it."""
        generator = self.config.generator(f"forward process {rollout} {update}")
        fresh_noise = torch.randn(self.config.samples, *DigitsPolicy.SHAPE, generator=generator)
        sigma = torch.rand(self.config.samples, generator=generator)
        return {"fresh_noise": fresh_noise[part].to(self.device), "sigma": sigma[part].to(self.device)}

    def _losses(self, own: Batch, seen: _Samples) -> Iterator[Tensor]:
        """Yield the loss of each micro-batch."""
        for rows in self.config.micro_batches:
            data, sigma, prompts = own["images"][rows], own["sigma"][rows], own["prompts"][rows]
            optimality = own["optimality"][rows]
            noisy, _ = training_pair(data, own["fresh_noise"][rows], sigma)
            with torch.no_grad():
                old = self.old(noisy, sigma, prompts)
            velocity = self.model(noisy, sigma, prompts)
            objective = nft_loss(velocity, old, noisy, data, sigma, optimality, self.config.beta)
            seen.add(
                positive_loss=objective.positive,
                negative_loss=objective.negative,
                r_mean=optimality,
                t_mean=sigma,
                old_policy_deviation=(velocity.detach() - old).square().flatten(1).mean(dim=1),
            )
            yield objective.loss


class _Samples:
    """What one update saw of each sample of a rank."""

    def __init__(self) -> None:
        self._seen: dict[str, list[Tensor]] = {}

    def add(self, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            self._seen.setdefault(name, []).append(tensor)

    def means(self) -> dict[str, Tensor]:
        return {f"train/{name}": torch.cat(parts).mean() for name, parts in self._seen.items()}


class DiffusionNftEngine(DigitsEngine):
    """Draws by the ODE, from the old policy."""

    config: DiffusionNftConfig

    def generate(self, rollout: int) -> dict[str, Tensor]:
        """Return one rollout of ``n`` samples, on the CPU.

        Returns:
            ``prompts`` (n,), ``rewards`` (n,), ``images`` (n, 1, 8, 8), the ``noise`` they began as and the model's
            ``velocities`` there, both of the same shape, and ``synced_at`` (): the sync whose weights drew them.
        """
        batch = self.draw(rollout, draws=1)
        return {**batch, "synced_at": torch.tensor(self.synced_at)}

    def sample(self, noise: Tensor, prompts: Tensor) -> dict[str, Tensor]:
        """Integrate the ODE by Euler's method; see :meth:`generate` for what is kept."""
        sigmas = noise_schedule(self.config.denoise_steps)
        sample = noise[:, 0]
        velocities = []
        for sigma, following in pairwise(sigmas):
            velocities.append(self.model(sample, torch.full((len(sample),), sigma, device=self.device), prompts))
            sample = sample + (following - sigma) * velocities[-1]
        return {"images": sample, "noise": noise[:, 0], "velocities": velocities[0]}

    def images(self, batch: Batch) -> Tensor:
        """Return the samples."""
        return batch["images"]

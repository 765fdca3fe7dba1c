"""Supervised fine-tuning of the small DiT: the train actor of that recipe, which encodes, caches and trains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from e2e_registry.recipes import digits, latent_cache
from e2e_registry.recipes.actor import ActorContext
from e2e_registry.recipes.dtype_policy import DtypePolicy
from e2e_registry.recipes.flow_matching import training_pair
from e2e_registry.recipes.generators import stream_generator
from e2e_registry.recipes.small_dit.encoder import encode
from e2e_registry.recipes.small_dit.model import DiTBlock, SmallDiT
from e2e_registry.recipes.train_actor import TrainActor


class Batch(NamedTuple):
    """What one forward pass takes, and what it should give.

    Attributes:
        noisy: Latents between data and noise, shape ``(n, 4, 4, 4)``.
        sigma: Their noise levels, from 0 to 1, shape ``(n,)``.
        labels: Classes, int64 of shape ``(n,)``.
        velocity: The target, of the shape of ``noisy``.
    """

    noisy: Tensor
    sigma: Tensor
    labels: Tensor
    velocity: Tensor

    def part(self, rows: slice, device: torch.device) -> Batch:
        """Return some of the samples, on a device."""
        return Batch(*(tensor[rows].to(device) for tensor in self))


@dataclass(frozen=True)
class LatentDataset:
    """Encoded samples and their order.

    Attributes:
        latents: Shape ``(n, 4, 4, 4)``; the first ``train_images`` are trained on, the held-out ones follow
            :data:`~e2e_registry.recipes.digits.TRAINING_IMAGES`.
        labels: Int64, shape ``(n,)``.
        seed: Of order and noise.
        train_images: How many samples are trained on.
    """

    latents: Tensor
    labels: Tensor
    seed: int
    train_images: int

    def epoch(self, index: int) -> Tensor:
        """Return the sample ids of an epoch in the order in which they are trained on."""
        return torch.randperm(self.train_images, generator=self._generator(f"epoch {index}"))

    def training_batch(self, ids: Tensor, step: int) -> Batch:
        """Return the samples ``ids`` with the noise of a step: all ranks draw all of it, and then take their share.

        So the draws depend on neither the number of ranks nor what was drawn before.
        """
        generator = self._generator(f"step {step}")
        noise = torch.randn(self.latents[ids].shape, generator=generator)
        return self._batch(ids, noise, torch.rand(len(ids), generator=generator))

    def held_out_batch(self) -> Batch:
        """Return all held-out samples, each time with the same noise, at noise levels spread evenly from 0 to 1."""
        ids = torch.arange(digits.TRAINING_IMAGES, len(self.labels))
        generator = self._generator("held out")
        noise = torch.randn(self.latents[ids].shape, generator=generator)
        sigma = (torch.randperm(len(ids), generator=generator) + 0.5) / len(ids)
        return self._batch(ids, noise, sigma)

    def _batch(self, ids: Tensor, noise: Tensor, sigma: Tensor) -> Batch:
        noisy, velocity = training_pair(self.latents[ids], noise, sigma)
        return Batch(noisy, sigma, self.labels[ids], velocity)

    def _generator(self, stream: str) -> torch.Generator:
        return stream_generator(self.seed, stream)


def flow_matching_loss(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Return the mean squared error of the predicted velocity, a scalar."""
    predicted: Tensor = model(batch.noisy, batch.sigma, batch.labels)
    return (predicted - batch.velocity).square().mean()


class SftTrainer(TrainActor):
    """One of the train ranks."""

    def __init__(
        self,
        context: ActorContext,
        *,
        train_images: int,
        batch_size: int,
        lr: float,
        max_grad_norm: float,
        dtypes: DtypePolicy,
    ) -> None:
        super().__init__(context, SmallDiT, shard=(DiTBlock,), lr=lr, max_grad_norm=max_grad_norm, dtypes=dtypes)
        self.train_images = train_images
        self.batch_size = batch_size
        self.dataset: LatentDataset | None = None

    def encode(self, folder: str) -> None:
        """Encode this rank's share of all images into a shard of the cache."""
        images, labels = digits.load()
        rank, world = self.context.rank, self.context.world_size
        rows = slice(len(images) * rank // world, len(images) * (rank + 1) // world)
        latents = encode(images[rows].to(self.device)).cpu()
        latent_cache.write_shard(Path(folder), rank, {"latents": latents.numpy(), "labels": labels[rows].numpy()})

    def open_cache(self, folder: str) -> None:
        """Read the cache, and log the digest of what came out of it."""
        arrays = latent_cache.read(Path(folder))
        self.recorder.log_digest("data/cache", dict(arrays), step=0)
        latents, labels = (torch.from_numpy(np.ascontiguousarray(arrays[name])) for name in ("latents", "labels"))
        self.dataset = LatentDataset(latents, labels, self.context.spec.seed, self.train_images)

    def train_epoch(self, index: int) -> dict[str, float]:
        """Train on each full batch of an epoch, then evaluate.

        The digest of the epoch's order stands before what the order influences: whatever changes the data shows in
        ``data/*`` before it shows in ``train/*``.

        Returns:
            The mean loss of the epoch, and the loss on the held-out samples.
        """
        dataset = self._opened()
        ids = dataset.epoch(index)
        self.recorder.log_digest("data/sample_ids", ids, step=self.steps_done)
        part = self.share(self.batch_size)
        losses: list[float] = []
        full = len(ids) // self.batch_size * self.batch_size
        for chosen in ids[:full].view(-1, self.batch_size):
            step = self.steps_done
            batch = dataset.training_batch(chosen, step).part(part, self.device)
            loss, grad_norm = self.update([flow_matching_loss(self.model, batch)])
            metrics = {"train/loss": loss, "train/grad_norm": grad_norm, **self.scaling_metrics}
            if not losses:  # one step an epoch says where a gradient changed; that it changed, every step says
                metrics |= self.grad_norm_metrics
            self.recorder.log(metrics, step=step)
            losses.append(loss)
        return {"train/loss": sum(losses) / len(losses), "eval/loss": self.evaluate()}

    @torch.no_grad()
    def evaluate(self) -> float:
        """Log the loss on all held-out samples, and the digest of the weights that gave it.

        Every rank takes all of them, so that the ranks' series say whether the ranks agree.
        """
        batch = self._opened().held_out_batch().part(slice(None), self.device)
        loss = flow_matching_loss(self.model, batch)
        self.recorder.log({"eval/loss": loss}, step=self.steps_done - 1)
        self.log_parameters()
        return loss.item()

    def _opened(self) -> LatentDataset:
        if self.dataset is None:
            raise RuntimeError("open_cache comes before training")
        return self.dataset

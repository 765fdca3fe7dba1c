"""The reward of a generated digit: the probability that a classifier reads what the prompt asked for; and statistics.

In small what OCR rewards are for text in images: a frozen reader, trained on real data, that the policy cannot change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from e2e_registry.recipes import digits
from e2e_registry.recipes.generators import drawing_from, stream_generator, stream_seed


class DigitReader(nn.Module):
    """A small convolutional classifier of images of shape ``(batch, 1, 8, 8)``, values from -1 to 1."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, padding=1),
            nn.GELU(),
            nn.Conv2d(width, width, kernel_size=3, stride=2, padding=1),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(width * (digits.SIDE // 2) ** 2, digits.CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape ``(batch, 10)``."""
        return self.layers(images)  # type: ignore[no-any-return]


def train_reader(
    seed: int, device: torch.device, *, steps: int = 200, batch_size: int = 64, noise: float = 0.3
) -> tuple[DigitReader, float]:
    """Train a reader on real digits with noise added, and return it frozen, with its accuracy on held-out digits.

    Noise keeps it from judging by single pixels, which a policy would learn to exploit. Weights and data are drawn on
    the CPU, each from a generator of their own: the reward depends on no policy.

    Args:
        seed: The run's.
        device: Where the reader is trained, and stays.
        steps: Optimizer steps.
        batch_size: Images a step.
        noise: Standard deviation of the noise.
    """
    images, labels = digits.load()
    generator = stream_generator(seed, "reader")
    with drawing_from(stream_seed(seed, "reader weights")):
        reader = DigitReader().to(device)
    optimizer = torch.optim.AdamW(reader.parameters(), lr=3e-3, fused=True)
    for _ in range(steps):
        rows = torch.randint(digits.TRAINING_IMAGES, (batch_size,), generator=generator)
        noisy = images[rows] + noise * torch.randn(images[rows].shape, generator=generator)
        optimizer.zero_grad()
        loss = functional.cross_entropy(reader(noisy.to(device)), labels[rows].to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    reader.requires_grad_(False).eval()
    held_out = slice(digits.TRAINING_IMAGES, None)
    correct = int((reader(images[held_out].to(device)).argmax(dim=1).cpu() == labels[held_out]).sum())
    return reader, correct / len(labels[held_out])


@torch.no_grad()
def read_probability(reader: DigitReader, images: Tensor, prompted: Tensor) -> Tensor:
    """Return the probability of the prompted digit, float32 of shape ``(batch,)``.

    Args:
        reader: The classifier.
        images: Generated, shape ``(batch, 1, 8, 8)``, on the reader's device; values outside of -1 to 1 are clipped,
            as a viewer would.
        prompted: Digits, int64 of shape ``(batch,)``, on the same device.
    """
    probabilities = torch.softmax(reader(images.clamp(-1.0, 1.0)), dim=1)
    return probabilities.gather(1, prompted.unsqueeze(1)).squeeze(1)


def reward_statistics(rewards: Tensor) -> dict[str, Any]:
    """Return the metrics of a rollout's raw rewards, before any normalization.

    The median is torch's: of an even number of rewards the lower of the two in the middle, so always one of them.
    """
    exact = rewards.double()
    return {
        "rollout/reward/raw_mean": exact.mean(),
        "rollout/reward/raw_median": exact.median(),
        "rollout/reward/raw_std": exact.std(),
        "rollout/reward/raw_num_samples": rewards.numel(),
    }

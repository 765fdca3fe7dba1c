"""Trains the same tagger with the three faults mended."""

import argparse
import os
import random
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from e2e_registry import MetricRecorder
from e2e_registry.determinism import make_deterministic, seed_worker, worker_rng
from e2e_registry.determinism.segments import segment_sum

TOKENS, BINS, WIDTH, CLASSES = 32, 8, 16, 4


class Sequences(Dataset):
    """Token sequences with their labels; each token comes with a weight that augmentation shakes."""

    def __init__(self, size: int) -> None:
        rng = np.random.default_rng(7)
        self.tokens = rng.integers(TOKENS, size=(size, 6))
        self.labels = self.tokens.sum(axis=1) % CLASSES

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, at: int):
        weights = 1 + 0.1 * worker_rng().standard_normal(6, dtype=np.float32)
        return self.tokens[at], weights, self.labels[at]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.head = nn.Linear(BINS * WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(tokens) * weights.unsqueeze(-1)
        batch = torch.arange(len(tokens)).unsqueeze(1) * BINS
        bins = (batch + tokens % BINS).flatten()
        pooled = segment_sum(embedded.flatten(0, 1), bins, len(tokens) * BINS)
        return self.head(pooled.view(len(tokens), -1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    generator = make_deterministic(args.seed)
    loader = DataLoader(
        Sequences(8 * args.steps),
        batch_size=8,
        shuffle=True,
        num_workers=2,
        worker_init_fn=seed_worker,
        generator=generator,
    )
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with MetricRecorder() as recorder:
        for step, (tokens, weights, labels) in enumerate(loader):
            recorder.log_digest("data/batch", [tokens, weights], step=step)
            loss = nn.functional.cross_entropy(model(tokens, weights), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.log({"train/loss": loss.detach()}, step=step)
    folder = Path(os.environ["E2E_REGISTRY_RUN_DIR"]) / "checkpoints"
    folder.mkdir()
    rng = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng}
    torch.save(state, folder / f"step_{args.steps}.pt")


if __name__ == "__main__":
    main()

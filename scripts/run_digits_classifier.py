"""Trains a small attention network on scikit-learn's handwritten digits: 200 steps, seconds on one CPU thread.

The smallest recipe that holds what real training code gets wrong: worker processes that augment with NumPy, a
shuffled sampler, an embedding, attention, gradient clipping, an optimizer with state and a learning-rate schedule,
and evaluation. It runs alone, with no arguments; under the registry its metrics become series.

Every operation is one whose bits the profile ``cpu-portable`` makes equal on all x86-64 CPUs. That rules out torch's
``sqrt`` and with it every AdamW but the fused one, and normal deviates inside the workers
(``docs/determinism.md`` has the list).

Data: ``sklearn.datasets.load_digits``, 1,797 images of 8 x 8 pixels with 17 grey levels, bundled with the package.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, RandomSampler

from e2e_registry import MetricRecorder
from e2e_registry.determinism import make_deterministic, seed_everything, seed_worker, worker_rng
from e2e_registry.recipes.gradients import gradient_norms

CLASSES = 10
SIDE = 8
GREY_LEVELS = 16
# The last fifth is held out in file order: neighbouring images share a writer, so a shuffled split would evaluate
# on handwriting that was trained on.
TRAINING_IMAGES = 1437
SHIFTS = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0))
NOISE = 0.1
WARMUP_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class ScriptArgs:
    """The options of the command line."""

    deterministic_mode: Annotated[
        bool,
        typer.Option("--deterministic-mode", help="Apply the strict determinism switches before the model is built."),
    ] = False
    seed: Annotated[int, typer.Option(min=0, help="Of the weights, the order of samples and the augmentation.")] = 0
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 200
    batch_size: Annotated[int, typer.Option(min=1, help="Images a step.")] = 128
    lr: Annotated[float, typer.Option(min=0.0, help="Peak learning rate of AdamW.")] = 0.003
    max_grad_norm: Annotated[float, typer.Option(min=0.0, help="Gradients are clipped to this norm.")] = 1.0
    num_workers: Annotated[
        int,
        typer.Option(min=0, help="Loader processes; each augments with its own generator, so the number changes data."),
    ] = 2
    eval_every: Annotated[int, typer.Option(min=1, help="Steps between evaluations.")] = 50
    digest_every: Annotated[int, typer.Option(min=1, help="Steps that one digest of the data covers.")] = 10
    device: Annotated[str, typer.Option(help="Where the model lives: cpu, cuda, cuda:1.")] = "cpu"
    checkpoint: Annotated[
        Path | None, typer.Option(help="Where model and optimizer are saved after the last step; nowhere by default.")
    ] = None


class Digits(NamedTuple):
    """One split.

    Attributes:
        images: float32, shape ``(n, 8, 8)``, grey levels from 0 to 1 in sixteenths.
        labels: int64, shape ``(n,)``.
    """

    images: NDArray[np.float32]
    labels: NDArray[np.int64]


def load_splits() -> tuple[Digits, Digits]:
    """Return the training and the evaluation split."""
    bunch = load_digits()
    images = (bunch.images / GREY_LEVELS).astype(np.float32)
    labels = bunch.target.astype(np.int64)
    cut = TRAINING_IMAGES
    return Digits(images[:cut], labels[:cut]), Digits(images[cut:], labels[cut:])


class AugmentedDigits(Dataset[tuple[int, NDArray[np.float32], int]]):
    """A split whose images are shifted and made noisy afresh each time they are drawn.

    The draws come from the loader process's own generator: one made here would be copied into every worker as it
    stands, and all of them would draw the same noise.
    """

    def __init__(self, digits: Digits) -> None:
        self.digits = digits

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.digits.labels)

    def __getitem__(self, sample_id: int) -> tuple[int, NDArray[np.float32], int]:
        """Return the row in the split, its augmented image of shape ``(1, 8, 8)``, and its label."""
        image = augment(self.digits.images[sample_id], worker_rng())
        return sample_id, image[np.newaxis], int(self.digits.labels[sample_id])


def augment(image: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
    """Return an image of shape ``(8, 8)`` shifted by at most one pixel, with uniform noise up to :data:`NOISE`.

    Uniform, because ``Generator.random`` scales an integer by a power of two, which is exact on every CPU; the tails
    of ``standard_normal`` go through the C library's ``exp`` and ``log1p``.
    """
    down, right = SHIFTS[rng.integers(len(SHIFTS))]
    shifted = np.pad(image, 1)[1 + down : 1 + down + SIDE, 1 + right : 1 + right + SIDE]
    noise = rng.random(shifted.shape, dtype=np.float32) - np.float32(0.5)
    return shifted + noise * np.float32(2 * NOISE)


def make_loader(args: ScriptArgs, digits: Digits, generator: torch.Generator) -> DataLoader[Any]:
    """Return a loader of exactly ``args.steps`` batches ``(sample_ids, images, labels)``.

    One epoch spans the run: the sampler shuffles again whenever it has gone through the split, and the workers live
    as long as the run does.
    """
    dataset = AugmentedDigits(digits)
    return DataLoader(
        dataset,
        batch_size=args.batch_size,
        sampler=RandomSampler(dataset, num_samples=args.steps * args.batch_size, generator=generator),
        num_workers=args.num_workers,
        worker_init_fn=seed_worker,
        generator=generator,
    )


class AttentionBlock(nn.Module):
    """Pre-norm self-attention, then a pre-norm MLP, over tokens of shape ``(batch, tokens, width)``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return tokens of the same shape."""
        batch, count, width = tokens.shape
        qkv = self.qkv(self.attention_norm(tokens)).view(batch, count, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        tokens = tokens + self.projection(mixed.transpose(1, 2).reshape(batch, count, width))
        return tokens + self.mlp(tokens)  # type: ignore[no-any-return]


class DigitsClassifier(nn.Module):
    """Two convolutions to a 4 x 4 grid of tokens, a learned position embedding, one attention block, a linear head."""

    def __init__(self, width: int = 48, heads: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width // 2, kernel_size=3, padding=1),
            nn.GELU(),
            nn.Conv2d(width // 2, width, kernel_size=3, stride=2, padding=1),
        )
        tokens = (SIDE // 2) ** 2
        self.register_buffer("positions", torch.arange(tokens), persistent=False)
        self.position_embedding = nn.Embedding(tokens, width)
        nn.init.normal_(self.position_embedding.weight, std=0.02)
        self.block = AttentionBlock(width, heads)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(tokens * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape ``(batch, 10)`` for images of shape ``(batch, 1, 8, 8)``."""
        tokens = self.stem(images).flatten(2).transpose(1, 2) + self.position_embedding(self.positions)
        return self.head(self.norm(self.block(tokens)).flatten(1))  # type: ignore[no-any-return]


class Trainer:
    """The model, what updates it, and what is logged about it."""

    def __init__(self, args: ScriptArgs, recorder: MetricRecorder) -> None:
        self.args = args
        self.recorder = recorder
        self.device = torch.device(args.device)
        # Before anything draws a number or starts the device: neither seeds nor switches reach back.
        generator = make_deterministic(args.seed) if args.deterministic_mode else seed_without_switches(args.seed)
        training, self.evaluation = load_splits()
        self.loader = make_loader(args, training, generator)
        self.model = DigitsClassifier().to(self.device)
        # Unfused, AdamW takes torch's vectorised sqrt, whose low bits differ between CPU vendors.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.lr_factor)

    def lr_factor(self, step: int) -> float:
        """Return the share of the peak learning rate: a linear warm-up, then a linear decay to zero."""
        return min((step + 1) / WARMUP_STEPS, 1 - step / self.args.steps)

    def train(self) -> None:
        """Train for ``args.steps`` steps and log each of them.

        Batches are drawn a block ahead of training, and their digests logged at the block's first step: so few digests
        miss no batch, and whatever changes the data shows in ``data/*`` before it shows in ``train/*``.
        """
        batches = enumerate(self.loader)
        while block := list(itertools.islice(batches, self.args.digest_every)):
            self.log_data(block)
            for step, (_, images, labels) in block:
                loss = self.train_step(step, images.to(self.device), labels.to(self.device))
                done = step + 1
                if done % self.args.eval_every == 0 or done == self.args.steps:
                    print(f"step {done}/{self.args.steps}  train/loss {loss:.4f}  {self.evaluate(step)}", flush=True)
        self.recorder.log_digest("model/parameters", self.model.state_dict(), step=self.args.steps - 1)
        if self.args.checkpoint is not None:
            self.args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, self.args.checkpoint)

    def log_data(self, block: list[tuple[int, Sequence[Tensor]]]) -> None:
        """Log which samples a block of batches holds, and what augmentation made of them."""
        first_step = block[0][0]
        sample_ids, images, _ = zip(*(batch for _, batch in block), strict=True)
        self.recorder.log_digest("data/sample_ids", torch.cat(sample_ids), step=first_step)
        self.recorder.log_digest("data/batch", torch.cat(images), step=first_step)

    def train_step(self, step: int, images: Tensor, labels: Tensor) -> float:
        """Take one optimizer step on images of shape ``(batch, 1, 8, 8)``; return the loss."""
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        norms = gradient_norms(self.model) if step % self.args.digest_every == 0 else {}
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
        self.optimizer.step()
        self.schedule.step()
        of_groups = {f"train/grad_norm/{group}": norm for group, norm in norms.items()}
        self.recorder.log({"train/loss": loss.detach(), "train/grad_norm": grad_norm, **of_groups}, step=step)
        return loss.item()

    @torch.no_grad()
    def evaluate(self, step: int) -> str:
        """Log the mean loss and the accuracy on the whole evaluation split; return them as a line for people."""
        images = torch.from_numpy(self.evaluation.images).unsqueeze(1).to(self.device)
        labels = torch.from_numpy(self.evaluation.labels).to(self.device)
        logits = self.model(images)
        loss = functional.cross_entropy(logits, labels)
        accuracy = int((logits.argmax(dim=1) == labels).sum()) / len(labels)
        self.recorder.log({"eval/loss": loss, "eval/accuracy": accuracy}, step=step)
        return f"eval/loss {loss.item():.4f}  eval/accuracy {accuracy:.4f}"


def seed_without_switches(seed: int) -> torch.Generator:
    """Seed the process, and return a generator for the sample order, as ``make_deterministic`` does."""
    seed_everything(seed)
    return torch.Generator().manual_seed(seed)


def main(**options: Any) -> None:
    """Train a small attention network on handwritten digits."""
    with MetricRecorder() as recorder:
        Trainer(ScriptArgs(**options), recorder).train()


def command_line() -> typer.Typer:
    """Return the command line: :func:`main` with an option for each field of :class:`ScriptArgs`."""
    hints = get_type_hints(ScriptArgs, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(ScriptArgs)
    ]
    main.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    main.__annotations__ = {}
    app = typer.Typer(add_completion=False)
    app.command()(main)
    return app


if __name__ == "__main__":
    command_line()()

"""Supervised fine-tuning on scikit-learn's handwritten digits: encode, cache, train; two FSDP train ranks on Ray.

A small instance of how teams fine-tune latent diffusion models on GPUs: images are encoded once into a cache of latents
on disk, and a class-conditional flow-matching transformer trains from the cache. The transformer is a native model
package, ``e2e_registry.recipes.small_dit``, whose attention kernel torch's strict mode does not reach; the kernel is
registered with the toolkit, forced to be deterministic, and checked when each actor starts. It runs alone, with no
arguments; under the registry its metrics become series. ``docs/recipes.md`` says what is measured, and what it shows.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from e2e_registry.errors import UsageError
from e2e_registry.recipes import latent_cache
from e2e_registry.recipes.actor_group import ActorGroup, AttentionOptions, GroupSpec, launch
from e2e_registry.recipes.command_line import ActorArgs, TrainDtypeArgs, command_line
from e2e_registry.recipes.small_dit import ATTENTION_KERNELS
from e2e_registry.recording.layout import RUN_DIR_VARIABLE


@dataclass(frozen=True, kw_only=True)
class ScriptArgs(ActorArgs, TrainDtypeArgs):
    """The options of the command line."""

    seed: Annotated[int, typer.Option(min=0, help="Of weights, the order of samples, and noise.")] = 0
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 4
    train_images: Annotated[
        int, typer.Option(min=1, max=1437, help="Images to train on, from the first; 360 others are held out.")
    ] = 1437
    batch_size: Annotated[int, typer.Option(min=1, help="Images a step, over all ranks.")] = 64
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate of AdamW.")] = 2e-3
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the latents, on a disk that all actors share; one that is whole is used as it is. "
            "Default: in the run's folder."
        ),
    ] = None
    fsdp_attention_backend: Annotated[
        str | None, typer.Option(help="A backend of diffusers, instead of the model package's own kernel.")
    ] = None


def train_spec(args: ScriptArgs) -> GroupSpec:
    """Return the train group.

    Raises:
        UsageError: The options contradict each other.
    """
    if args.batch_size % args.train_ranks:
        raise UsageError(f"{args.batch_size} images do not divide by {args.train_ranks} ranks", where="--batch-size")
    if args.batch_size > args.train_images:
        raise UsageError(f"{args.train_images} images fill no batch of {args.batch_size}", where="--train-images")
    return GroupSpec(
        role="train",
        actor="e2e_registry.recipes.sft:SftTrainer",
        kwargs={
            "train_images": args.train_images,
            "batch_size": args.batch_size,
            "lr": args.lr,
            "max_grad_norm": args.max_grad_norm,
            "dtypes": args.dtypes(),
        },
        world_size=args.train_ranks,
        seed=args.seed,
        **args.of_every_group(),
        attention=AttentionOptions(
            backend=args.fsdp_attention_backend,
            # The package's own kernel needs nothing of diffusers, whose import takes seconds in every actor.
            library=None if args.fsdp_attention_backend is None else "diffusers",
            native_kernels=ATTENTION_KERNELS,
        ),
    )


@contextlib.contextmanager
def cache_folder(args: ScriptArgs) -> Iterator[Path]:
    """Yield where the latents are or will be: given, in the run's folder, or in a temporary one."""
    run_dir = os.environ.get(RUN_DIR_VARIABLE)
    if args.cache_dir is not None:
        yield args.cache_dir.absolute()
    elif run_dir:
        yield Path(run_dir).absolute() / "latents"
    else:
        with tempfile.TemporaryDirectory(prefix="latents-") as folder:
            yield Path(folder)


def run(args: ScriptArgs) -> None:
    """Train a flow-matching model of handwritten digits from a cache of latents."""
    with cache_folder(args) as folder, launch([train_spec(args)], address=args.ray_address) as (train,):
        fill_cache(train, folder)
        for epoch in range(args.epochs):
            losses = train.call("train_epoch", epoch)[0]
            shown = "  ".join(f"{name} {value:.4f}" for name, value in losses.items())
            print(f"epoch {epoch + 1}/{args.epochs}  {shown}", flush=True)


def fill_cache(train: ActorGroup, folder: Path) -> None:
    """Encode into the cache unless it is whole, then let every rank read it."""
    if latent_cache.is_complete(folder):
        print(f"using the latents of {folder}", flush=True)
    else:
        train.call("encode", str(folder))
        latent_cache.finish(folder, train.spec.world_size)
    train.call("open_cache", str(folder))


if __name__ == "__main__":
    command_line(run, ScriptArgs)()

"""DiffusionNFT on scikit-learn's handwritten digits: two FSDP train ranks and a rollout engine, on Ray.

A small instance of what teams run on GPUs: a class-conditional flow-matching model (Stable Diffusion 3's transformer,
from diffusers) is warmed up on real digits, then improved by reinforcement learning on the forward process. For each of
a few prompts a group of images is drawn from the old policy by an ODE sampler; a classifier that was trained on real
digits gives the reward. The images are noised anew, and the policy is regressed on them, towards the good ones and away
from the bad ones, against the old policy, which follows by an exponential moving average and goes to the engine. It
runs alone, with no arguments; under the registry its metrics become series. ``docs/recipes.md`` says
what is measured, and what it shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import typer

from e2e_registry.recipes.actor_group import ActorGroup, GroupSpec, launch
from e2e_registry.recipes.command_line import command_line
from e2e_registry.recipes.diffusion_nft_config import DiffusionNftConfig
from e2e_registry.recipes.digits_arguments import DigitsArgs, digits_groups
from e2e_registry.recipes.rollout_arguments import line_for_people, sync_weights


@dataclass(frozen=True, kw_only=True)
class ScriptArgs(DigitsArgs):
    """The options of the command line."""

    async_rollout: Annotated[
        bool, typer.Option("--async-rollout", help="Draw each rollout while the one before it is trained on.")
    ] = False
    updates: Annotated[int, typer.Option(min=1, help="Optimizer steps on a rollout.")] = 2
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate of the policy updates.")] = 1e-3
    beta: Annotated[float, typer.Option(help="Distance of the positive and negative policies from the old one.")] = 1.0
    advantage_clip: Annotated[
        float, typer.Option(help="Standard deviations of reward at which a sample counts as wholly good or bad.")
    ] = 1.0
    decay_growth: Annotated[
        float, typer.Option(min=0.0, help="By how much the old policy's decay grows with each rollout.")
    ] = 0.02
    decay_limit: Annotated[float, typer.Option(help="Where it stops, from 0 to 1.")] = 0.5


def group_specs(args: ScriptArgs) -> tuple[GroupSpec, GroupSpec]:
    """Return the train group and the rollout group."""
    config = DiffusionNftConfig(
        **args.shared_config(),
        beta=args.beta,
        advantage_clip=args.advantage_clip,
        decay_growth=args.decay_growth,
        decay_limit=args.decay_limit,
    )
    home = "e2e_registry.recipes.diffusion_nft"
    return digits_groups(args, config, trainer=f"{home}:DiffusionNftTrainer", engine=f"{home}:DiffusionNftEngine")


def run(args: ScriptArgs) -> None:
    """Train a flow-matching model of handwritten digits by reinforcement learning on the forward process."""
    with launch(group_specs(args), address=args.ray_address) as (train, rollout):
        train.call("warm_up", args.warm_up_steps, args.warm_up_batch_size, args.warm_up_lr)
        lines = overlapping(args, train, rollout) if args.async_rollout else in_turns(args, train, rollout)
        for index, line in enumerate(lines):
            print(f"rollout {index + 1}/{args.num_rollout}  {line}", flush=True)
        train.call("log_parameters")


def in_turns(args: ScriptArgs, train: ActorGroup, rollout: ActorGroup) -> Iterator[str]:
    """Draw each rollout from the latest weights, then train on it; yield a line for people."""
    for index in range(args.num_rollout):
        is_match = sync_weights(args, train, rollout, index)
        batch = rollout.call_kept("generate", index)
        values = train.call("train_on", index, args.updates, ref=batch)[0]
        yield line_for_people(values, is_match=is_match)


def overlapping(args: ScriptArgs, train: ActorGroup, rollout: ActorGroup) -> Iterator[str]:
    """Draw each rollout while the one before it is trained on; yield a line for people.

    Weights go to the engine between a rollout and the next, when neither side works: which weights draw which rollout
    is a matter of this order alone, whoever is faster. A rollout is drawn from weights that lack the latest training.
    """
    is_match = sync_weights(args, train, rollout, 0)
    drawing = rollout.submit_kept("generate", 0)
    for index in range(args.num_rollout):
        batch, was_match = rollout.wait_kept(drawing), is_match
        if index + 1 < args.num_rollout:
            is_match = sync_weights(args, train, rollout, index + 1)
            drawing = rollout.submit_kept("generate", index + 1)
        values = train.call("train_on", index, args.updates, ref=batch)[0]
        yield line_for_people(values, is_match=was_match)


if __name__ == "__main__":
    command_line(run, ScriptArgs)()

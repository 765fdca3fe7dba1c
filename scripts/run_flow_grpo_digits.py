"""Flow-GRPO on scikit-learn's handwritten digits: two FSDP train ranks and a rollout engine, on Ray.

A small instance of what teams run on GPUs: a class-conditional flow-matching model (Stable Diffusion 3's transformer,
from diffusers) is warmed up on real digits, then improved by reinforcement learning. For each of a few prompts a group
of images is drawn by an SDE sampler with a log-prob for each transition; a classifier that was trained on real digits
gives the reward; advantages are relative to the group; PPO's clipped objective trains the sharded policy, whose
weights go back to the engine. It runs alone, with no arguments; under the registry its metrics become
series. ``docs/recipes.md`` says what is measured, and what it shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from e2e_registry.recipes.actor_group import ActorGroup, GroupSpec, launch
from e2e_registry.recipes.command_line import command_line
from e2e_registry.recipes.digits_arguments import DigitsArgs, digits_groups
from e2e_registry.recipes.flow_grpo_config import FlowGrpoConfig
from e2e_registry.recipes.rollout_arguments import line_for_people, sync_weights


@dataclass(frozen=True, kw_only=True)
class ScriptArgs(DigitsArgs):
    """The options of the command line."""

    noise_level: Annotated[float, typer.Option(min=0.01, help="Scale of the sampler's noise.")] = 0.7
    updates: Annotated[int, typer.Option(min=1, help="Optimizer steps on a rollout.")] = 2
    clip_range: Annotated[float, typer.Option(min=0.0, help="PPO's: how far from 1 ratios count.")] = 2e-3


def group_specs(args: ScriptArgs) -> tuple[GroupSpec, GroupSpec]:
    """Return the train group and the rollout group."""
    config = FlowGrpoConfig(**args.shared_config(), noise_level=args.noise_level)
    home = "e2e_registry.recipes.flow_grpo"
    return digits_groups(args, config, trainer=f"{home}:FlowGrpoTrainer", engine=f"{home}:FlowGrpoEngine")


def run(args: ScriptArgs) -> None:
    """Train a flow-matching model of handwritten digits by reinforcement learning."""
    with launch(group_specs(args), address=args.ray_address) as (train, rollout):
        train.call("warm_up", args.warm_up_steps, args.warm_up_batch_size, args.warm_up_lr)
        for index in range(args.num_rollout):
            line = one_rollout(args, train, rollout, index)
            print(f"rollout {index + 1}/{args.num_rollout}  {line}", flush=True)
        train.call("log_parameters")


def one_rollout(args: ScriptArgs, train: ActorGroup, rollout: ActorGroup, index: int) -> str:
    """Sync weights, draw and reward samples, train on them; return a line for people."""
    is_match = sync_weights(args, train, rollout, index)
    batch = rollout.call_kept("generate", index)
    values = train.call("train_on", index, args.updates, args.clip_range, ref=batch)[0]
    return line_for_people(values, is_match=is_match)


if __name__ == "__main__":
    command_line(run, ScriptArgs)()

"""GRPO on arithmetic: a language model learns sums from a reward that checks them, on Ray.

A small instance of reinforcement learning with verifiable rewards as teams run it on GPUs: a causal language model of
transformers learns from problems with answers, then from its own responses. For each of a few prompts a group of
responses is sampled, token by token with cached keys and values; a program judges them; advantages are relative to the
group; PPO's clipped objective, with a divergence from the frozen first policy and an entropy bonus, normalized over
tokens, trains the policy over two FSDP ranks, whose weights go back to the engine. It runs with no arguments and needs
no registry; under the registry its metrics become series. ``docs/recipes.md`` says what is measured, and what it shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from e2e_registry.recipes.actor_group import ActorGroup, AttentionOptions, GroupSpec, launch
from e2e_registry.recipes.command_line import command_line
from e2e_registry.recipes.grpo_config import GrpoConfig, OldLogProbs
from e2e_registry.recipes.rollout_arguments import RolloutArgs, actor_groups, line_for_people, sync_weights


@dataclass(frozen=True, kw_only=True)
class ScriptArgs(RolloutArgs):
    """The options of the command line."""

    largest: Annotated[int, typer.Option(min=1, help="Of the numbers that are added.")] = 19
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a rollout.")] = 32
    updates: Annotated[int, typer.Option(min=1, help="Optimizer steps on a rollout.")] = 2
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate of the policy updates.")] = 5e-4
    clip_low: Annotated[float, typer.Option(min=0.0, max=1.0, help="PPO's: how far below 1 ratios count.")] = 0.2
    clip_high: Annotated[float, typer.Option(min=0.0, help="How far above 1.")] = 0.28
    kl_coefficient: Annotated[float, typer.Option(min=0.0, help="Of the divergence from the reference.")] = 0.001
    entropy_coefficient: Annotated[float, typer.Option(min=0.0, help="Of the entropy bonus.")] = 0.001
    old_log_probs: Annotated[
        OldLogProbs, typer.Option(help="Denominator of the ratio: the engine's full forward pass, or its decoding.")
    ] = "rescored"
    warm_up_steps: Annotated[int, typer.Option(min=0, help="Supervised steps before the first rollout.")] = 80
    warm_up_batch_size: Annotated[int, typer.Option(min=1, help="Samples of a supervised step.")] = 128
    attn_implementation: Annotated[
        str | None, typer.Option(help="transformers' name of an attention implementation, for trainer and engine.")
    ] = None


def group_specs(args: ScriptArgs) -> tuple[GroupSpec, GroupSpec]:
    """Return the train group and the rollout group.

    Raises:
        UsageError: The options contradict each other.
    """
    config = GrpoConfig(
        **args.shared_config(),
        largest=args.largest,
        clip_low=args.clip_low,
        clip_high=args.clip_high,
        kl_coefficient=args.kl_coefficient,
        entropy_coefficient=args.entropy_coefficient,
        old_log_probs=args.old_log_probs,
    )
    home = "e2e_registry.recipes.grpo_arithmetic"
    return actor_groups(
        args,
        config,
        trainer=f"{home}:GrpoTrainer",
        engine=f"{home}:GrpoEngine",
        attention=AttentionOptions(
            backend=args.attn_implementation, flag="--attn-implementation", library="transformers"
        ),
    )


def run(args: ScriptArgs) -> None:
    """Train a language model to add by reinforcement learning with a verifiable reward."""
    with launch(group_specs(args), address=args.ray_address) as (train, rollout):
        train.call("warm_up", args.warm_up_steps, args.warm_up_batch_size, args.warm_up_lr)
        for index in range(args.num_rollout):
            line = one_rollout(args, train, rollout, index)
            print(f"rollout {index + 1}/{args.num_rollout}  {line}", flush=True)
        train.call("log_parameters")


def one_rollout(args: ScriptArgs, train: ActorGroup, rollout: ActorGroup, index: int) -> str:
    """Sync weights, draw and judge responses, train on them; return a line for people."""
    is_match = sync_weights(args, train, rollout, index)
    batch = rollout.call_kept("generate", index)
    values = train.call("train_on", index, args.updates, ref=batch)[0]
    return line_for_people(values, is_match=is_match)


if __name__ == "__main__":
    command_line(run, ScriptArgs)()

"""GRPO on arithmetic: a language model learns sums from a reward that checks them, on Ray.

A small instance of reinforcement learning with verifiable rewards as teams run it on GPUs: a causal language model of
transformers learns from problems with answers, then from its own responses. For each of a few prompts a group of
responses is sampled, token by token with cached keys and values; a program judges them; advantages are relative to the
group; PPO's clipped objective, with a divergence from the frozen first policy and an entropy bonus, normalized over
tokens, trains the policy over two FSDP ranks, whose weights go back to the engine. It runs with no arguments and needs
no registry; under the registry its metrics become series. ``docs/recipes.md`` says what is measured, and what it shows.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import typer

from e2e_registry.errors import UsageError
from e2e_registry.recipes.actor_group import ActorGroup, AttentionOptions, GroupSpec, launch
from e2e_registry.recipes.command_line import command_line, parse_env_vars
from e2e_registry.recipes.grpo_config import GrpoConfig


@dataclass(frozen=True, kw_only=True)
class ScriptArgs:
    """The options of the command line."""

    deterministic_mode: Annotated[
        bool,
        typer.Option("--deterministic-mode", help="Pin each actor's environment, and switch to strict kernels in it."),
    ] = False
    seed: Annotated[int, typer.Option(min=0, help="Of weights, problems and sampling.")] = 0
    num_rollout: Annotated[int, typer.Option(min=1, help="Rollouts; each is trained on before the next.")] = 4
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a rollout.")] = 32
    group_size: Annotated[int, typer.Option(min=2, help="Responses to a prompt.")] = 8
    largest: Annotated[int, typer.Option(min=1, help="Of the numbers that are added.")] = 19
    micro_batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Responses of a forward pass, in engine and trainer; default: a rank's all."),
    ] = None
    updates: Annotated[int, typer.Option(min=1, help="Optimizer steps on a rollout.")] = 2
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate of the policy updates.")] = 5e-4
    clip_low: Annotated[float, typer.Option(min=0.0, max=1.0, help="PPO's: how far below 1 ratios count.")] = 0.2
    clip_high: Annotated[float, typer.Option(min=0.0, help="How far above 1.")] = 0.28
    kl_coefficient: Annotated[float, typer.Option(min=0.0, help="Of the divergence from the reference.")] = 0.001
    entropy_coefficient: Annotated[float, typer.Option(min=0.0, help="Of the entropy bonus.")] = 0.001
    old_log_probs: Annotated[
        Literal["rescored", "decoded"],
        typer.Option(help="Denominator of the ratio: the engine's full forward pass, or its decoding loop."),
    ] = "rescored"
    max_grad_norm: Annotated[float, typer.Option(min=0.0, help="Gradients are clipped to this norm.")] = 1.0
    warm_up_steps: Annotated[int, typer.Option(min=0, help="Supervised steps before the first rollout.")] = 80
    warm_up_batch_size: Annotated[int, typer.Option(min=1, help="Problems of a supervised step.")] = 128
    warm_up_lr: Annotated[float, typer.Option(min=0.0, help="Learning rate of the supervised steps.")] = 3e-3
    train_ranks: Annotated[int, typer.Option(min=1, help="FSDP ranks.")] = 2
    colocate: Annotated[
        bool, typer.Option("--colocate/--disaggregate", help="Whether the engine shares train rank 0's device.")
    ] = True
    rollout_precision: Annotated[
        Literal["fp32", "bf16", "fp16"], typer.Option(help="Of the engine; the trainer computes in fp32.")
    ] = "fp32"
    rollout_seed: Annotated[int | None, typer.Option(min=0, help="Of prompts and sampling; default: --seed.")] = None
    attn_implementation: Annotated[
        str | None, typer.Option(help="transformers' name of an attention implementation, for trainer and engine.")
    ] = None
    train_env_vars: Annotated[
        list[str], typer.Option(metavar="NAME=VALUE", help="For each actor, before the profile; may be repeated.")
    ] = field(default_factory=list)
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Of all actors.")] = "cpu"
    profile: Annotated[
        str | None, typer.Option(help="Determinism profile; default: cpu-portable or cuda, by device.")
    ] = None
    ray_address: Annotated[str, typer.Option(help="A Ray cluster; `local` starts one for this run and ends it.")] = (
        "local"
    )


def group_specs(args: ScriptArgs) -> tuple[GroupSpec, GroupSpec]:
    """Return the train group and the rollout group.

    Raises:
        UsageError: The options contradict each other.
    """
    samples = args.prompts * args.group_size
    if samples % args.train_ranks or args.warm_up_batch_size % args.train_ranks:
        raise UsageError(
            f"{samples} responses and {args.warm_up_batch_size} warm-up problems must divide by {args.train_ranks} "
            "ranks",
            where="--train-ranks",
        )
    share = samples // args.train_ranks
    micro_batch_size = args.micro_batch_size or share
    if share % micro_batch_size:
        raise UsageError(
            f"a rank's {share} responses do not divide into forward passes of {micro_batch_size}",
            where="--micro-batch-size",
            hint="equal shapes are what makes trainer and engine agree",
        )
    config = GrpoConfig(
        seed=args.seed,
        largest=args.largest,
        prompts=args.prompts,
        group_size=args.group_size,
        micro_batch_size=micro_batch_size,
        precision=args.rollout_precision,
        clip_low=args.clip_low,
        clip_high=args.clip_high,
        kl_coefficient=args.kl_coefficient,
        entropy_coefficient=args.entropy_coefficient,
        old_log_probs=args.old_log_probs,
    )
    rollout_seed = args.seed if args.rollout_seed is None else args.rollout_seed
    shared: dict[str, Any] = {
        "device": args.device,
        "profile": args.profile,
        "deterministic": args.deterministic_mode,
        "env_vars": parse_env_vars(args.train_env_vars, flag="--train-env-vars"),
        "attention": AttentionOptions(
            backend=args.attn_implementation, flag="--attn-implementation", library="transformers"
        ),
    }
    home = "e2e_registry.recipes.grpo_arithmetic"
    train = GroupSpec(
        role="train",
        actor=f"{home}:GrpoTrainer",
        kwargs={"config": config, "lr": args.lr, "max_grad_norm": args.max_grad_norm},
        world_size=args.train_ranks,
        seed=args.seed,
        **shared,
    )
    rollout = GroupSpec(
        role="rollout",
        actor=f"{home}:GrpoEngine",
        kwargs={"config": dataclasses.replace(config, seed=rollout_seed)},
        seed=rollout_seed,
        colocated_with="train" if args.colocate else None,
        **shared,
    )
    return train, rollout


def run(args: ScriptArgs) -> None:
    """Train a language model to add by reinforcement learning with a verifiable reward."""
    with launch(group_specs(args), address=args.ray_address) as (train, rollout):
        train.call("warm_up", args.warm_up_steps, args.warm_up_batch_size, args.warm_up_lr)
        for index in range(args.num_rollout):
            line = one_rollout(args, train, rollout, index)
            print(f"rollout {index + 1}/{args.num_rollout}  {line}", flush=True)


def one_rollout(args: ScriptArgs, train: ActorGroup, rollout: ActorGroup, index: int) -> str:
    """Sync weights, draw and judge responses, train on them; return a line for people.

    Weights and samples go from actor to actor: the driver holds references only, and needs no torch.
    """
    exported = train.call("export_weights", index, args.rollout_precision)
    digest, (weights,) = exported[0]
    rollout.call("load_weights", ref=weights)
    is_match = rollout.call("log_weights", digest, index)[0]
    batch = rollout.call_kept("generate", index)
    summary = rollout.call("last_summary")[0]
    losses = train.call("train_on", index, args.updates, ref=batch)[0]
    values = {**summary, **losses}
    shown = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
    return shown if is_match else f"{shown}  (the engine does not hold the trainer's weights)"


if __name__ == "__main__":
    command_line(run, ScriptArgs)()

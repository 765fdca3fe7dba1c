"""Flow-GRPO on scikit-learn's handwritten digits: two FSDP train ranks and a rollout engine, on Ray.

A small instance of what teams run on GPUs: a class-conditional flow-matching model (Stable Diffusion 3's transformer,
from diffusers) is warmed up on real digits, then improved by reinforcement learning. For each of a few prompts a group
of images is drawn by an SDE sampler with a log-prob for each transition; a classifier that was trained on real digits
gives the reward; advantages are relative to the group; PPO's clipped objective trains the sharded policy, whose
weights go back to the engine. It runs with no arguments and needs no registry; under the registry its metrics become
series. ``docs/recipes.md`` says what is measured, and what it shows.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import typer

from e2e_registry.errors import UsageError
from e2e_registry.recipes.actor_group import ActorGroup, AttentionOptions, GroupSpec, launch
from e2e_registry.recipes.command_line import RolloutDtypeArgs, command_line, parse_env_vars
from e2e_registry.recipes.flow_grpo_config import FlowGrpoConfig


@dataclass(frozen=True, kw_only=True)
class ScriptArgs(RolloutDtypeArgs):
    """The options of the command line."""

    deterministic_mode: Annotated[
        bool,
        typer.Option("--deterministic-mode", help="Pin each actor's environment, and switch to strict kernels in it."),
    ] = False
    seed: Annotated[int, typer.Option(min=0, help="Of weights, data, prompts and noise.")] = 0
    num_rollout: Annotated[int, typer.Option(min=1, help="Rollouts; each is trained on before the next.")] = 4
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a rollout.")] = 8
    group_size: Annotated[int, typer.Option(min=2, help="Samples of a prompt.")] = 8
    denoise_steps: Annotated[int, typer.Option(min=2, help="Transitions of a sample.")] = 6
    noise_level: Annotated[float, typer.Option(min=0.01, help="Scale of the sampler's noise.")] = 0.7
    micro_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples of a forward pass, in engine and trainer; default: a rank's all.")
    ] = None
    updates: Annotated[int, typer.Option(min=1, help="Optimizer steps on a rollout.")] = 2
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate of the policy updates.")] = 3e-4
    clip_range: Annotated[float, typer.Option(min=0.0, help="PPO's: how far from 1 ratios count.")] = 2e-3
    max_grad_norm: Annotated[float, typer.Option(min=0.0, help="Gradients are clipped to this norm.")] = 1.0
    warm_up_steps: Annotated[int, typer.Option(min=0, help="Supervised steps before the first rollout.")] = 90
    warm_up_batch_size: Annotated[int, typer.Option(min=1, help="Images of a supervised step.")] = 64
    warm_up_lr: Annotated[float, typer.Option(min=0.0, help="Learning rate of the supervised steps.")] = 3e-3
    train_ranks: Annotated[int, typer.Option(min=1, help="FSDP ranks.")] = 2
    colocate: Annotated[
        bool, typer.Option("--colocate/--disaggregate", help="Whether the engine shares train rank 0's device.")
    ] = True
    rollout_seed: Annotated[
        int | None, typer.Option(min=0, help="Of prompts, sampling noise and the reward model; default: --seed.")
    ] = None
    fsdp_attention_backend: Annotated[
        str | None, typer.Option(help="A backend of diffusers, for trainer and engine.")
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
    """Return the train group and the rollout group."""
    samples = args.prompts * args.group_size
    if samples % args.train_ranks or args.warm_up_batch_size % args.train_ranks:
        raise UsageError(
            f"{samples} samples and {args.warm_up_batch_size} warm-up images must divide by {args.train_ranks} ranks",
            where="--train-ranks",
        )
    config = FlowGrpoConfig(
        seed=args.seed,
        denoise_steps=args.denoise_steps,
        noise_level=args.noise_level,
        prompts=args.prompts,
        group_size=args.group_size,
        micro_batch_size=args.micro_batch_size or samples // args.train_ranks,
        precision=args.engine_precision(),
    )
    dtypes = args.dtypes()
    rollout_seed = args.seed if args.rollout_seed is None else args.rollout_seed
    shared: dict[str, Any] = {
        "device": args.device,
        "profile": args.profile,
        "deterministic": args.deterministic_mode,
        "env_vars": parse_env_vars(args.train_env_vars, flag="--train-env-vars"),
        "attention": AttentionOptions(backend=args.fsdp_attention_backend),
    }
    home = "e2e_registry.recipes.flow_grpo"
    train = GroupSpec(
        role="train",
        actor=f"{home}:FlowGrpoTrainer",
        kwargs={"config": config, "lr": args.lr, "max_grad_norm": args.max_grad_norm, "dtypes": dtypes},
        world_size=args.train_ranks,
        seed=args.seed,
        **shared,
    )
    rollout = GroupSpec(
        role="rollout",
        actor=f"{home}:FlowGrpoEngine",
        kwargs={"config": dataclasses.replace(config, seed=rollout_seed), "overrides": dtypes.overrides},
        seed=rollout_seed,
        colocated_with="train" if args.colocate else None,
        **shared,
    )
    return train, rollout


def run(args: ScriptArgs) -> None:
    """Train a flow-matching model of handwritten digits by reinforcement learning."""
    with launch(group_specs(args), address=args.ray_address) as (train, rollout):
        train.call("warm_up", args.warm_up_steps, args.warm_up_batch_size, args.warm_up_lr)
        for index in range(args.num_rollout):
            line = one_rollout(args, train, rollout, index)
            print(f"rollout {index + 1}/{args.num_rollout}  {line}", flush=True)


def one_rollout(args: ScriptArgs, train: ActorGroup, rollout: ActorGroup, index: int) -> str:
    """Sync weights, draw and reward samples, train on them; return a line for people.

    Weights and samples go from actor to actor: the driver holds references only, and needs no torch.
    """
    exported = train.call("export_weights", index, args.engine_precision())
    digest, (weights,) = exported[0]
    rollout.call("load_weights", ref=weights)
    is_match = rollout.call("log_weights", digest, index)[0]
    batch = rollout.call_kept("generate", index)
    values = train.call("train_on", index, args.updates, args.clip_range, ref=batch)[0]
    shown = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
    return shown if is_match else f"{shown}  (the engine does not hold the trainer's weights)"


if __name__ == "__main__":
    command_line(run, ScriptArgs)()

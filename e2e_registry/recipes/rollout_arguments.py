"""What the drivers of recipes that learn from their own samples share: options, groups of actors, the weight sync."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from e2e_registry.errors import UsageError
from e2e_registry.recipes.actor_group import ActorGroup, AttentionOptions, GroupSpec
from e2e_registry.recipes.command_line import ActorArgs, RolloutDtypeArgs
from e2e_registry.recipes.rollout_config import RolloutConfig


@dataclass(frozen=True, kw_only=True)
class RolloutArgs(ActorArgs, RolloutDtypeArgs):
    """Options of every recipe that trains a policy by samples that an engine draws from it."""

    seed: Annotated[int, typer.Option(min=0, help="Of weights, data, prompts and noise.")] = 0
    num_rollout: Annotated[int, typer.Option(min=1, help="Rollouts; each is trained on before the next.")] = 4
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a rollout.")] = 8
    group_size: Annotated[int, typer.Option(min=2, help="Samples of a prompt.")] = 8
    micro_batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Samples of a forward pass at most, in engine and trainer; default: a rank's all."),
    ] = None
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate of the policy updates.")] = 3e-4
    warm_up_steps: Annotated[int, typer.Option(min=0, help="Supervised steps before the first rollout.")] = 90
    warm_up_batch_size: Annotated[int, typer.Option(min=1, help="Samples of a supervised step.")] = 64
    warm_up_lr: Annotated[float, typer.Option(min=0.0, help="Learning rate of the supervised steps.")] = 3e-3
    colocate: Annotated[
        bool, typer.Option("--colocate/--disaggregate", help="Whether the engine shares train rank 0's device.")
    ] = True
    rollout_seed: Annotated[
        int | None,
        typer.Option(min=0, help="Of prompts, sampling and a trained reward model; default: --seed."),
    ] = None

    def shared_config(self) -> dict[str, Any]:
        """Return the fields of :class:`~e2e_registry.recipes.rollout_config.RolloutConfig`.

        Raises:
            UsageError: The options contradict each other.
        """
        samples = self.prompts * self.group_size
        if samples % self.train_ranks or self.warm_up_batch_size % self.train_ranks:
            raise UsageError(
                f"{samples} samples and {self.warm_up_batch_size} of a supervised step must divide by "
                f"{self.train_ranks} ranks",
                where="--train-ranks",
            )
        return {
            "seed": self.seed,
            "prompts": self.prompts,
            "group_size": self.group_size,
            "micro_batch_size": self.micro_batch_size or samples // self.train_ranks,
            "train_ranks": self.train_ranks,
            "precision": self.engine_precision(),
        }


def actor_groups(
    args: RolloutArgs, config: RolloutConfig, *, trainer: str, engine: str, attention: AttentionOptions
) -> tuple[GroupSpec, GroupSpec]:
    """Return the train group and the rollout group.

    Args:
        args: The options.
        config: What both are given; the engine with a seed of its own if the options say so.
        trainer: The train actor's class, as ``module:Class``.
        engine: The rollout engine's.
        attention: Of both.
    """
    rollout_seed = args.seed if args.rollout_seed is None else args.rollout_seed
    dtypes = args.dtypes()
    shared = {**args.of_every_group(), "attention": attention}
    train = GroupSpec(
        role="train",
        actor=trainer,
        kwargs={"config": config, "lr": args.lr, "max_grad_norm": args.max_grad_norm, "dtypes": dtypes},
        world_size=args.train_ranks,
        seed=args.seed,
        **shared,
    )
    rollout = GroupSpec(
        role="rollout",
        actor=engine,
        kwargs={"config": dataclasses.replace(config, seed=rollout_seed), "overrides": dtypes.overrides},
        seed=rollout_seed,
        colocated_with="train" if args.colocate else None,
        **shared,
    )
    return train, rollout


def sync_weights(args: RolloutArgs, train: ActorGroup, rollout: ActorGroup, index: int) -> bool:
    """Give the engine the trainer's weights; return whether it holds them then.

    Weights go from actor to actor: the driver holds a reference only, and needs no torch.
    """
    exported = train.call("export_weights", index, args.engine_precision())
    digest, (weights,) = exported[0]
    rollout.call("load_weights", ref=weights)
    is_match: bool = rollout.call("log_weights", digest, index)[0]
    return is_match


def line_for_people(values: dict[str, float], *, is_match: bool) -> str:
    """Return what to print of a rollout."""
    shown = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
    return shown if is_match else f"{shown}  (the engine does not hold the trainer's weights)"

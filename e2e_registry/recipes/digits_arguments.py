"""What the drivers of recipes that train the policy of digits by its own samples share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from e2e_registry.recipes.actor_group import AttentionOptions, GroupSpec
from e2e_registry.recipes.digits_config import DigitsConfig
from e2e_registry.recipes.rollout_arguments import RolloutArgs, actor_groups


@dataclass(frozen=True, kw_only=True)
class DigitsArgs(RolloutArgs):
    """Options of every recipe that trains the policy of digits."""

    denoise_steps: Annotated[int, typer.Option(min=2, help="Transitions of a sample.")] = 6
    fsdp_attention_backend: Annotated[
        str | None, typer.Option(help="A backend of diffusers, for trainer and engine.")
    ] = None

    def shared_config(self) -> dict[str, Any]:
        """Return the fields of :class:`~e2e_registry.recipes.digits_config.DigitsConfig`.

        Raises:
            UsageError: The options contradict each other.
        """
        return {**super().shared_config(), "denoise_steps": self.denoise_steps}


def digits_groups(args: DigitsArgs, config: DigitsConfig, *, trainer: str, engine: str) -> tuple[GroupSpec, GroupSpec]:
    """Return the train group and the rollout group; see :func:`actor_groups`."""
    attention = AttentionOptions(backend=args.fsdp_attention_backend)
    return actor_groups(args, config, trainer=trainer, engine=engine, attention=attention)

"""The command line of a recipe: a Typer option for each field of its ``ScriptArgs`` dataclass.

Recipes on Ray inherit the options of :class:`ActorArgs`; those that shard with FSDP2 also those of
:class:`TrainDtypeArgs`, and those with an engine too, those of :class:`RolloutDtypeArgs`.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from e2e_registry.errors import RegistryError, UsageError
from e2e_registry.recipes.dtype_policy import OVERRIDE_FLAG, DtypeOverride, DtypePolicy, Precision

Args = TypeVar("Args")


def command_line(run: Callable[[Args], None], args_type: type[Args]) -> typer.Typer:
    """Return the command line that calls ``run`` with an ``args_type`` built from its options.

    A :class:`~e2e_registry.errors.RegistryError` is printed, without the driver's traceback, and ends the process with
    the error's exit code; any other exception ends it as usual.

    Args:
        run: The recipe; its docstring is the help text.
        args_type: A dataclass whose fields are annotated with ``typer.Option(...)`` and have defaults.
    """
    hints = get_type_hints(args_type, include_extras=True)

    def main(**options: Any) -> None:
        try:
            run(args_type(**options))
        except RegistryError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201 - a program's last words
            raise typer.Exit(error.exit_code) from None

    main.__doc__ = run.__doc__
    main.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=hint)
            for field in _fields(args_type)
            for hint in [hints[field.name]]
        ]
    )
    main.__annotations__ = {}
    # Typer's own rendering of exceptions cuts long tracebacks and shows local variables; the log needs the plain one.
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    return app


def _fields(args_type: type[Any]) -> list[dataclasses.Field[Any]]:
    """Return the dataclass's own fields, then those it inherits: ``--help`` should begin with what is the recipe's."""
    lineage = [vars(parent).get("__annotations__", {}) for parent in args_type.__mro__]
    distance = {name: depth for depth, names in reversed(list(enumerate(lineage))) for name in names}
    return sorted(dataclasses.fields(args_type), key=lambda field: distance[field.name])


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


@dataclass(frozen=True, kw_only=True)
class ActorArgs:
    """The options that say where and how a recipe's actors run."""

    deterministic_mode: Annotated[
        bool,
        typer.Option("--deterministic-mode", help="Pin each actor's environment, and switch to strict kernels in it."),
    ] = False
    max_grad_norm: Annotated[float, typer.Option(min=0.0, help="Gradients are clipped to this norm.")] = 1.0
    train_ranks: Annotated[int, typer.Option(min=1, help="FSDP ranks.")] = 2
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

    def of_every_group(self) -> dict[str, Any]:
        """Return the fields of :class:`~e2e_registry.recipes.actor.GroupSpec` that are the same for all groups.

        Raises:
            UsageError: A variable is not NAME=VALUE.
        """
        return {
            "device": self.device,
            "profile": self.profile,
            "deterministic": self.deterministic_mode,
            "env_vars": parse_env_vars(self.train_env_vars, flag="--train-env-vars"),
        }


@dataclass(frozen=True, kw_only=True)
class TrainDtypeArgs:
    """The options that give a train actor its dtypes."""

    master_dtype: Annotated[Precision, typer.Option(help="Of the parameters that the optimizer steps.")] = "fp32"
    forward_dtype: Annotated[Precision, typer.Option(help="Of gathered parameters and of activations.")] = "fp32"
    reduce_dtype: Annotated[Precision, typer.Option(help="In which ranks sum their gradients.")] = "fp32"
    dtype_override: Annotated[
        list[str],
        typer.Option(
            metavar="PATTERN=DTYPE",
            help="Parameters, by a glob over their names, that compute in another dtype than --forward-dtype; "
            "may be repeated, and the last that matches counts.",
        ),
    ] = field(default_factory=list)
    initial_loss_scale: Annotated[
        float, typer.Option(min=1.0, help="Where loss scaling starts; it is in use if --forward-dtype is fp16.")
    ] = 65536.0
    loss_scale_growth_interval: Annotated[
        int, typer.Option(min=1, help="Finite steps in a row after which the loss scale doubles.")
    ] = 2000

    def dtypes(self) -> DtypePolicy:
        """Return the train actor's dtypes.

        Raises:
            UsageError: An override is not PATTERN=DTYPE, parameters would be kept in fp16, or gradients computed or
                summed in fp16 without loss scaling.
        """
        overrides = tuple(DtypeOverride.parse(text) for text in self.dtype_override)
        if self.master_dtype == "fp16":
            # They overflow where scaled losses have them overflow, and unscaled ones vanish: torch refuses them too.
            raise UsageError(
                "gradients of fp16 parameters cannot be unscaled", where="--master-dtype", hint="give fp32 or bf16"
            )
        is_fp16 = {
            "--reduce-dtype": self.reduce_dtype == "fp16",
            OVERRIDE_FLAG: any(o.dtype == "fp16" for o in overrides),
        }
        if self.forward_dtype != "fp16" and any(is_fp16.values()):
            raise UsageError(
                f"gradients in fp16 vanish unless losses are scaled, which they are not in {self.forward_dtype}",
                where=next(flag for flag, is_given in is_fp16.items() if is_given),
                hint="give fp32 or bf16, or --forward-dtype fp16, under which losses are scaled",
            )
        return DtypePolicy(
            master=self.master_dtype,
            forward=self.forward_dtype,
            reduce=self.reduce_dtype,
            overrides=overrides,
            loss_scale=self.initial_loss_scale if self.forward_dtype == "fp16" else None,
            loss_scale_growth_interval=self.loss_scale_growth_interval,
        )


@dataclass(frozen=True, kw_only=True)
class RolloutDtypeArgs(TrainDtypeArgs):
    """The options that give a train actor and a rollout engine their dtypes."""

    rollout_precision: Annotated[
        Precision | None, typer.Option(help="Of the engine; default: that of --forward-dtype.")
    ] = None
    allow_dtype_mismatch: Annotated[
        bool,
        typer.Option("--allow-dtype-mismatch", help="Let the engine compute in another dtype than the trainer."),
    ] = False

    def engine_precision(self) -> Precision:
        """Return the dtype of the engine.

        Raises:
            UsageError: It is not the trainer's, and nothing says that this is wanted.
        """
        precision = self.rollout_precision or self.forward_dtype
        if precision != self.forward_dtype and not self.allow_dtype_mismatch:
            raise UsageError(
                f"the engine would compute in {precision} and the trainer in {self.forward_dtype}, so that samples are "
                "drawn from a policy that the trainer does not hold",
                where="--rollout-precision",
                hint=f"give --forward-dtype {precision}, or --allow-dtype-mismatch to measure how far apart they are",
            )
        return precision


def parse_env_vars(assignments: Iterable[str], *, flag: str) -> Mapping[str, str]:
    """Return the variables that a repeatable ``NAME=VALUE`` option gives; the last value of a name counts.

    Raises:
        UsageError: An item is not of that form.
    """
    variables = {}
    for assignment in assignments:
        name, separator, value = assignment.partition("=")
        if not separator or not name.isidentifier():
            raise UsageError(
                f"{assignment!r} is not NAME=VALUE", where=flag, hint=f"one variable an option: {flag} MKL_CBWR=AUTO"
            )
        variables[name] = value
    return variables

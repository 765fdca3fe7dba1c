"""The check of a recipe's attention backend: the same function in the driver, before launch, and in the actor."""

from __future__ import annotations

import enum
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from e2e_registry.determinism.attention.classification import (
    SDPA_INSTEAD,
    TRANSFORMERS_INSTEAD,
    AttentionClass,
    AttentionError,
    BackendClass,
    Library,
    canonical_name,
    classify,
    table_of,
)
from e2e_registry.determinism.attention.kernels import describe, exposes_deterministic
from e2e_registry.errors import UsageError

VARIABLE = "DIFFUSERS_ATTN_BACKEND"
TRANSFORMERS_VARIABLE = "FLASH_ATTENTION_DETERMINISTIC"
DISPATCH = "diffusers.models.attention_dispatch"
TRANSFORMERS_FLASH = "transformers.modeling_flash_attention_utils"

#: What is read of diffusers beside its public names; without it neither the check nor the patch means anything.
_INTERNALS = ("_AttentionBackendRegistry", "_HUB_KERNELS_REGISTRY")

#: Packages whose presence makes transformers' flash implementations loadable, tried in this order.
_FLASH_PACKAGES = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_4": "flash_attn.cute",
}

#: Processors of diffusers that call a kernel themselves, past the dispatch: part of the class name, backend.
_DIRECT_PROCESSORS = (("XFormers", "xformers"), ("NPU", "_native_npu"), ("XLA", "_native_xla"), ("Flex", "flex"))


class Source(enum.Enum):
    """Where a backend was chosen."""

    FLAG = "flag"
    VARIABLE = "variable"
    CONTEXT = "context"
    MODULE = "module"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """One place that chooses a backend.

    Attributes:
        backend: The row of the backend chosen there.
        source: The kind of place.
        where: The place by name: the flag, the variable, or the path of the module.
    """

    backend: BackendClass
    source: Source
    where: str


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What :func:`validate_attention_args` accepted.

    Attributes:
        library: Whose backends these are.
        deterministic: Whether the check was asked for; if not, nothing was rejected.
        choices: Every place that chooses; at least one (the default).
        unverified: Backends whose kernel is loaded only in the actor. Their signature is checked then, by the
            patch and by ``require_patched``.
    """

    library: Library
    deterministic: bool
    choices: tuple[AttentionChoice, ...]
    unverified: tuple[str, ...]

    @property
    def needs_patch(self) -> bool:
        """Whether the actor must call ``patch_flash_kernels``."""
        return self.deterministic and any(choice.backend.needs_patch for choice in self.choices)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that an actor's runtime environment must state, spelled as the libraries read them."""
        variables = {}
        for choice in self.choices:
            if choice.source is Source.VARIABLE:
                variables[VARIABLE] = choice.backend.name
        if self.needs_patch and self.library == "transformers":
            variables[TRANSFORMERS_VARIABLE] = "1"
        return variables


def canonicalise_environment(environment: MutableMapping[str, str]) -> None:
    """Rewrite ``DIFFUSERS_ATTN_BACKEND`` the way diffusers can read it.

    diffusers compares the variable with lower-case names when it is imported, and an empty value is an error to
    it. This makes any case mean the same in every process, and drops a variable that chooses nothing.
    """
    if VARIABLE not in environment:
        return
    name = canonical_name(environment[VARIABLE])
    if name is None:
        del environment[VARIABLE]
    else:
        environment[VARIABLE] = name


def effective_backends(
    model: object | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    backend: object = None,
    library: Library = "diffusers",
    flag: str = "--attention-backend",
) -> tuple[AttentionChoice, ...]:
    """Return every place that chooses an attention backend, and what it chooses. Imports nothing.

    All of them count, rather than the one that wins: a module without a choice of its own falls back to the
    process-wide one, so a variable stays in effect beside a flag.

    Args:
        model: A module, or a pipeline with ``components``: its attention processors (diffusers) or configurations
            (transformers) are read.
        environment: The environment of the process that will run the model; this one's by default.
        backend: The value of the recipe's own flag.
        library: Whose backends to look for.
        flag: The name of that flag, for messages.

    Returns:
        The choices, in the order flag, variable, context, modules; one ``DEFAULT`` choice if there are none.

    Raises:
        AttentionError: A value is not a name.
        UsageError: Unknown library, or ``model`` has no modules.
    """
    table_of(library)
    environment = os.environ if environment is None else environment
    named = [(backend, Source.FLAG, flag)]
    if library == "diffusers":
        variable = environment.get(VARIABLE)
        named += [(variable, Source.VARIABLE, VARIABLE), (_active_backend(variable), Source.CONTEXT, _CONTEXT)]
    choices = [
        AttentionChoice(classify(name, library=library), source, where)
        for name, source, where in named
        if canonical_name(name) is not None
    ]
    if model is not None:
        choices += _module_choices(model, library)
    return tuple(choices) or (AttentionChoice(classify(None, library=library), Source.DEFAULT, f"{library}' default"),)


_CONTEXT = "attention_backend() context or set_attention_backend()"


def _active_backend(variable: str | None) -> str | None:
    """Return the process-wide backend of diffusers, unless it merely repeats the variable or the default."""
    dispatch = sys.modules.get(DISPATCH)
    registry = getattr(dispatch, "_AttentionBackendRegistry", None)
    active = canonical_name(getattr(registry, "_active_backend", None))
    return None if active in (canonical_name(variable), "native") else active


def _module_choices(model: object, library: Library) -> list[AttentionChoice]:
    places: dict[str, list[str]] = {}
    for path, module in _named_modules(model):
        for name, where in _choices_of_module(path, module, library):
            places.setdefault(name, []).append(where)
    return [
        AttentionChoice(classify(name, library=library), Source.MODULE, _summarise(where))
        for name, where in places.items()
    ]


def _summarise(places: list[str]) -> str:
    return places[0] if len(places) == 1 else f"{places[0]} (and {len(places) - 1} more)"


def _named_modules(model: object) -> Iterator[tuple[str, object]]:
    if hasattr(model, "named_modules"):
        yield from model.named_modules()
    elif isinstance(components := getattr(model, "components", None), Mapping):
        for name, component in components.items():
            if hasattr(component, "named_modules"):
                for path, module in component.named_modules():
                    yield f"{name}.{path}" if path else str(name), module
    else:
        raise UsageError(
            f"{type(model).__name__} has neither named_modules() nor components to read attention backends from",
            hint="Pass the torch module, or the diffusers pipeline, that the actor runs.",
        )


def _choices_of_module(path: str, module: object, library: Library) -> Iterator[tuple[str, str]]:
    """Yield (canonical name, place) for one module."""
    prefix = f"{path}." if path else ""
    if library == "transformers":
        name = canonical_name(getattr(getattr(module, "config", None), "_attn_implementation", None))
        # Every layer shares the configuration of its model, so only the modules that own one are named.
        if name is not None and hasattr(module, "set_attn_implementation"):
            yield name, f"{prefix}config._attn_implementation"
        return
    processor = getattr(module, "processor", None)
    for holder, where in ((module, prefix), (processor, f"{prefix}processor.")):
        name = canonical_name(getattr(holder, "_attention_backend", None))
        if name is not None:
            yield name, f"{where}_attention_backend"
    kind = type(processor)
    if kind.__module__.partition(".")[0] == "diffusers":
        for part, name in _DIRECT_PROCESSORS:
            if part in kind.__name__:
                yield name, f"{prefix}processor, a {kind.__name__}"


def validate_attention_args(
    backend: object = None,
    *,
    deterministic: bool = True,
    library: Library = "diffusers",
    context_parallel: bool = False,
    kernels: Mapping[str, Callable[..., Any]] | None = None,
    model: object | None = None,
    environment: Mapping[str, str] | None = None,
    flag: str = "--attention-backend",
) -> AttentionPlan:
    """Check that every chosen attention backend can run deterministically.

    Call it in the driver before anything launches, and again in the actor with the model. A backend that its name
    rules out is rejected before diffusers is imported; diffusers is imported only to read the signature of a flash
    entry point.

    Args:
        backend: The value of the recipe's flag: a name in any case, or None.
        deterministic: Whether the run asks for determinism; if not, nothing is rejected or imported.
        library: ``diffusers`` or ``transformers``.
        context_parallel: Whether the model runs with context parallelism.
        kernels: The entry points to check, by name (``flash_attn_func``), instead of the installed ones: for a
            driver on a machine without the kernels.
        model: The built model, in the actor.
        environment: The environment of the actor; this process's by default.
        flag: The flag's name, for messages.

    Returns:
        What was accepted, and what the actor must still do.

    Raises:
        AttentionError: One or more choices are rejected; the message names each backend, where it was chosen, why
            it is rejected and what to use instead.
        UsageError: Unknown library, or ``model`` has no modules.
    """
    choices = effective_backends(model, environment, backend=backend, library=library, flag=flag)
    if not deterministic:
        return AttentionPlan(library, deterministic, choices, ())
    refuse([_under_context_parallelism(choice, library) for choice in choices] if context_parallel else choices)
    verified = [_verify(choice, library, kernels) for choice in choices]
    refuse([choice for choice, _ in verified])
    unverified = tuple(dict.fromkeys(choice.backend.name for choice, is_checked in verified if not is_checked))
    return AttentionPlan(library, deterministic, choices, unverified)


def refuse(choices: tuple[AttentionChoice, ...] | list[AttentionChoice]) -> None:
    """Raise one error for all rejected choices; return if there are none.

    Raises:
        AttentionError: At least one choice is rejected.
    """
    rejected = [choice for choice in choices if not choice.backend.is_accepted]
    if not rejected:
        return
    first = rejected[0]
    if len(rejected) == 1:
        raise AttentionError(_complaint(first), where=first.where, hint=f"Use {first.backend.instead} instead.")
    lines = [f"{choice.where}: {_complaint(choice)}" for choice in rejected]
    rows = dict.fromkeys(choice.backend for choice in rejected)
    hints = [f"Instead of {row.name!r} use {row.instead}." for row in rows]
    raise AttentionError("\n".join(lines), hint="\n  ".join(hints))


def _complaint(choice: AttentionChoice) -> str:
    return f"attention backend {choice.backend.name!r} cannot run deterministically: {choice.backend.reason}"


def _under_context_parallelism(choice: AttentionChoice, library: Library) -> AttentionChoice:
    row = choice.backend
    if not row.is_accepted or not row.context_parallel:
        return choice
    instead = "`native` or `_native_flash`" if library == "diffusers" else "`sdpa`"
    return replace(choice, backend=row.rejected(f"under context parallelism, {row.context_parallel}", instead))


def _verify(
    choice: AttentionChoice, library: Library, kernels: Mapping[str, Callable[..., Any]] | None
) -> tuple[AttentionChoice, bool]:
    """Return the choice, rejected if its own entry point cannot be forced, and whether one could be looked at."""
    row = choice.backend
    if not row.needs_patch:
        return choice, True
    lookup = _diffusers_entry_points if library == "diffusers" else _transformers_entry_points
    found = {name: kernels.get(name) for name in row.entry_points} if kernels is not None else lookup(row)
    if found is None:
        return choice, False
    # transformers' packages may lack one of the two functions: what is missing cannot be called.
    present = {name: function for name, function in found.items() if function is not None}
    reason = None
    if not present:
        names = " or ".join(row.entry_points)
        reason = f"its {names} is not installed here, too old, or fails to import"
        if row.klass is AttentionClass.PATCH_AFTER_LOAD:
            reason = f"neither its {names} nor the `kernels` package, which would load it, is installed here"
    for name, function in present.items():
        if not exposes_deterministic(function):
            reason = f"its own entry point {name} ({describe(function)}) has no `deterministic` parameter"
    if reason is None:
        return choice, True
    instead = SDPA_INSTEAD if library == "diffusers" else TRANSFORMERS_INSTEAD
    instead = f"a package whose {' and '.join(row.entry_points)} takes `deterministic`, or {instead}"
    return replace(choice, backend=row.rejected(reason, instead)), True


def _diffusers_entry_points(row: BackendClass) -> dict[str, Callable[..., Any] | None] | None:
    """Return the functions that diffusers will call for a backend; None if they are loaded later."""
    if row.klass is AttentionClass.PATCH:
        dispatch = import_dispatch()
        return {name: getattr(dispatch, name, None) for name in row.entry_points}
    registry = getattr(sys.modules.get(DISPATCH), "_HUB_KERNELS_REGISTRY", {})
    config = next((config for key, config in registry.items() if canonical_name(key) == row.name), None)
    if config is not None and config.kernel_fn is not None:
        return {row.entry_points[0]: config.kernel_fn}
    return None if importlib.util.find_spec("kernels") else {}


def _transformers_entry_points(row: BackendClass) -> dict[str, Callable[..., Any] | None] | None:
    """Return the functions that transformers will call for an implementation; None if they are loaded later."""
    loaded = sys.modules.get(TRANSFORMERS_FLASH)
    if getattr(loaded, "_loaded_implementation", None) == row.name:
        names = dict(zip(row.entry_points, ("_flash_fn", "_flash_varlen_fn"), strict=True))
        return {name: getattr(loaded, attribute) for name, attribute in names.items()}
    package = _FLASH_PACKAGES.get(row.name)
    found = _functions_of(package, row.entry_points) if package is not None else {}
    # Without the package, transformers loads the same implementation from the hub through `kernels`.
    if not any(found.values()) and importlib.util.find_spec("kernels"):
        return None
    return found


def _functions_of(package: str, names: tuple[str, ...]) -> dict[str, Callable[..., Any] | None]:
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        return {}
    try:
        module = importlib.import_module(package)
    except (ImportError, OSError, RuntimeError):  # what a build against another torch or CUDA raises
        return {}
    return {name: getattr(module, name, None) for name in names}


def import_dispatch() -> ModuleType:
    """Import diffusers' dispatch module, with ``DIFFUSERS_ATTN_BACKEND`` spelled as it can read it.

    Raises:
        AttentionError: diffusers is not installed, cannot be imported, or differs from what this package reads.
    """
    canonicalise_environment(os.environ)
    try:
        dispatch = importlib.import_module(DISPATCH)
    except (ImportError, RuntimeError, ValueError) as error:
        raise AttentionError(
            f"diffusers' attention dispatch cannot be imported here: {error}",
            hint=f"Install diffusers, and let {VARIABLE} name one of its backends before diffusers is imported.",
        ) from error
    missing = [name for name in _INTERNALS if not hasattr(dispatch, name)]
    if missing:
        raise AttentionError(
            f"the installed diffusers has no {' and '.join(missing)} in {DISPATCH}",
            hint="Install a version that this package knows: see the extra `recipes` in pyproject.toml.",
        )
    return dispatch

"""Forcing ``deterministic=True`` onto one kernel entry point."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from e2e_registry.determinism.attention.classification import AttentionError

#: The argument that flash-attention's entry points, and those built after them, take.
ARGUMENT = "deterministic"

_MARK = "__e2e_registry_forced__"


def _signature(function: object) -> inspect.Signature | None:
    if not callable(function):
        return None
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # builtins and extension functions need not have a readable one
        return None


def exposes_deterministic(function: object) -> bool:
    """Whether ``function`` names ``deterministic`` among its parameters, and takes it by keyword.

    A ``**kwargs`` does not count: kernels exist that accept any keyword and ignore it.
    """
    signature = _signature(function)
    parameter = signature.parameters.get(ARGUMENT) if signature else None
    return parameter is not None and parameter.kind in (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )


def is_forced(function: object) -> bool:
    """Whether ``function`` is a wrapper that :func:`force_deterministic` made."""
    # By identity, because functools.wraps copies attributes: another wrapper around ours carries the mark too.
    return function is not None and getattr(function, _MARK, None) is function


def force_deterministic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a kernel entry point so that every call runs with ``deterministic=True``.

    ``functools.partial(function, deterministic=True)`` would lose against a caller's explicit False, which
    diffusers (``_flash_3_hub``) and transformers (ModernBERT) do pass; this overwrites the argument, by keyword or
    by position. Name, documentation and signature stay; ``__wrapped__`` is the original. A wrapper is returned
    as it is.

    Raises:
        AttentionError: The function has no such parameter.
    """
    if is_forced(function):
        return function
    if not exposes_deterministic(function):
        raise AttentionError(
            f"{describe(function)} has no `{ARGUMENT}` parameter, so that it cannot be made deterministic"
        )
    signature = inspect.signature(function)
    is_keyword_only = signature.parameters[ARGUMENT].kind is inspect.Parameter.KEYWORD_ONLY
    position = None if is_keyword_only else list(signature.parameters).index(ARGUMENT)

    @functools.wraps(function)
    def forced(*args: Any, **kwargs: Any) -> Any:
        if position is not None and len(args) > position:
            args = (*args[:position], True, *args[position + 1 :])
        else:
            kwargs[ARGUMENT] = True
        return function(*args, **kwargs)

    forced.__signature__ = signature  # type: ignore[attr-defined]
    setattr(forced, _MARK, forced)
    return forced


def original_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what :func:`force_deterministic` wrapped; any other function as it is."""
    return function.__wrapped__ if is_forced(function) else function  # type: ignore[attr-defined]


def describe(function: object) -> str:
    """Return the dotted name of a kernel entry point, for messages."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None) or repr(function)
    return f"{module}.{name}" if module else str(name)

"""In which dtypes a sharded model is kept, computes and reduces: what the driver decides, and what models are given.

FSDP2 keeps a master copy of each parameter, gathers it in the dtype of the forward pass, and reduces gradients in a
third. By name pattern, parts of the model can compute in a dtype of their own. Nothing here needs torch; what models
do with it is in :mod:`e2e_registry.recipes.mixed_precision`.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from e2e_registry.errors import UsageError

Precision = Literal["fp32", "bf16", "fp16"]

OVERRIDE_FLAG = "--dtype-override"


@dataclass(frozen=True, slots=True)
class DtypeOverride:
    """The parameters whose names match a glob compute in a dtype of their own."""

    pattern: str
    dtype: Precision

    @staticmethod
    def parse(text: str) -> DtypeOverride:
        """Return the override that ``PATTERN=DTYPE`` gives.

        Raises:
            UsageError: It is not of that form, or there is no such dtype.
        """
        pattern, separator, dtype = text.rpartition("=")
        for known in get_args(Precision):
            if separator and pattern and dtype == known:
                return DtypeOverride(pattern, known)
        raise UsageError(
            f"{text!r} is not PATTERN=DTYPE",
            where=OVERRIDE_FLAG,
            hint=f"a glob over parameter names and one of {', '.join(get_args(Precision))}: "
            f"{OVERRIDE_FLAG} '*.norm*=fp32'",
        )


@dataclass(frozen=True, kw_only=True)
class DtypePolicy:
    """The dtypes of one trained model.

    Attributes:
        master: Of the parameters that the optimizer steps, and of its state.
        forward: Of the gathered parameters and of activations, forward and backward.
        reduce: In which gradients are summed over ranks.
        overrides: Parts that compute in another dtype than ``forward``; of those that match a parameter, the last.
        loss_scale: Where dynamic loss scaling starts; None for no scaling.
        loss_scale_growth_interval: Finite steps in a row after which the scale doubles.
    """

    master: Precision = "fp32"
    forward: Precision = "fp32"
    reduce: Precision = "fp32"
    overrides: tuple[DtypeOverride, ...] = ()
    loss_scale: float | None = None
    loss_scale_growth_interval: int = 2000

    def computing_in(self, forward: Precision) -> DtypePolicy:
        """Return the policy of an engine in another precision, with the same overrides."""
        return replace(self, forward=forward)

    def compute_dtypes(self, names: Iterable[str]) -> dict[str, Precision]:
        """Return the dtype in which each parameter computes, by name.

        Raises:
            UsageError: A pattern matches no name.
        """
        names = list(names)
        resolved: dict[str, Precision] = dict.fromkeys(names, self.forward)
        for override in self.overrides:
            matching = fnmatch.filter(names, override.pattern)
            if not matching:
                raise UsageError(
                    f"{override.pattern!r} matches no parameter", where=OVERRIDE_FLAG, hint=_near(override, names)
                )
            resolved.update(dict.fromkeys(matching, override.dtype))
        return resolved


def _near(override: DtypeOverride, names: Sequence[str]) -> str:
    """Return what the user may have meant: the names most like the pattern, or a few of those there are."""
    near = difflib.get_close_matches(override.pattern.replace("*", ""), names, n=3, cutoff=0.3) or names[:3]
    return f"names are compared whole, as in fnmatch; near ones: {', '.join(near)}"


#: Everything in fp32.
FP32 = DtypePolicy()

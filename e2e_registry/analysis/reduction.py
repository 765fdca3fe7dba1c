"""How a series becomes one number. Apart, because the command line names it before anything heavy is loaded."""

from __future__ import annotations

import enum


class Reduction(enum.StrEnum):
    """The one number of a run: the last value of a series, or an aggregate of all of them."""

    LAST = "last"
    MEAN = "mean"
    MEDIAN = "median"
    MIN = "min"
    MAX = "max"

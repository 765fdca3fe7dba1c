"""What this package says of a run while it goes on."""

from __future__ import annotations


class Notice(str):
    """A line of this package's own among those that the recipe prints: why nothing happens yet.

    Where a recipe's lines are not shown, as in the log of a CI job, this one is.
    """

    __slots__ = ()

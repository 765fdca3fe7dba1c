"""The profile that a process holds, asked for or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from e2e_registry.determinism.variables import PinDifference, pin_differences


@dataclass(frozen=True, slots=True)
class Holding:
    """The determinism profile that names a process's platform.

    Attributes:
        profile: The profile that was asked for; else the strongest that holds; where none does, the one that says
            what the hardware is.
        pins: The pins of it that do not hold; empty if it is held.
        is_asked: Whether it was asked for.
    """

    profile: str
    pins: tuple[PinDifference, ...]
    is_asked: bool

    @property
    def is_held(self) -> bool:
        """Whether every pin holds."""
        return not self.pins

    @property
    def faults(self) -> list[str]:
        """Why nothing can be compared: what was asked for and does not hold."""
        return [f"not on the profile {self.profile!r}: {pin}" for pin in self.pins] if self.is_asked else []


def holding_profile(state: Mapping[str, Any], asked: str | None = None) -> Holding:
    """Return the profile that a process holds by effect, whether or not anybody asked for it.

    Args:
        state: What :func:`~e2e_registry.determinism.state.read_state` said in that process.
        asked: The profile that it should hold.
    """
    # Of a process that has started CUDA the GPU decides the bits, and no CPU profile can hold.
    candidates = (asked,) if asked else ("cuda",) if state.get("gpus") else ("cpu-portable", "cpu-native")
    found = [Holding(profile, tuple(pin_differences(profile, state)), asked is not None) for profile in candidates]
    return next((holding for holding in found if holding.is_held), found[-1])

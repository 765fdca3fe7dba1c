"""What a machine has for tests, and what of it is in use: CPU cores and GPUs are admitted, not overbooked."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Where cgroups are, and which of them this process is in.
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Lease:
    """What one test was given until it is handed back.

    Attributes:
        cpus: How many cores.
        gpus: Which GPUs, as ``CUDA_VISIBLE_DEVICES`` names them.
    """

    cpus: int
    gpus: tuple[str, ...]


class Capacity:
    """Cores and GPUs, handed out and taken back; used from one thread.

    Args:
        cpus: How many cores there are.
        gpus: Which GPUs there are, as ``CUDA_VISIBLE_DEVICES`` names them.
    """

    def __init__(self, cpus: int, gpus: Sequence[str]) -> None:
        self.cpus = cpus
        self.gpus = tuple(gpus)
        self._free_cpus = cpus
        self._free_gpus = list(gpus)

    def lease(self, num_cpus: int, num_gpus: int) -> Lease | None:
        """Hand out cores and GPUs; None while too few are free.

        A test that was registered with more cores than there are gets all of them, so that it runs alone. One that
        needs more GPUs than there are is never admitted: ask before.
        """
        cpus = min(num_cpus, self.cpus)
        if cpus > self._free_cpus or num_gpus > len(self._free_gpus):
            return None
        self._free_cpus -= cpus
        given, self._free_gpus = self._free_gpus[:num_gpus], self._free_gpus[num_gpus:]
        return Lease(cpus, tuple(given))

    def release(self, lease: Lease) -> None:
        """Take back what was handed out; GPUs keep their order, so that a test run again gets the same ones."""
        self._free_cpus += lease.cpus
        self._free_gpus = [gpu for gpu in self.gpus if gpu in self._free_gpus or gpu in lease.gpus]


def available_cpus() -> int:
    """Return how many cores this process may use: its affinity, and the quotas of its container or service."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cpus, *map(math.ceil, _quotas())]))


def _quotas() -> Iterator[float]:
    """Yield the cores that each cgroup around this process allows, under version 1 or 2 of cgroups.

    A container may be told its path as its host sees it, which is not there: its own cgroup is then at the top.
    """
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Version 2 names no controllers; version 1 may mount the controllers of a line together.
        for top in (_CGROUPS / controllers, _CGROUPS / "cpu") if controllers else (_CGROUPS,):
            own = top / path.lstrip("/")
            around = [folder for folder in (own, *own.parents) if folder.is_relative_to(top)]
            yield from (quota for quota in map(_quota, around) if quota is not None)


def _quota(cgroup: Path) -> float | None:
    """Return how many cores a cgroup allows at a time; None if it does not say."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((cgroup / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        except OSError:
            return None
    try:
        return int(quota) / int(period) if int(quota) > 0 else None
    except (ValueError, ZeroDivisionError):  # "max"
        return None

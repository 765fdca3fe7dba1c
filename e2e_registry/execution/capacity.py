"""What a machine has for tests, and what of it is in use: CPU cores and GPUs are admitted, not overbooked."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e_registry.execution.gpus import visible_gpus


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

    @classmethod
    def of_this_machine(cls) -> Capacity:
        """Return what this process may use of the machine."""
        return cls(available_cpus(), visible_gpus())

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
    """Return how many cores this process may use: its affinity, and the quota of its container."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cpus, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup v2, or "max": no quota
        return cpus

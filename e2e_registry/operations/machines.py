"""Where a check runs its tests: this machine, or anything else that can run one and bring its recording back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from e2e_registry.config import Settings
from e2e_registry.execution.capacity import Capacity, Lease, available_cpus
from e2e_registry.execution.gpus import WHEN_EMPTY, GpuAdmission, visible_gpus
from e2e_registry.execution.launcher import Cancellation
from e2e_registry.operations.running import ObservedRun, run_test
from e2e_registry.registration import Registration


class Machine(Protocol):
    """Runs one test at a time or many, from any thread."""

    @property
    def capacity(self) -> Capacity | None:
        """What tests are admitted to; None if the machine admits them by itself."""

    def lacks(self, registration: Registration) -> str | None:
        """Return what a test needs and the machine has not, so that it cannot run; None if it can."""

    def remark(self, registration: Registration) -> str | None:
        """Return what should be known of a run of the test here, though it changes no verdict."""

    def run(
        self,
        registration: Registration,
        settings: Settings,
        *,
        lease: Lease | None,
        on_line: Callable[[str], None] | None,
        cancellation: Cancellation | None,
    ) -> ObservedRun:
        """Run the test once and keep the run in the local run folder.

        Raises:
            RegistryError: The test cannot be run, or the run not be kept.
        """


def skip_reason(registration: Registration, machine: Machine) -> str | None:
    """Return why a test is not run on a machine at all; None if it is."""
    return f"disabled: {registration.disabled}" if registration.disabled else machine.lacks(registration)


@dataclass(frozen=True)
class LocalMachine:
    """This machine. What it has is counted once, so that a test which is said to fit does fit.

    Attributes:
        gpus: When a test may use its GPUs.
        num_cpus: Cores that this process may use.
        devices: GPUs that it may use, as ``CUDA_VISIBLE_DEVICES`` names them.
    """

    gpus: GpuAdmission = WHEN_EMPTY
    num_cpus: int = field(default_factory=lambda: available_cpus())
    devices: tuple[str, ...] = field(default_factory=lambda: visible_gpus())

    @property
    def capacity(self) -> Capacity:
        """A new account of cores and GPUs."""
        return Capacity(self.num_cpus, self.devices)

    def lacks(self, registration: Registration) -> str | None:
        """Return why the test cannot run here: too few GPUs."""
        here = len(self.devices)
        return None if registration.num_gpus <= here else f"needs {registration.num_gpus} GPU(s), and {here} are here"

    def remark(self, registration: Registration) -> str | None:
        """Say that the test has fewer cores than it was registered with."""
        if registration.num_cpus <= self.num_cpus:
            return None
        return (
            f"registered with num_cpus={registration.num_cpus}, and this machine has {self.num_cpus}: "
            "it ran alone on those"
        )

    def run(
        self,
        registration: Registration,
        settings: Settings,
        *,
        lease: Lease | None,
        on_line: Callable[[str], None] | None,
        cancellation: Cancellation | None,
    ) -> ObservedRun:
        """Run the test on the devices of its lease, or on others if these are not free, once there are enough."""
        return run_test(
            registration,
            settings,
            on_line=on_line,
            cancellation=cancellation,
            devices=None if lease is None else lease.gpus,
            gpus=self.gpus,
        )

"""Where a check runs its tests: this machine, or anything else that can run one and bring its recording back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from e2e_registry.config import Settings
from e2e_registry.execution.capacity import Capacity, Lease, available_cpus
from e2e_registry.execution.gpus import DEFAULT_WAIT_S, visible_gpus, wait_until_empty
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
    """This machine.

    Attributes:
        gpu_wait_s: Seconds that a GPU is waited for while somebody else computes on it.
        allows_busy_gpus: Whether a test may share its GPU with whatever else computes there.
    """

    gpu_wait_s: float = DEFAULT_WAIT_S
    allows_busy_gpus: bool = False

    @property
    def capacity(self) -> Capacity:
        """A new account of cores and GPUs."""
        return Capacity.of_this_machine()

    def lacks(self, registration: Registration) -> str | None:
        """Return why the test cannot run here: too few GPUs."""
        # Asked of every waiting test whenever one ends: most need no look at the devices.
        here = len(visible_gpus()) if registration.num_gpus else 0
        return None if registration.num_gpus <= here else f"needs {registration.num_gpus} GPU(s), and {here} are here"

    def remark(self, registration: Registration) -> str | None:
        """Say that the test has fewer cores than it was registered with."""
        cpus = available_cpus()
        if registration.num_cpus <= cpus:
            return None
        return f"registered with num_cpus={registration.num_cpus}, and this machine has {cpus}: it ran alone on those"

    def run(
        self,
        registration: Registration,
        settings: Settings,
        *,
        lease: Lease | None,
        on_line: Callable[[str], None] | None,
        cancellation: Cancellation | None,
    ) -> ObservedRun:
        """Run the test on the devices of its lease, once they are empty."""
        devices = visible_gpus()[: registration.num_gpus] if lease is None else lease.gpus
        self.wait_for(devices, on_line=on_line, cancellation=cancellation)
        return run_test(registration, settings, on_line=on_line, cancellation=cancellation, devices=devices)

    def wait_for(
        self,
        devices: Sequence[str],
        *,
        on_line: Callable[[str], None] | None,
        cancellation: Cancellation | None,
    ) -> None:
        """Return once nobody else computes on the devices, or the test may run beside whoever does.

        Raises:
            RefusedError: They are still in use after :attr:`gpu_wait_s`.
        """
        if devices and not self.allows_busy_gpus:
            wait_until_empty(
                devices,
                patience_s=self.gpu_wait_s,
                on_wait=on_line or (lambda line: None),
                is_cancelled=lambda: cancellation is not None and cancellation.is_cancelled,
            )

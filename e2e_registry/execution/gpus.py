"""The GPUs of this machine: which there are, and whether somebody else computes on them.

A recipe that shares its GPU is slow, may run out of memory, and is no measurement. So a GPU that is not empty is
waited for; whose process that is, is its owner's affair: none is ever ended.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e_registry.determinism.relaunch import callers_environment
from e2e_registry.errors import RefusedError

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"

#: Seconds that a GPU which somebody else computes on is waited for, unless told otherwise.
DEFAULT_WAIT_S = 600.0

#: Seconds between two looks at a GPU that is waited for, and how long ``nvidia-smi`` may take to answer.
_POLL_S = 5.0
_QUERY_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that computes on a GPU.

    Attributes:
        pid: Its number, as the driver sees it.
        name: Its program.
        memory: What it holds of the GPU's memory, as ``nvidia-smi`` says it.
    """

    pid: int
    name: str
    memory: str

    def __str__(self) -> str:
        """Render as ``pid 71 python (12 MiB)``."""
        return f"pid {self.pid} {self.name} ({self.memory})"


@dataclass(frozen=True, slots=True)
class GpuAdmission:
    """When a test may use its GPUs.

    Attributes:
        wait_s: Seconds that a GPU is waited for while somebody else computes on it.
        allows_busy: Whether a test may share its GPUs with whatever else computes there.
    """

    wait_s: float = DEFAULT_WAIT_S
    allows_busy: bool = False

    def admit(
        self,
        devices: Sequence[str],
        *,
        on_wait: Callable[[str], None] | None,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Return once nobody else computes on the devices, or the test may run beside whoever does.

        Args:
            devices: As :func:`visible_gpus` returns them.
            on_wait: Called with a line for people while it waits.
            is_cancelled: Ends the wait without an error.

        Raises:
            RefusedError: They are still in use after :attr:`wait_s`; the message names the processes.
        """
        if devices and not self.allows_busy:
            wait_until_empty(
                devices, patience_s=self.wait_s, on_wait=on_wait or (lambda line: None), is_cancelled=is_cancelled
            )


#: A GPU in use is waited for, :data:`DEFAULT_WAIT_S` at most.
WHEN_EMPTY = GpuAdmission()


def visible_gpus(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the GPUs that may be handed out, as ``CUDA_VISIBLE_DEVICES`` names them; CUDA is not started.

    Args:
        environ: Its ``CUDA_VISIBLE_DEVICES`` limits the choice; by default the environment that this process's
            caller gave it, which a CPU profile that it was started over with does not limit.
    """
    named = (callers_environment() if environ is None else environ).get(VISIBLE_VARIABLE)
    if named is not None:
        return tuple(_before_the_first_invalid(named))
    return tuple(
        sorted((path.name[6:] for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()), key=int)
    )


def _before_the_first_invalid(named: str) -> list[str]:
    """Return what CUDA takes of the variable's value: the devices before the first that cannot be one."""
    devices: list[str] = []
    for name in (part.strip() for part in named.split(",")):
        if not name or name.startswith("-") or name in devices:
            break
        devices.append(name)
    return devices


def wait_until_empty(
    devices: Sequence[str],
    *,
    patience_s: float,
    on_wait: Callable[[str], None],
    is_cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Return once no process computes on the devices; at once where no ``nvidia-smi`` can tell.

    Args:
        devices: As :func:`visible_gpus` returns them.
        patience_s: Seconds to wait at most.
        on_wait: Called with a line for people while it waits.
        is_cancelled: Ends the wait without an error.

    Raises:
        RefusedError: They are still in use; the message names the processes.
    """
    deadline = time.monotonic() + patience_s
    while processes := processes_on(devices):
        if is_cancelled():
            return
        shown = "; ".join(f"GPU {device}: {', '.join(map(str, found))}" for device, found in processes.items())
        left = deadline - time.monotonic()
        if left <= 0:
            raise RefusedError(
                f"still in use after {patience_s:g} s: {shown}",
                hint="wait for them or end them yourself; e2e-registry's commands wait longer with --gpu-wait SECONDS, "
                "and run beside them with --allow-busy-gpus",
            )
        on_wait(f"waiting for {shown}")
        _sleep(min(_POLL_S, left), is_cancelled)


def _sleep(seconds: float, is_cancelled: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while not is_cancelled() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 0.2))


def processes_on(devices: Sequence[str]) -> dict[str, list[GpuProcess]]:
    """Return the processes that compute on each device that is in use; empty where ``nvidia-smi`` cannot tell."""
    if not devices:
        return {}
    names = {uuid: index for index, uuid in _query("--query-gpu=index,uuid", columns=2)}
    found: dict[str, list[GpuProcess]] = {}
    for uuid, pid, name, memory in _query("--query-compute-apps=gpu_uuid,pid,process_name,used_memory", columns=4):
        device = next((device for device in devices if _is_named(device, names.get(uuid), uuid)), None)
        if device is not None and pid.isdigit():
            found.setdefault(device, []).append(GpuProcess(int(pid), name, memory))
    return found


def _is_named(device: str, index: str | None, uuid: str) -> bool:
    """Whether a device of ``CUDA_VISIBLE_DEVICES`` is this GPU: by index, or by a beginning of its UUID."""
    return device == index or (device.startswith("GPU-") and uuid.startswith(device))


def _query(query: str, *, columns: int) -> list[list[str]]:
    """Return the rows that ``nvidia-smi`` answers with; none if it is not there or fails."""
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    # A program's name may hold commas; the columns around it do not.
    return [[*row[:2], ",".join(row[2:-1]), row[-1]] if columns == 4 else row for row in rows if len(row) >= columns]

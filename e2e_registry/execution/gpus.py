"""The GPUs of this machine: which there are, and whether somebody else computes on them.

A recipe that shares its GPU is slow, may run out of memory, and is no measurement. So a GPU that is not empty is
waited for; whose process that is, is its owner's affair: none is ever ended.

That a GPU is empty says nothing of the next second: another run may have found it empty too, and not have begun to
compute. So a run holds a lock on each of its GPUs (:class:`GpuLock`) before it looks, and until its recipe has ended.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e_registry.determinism.relaunch import callers_environment
from e2e_registry.errors import NotStartedError, RefusedError, UsageError
from e2e_registry.execution import processes
from e2e_registry.execution.notice import Notice

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"

#: Seconds that a GPU which somebody else computes on is waited for, unless told otherwise.
DEFAULT_WAIT_S = 600.0

#: Seconds between two looks at a GPU that is waited for: at who computes there, and at whether its lock is free.
_POLL_S = 5.0
_LOCK_POLL_S = 0.5
#: How long ``nvidia-smi`` may take to answer.
_QUERY_TIMEOUT_S = 60.0

_DEVICE_FOLDER = Path("/dev")

#: Where the locks are. Not where ``TMPDIR`` says: two runs that differ in it would not see each other's.
_LOCK_FOLDER = Path("/tmp")  # noqa: S108  # what is opened there may be anybody's: see GpuLock


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


class GpuLock:
    """The right to run a test on one GPU, among all who ask for it through this package on this machine.

    It is a file with a ``flock``, which the kernel releases when its holder ends, however that ends; the file stays,
    since whoever removed it could remove another's lock, and holds the holder's pid for people. Any user may open it.

    A GPU has one name here, its UUID, whether it was asked for by index or by UUID; where no ``nvidia-smi`` tells, the
    name that it was asked for by. Not covered are containers that do not share ``/tmp``, a MIG instance beside the
    whole GPU, and programs that ask for no lock: these show as processes only.

    Args:
        device: As ``CUDA_VISIBLE_DEVICES`` names it.
        descriptor: The locked file; None if no lock can be had here, as on another system or where the file cannot be
            opened: then processes are all that is looked at.
    """

    def __init__(self, device: str, descriptor: int | None) -> None:
        self.device = device
        self._descriptor = descriptor

    @property
    def is_held(self) -> bool:
        """Whether nobody else can have it."""
        return self._descriptor is not None

    @classmethod
    def take(cls, device: str, name: str) -> GpuLock | str:
        """Lock a GPU without waiting; or return who has it, for people.

        Args:
            device: As ``CUDA_VISIBLE_DEVICES`` names it.
            name: Its one name.
        """
        path = _LOCK_FOLDER / f"e2e-registry-{re.sub(r'[^A-Za-z0-9-]', '_', name)}.lock"
        descriptor = None
        try:
            descriptor = _open_lock(path) if processes.is_supported() else None
            if descriptor is None:
                return cls(device, None)
            if not processes.try_lock(descriptor):
                holder = _holder(descriptor)
                os.close(descriptor)
                return holder
        except OSError:
            if descriptor is not None:
                os.close(descriptor)
            return cls(device, None)
        with contextlib.suppress(OSError):  # a full disk, or a file that may only be read: nobody is named
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return cls(device, descriptor)

    def release(self) -> None:
        """Let others have it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _open_lock(path: Path) -> int | None:
    """Open a file that anybody may have put there; None if it is no plain file."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    # First without O_CREAT: with it, Linux refuses a file of another user in a sticky folder (fs.protected_regular).
    for attempt in (os.O_RDWR, os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_RDWR, os.O_RDONLY):
        try:
            descriptor = os.open(path, flags | attempt, 0o666)
        except (FileNotFoundError, FileExistsError, PermissionError):
            continue
        with contextlib.suppress(OSError):  # another user's
            os.fchmod(descriptor, 0o666)  # whatever the umask
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        return None
    return None


def _holder(descriptor: int) -> str:
    pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
    if not pid.isdigit():
        return "another run of e2e-registry"
    return f"another run of e2e-registry, pid {pid} ({processes.command_line(int(pid)) or 'elsewhere'})"


@dataclass(frozen=True, slots=True)
class GpuAdmission:
    """When a test may use its GPUs.

    Attributes:
        wait_s: Seconds that a GPU is waited for while somebody else has it.
        allows_busy: Whether a test may share its GPUs with whatever else computes there.

    Raises:
        UsageError: The time is negative or NaN.
    """

    wait_s: float = DEFAULT_WAIT_S
    allows_busy: bool = False

    def __post_init__(self) -> None:
        """Refuse what would wait for ever, and does not say so as ``inf`` does."""
        if not self.wait_s >= 0:
            raise UsageError(f"{self.wait_s!r} is no number of seconds", where="--gpu-wait")

    @contextlib.contextmanager
    def admit(
        self,
        devices: Sequence[str],
        num: int,
        *,
        spare: Sequence[str] = (),
        on_wait: Callable[[str], None] | None,
        allows_start: Callable[[], bool] = lambda: True,
    ) -> Iterator[tuple[str, ...]]:
        """Give the context GPUs that nobody else has, for as long as it lasts; wait for them if need be.

        Args:
            devices: To choose from, the first that are free, as :func:`visible_gpus` returns them.
            num: How many.
            spare: What to choose from if these are not free. A scheduler in this process may have given them to
                another run, so they are taken only with a lock.
            on_wait: Called with a line for people when it waits, and when it comes to wait for something else.
            allows_start: Asked while it waits.

        Yields:
            The devices; all of ``devices`` if there are fewer than ``num``.

        Raises:
            RefusedError: Too few are free after :attr:`wait_s`; the message names who has the others.
            NotStartedError: ``allows_start`` said no.
        """
        num = min(num, len(devices))
        if self.allows_busy or num == 0:
            yield tuple(devices[:num])
            return
        held = self._wait(devices, num, spare, on_wait or (lambda line: None), allows_start)
        try:
            yield tuple(lock.device for lock in held)
        finally:
            for lock in held:
                lock.release()

    def _wait(
        self,
        devices: Sequence[str],
        num: int,
        spare: Sequence[str],
        on_wait: Callable[[str], None],
        allows_start: Callable[[], bool],
    ) -> list[GpuLock]:
        deadline: float | None = None
        told: object = None
        uuids = _uuids()
        while True:
            held, obstacles = _take_free(devices, num, spare, uuids)
            if len(held) == num:
                return held
            if deadline is None:  # to look is not to wait: nvidia-smi may take its time
                deadline = time.monotonic() + self.wait_s
            if not allows_start():
                raise NotStartedError("called off while it waited for a GPU")
            shown = "; ".join(f"GPU {device}: {', '.join(map(str, found))}" for device, found in obstacles.items())
            left = deadline - time.monotonic()
            if left <= 0:
                raise RefusedError(
                    f"still in use after {self.wait_s:g} s: {shown}",
                    hint="wait for them or end them yourself; e2e-registry's commands wait longer with "
                    "--gpu-wait SECONDS, and run beside them with --allow-busy-gpus (in pytest, --e2e-gpu-wait and "
                    "--e2e-allow-busy-gpus)",
                )
            who = {device: [getattr(each, "pid", each) for each in found] for device, found in obstacles.items()}
            if who != told:  # not for each change of the memory that they hold
                on_wait(Notice(f"waiting for {shown}"))
                told = who
            is_locked = any(isinstance(each, str) for found in obstacles.values() for each in found)
            # Not all at the same time: of two runs that need two GPUs each, both might get one, again and again.
            pause_s = (_LOCK_POLL_S if is_locked else _POLL_S) * random.SystemRandom().uniform(0.8, 1.2)
            _sleep(min(left, pause_s), allows_start)


def _take_free(
    devices: Sequence[str], num: int, spare: Sequence[str], uuids: Mapping[str, str]
) -> tuple[list[GpuLock], dict[str, Sequence[GpuProcess | str]]]:
    """Return locks on ``num`` GPUs that nobody computes on; none of them, and who has the others, if too few are."""
    remaining = [(device, False) for device in devices] + [(device, True) for device in spare]
    obstacles: dict[str, Sequence[GpuProcess | str]] = {}
    with contextlib.ExitStack() as locks:
        held: list[GpuLock] = []
        while len(held) < num and remaining:
            fresh: list[GpuLock] = []
            while remaining and len(held) + len(fresh) < num:
                device, is_spare = remaining.pop(0)
                lock = GpuLock.take(device, _one_name(device, uuids))
                if isinstance(lock, str):
                    obstacles[device] = [lock]
                elif lock.is_held or not is_spare:
                    locks.callback(lock.release)
                    fresh.append(lock)
            # Only now, with the locks: what computes there is no run of this package that has just begun.
            busy = processes_on([lock.device for lock in fresh], uuids)
            obstacles.update(busy)
            for lock in fresh:
                if lock.device in busy:
                    lock.release()
                else:
                    held.append(lock)
        if len(held) < num:
            return [], obstacles
        locks.pop_all()
    return held, obstacles


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
    # Counted: a container that was given nvidia3 alone calls it 0.
    present = [path for path in _DEVICE_FOLDER.glob("nvidia[0-9]*") if path.name[6:].isdigit()]
    return tuple(map(str, range(len(present))))


def _before_the_first_invalid(named: str) -> list[str]:
    """Return what CUDA takes of the variable's value: the devices before the first that cannot be one.

    So there is none in ``-1``, ``none``, ``void`` or ``NoDevFiles``, which tools set to hide all GPUs.
    """
    devices: list[str] = []
    for name in (part.strip() for part in named.split(",")):
        if not re.fullmatch(r"[0-9]+|(GPU|MIG)-\S+", name) or name in devices:
            break
        devices.append(name)
    return devices


def _sleep(seconds: float, allows_sleep: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while allows_sleep() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 0.2))


def processes_on(devices: Sequence[str], uuids: Mapping[str, str]) -> dict[str, list[GpuProcess]]:
    """Return the processes that compute on each device that is in use; empty where ``nvidia-smi`` cannot tell."""
    if not devices:
        return {}
    found: dict[str, list[GpuProcess]] = {}
    for uuid, pid, name, memory in _query("--query-compute-apps=gpu_uuid,pid,process_name,used_memory", columns=4):
        device = next((device for device in devices if _one_name(device, uuids) == uuid), None)
        if device is not None and pid.isdigit():
            found.setdefault(device, []).append(GpuProcess(int(pid), name, memory))
    return found


def _uuids() -> dict[str, str]:
    """Return the UUID of each GPU by its index; empty where ``nvidia-smi`` cannot tell."""
    return {row[0]: row[1] for row in _query("--query-gpu=index,uuid", columns=2)}


def _one_name(device: str, uuids: Mapping[str, str]) -> str:
    """Return the UUID of what ``CUDA_VISIBLE_DEVICES`` names by index or by a beginning of it, else that name."""
    if device.startswith("GPU-"):
        return next((uuid for uuid in uuids.values() if uuid.startswith(device)), device)
    return uuids.get(device, device)


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

"""A Ray cluster as the machine of a check: what a node needs to run a test as this machine would, and what comes back.

A verdict must not depend on where a test ran. So everything that describes the test is computed here and sent: the
declaration, the hash of the script, the source tree (a node has no git). Of the variables those are sent that may
change bits or that the registration names; what the node or Ray set of these is dropped there, and what remains of
the node's environment says where things are on it: paths, the home folder.
"""

from __future__ import annotations

import dataclasses
import io
import os
import secrets
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from e2e_registry import __version__
from e2e_registry.config import Settings
from e2e_registry.determinism.relaunch import SET_BY_PYTEST
from e2e_registry.determinism.variables import ChildEnvironment, is_captured
from e2e_registry.environment import source_facts
from e2e_registry.errors import StorageError, UsageError
from e2e_registry.execution.capacity import Lease
from e2e_registry.execution.gpus import VISIBLE_VARIABLE, GpuAdmission, visible_gpus
from e2e_registry.execution.launcher import LOG_FILE, Cancellation
from e2e_registry.execution.ray_pool import Attempt, RayPool
from e2e_registry.execution.working_tree import read_working_tree
from e2e_registry.operations.running import ObservedRun, declared_facts, launch_test, load_run, new_run_dir
from e2e_registry.recording.layout import METRICS_FILE, PLAIN_FILE, RUN_FILE, STATE_FILE
from e2e_registry.registration import Registration

#: Greatest size in bytes of what a run leaves beside its recording, such as checkpoints, and is brought back whole.
EXTRAS_LIMIT = 256 * 2**20

#: What Ray's worker adds to its own environment, beside ``RAY_*``.
_SET_BY_RAY = ("PYTHONBREAKPOINT", "SPT_NOENV")


@dataclass(frozen=True, kw_only=True)
class NodeOrder:
    """What a node needs to run one test.

    Attributes:
        registration: The test.
        settings: The repository's settings; the root is the driver's.
        facts: What the driver found out of the test and its source tree.
        variables: The driver's variables that count, and no others.
        python_path: Entries of the driver's ``PYTHONPATH`` in the tree, relative to its top.
        root: The root, relative to the top of the tree.
        links: Symbolic links of the tree, which the archive cannot hold.
        gpus: When it may use its GPUs.
        tool: The driver's version of this package.
    """

    registration: Registration
    settings: Settings
    facts: Mapping[str, Any]
    variables: Mapping[str, str]
    python_path: Sequence[str]
    root: str
    links: Sequence[tuple[Path, str]]
    gpus: GpuAdmission
    tool: str = __version__


@dataclass(frozen=True, kw_only=True)
class PackedRun:
    """A run on its way back.

    Attributes:
        archive: The run directory, as an uncompressed tar file.
        left_out: Files that were too large to be brought back.
        child: What the recipe was started with; of its variables only those that may be recorded.
    """

    archive: bytes
    left_out: Sequence[str]
    child: ChildEnvironment


class RayCluster:
    """A cluster that runs tests; a context, since it is connected to.

    Args:
        address: As for ``ray.init``; ``local`` starts a cluster here, which ends with the context.
        settings: The repository's settings.
        gpus: When a test may use the GPUs of its node.
    """

    def __init__(self, address: str, settings: Settings, gpus: GpuAdmission) -> None:
        self._settings = settings
        self._gpus = gpus
        excluded = [settings.standards_dir, settings.run_dir]
        self._tree = read_working_tree(settings.root, excluded)
        self._source = source_facts(settings.root, excluded)  # of what is sent, whatever is edited meanwhile
        self._pool = RayPool(address, self._tree)

    def __enter__(self) -> RayCluster:
        """Connect.

        Raises:
            UsageError: There is no cluster, or the working tree is too large for one.
        """
        self._pool.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the cluster."""
        self._pool.__exit__(kind, error, trace)

    @property
    def capacity(self) -> None:
        """Ray admits tasks by itself."""

    def lacks(self, registration: Registration) -> str | None:
        """Return why no node can run the test now: too few GPUs on each, or no core beside them."""
        if not registration.num_gpus or self._most_cpus(registration):
            return None
        most = self._pool.greatest("GPU")
        if registration.num_gpus <= most:
            return f"needs {registration.num_gpus} GPU(s), and no node of the cluster that has them lends a core"
        return f"needs {registration.num_gpus} GPU(s), and no node of the cluster has more than {most}"

    def _most_cpus(self, registration: Registration) -> int:
        """Return the most cores of a node that has the GPUs of a test: one node has to have both."""
        return self._pool.greatest("CPU", num_gpus=registration.num_gpus)

    def remark(self, registration: Registration) -> str | None:
        """Say that the test has fewer cores than it was registered with."""
        most = self._most_cpus(registration)
        if registration.num_cpus <= most:
            return None
        node = f"node with {registration.num_gpus} GPU(s)" if registration.num_gpus else "node"
        return (
            f"registered with num_cpus={registration.num_cpus}, and no {node} has more than {most}: it was given those"
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
        """Run the test on a node, and bring the run back into the local run folder."""
        packed: PackedRun = self._pool.run(
            run_on_node,
            self._order(registration, settings),
            name=registration.test_id,
            num_cpus=min(registration.num_cpus, max(self._most_cpus(registration), 1)),
            num_gpus=registration.num_gpus,
            on_line=on_line,
            cancellation=cancellation,
        )
        run_dir = new_run_dir(settings, registration.stem)
        unpack(packed, run_dir)
        run = load_run(run_dir, settings, child=packed.child)
        return dataclasses.replace(run, left_out=tuple(packed.left_out))

    def _order(self, registration: Registration, settings: Settings) -> NodeOrder:
        top = self._tree.top
        names = registration.expanded_variables
        given = os.environ.get("PYTHONPATH")
        entries = [_in_tree(entry, settings.root, top) for entry in (given.split(os.pathsep) if given else ())]
        return NodeOrder(
            registration=registration,
            settings=settings,
            facts=declared_facts(registration, settings, source=self._source),
            variables={name: value for name, value in os.environ.items() if is_captured(name) or name in names},
            python_path=[entry for entry in entries if entry is not None],
            root=settings.root.resolve().relative_to(top.resolve()).as_posix(),
            links=self._tree.links,
            gpus=self._gpus,
        )


def _in_tree(entry: str, root: Path, top: Path) -> str | None:
    """Return an entry of ``PYTHONPATH`` relative to the top of the tree; None if it lies elsewhere.

    A relative one, and an empty one, is read as the recipe would here: from the root, where recipes run.
    """
    path = Path(os.path.normpath(root / entry))
    for found, base in ((path, top), (path.resolve(), top.resolve())):
        if found.is_relative_to(base):
            return found.relative_to(base).as_posix()
    return None


# ------------------------------------------------------------------------------------------------ on the node


def run_on_node(
    order: NodeOrder, attempt: Attempt, on_line: Callable[[str], None], cancellation: Cancellation
) -> PackedRun:
    """Run a test on this node, in the working tree that Ray unpacked as the current folder, and pack the run.

    Raises:
        UsageError: This package is another version here.
        StorageError: A file of this node cannot be read or written: as on a full disk.
        RegistryError: The test cannot be run.
    """
    if order.tool != __version__:
        raise UsageError(
            f"e2e-registry is {__version__} on node {attempt.node}, and {order.tool} here",
            where="--ray",
            hint=f"pip install e2e-registry=={order.tool} on every node",
        )
    try:
        return _run_here(order, attempt, on_line, cancellation)
    except OSError as error:  # of one node, and not of the check
        where = error.filename or "the working tree that Ray unpacked there"  # no name: the current folder is gone
        raise StorageError(f"node {attempt.node} cannot run the test: {error}", where=where) from error


def _run_here(
    order: NodeOrder, attempt: Attempt, on_line: Callable[[str], None], cancellation: Cancellation
) -> PackedRun:
    top = Path.cwd()
    _restore_links(top, order.links)
    caller = node_environment(os.environ, order.variables, top, order.python_path)
    scratch = Path(tempfile.mkdtemp(prefix="e2e-registry-run-"))
    given_by_ray = visible_gpus() if order.registration.num_gpus else ()
    admitted = order.gpus.admit(
        given_by_ray, order.registration.num_gpus, on_wait=on_line, allows_start=lambda: cancellation.allows_start
    )
    try:
        run_dir = scratch / "run"
        with admitted as devices:
            child = launch_test(
                order.registration,
                dataclasses.replace(order.settings, root=top / order.root),
                run_dir,
                {**order.facts, "ray": {"node": attempt.node, "attempt": attempt.number}},
                caller={**caller, **({VISIBLE_VARIABLE: ",".join(devices)} if devices else {})},
                on_line=on_line,
                cancellation=cancellation,
            )
        return pack(run_dir, child)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def node_environment(
    worker: Mapping[str, str], sent: Mapping[str, str], top: Path, python_path: Sequence[str]
) -> dict[str, str]:
    """Return the environment that stands for the caller's on a node.

    Args:
        worker: The environment of Ray's worker.
        sent: The driver's variables that count.
        top: The unpacked working tree.
        python_path: Entries of ``PYTHONPATH`` in it that the driver has.
    """
    own = {
        name: value
        for name, value in worker.items()
        if not (name.startswith("RAY_") or is_captured(name) or name in _SET_BY_RAY or name in SET_BY_PYTEST)
    }
    # Ray puts the working tree, and whatever else it unpacks, before the node's own entries.
    entries = [entry for entry in own.pop("PYTHONPATH", "").split(os.pathsep) if entry]
    kept = [entry for entry in entries if not _is_unpacked_by_ray(Path(entry), top)]
    found = [*(str(top / entry) for entry in python_path), *kept]
    return {**own, **({"PYTHONPATH": os.pathsep.join(found)} if found else {}), **sent}


def _is_unpacked_by_ray(entry: Path, top: Path) -> bool:
    """Whether an entry lies among what Ray unpacks: packages are folders beside the working tree."""
    return entry.is_relative_to(top.parent)


def _restore_links(top: Path, links: Sequence[tuple[Path, str]]) -> None:
    """Make the links of the tree, which the archive could not hold, unless an earlier task on this node has.

    What is there instead, a recipe has put there: it is replaced in one step, since other tasks may read it now.
    """
    for path, target in links:
        link = top / path
        if link.is_symlink() and os.readlink(link) == target:
            continue
        link.parent.mkdir(parents=True, exist_ok=True)
        temporary = link.with_name(f".{secrets.token_hex(8)}")
        temporary.symlink_to(target)
        try:
            temporary.replace(link)
        except OSError:
            temporary.unlink()
            raise


# ------------------------------------------------------------------------------------------------ packing


def pack(run_dir: Path, child: ChildEnvironment) -> PackedRun:
    """Pack a run: the recording whole, and of the rest the smallest files, as far as :data:`EXTRAS_LIMIT` goes."""
    files = sorted(path for path in run_dir.rglob("*") if path.is_file() and not path.is_symlink())
    recording = [path for path in files if path.parent == run_dir and _is_of_recording(path.name)]
    extras = sorted(set(files) - set(recording), key=lambda path: (path.stat().st_size, path))
    taken, size = list(recording), 0
    for path in extras:
        size += path.stat().st_size
        if size <= EXTRAS_LIMIT:
            taken.append(path)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in taken:
            archive.add(path, path.relative_to(run_dir).as_posix())
    left_out = [path.relative_to(run_dir).as_posix() for path in files if path not in taken]
    recorded = {name: value for name, value in child.variables.items() if is_captured(name)}
    return PackedRun(
        archive=buffer.getvalue(),
        left_out=left_out,
        child=dataclasses.replace(child, variables=recorded, explicit={}),
    )


def _is_of_recording(name: str) -> bool:
    is_file_of_writer = METRICS_FILE.fullmatch(name) or STATE_FILE.fullmatch(name)
    return name in (RUN_FILE, LOG_FILE, PLAIN_FILE) or bool(is_file_of_writer)


def unpack(packed: PackedRun, run_dir: Path) -> None:
    """Write a packed run into a new run directory.

    Raises:
        StorageError: It cannot be written.
    """
    try:
        run_dir.mkdir(parents=True)
        with tarfile.open(fileobj=io.BytesIO(packed.archive)) as archive:
            archive.extractall(run_dir, filter="data")
    except (OSError, tarfile.TarError) as error:
        shutil.rmtree(run_dir, ignore_errors=True)  # half a recording must not look like a run
        raise StorageError(f"cannot keep the run: {error}", where=run_dir) from error

"""Groups of Ray actors: validated in the driver, placed together, started strict, and ended together.

::

    train = GroupSpec(role="train", actor="my_package.trainer:Trainer", world_size=2, deterministic=True)
    with launch([train]) as (trainers,):
        losses = trainers.call("train_step", 0)

What an actor does first is in :mod:`e2e_registry.recipes.actor`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from e2e_registry.determinism.attention import validate_attention_args
from e2e_registry.determinism.variables import runtime_env_variables
from e2e_registry.errors import RecipeError, RecordingError, RegistryError, UsageError
from e2e_registry.recipes.actor import ActorHost, AttentionOptions, GroupSpec
from e2e_registry.recording.layout import RUN_DIR_VARIABLE

__all__ = ["ActorDiedError", "ActorGroup", "AttentionOptions", "GroupSpec", "actor_environment", "launch"]

#: Seconds after a first failure in which other ranks may report theirs: a dead peer makes its neighbours fail too, and
#: theirs can arrive first.
GRACE_S = 3.0

_START_TIMEOUT_S = 120.0

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class ActorDiedError(RecipeError):
    """An actor raised or died; the message holds its traceback."""


def actor_environment(spec: GroupSpec) -> dict[str, str]:
    """Return the variables of the group's ``runtime_env``: in each actor's environment before its interpreter starts.

    In deterministic mode every variable of the profile is stated, because Ray sets some by itself, and an actor on
    another node inherits nothing of the driver's. ``spec.env_vars`` go before the caller's, those before the profile's.

    Raises:
        AttentionError: In deterministic mode, an attention backend cannot be deterministic.
        UsageError: There is no such profile.
    """
    variables = dict(spec.env_vars)
    if spec.deterministic:
        variables = runtime_env_variables(
            spec.profile_name, caller=os.environ, train_env_vars=spec.env_vars, python=sys.executable
        )
    if spec.attention.library is not None:
        plan = validate_attention_args(
            spec.attention.backend,
            deterministic=spec.deterministic,
            library=spec.attention.library,
            environment={**os.environ, **variables},
            flag=spec.attention.flag,
        )
        variables |= plan.environment
    if run_dir := os.environ.get(RUN_DIR_VARIABLE):
        variables[RUN_DIR_VARIABLE] = run_dir
    return variables


class ActorGroup:
    """The actors of one :class:`GroupSpec`, in rank order."""

    def __init__(self, spec: GroupSpec, actors: Sequence[Any]) -> None:
        self.spec = spec
        self._actors = actors

    def call(self, method: str, *args: Any, ref: Any = None) -> list[Any]:
        """Call a method on every rank at the same time and return the results in rank order.

        Args:
            method: Name of a method of the recipe's actor class.
            args: Its arguments, the same for each rank.
            ref: An object reference whose object comes as the last argument, straight from the actor that made it.

        Raises:
            ActorDiedError: A rank raised or died; within seconds, although others may wait for it in a collective.
        """
        return _gather(self.submit(method, *args, ref=ref), self._names)

    def submit(self, method: str, *args: Any, ref: Any = None) -> list[Any]:
        """Like :meth:`call`, but return the object references at once, without waiting."""
        refs = () if ref is None else (ref,)
        return [actor.call.remote(method, args, *refs) for actor in self._actors]

    def wait(self, refs: Sequence[Any]) -> list[Any]:
        """Return the results of :meth:`submit`.

        Raises:
            ActorDiedError: As for :meth:`call`.
        """
        return _gather(refs, self._names)

    def call_kept(self, method: str, *args: Any, ref: Any = None) -> Any:
        """Call a method on rank 0 alone and return a reference to its result, which never enters the driver.

        The object lives as long as that actor.

        Raises:
            ActorDiedError: The rank raised or died.
        """
        return self.wait_kept(self.submit_kept(method, *args, ref=ref))

    def submit_kept(self, method: str, *args: Any, ref: Any = None) -> Any:
        """Like :meth:`call_kept`, but return at once, with what :meth:`wait_kept` takes.

        What is called on the group meanwhile waits in its actors until this is done; other groups work on.
        """
        refs = () if ref is None else (ref,)
        return self._actors[0].call_kept.remote(method, args, *refs)

    def wait_kept(self, submitted: Any) -> Any:
        """Return the result of :meth:`submit_kept`.

        Raises:
            ActorDiedError: As for :meth:`call_kept`.
        """
        return _gather([submitted], self._names[:1])[0][0]

    def close(self) -> None:
        """Finish the recordings of all ranks."""
        _gather([actor.close.remote() for actor in self._actors], self._names)

    @property
    def _names(self) -> list[str]:
        return [f"{self.spec.role} rank {rank}" for rank in range(len(self._actors))]


@contextlib.contextmanager
def launch(specs: Sequence[GroupSpec], *, address: str = "local") -> Iterator[tuple[ActorGroup, ...]]:
    """Start the actors of all groups in one placement group; end them, and a Ray that was started here, at the end.

    Whatever can be refused is refused before Ray starts. At a normal end the recordings are finished.

    Args:
        specs: The groups. One that is ``colocated_with`` another shares its bundles, and each its part of the device.
        address: Passed to ``ray.init``. ``local`` starts a Ray of its own whatever ``RAY_ADDRESS`` says.

    Raises:
        AttentionError: An attention backend cannot be deterministic.
        UsageError: A group is colocated with none of the others, or its ranks outnumber theirs; no such profile; Ray
            has fewer devices than the groups need; or an actor found an option that does not fit its model.
        DeterminismError: A strict switch does not hold in an actor.
        ActorDiedError: An actor could not be started.
    """
    environments = [actor_environment(spec) for spec in specs]
    placements = _place(specs)
    import ray

    _start_ray(address, len({bundle for bundles in placements for bundle in bundles}))
    try:
        groups = _start_actors(specs, environments, placements)
        yield groups
        for group in groups:
            group.close()
    finally:
        ray.shutdown()


def _place(specs: Sequence[GroupSpec]) -> list[list[int]]:
    """Return for each group the bundle of each of its ranks."""
    bundles: dict[str, list[int]] = {}
    count = 0
    for spec in specs:
        if spec.colocated_with is None:
            bundles[spec.role] = list(range(count, count + spec.world_size))
            count += spec.world_size
    for spec in specs:
        if spec.colocated_with is not None:
            shared = bundles.get(spec.colocated_with, [])
            if spec.world_size > len(shared):
                raise UsageError(
                    f"{spec.role} has {spec.world_size} ranks to colocate with {len(shared)} of {spec.colocated_with}"
                )
            bundles[spec.role] = shared[: spec.world_size]
    return [bundles[spec.role] for spec in specs]


def _start_ray(address: str, bundles: int) -> None:
    import ray

    # Read by Ray's processes when they start. Deduplication would drop one rank's line where two print the same.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    # The former meaning of num_gpus=0, silenced: actors without a GPU keep CUDA_VISIBLE_DEVICES as it is stated.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address == "local":
        # A worker for each core would be started in advance, and none of them has the actors' environment.
        os.environ.setdefault("RAY_enable_worker_prestart", "0")
        # Ray's workers run at low priority by default, below whatever else the machine is busy with.
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        ray.init(address="local", num_cpus=bundles, include_dashboard=False, logging_level=logging.WARNING)
    else:
        ray.init(address=address, logging_level=logging.WARNING)


def _start_actors(
    specs: Sequence[GroupSpec], environments: Sequence[dict[str, str]], placements: Sequence[Sequence[int]]
) -> tuple[ActorGroup, ...]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    tenants = Counter(bundle for bundles in placements for bundle in bundles)
    uses_cuda = {b for spec, bundles in zip(specs, placements, strict=True) for b in bundles if spec.device == "cuda"}
    _require_devices(len(tenants), len(uses_cuda))
    placement = ray.util.placement_group(
        [{"CPU": 1.0, **({"GPU": 1.0} if bundle in uses_cuda else {})} for bundle in sorted(tenants)]
    )
    if not placement.wait(timeout_seconds=_START_TIMEOUT_S):
        raise UsageError(
            f"Ray had no room for {len(tenants)} bundles ({len(uses_cuda)} with a GPU) for {_START_TIMEOUT_S:.0f} s",
            hint="others may be using them: try again, give fewer ranks, or --ray-address of a larger cluster",
        )
    groups = []
    for spec, environment, bundles in zip(specs, environments, placements, strict=True):
        actors = []
        for rank, bundle in enumerate(bundles):
            share = 1.0 / tenants[bundle]
            remote = ray.remote(ActorHost).options(
                num_cpus=share,
                num_gpus=share if spec.device == "cuda" else 0,
                runtime_env={"env_vars": environment},
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=bundle),
            )
            actors.append(remote.remote(spec, rank))
        groups.append(ActorGroup(spec, actors))
    names = [name for group in groups for name in group._names]
    _gather([actor.prepare.remote() for group in groups for actor in group._actors], names)
    pending: list[Any] = []
    for group in groups:
        store = _gather([group._actors[0].open_store.remote()], group._names[:1])[0]
        pending += [actor.build.remote(*store) for actor in group._actors]
    _gather(pending, names)
    return tuple(groups)


def _require_devices(cpus: int, gpus: int) -> None:
    """Refuse at once what the whole cluster does not have; what others use now may become free.

    Raises:
        UsageError: There are fewer CPUs or GPUs than the groups need.
    """
    import ray

    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    missing = [
        f"{needed} {name}s and Ray has {resources.get(name, 0.0):g}"
        for name, needed in (("CPU", cpus), ("GPU", gpus))
        if resources.get(name, 0.0) < needed
    ]
    if missing:
        raise UsageError(
            f"the groups need {', '.join(missing)}",
            hint="give fewer ranks, let groups share devices (--colocate), or --ray-address of a larger cluster",
        )


def _gather(refs: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Return the results; at the first failure, wait no longer than :data:`GRACE_S` for the others and raise."""
    import ray

    name_of = dict(zip(refs, names, strict=True))
    results: dict[Any, Any] = {}
    failures: list[tuple[str, Exception]] = []
    pending, deadline = list(refs), None
    while pending:
        done, pending = ray.wait(pending, timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not done:
            break
        try:
            results[done[0]] = ray.get(done[0])
        except ray.exceptions.RayError as error:
            failures.append((name_of[done[0]], error))
            deadline = deadline or time.monotonic() + GRACE_S
    for _, failure in failures:
        # What the user asked for does not fit, or a file cannot be read: a traceback would add nothing. What is logged
        # wrongly is a fault of the recipe's code, and the traceback says where.
        cause = getattr(failure, "cause", None)
        if isinstance(cause, RegistryError) and not isinstance(cause, RecordingError):
            raise cause
    if failures:
        raise _died(failures)
    return [results[ref] for ref in refs]


def _died(failures: Sequence[tuple[str, Exception]]) -> ActorDiedError:
    """Return one error for all failures, the likely cause last: that is where the ends of logs are read."""
    import ray

    # What others raise when a peer is gone may have arrived first; an actor that is gone is nobody's consequence.
    latest_first = failures[::-1]
    *others, cause = sorted(latest_first, key=lambda failure: isinstance(failure[1], ray.exceptions.RayActorError))
    sections = [f"--- {name}\n{_COLOUR.sub('', str(error)).strip()}" for name, error in (*others, cause)]
    name, error = cause
    verb = "died" if isinstance(error, ray.exceptions.RayActorError) else "raised"
    return ActorDiedError("\n".join(["the recipe ends, because an actor failed", *sections, f"{name} {verb} first"]))

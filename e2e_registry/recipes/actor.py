"""What runs first in every actor: seeds, strict switches, attention patches, the process group, the recorder.

Nothing here imports torch before the process is pinned, and :class:`ActorHost` imports the recipe's actor class last,
so that no model, kernel or generator can come into being too early.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from e2e_registry.determinism.attention import NativeKernel
from e2e_registry.errors import UsageError
from e2e_registry.recording import MetricRecorder

if TYPE_CHECKING:
    import torch
    from torch import nn

AttentionLibrary = Literal["diffusers", "transformers"]

#: A collective that waits longer than this fails; the driver ends a run with a dead peer long before.
COLLECTIVE_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Which attention kernels a group's model may call.

    Attributes:
        backend: The value of the recipe's flag; None for the library's default.
        flag: That flag's name, for messages.
        library: Whose backends these are; None for a native model package, which brings its own entry points.
        native_kernels: Places where native model packages look their kernels up.
    """

    backend: str | None = None
    flag: str = "--fsdp-attention-backend"
    library: AttentionLibrary | None = "diffusers"
    native_kernels: tuple[NativeKernel, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """One group of actors: what runs in each, on what, and how it is pinned.

    Attributes:
        role: Role of its writers, and its name.
        actor: The class to run, as ``module:Class``; constructed as ``Class(context, **kwargs)`` in each actor.
        kwargs: Keyword arguments of the constructor; pickled.
        world_size: Number of actors; all of them are in one process group.
        device: ``cpu`` or ``cuda``; a CUDA actor sees one device, as ``cuda:0``.
        profile: The determinism profile; None for the device's (``cpu-portable`` or ``cuda``).
        deterministic: Whether spawn environment, strict switches and attention checks apply.
        seed: Of every rank alike until its model is built, so that ranks build equal models; then each rank's global
            generators get a seed that is derived from it.
        env_vars: Go before everything else in the actors' environment.
        attention: See :class:`AttentionOptions`.
        colocated_with: Role of the group whose devices this one shares, rank by rank; None for devices of its own.
    """

    role: str
    actor: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 1
    device: str = "cpu"
    profile: str | None = None
    deterministic: bool = False
    seed: int = 0
    env_vars: Mapping[str, str] = field(default_factory=dict)
    attention: AttentionOptions = AttentionOptions()
    colocated_with: str | None = None

    def __post_init__(self) -> None:
        """Refuse in the driver what an actor could not become.

        Raises:
            UsageError: ``device`` is neither ``cpu`` nor ``cuda``, or ``world_size`` is less than 1.
        """
        if self.device not in ("cpu", "cuda"):
            raise UsageError(f"no device {self.device!r}", hint="give cpu or cuda; Ray assigns the CUDA devices")
        if self.world_size < 1:
            raise UsageError(f"world size {self.world_size} of {self.role} must be at least 1")

    @property
    def profile_name(self) -> str:
        """The determinism profile by name."""
        return self.profile or ("cuda" if self.device == "cuda" else "cpu-portable")


@dataclass(frozen=True)
class ActorContext:
    """What a recipe's actor is given.

    Attributes:
        spec: The group's.
        rank: In the group, from 0.
        recorder: The writer of (role, rank).
        device: Where the actor's tensors live.
    """

    spec: GroupSpec
    rank: int
    recorder: MetricRecorder
    device: torch.device

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self.spec.world_size

    def seed_rank(self) -> None:
        """Seed the process's global generators for this rank alone.

        Until then they are seeded alike on every rank, so that all build the same weights. What draws from them
        afterwards, dropout for one, must not draw the same on each rank's samples.
        """
        from e2e_registry.determinism import seed_everything
        from e2e_registry.determinism.seeding import derive_seed

        seed_everything(derive_seed(self.spec.seed, self.rank, stream=self.spec.role))

    def adopt_attention(self, model: nn.Module) -> None:
        """Set the chosen backend on a model that was just built, and check what its modules will really call.

        Raises:
            AttentionError: In deterministic mode, a module chose a backend that cannot be deterministic, or a kernel
                is not patched.
        """
        from e2e_registry.determinism.attention import require_patched, validate_attention_args

        attention = self.spec.attention
        if attention.backend is not None:
            for module in model.modules():  # a recipe's policy may wrap the library's model
                set_backend: Any = getattr(module, "set_attention_backend", None)
                if set_backend is not None:
                    set_backend(attention.backend)
        if not self.spec.deterministic:
            return
        plan = None
        if attention.library is not None:
            plan = validate_attention_args(
                attention.backend, library=attention.library, model=model, flag=attention.flag
            )
        require_patched(plan)


class ActorHost:
    """The Ray actor of every group: makes the process strict, joins the process group, runs the recipe's class."""

    recorder: MetricRecorder

    def __init__(self, spec: GroupSpec, rank: int) -> None:
        self.spec = spec
        self.rank = rank
        self.store: Any = None
        self.actor: Any = None

    def __repr__(self) -> str:
        return f"{self.spec.role} rank {self.rank}"  # Ray puts it before each line that the actor prints

    def prepare(self) -> None:
        """Make the process strict and open the recorder; the first call.

        Not in the constructor: what that raises reaches the driver as text of an actor that died, not as an error with
        an exit code of its own.

        Raises:
            DeterminismError: A switch does not hold.
            AttentionError: A native kernel cannot be forced, or a library's internals are not those known.
        """
        make_strict(self.spec)
        self.recorder = MetricRecorder(role=self.spec.role, rank=self.rank)

    def open_store(self) -> tuple[str, int]:
        """Open the store at which the group's ranks meet, on a port that the system picks; rank 0 only."""
        import ray
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        # Port 0, because a port that is found free first and opened later may be another run's by then.
        self.store = TCPStore(
            host, 0, self.spec.world_size, is_master=True, wait_for_workers=False, timeout=COLLECTIVE_TIMEOUT
        )
        return host, self.store.port

    def build(self, host: str, port: int) -> None:
        """Join the process group and construct the recipe's actor."""
        import torch
        from torch import distributed
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

        spec = self.spec
        device = torch.device("cpu") if spec.device == "cpu" else torch.device("cuda", 0)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if self.store is None:
            self.store = TCPStore(host, port, is_master=False, timeout=COLLECTIVE_TIMEOUT)
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=self.store,
            rank=self.rank,
            world_size=spec.world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        module, _, name = spec.actor.partition(":")
        factory = getattr(importlib.import_module(module), name)
        self.actor = factory(ActorContext(spec, self.rank, self.recorder, device), **spec.kwargs)

    def call(self, method: str, args: tuple[Any, ...], *refs: Any) -> Any:
        """Call a method of the recipe's actor; ``refs`` are object references, which Ray has resolved by now."""
        return getattr(self.actor, method)(*args, *refs)

    def call_kept(self, method: str, args: tuple[Any, ...], *refs: Any) -> list[Any]:
        """Like :meth:`call`, but keep the result here and return a reference to it, in a list so that it stays one."""
        import ray

        return [ray.put(self.call(method, args, *refs))]

    def close(self) -> None:
        """Leave the process group and finish the recording."""
        from torch import distributed

        if distributed.is_initialized():
            distributed.destroy_process_group()
        self.recorder.close()


def make_strict(spec: GroupSpec) -> None:
    """Seed this process and, in deterministic mode, set the strict switches and force deterministic attention.

    Raises:
        DeterminismError: A switch does not hold.
        AttentionError: A native kernel cannot be forced, or a library's internals are not those known.
    """
    from e2e_registry.determinism import apply, make_deterministic, seed_everything
    from e2e_registry.determinism.attention import patch_flash_kernels, register_native_kernel, require_patched

    if not spec.deterministic:
        seed_everything(spec.seed)
        return
    make_deterministic(spec.seed)
    apply(spec.profile_name)
    for kernel in spec.attention.native_kernels:
        register_native_kernel(kernel.module, kernel.attribute)
    patch_flash_kernels(() if spec.attention.library is None else (spec.attention.library,))
    require_patched()

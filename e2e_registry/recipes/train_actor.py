"""The train actor: a model sharded by FSDP2 over the group's ranks, its optimizer, and weights for rollout engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from e2e_registry.errors import UsageError
from e2e_registry.recipes.actor import ActorContext
from e2e_registry.recipes.dtype_policy import FP32, DtypePolicy, Precision
from e2e_registry.recipes.mixed_precision import DTYPES, cast_parameters, compute_dtypes, fsdp_policy, regions
from e2e_registry.recording.digests import digest_of

OptimizerBuilder = Callable[[Iterable[nn.Parameter]], Optimizer]


class TrainActor:
    """A base for recipes' train actors: construct, then call :meth:`update` with micro-batches of losses.

    Args:
        context: What :class:`~e2e_registry.recipes.actor.ActorHost` gives.
        build_model: Builds the model on the CPU. It is called under the group's seed, so that all ranks build the
            same weights; afterwards each rank's generators are its own.
        build_optimizer: Builds the optimizer over the sharded parameters; :func:`adamw` by default.
        shard: Types of the modules that become FSDP units of their own, besides the root.
        lr: Of the default optimizer.
        max_grad_norm: The global gradient norm that :meth:`update` clips to.
        dtypes: In which the model is kept, computes and reduces, and whether losses are scaled.
        grad_groups: Parts of the model whose gradient norms :meth:`gradient_metrics` gives, as name to the prefixes of
            their parameters' names.

    Attributes:
        exported: The model whose weights engines get; a recipe that samples from another policy sets it.

    Raises:
        UsageError: A dtype override fits no part of the model, or no parameter is in a gradient group.
    """

    def __init__(
        self,
        context: ActorContext,
        build_model: Callable[[], nn.Module],
        *,
        build_optimizer: OptimizerBuilder | None = None,
        shard: tuple[type[nn.Module], ...] = (),
        lr: float = 1e-3,
        max_grad_norm: float = 1.0,
        dtypes: DtypePolicy = FP32,
        grad_groups: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.context = context
        self.recorder = context.recorder
        self.device = context.device
        self.max_grad_norm = max_grad_norm
        self.dtypes = dtypes
        self.model = self.sharded(build_model(), shard)
        self.exported = self.model
        self.optimizer = (build_optimizer or (lambda parameters: adamw(parameters, lr=lr)))(self.model.parameters())
        self.scaler = _grad_scaler(dtypes, self.device)
        self.steps_done = 0
        self._grad_groups = _parameters_of(self.model, grad_groups or {})
        self._gradient_metrics: dict[str, float] = {}

    def sharded(self, model: nn.Module, units: tuple[type[nn.Module], ...]) -> nn.Module:
        """Give a model that was built on the CPU its attention backend, device and dtypes, and shard it in place."""
        self.context.adopt_attention(model)
        cast_parameters(
            model, dict.fromkeys((name for name, _ in model.named_parameters()), DTYPES[self.dtypes.master])
        )
        shard_model(model.to(self.device), units, self.dtypes)
        return model

    def share(self, count: int) -> slice:
        """Return this rank's contiguous share of ``count`` samples.

        Raises:
            UsageError: The ranks' shares would differ in size, so that a mean over ranks were no mean over samples.
        """
        world = self.context.world_size
        if count % world:
            raise UsageError(f"{count} samples cannot be shared evenly by {world} train ranks")
        size = count // world
        return slice(self.context.rank * size, (self.context.rank + 1) * size)

    def update(self, losses: Iterable[Tensor], *, count: int) -> tuple[float, float]:
        """Take one optimizer step on the mean of ``count`` micro-batch losses.

        Args:
            losses: Scalars with gradients, made one at a time, so that one graph is alive at once; equal in number on
                every rank, each a mean over equally many samples.
            count: How many there are.

        Returns:
            The loss and the gradient norm before clipping, both over all ranks.
        """
        self.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, loss in enumerate(losses):
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(index == count - 1)
            share = loss / count
            (share if self.scaler is None else self.scaler.scale(share)).backward()  # type: ignore[no-untyped-call]
            total += loss.detach().double() / count
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        self._gradient_metrics = {name: grad_norm(members) for name, members in self._grad_groups.items()}
        norm = clip_grad_norm(self.model.parameters(), self.max_grad_norm)
        self._step()
        self.steps_done += 1
        return self.mean_over_ranks(total), norm

    def _step(self) -> None:
        """Step the optimizer; with loss scaling not where a gradient overflowed, on whichever rank.

        The scaler reads the sharded gradients of its own rank, and torch takes the maximum over the ranks of what it
        found; a rank that stepped alone would hold parts of other weights than its peers.
        """
        if self.scaler is None:
            self.optimizer.step()
            return
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        is_skipped = self.scaler.get_scale() < scale
        self._gradient_metrics |= {"loss_scale": scale, "step_skipped": int(is_skipped)}

    def gradient_metrics(self, prefix: str = "train/") -> dict[str, float]:
        """Return what the last :meth:`update` saw besides its loss and norm, as metrics.

        ``grad_norm/<group>`` before clipping; with loss scaling also ``loss_scale``, which that update's loss was
        multiplied by, and ``step_skipped``: 1 where a gradient overflowed and the weights stayed.
        """
        return {f"{prefix}{name}": value for name, value in self._gradient_metrics.items()}

    def mean_over_ranks(self, value: Tensor) -> float:
        """Return the mean over ranks of a float64 scalar."""
        distributed.all_reduce(value)
        return value.item() / self.context.world_size

    def weights(self, dtypes: Mapping[str, torch.dtype] | None = None) -> dict[str, Tensor]:
        """Return the whole state that engines get, gathered, on the CPU; a collective, so call it on every rank.

        Args:
            dtypes: What parameters are cast to, by name; the others, and all buffers, stay what they are.
        """
        casts = dtypes or {}
        gathered = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in self.exported.state_dict().items()
        }
        return {name: value.detach().to(casts.get(name, value.dtype)).cpu() for name, value in gathered.items()}

    def export_weights(self, step: int, precision: Precision) -> tuple[str, list[Any]]:
        """Log and return the digest of the weights as an engine holds them; rank 0 also puts them where it can fetch.

        Parameters are in the engine's precision, but for those that the dtype overrides take elsewhere.

        Args:
            step: What ``train/weights`` is logged at.
            precision: The engine's.

        Returns:
            The digest, and a reference to the weights in a list, which is empty on the other ranks.
        """
        import ray

        weights = self.weights(compute_dtypes(self.exported, self.dtypes.computing_in(precision)))
        digest = digest_of(weights)
        self.recorder.log_digest("train/weights", weights, step=step)
        return digest, [ray.put(weights)] if self.context.rank == 0 else []


def shard_model(model: nn.Module, units: tuple[type[nn.Module], ...], dtypes: DtypePolicy = FP32) -> None:
    """Shard a model in place over all ranks: each module of the given types, each region of a dtype, then the rest.

    Every rank must hold the same weights: each keeps its own part of its own copy.

    Raises:
        UsageError: A dtype override fits no part of the model.
    """
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (distributed.get_world_size(),))
    own = regions(model, dtypes)
    chosen = [prefix for prefix, module in model.named_modules() if isinstance(module, units) or prefix in own]
    # FSDP2 leaves out what a module inside has taken already, so inner ones go first, and the root last.
    for prefix in [*sorted(filter(None, chosen), key=lambda prefix: -prefix.count(".")), ""]:
        fully_shard(model.get_submodule(prefix), mesh=mesh, mp_policy=fsdp_policy(prefix, own, dtypes))


def adamw(parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float = 0.0) -> Optimizer:
    """Return an AdamW whose bits are equal on all x86-64 CPUs under ``cpu-portable``.

    Fused, because the others take torch's vectorised ``sqrt``, whose low bits differ between CPU vendors.
    """
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, betas=(0.9, 0.95), fused=True)


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale the sharded gradients so that their global 2-norm is at most ``max_norm``; return the norm before.

    ``torch.nn.utils.clip_grad_norm_`` would end in torch's ``pow(0.5)`` here, which is not portable; the square root
    of one number is Python's, which IEEE 754 rounds correctly.
    """
    members = list(parameters)
    norm = grad_norm(members)
    if norm > max_norm:
        for grad in _local_gradients(members):
            grad.mul_(max_norm / norm)
    return norm


def grad_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Return the global 2-norm of sharded gradients; a collective, so call it on every rank.

    Not finite where a gradient is not. Of the NaNs there are, it is Python's: which one comes out of a sum depends on
    the order of its terms, which says nothing about training.
    """
    local = _local_gradients(parameters)
    device = local[0].device if local else torch.device("cpu")
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for grad in local:
        squares += grad.double().square().sum()
    if distributed.is_initialized():
        distributed.all_reduce(squares)
    norm = math.sqrt(squares.item())
    return math.nan if math.isnan(norm) else norm


def _local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]


def _parameters_of(model: nn.Module, groups: Mapping[str, tuple[str, ...]]) -> dict[str, list[nn.Parameter]]:
    """Return the members of each gradient group, by the name of its metric.

    Raises:
        UsageError: A group has none.
    """
    members = {
        f"grad_norm/{group}": [value for name, value in model.named_parameters() if name.startswith(prefixes)]
        for group, prefixes in groups.items()
    }
    for metric, found in members.items():
        if not found:
            raise UsageError(f"no parameter of the model belongs to {metric}")
    return members


def _grad_scaler(dtypes: DtypePolicy, device: torch.device) -> torch.amp.GradScaler | None:
    if dtypes.loss_scale is None:
        return None
    return torch.amp.GradScaler(
        device.type, init_scale=dtypes.loss_scale, growth_interval=dtypes.loss_scale_growth_interval
    )

"""The train actor: a model sharded by FSDP2 over the group's ranks, its optimizer, and weights for rollout engines."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from e2e_registry.errors import UsageError
from e2e_registry.recipes.actor import ActorContext
from e2e_registry.recipes.gradients import gradient_norms
from e2e_registry.recipes.rollout_engine import DTYPES, Precision
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

    Attributes:
        grad_norms: Of the last update, before clipping: the gradient norm of each group of parameters, over all ranks.
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
    ) -> None:
        self.context = context
        self.recorder = context.recorder
        self.device = context.device
        self.max_grad_norm = max_grad_norm
        self.model = build_model()
        context.adopt_attention(self.model)
        shard_model(self.model.to(self.device), shard)
        self.optimizer = (build_optimizer or (lambda parameters: adamw(parameters, lr=lr)))(self.model.parameters())
        self.steps_done = 0
        self.grad_norms: dict[str, float] = {}

    @property
    def grad_norm_metrics(self) -> dict[str, float]:
        """:attr:`grad_norms` by the names that recipes log them under."""
        return {f"train/grad_norm/{group}": norm for group, norm in self.grad_norms.items()}

    @contextlib.contextmanager
    def warming_up(self, lr: float) -> Iterator[None]:
        """Train at another learning rate; afterwards the optimizer and the count of steps start afresh.

        Moments of another objective would steer the first updates of the next.
        """
        group = self.optimizer.param_groups[0]
        lr_after = group["lr"]
        group["lr"] = lr
        yield
        group["lr"] = lr_after
        self.optimizer.state.clear()
        self.steps_done = 0

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
            (loss / count).backward()  # type: ignore[no-untyped-call]
            total += loss.detach().double() / count
        self.grad_norms = gradient_norms(self.model)
        grad_norm = clip_grad_norm(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.steps_done += 1
        return self.mean_over_ranks(total), grad_norm

    def mean_over_ranks(self, value: Tensor) -> float:
        """Return the mean over ranks of a float64 scalar."""
        distributed.all_reduce(value)
        return value.item() / self.context.world_size

    def weights(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the whole state, gathered from all ranks, on the CPU; a collective, so call it on every rank.

        Args:
            dtype: What floating-point tensors are cast to; None for what they are.
        """
        gathered = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in self.model.state_dict().items()
        }
        return {name: _cast(value.detach(), dtype).cpu() for name, value in gathered.items()}

    def export_weights(self, step: int, precision: Precision) -> tuple[str, list[Any]]:
        """Log and return the digest of the weights in an engine's precision; rank 0 also puts them where it can fetch.

        Args:
            step: What ``train/weights`` is logged at.
            precision: The engine's.

        Returns:
            The digest, and a reference to the weights in a list, which is empty on the other ranks.
        """
        import ray

        weights = self.weights(DTYPES[precision])
        digest = digest_of(weights)
        self.recorder.log_digest("train/weights", weights, step=step)
        return digest, [ray.put(weights)] if self.context.rank == 0 else []


def shard_model(model: nn.Module, units: tuple[type[nn.Module], ...]) -> None:
    """Shard a model in place over all ranks: each module of the given types, then the rest.

    Every rank must hold the same weights: each keeps its own part of its own copy.
    """
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (distributed.get_world_size(),))
    for module in list(model.modules()):
        if units and isinstance(module, units):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


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
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]
    device = local[0].device if local else torch.device("cpu")
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for grad in local:
        squares += grad.double().square().sum()
    if distributed.is_initialized():
        distributed.all_reduce(squares)
    norm = math.sqrt(squares.item())
    if norm > max_norm:
        for grad in local:
            grad.mul_(max_norm / norm)
    return norm


def _cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value

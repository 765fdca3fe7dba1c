"""The train actor: a model sharded by FSDP2 over the group's ranks, its optimizer, and weights for rollout engines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from e2e_registry.recipes.generators import drawing_from
from e2e_registry.recipes.gradients import clip_grad_norm, gradient_norms
from e2e_registry.recipes.mixed_precision import DTYPES, cast_parameters, compute_dtypes, fsdp_policy, regions
from e2e_registry.recording.digests import digest_of

OptimizerBuilder = Callable[[Iterable[nn.Parameter]], Optimizer]


class TrainActor:
    """A base for recipes' train actors: construct, then call :meth:`update` with micro-batches of losses.

    Args:
        context: What :class:`~e2e_registry.recipes.actor.ActorHost` gives.
        build_model: Builds the model on the CPU. It is called under the group's seed, so that all ranks build the
            same weights; afterwards each rank's global generators are its own
            (:meth:`~e2e_registry.recipes.actor.ActorContext.seed_rank`).
        build_optimizer: Builds the optimizer over the sharded parameters; :func:`adamw` by default.
        shard: Types of the modules that become FSDP units of their own, besides the root.
        lr: Of the default optimizer.
        max_grad_norm: The global gradient norm that :meth:`update` clips to.
        dtypes: In which the model is kept, computes and reduces, and whether losses are scaled.

    Attributes:
        exported: The model whose weights engines get; a recipe that samples from another policy sets it.
        grad_norms: Of the last update, before clipping: the gradient norm of each group of parameters, over all ranks.
        scaling_metrics: Of the last update, as recipes log it; empty without loss scaling. ``train/loss_scale`` is what
            its loss was multiplied by, ``train/step_skipped`` 1 where a gradient overflowed and the weights stayed.

    Raises:
        UsageError: A dtype override fits no part of the model.
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
    ) -> None:
        self.context = context
        self.recorder = context.recorder
        self.device = context.device
        self.max_grad_norm = max_grad_norm
        self.dtypes = dtypes
        self.model = self.sharded(build_model, shard)
        self.exported = self.model
        self.optimizer = (build_optimizer or (lambda parameters: adamw(parameters, lr=lr)))(self.model.parameters())
        self.scaler = _grad_scaler(dtypes, self.device)
        self.steps_done = 0
        self.grad_norms: dict[str, float] = {}
        self.scaling_metrics: dict[str, float] = {}
        context.seed_rank()

    def sharded(self, build_model: Callable[[], nn.Module], units: tuple[type[nn.Module], ...]) -> nn.Module:
        """Build a model on the CPU, give it its attention backend, device and dtypes, and shard it.

        Whatever was drawn before, its weights are those of the group's seed, on all ranks: each keeps a part of them.
        """
        with drawing_from(self.context.spec.seed):
            model = build_model()
        self.context.adopt_attention(model)
        cast_parameters(
            model, dict.fromkeys((name for name, _ in model.named_parameters()), DTYPES[self.dtypes.master])
        )
        shard_model(model.to(self.device), units, self.dtypes)
        return model

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

    def update(self, losses: Iterable[Tensor], *, weights: Sequence[float] = (1.0,)) -> tuple[float, float]:
        """Take one optimizer step on the weighted sum of micro-batch losses; of that, on the mean over the ranks.

        Args:
            losses: Scalars with gradients, made one at a time, so that one graph is alive at once; equal in number on
                every rank.
            weights: One for each. Where losses are means over samples, the share of the rank's samples that they are
                means of: then every sample counts alike, however large its micro-batch is. Where they are sums over
                tokens, the number of ranks over the number of all ranks' tokens.

        Returns:
            The loss and the gradient norm before clipping, both over all ranks.
        """
        self.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, (loss, weight) in enumerate(zip(losses, weights, strict=True)):
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(index == len(weights) - 1)
            part = loss * weight
            (part if self.scaler is None else self.scaler.scale(part)).backward()  # type: ignore[no-untyped-call]
            total += loss.detach().double() * weight
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        self.grad_norms = gradient_norms(self.model)
        grad_norm = clip_grad_norm(self.model.parameters(), self.max_grad_norm)
        self._step()
        self.steps_done += 1
        return self.mean_over_ranks(total), grad_norm

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
        self.scaling_metrics = {"train/loss_scale": scale, "train/step_skipped": int(is_skipped)}

    def mean_over_ranks(self, value: Tensor) -> float:
        """Return the mean over ranks of a float64 scalar."""
        distributed.all_reduce(value)
        return value.item() / self.context.world_size

    def weights(self, model: nn.Module, dtypes: Mapping[str, torch.dtype] | None = None) -> dict[str, Tensor]:
        """Return the whole state of a model, gathered, on the CPU; a collective, so call it on every rank.

        Args:
            model: :attr:`model`, :attr:`exported`, or another that :meth:`sharded` returned.
            dtypes: What parameters are cast to, by name; the others, and all buffers, stay what they are.
        """
        casts = dtypes or {}
        gathered = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in model.state_dict().items()
        }
        return {name: value.detach().to(casts.get(name, value.dtype)).cpu() for name, value in gathered.items()}

    def log_parameters(self) -> None:
        """Log the digest of the weights that were trained, at the step that made them; after the last, at the latest.

        What :meth:`export_weights` logs is seen before each rollout only, and nothing else sees what the last steps of
        a run did.
        """
        self.recorder.log_digest("model/parameters", self.weights(self.model), step=self.steps_done - 1)

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

        dtypes = compute_dtypes(self.exported, self.dtypes.computing_in(precision))
        weights = self.weights(self.exported, dtypes)
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


def _grad_scaler(dtypes: DtypePolicy, device: torch.device) -> torch.amp.GradScaler | None:
    if dtypes.loss_scale is None:
        return None
    return torch.amp.GradScaler(
        device.type, init_scale=dtypes.loss_scale, growth_interval=dtypes.loss_scale_growth_interval
    )

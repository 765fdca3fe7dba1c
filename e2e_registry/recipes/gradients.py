"""What a backward pass left in each part of a model."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor


def parameter_group(name: str) -> str:
    """Return the part of the model that a parameter belongs to: the block, or the module near the root.

    ``model.layers.0.self_attn.q_proj.weight`` belongs to ``model.layers.0``, ``lm_head.weight`` to ``lm_head``, and
    ``transformer.time_text_embed.timestep_embedder.linear_1.weight`` to ``transformer.time_text_embed``.
    """
    modules = name.split(".")[:-1] or [name]
    numbered = next((index for index, module in enumerate(modules) if module.isdecimal()), None)
    return ".".join(modules[:2] if numbered is None else modules[: numbered + 1])


def gradient_norms(model: nn.Module) -> dict[str, float]:
    """Return the 2-norm of the gradient of each group of parameters, over all ranks; a collective on sharded models.

    A group's norm sees what the global norm drowns: a block that learns nothing, or twice as fast.

    Args:
        model: After its backward pass. Groups are those of :func:`parameter_group`.
    """
    parameters = [(parameter_group(name), value) for name, value in model.named_parameters() if value.requires_grad]
    groups = list(dict.fromkeys(group for group, _ in parameters))
    device = parameters[0][1].device if parameters else torch.device("cpu")
    squares = torch.zeros(len(groups), dtype=torch.float64, device=device)
    is_sharded = False
    for group, parameter in parameters:
        if parameter.grad is not None:
            is_sharded |= isinstance(parameter.grad, DTensor)
            squares[groups.index(group)] += local_part(parameter.grad).double().square().sum()
    if is_sharded:
        distributed.all_reduce(squares)
    return {group: _root(square) for group, square in zip(groups, squares.tolist(), strict=True)}


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale the sharded gradients so that their global 2-norm is at most ``max_norm``; return the norm before.

    ``torch.nn.utils.clip_grad_norm_`` would end in torch's ``pow(0.5)`` here, which is not portable.
    """
    local = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    device = local[0].device if local else torch.device("cpu")
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for grad in local:
        squares += grad.double().square().sum()
    if distributed.is_initialized():
        distributed.all_reduce(squares)
    norm = _root(squares.item())
    if norm > max_norm:
        for grad in local:
            grad.mul_(max_norm / norm)
    return norm


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor; of one that is not sharded, all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _root(square: float) -> float:
    """Return the square root: Python's, which IEEE 754 rounds correctly; torch's is not the same on all CPUs.

    Of the NaNs there are it returns Python's: which one comes out of a sum depends on the order of its terms, which
    says nothing about training.
    """
    return math.nan if math.isnan(square) else math.sqrt(square)

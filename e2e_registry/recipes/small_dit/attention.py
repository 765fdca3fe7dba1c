"""Attention in tiles of keys, after FlashAttention-2 (arXiv:2307.08691), as plain torch operations on any device.

It keeps what makes the flash kernels a matter of determinism: in the backward pass each tile of keys adds its part to
the gradient of the queries, and unless asked to keep the order, the tiles add theirs as they finish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

KEYS_PER_TILE = 4

_Tile = tuple[slice, Tensor, Tensor, Tensor]


def tiled_attention(
    query: Tensor, key: Tensor, value: Tensor, softmax_scale: float | None = None, *, deterministic: bool = False
) -> Tensor:
    """Return ``softmax(query @ key^T * scale) @ value``: the package's one attention entry point.

    Args:
        query: Shape ``(batch, queries, heads, size)``, as flash-attention takes it.
        key: Shape ``(batch, keys, heads, size)``.
        value: Of the shape of ``key``.
        softmax_scale: ``size ** -0.5`` by default.
        deterministic: Whether the backward pass adds the tiles in one fixed order. Otherwise it adds them in the order
            in which threads finish, and the low bits of the gradient of ``query`` may change from run to run.

    Returns:
        Shape ``(batch, queries, heads, size)``.
    """
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    # torch.autograd's apply has no type of its own.
    return cast("Tensor", _TiledAttention.apply(query, key, value, scale, deterministic))  # type: ignore[no-untyped-call]


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, deterministic: bool) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        maximum = q.new_full((*q.shape[:-1], 1), -torch.inf)
        total = torch.zeros_like(maximum)
        output = torch.zeros_like(q)
        for tile in _tiles(k.shape[2]):
            scores = (q @ k[:, :, tile].mT) * scale
            new_maximum = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
            weights = (scores - new_maximum).exp()
            # What earlier tiles have summed stands relative to the maximum that was known then.
            correction = (maximum - new_maximum).exp()
            total = total * correction + weights.sum(dim=-1, keepdim=True)
            output = output * correction + weights @ v[:, :, tile]
            maximum = new_maximum
        output = output / total
        ctx.save_for_backward(q, k, v, output, maximum + total.log())
        ctx.scale, ctx.deterministic = scale, deterministic
        return output.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, log_total = ctx.saved_tensors
        grad = grad_output.transpose(1, 2)
        delta = (grad * output).sum(dim=-1, keepdim=True)
        grad_q, grad_k, grad_v = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)

        def one_tile(tile: slice) -> _Tile:
            with torch.no_grad():  # grad mode is a thread's own
                weights = ((q @ k[:, :, tile].mT) * ctx.scale - log_total).exp()
                grad_scores = weights * (grad @ v[:, :, tile].mT - delta) * ctx.scale
                return tile, grad_scores @ k[:, :, tile], grad_scores.mT @ q, weights.mT @ grad

        tiles = _tiles(k.shape[2])
        for tile, part_q, part_k, part_v in (
            map(one_tile, tiles) if ctx.deterministic else _as_finished(one_tile, tiles)
        ):
            grad_q += part_q
            grad_k[:, :, tile] = part_k
            grad_v[:, :, tile] = part_v
        return grad_q.transpose(1, 2), grad_k.transpose(1, 2), grad_v.transpose(1, 2), None, None


def _tiles(keys: int) -> list[slice]:
    return [slice(start, min(start + KEYS_PER_TILE, keys)) for start in range(0, keys, KEYS_PER_TILE)]


def _as_finished(one_tile: Callable[[slice], _Tile], tiles: list[slice]) -> Iterator[_Tile]:
    with ThreadPoolExecutor(max_workers=len(tiles)) as pool:
        for future in as_completed([pool.submit(one_tile, tile) for tile in tiles]):
            yield future.result()

"""Sums over segments in one fixed order: replacements for scatter-style additions, on CPU and CUDA.

``index_add``, ``scatter_add`` and the gradient of an embedding add many rows into few. With atomic additions the
order changes from run to run, and the bits with it; split over threads, it changes with their number. Here rows are
sorted by index with a stable sort, and each segment is summed along a binary tree over the positions inside it:
neighbours first, then pairs of pairs. The tree depends on the segment's own rows and their order alone, so neither
the number of threads, nor the memory layout, nor the other segments move a bit.

- Cost: the sort, one addition a row in ceil(log2 m) rounds, where m is the longest segment, and one sorted copy of
  the rows with a few int64 vectors of their number, however skewed the segments are.
- Only elementwise arithmetic, gathers, and writes to distinct rows are used, which
  ``torch.use_deterministic_algorithms(True, warn_only=False)`` allows (a float ``cumsum`` on CUDA it refuses).
- Rounding: barring overflow ``|error| <= eps * ceil(log2 m) * sum(|x|)``, with ``eps`` that of the dtype (N. Higham,
  *Accuracy and Stability of Numerical Algorithms*, 2nd ed., section 4.2).
- float16 and bfloat16 are added in float32, and the sum is rounded once. Integers are added in their own dtype:
  exactly, and modulo 2**width where the sum does not fit, as in torch.
- A segment of one row is that row, bit for bit; an empty one is +0.
- Gradients of every order are made of the same sums and gathers.

Every function checks its indices first, which on CUDA waits for the device.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from e2e_registry.errors import UsageError

_ACCUMULATED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
_SUMMABLE = frozenset(
    {
        *(torch.float64, torch.float32, torch.complex128, torch.complex64, *_ACCUMULATED_IN),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    }
)
_INDEX_DTYPES = (torch.int64, torch.int32)


def segment_sum(values: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """Return the sum of the rows of each segment.

    Args:
        values: The rows, shape ``(n, ...)``; float, complex or integer.
        segment_ids: The segment of each row, shape ``(n,)``, int64 or int32, in any order.
        num_segments: The number of segments.

    Returns:
        Shape ``(num_segments, ...)``, dtype of ``values``. The rounding error is bounded as the module says.

    Raises:
        UsageError: A shape, dtype or device does not fit, or an id is outside ``[0, num_segments)``.
    """
    if isinstance(num_segments, bool) or not isinstance(num_segments, int) or num_segments < 0:
        raise UsageError(f"segment_sum: num_segments must be a whole number from 0 on, not {num_segments!r}")
    if values.dim() == 0:
        raise UsageError("segment_sum: values has no dimension to sum over", hint="give it the shape (n, ...)")
    _check_summable("segment_sum: values", values)
    _check_index("segment_sum: segment_ids", segment_ids, values, num_segments, length=values.shape[0])
    return _sum_rows(values, segment_ids, num_segments)


def index_add(input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:  # noqa: A002
    """Return ``input`` with ``alpha`` times the slices of ``source`` added at ``index``; as ``torch.index_add``.

    ``alpha`` multiplies each segment's sum, not each slice. Slices of ``input`` that ``index`` does not name are
    returned bit for bit. Bound of the rounding error: that of the segment's sum times ``|alpha|``, and one rounding
    each of the product and of the sum with ``input``.

    Args:
        input: What to add to.
        dim: The dimension that ``index`` counts along.
        index: Where each slice goes, shape ``(n,)``, int64 or int32, in any order, repeats allowed.
        source: The slices: the shape of ``input``, but ``n`` along ``dim``; dtype of ``input``.
        alpha: The factor, a whole number for integer tensors.

    Returns:
        Shape and dtype of ``input``, which is unchanged.

    Raises:
        UsageError: A shape, dtype or device does not fit, or an index is out of range.
    """
    dim = _dimension("index_add", input, dim)
    _check_summable("index_add: input", input)
    _check_index("index_add: index", index, input, input.shape[dim], length=None)
    wanted = (*input.shape[:dim], index.shape[0], *input.shape[dim + 1 :])
    if source.shape != wanted or source.dtype != input.dtype or source.device != input.device:
        raise UsageError(
            f"index_add: source is {_shown(source)}, but input and index ask for {_shown(input, wanted)}",
            hint="source has the shape of input, but along dim that of index",
        )
    if not (input.is_floating_point() or input.is_complex()) and not isinstance(alpha, int):
        raise UsageError(f"index_add: alpha must be a whole number for {input.dtype}, not {alpha!r}")

    wide = _ACCUMULATED_IN.get(input.dtype, input.dtype)
    total = _sum_rows(source.movedim(dim, 0).to(wide), index, input.shape[dim]).movedim(0, dim)
    changed = (input.to(wide) + total * alpha).to(input.dtype)
    named = torch.zeros(input.shape[dim], dtype=torch.bool, device=input.device)
    named = named.index_fill_(0, index.long(), True).view(-1, *[1] * (input.dim() - dim - 1))
    return torch.where(named, changed, input)


def index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:  # noqa: A002
    """Return the slices of ``input`` at ``index``; as ``torch.index_select``, with a gradient in fixed order.

    Args:
        input: What to take from.
        dim: The dimension that ``index`` counts along.
        index: Which slices, shape ``(n,)``, int64 or int32.

    Raises:
        UsageError: A shape, dtype or device does not fit, or an index is out of range.
    """
    dim = _dimension("index_select", input, dim)
    _check_index("index_select: index", index, input, input.shape[dim], length=None)
    return _take_rows(input.movedim(dim, 0), index).movedim(0, dim)


def deterministic_embedding(weight: Tensor, ids: Tensor, *, padding_idx: int | None = None) -> Tensor:
    """Return the rows of ``weight`` at ``ids``; as ``torch.nn.functional.embedding``, with a gradient in fixed order.

    Args:
        weight: The table, shape ``(vocabulary, ...)``.
        ids: Any shape, int64 or int32.
        padding_idx: The row whose gradient is zero; negative counts from the end.

    Returns:
        Shape ``(*ids.shape, *weight.shape[1:])``.

    Raises:
        UsageError: A dtype or device does not fit, or an id is out of range.
    """
    if weight.dim() == 0:
        raise UsageError("deterministic_embedding: weight has no rows", hint="give it the shape (vocabulary, width)")
    flat = ids.reshape(-1)
    _check_index("deterministic_embedding: ids", flat, weight, weight.shape[0], length=None)
    rows = _take_rows(weight, flat)
    if padding_idx is not None:
        if not -weight.shape[0] <= padding_idx < weight.shape[0]:
            raise UsageError(
                f"deterministic_embedding: padding_idx {padding_idx} is out of range for {weight.shape[0]} rows"
            )
        is_padding = (flat == padding_idx % weight.shape[0]).view(-1, *[1] * (weight.dim() - 1))
        rows = torch.where(is_padding, rows.detach(), rows)
    return rows.reshape(*ids.shape, *weight.shape[1:])


def error_bound(values: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """Return the bound of the rounding error of :func:`segment_sum`, for float and complex values.

    ``eps * ceil(log2 m) * sum(|x|)`` for a segment of m rows, plus ``eps`` of a narrow dtype times ``sum(|x|)`` for
    the one rounding to it (and half its smallest subnormal).

    Returns:
        Shape ``(num_segments, ...)``, float64.
    """
    wide = _ACCUMULATED_IN.get(values.dtype, values.dtype)
    magnitudes = segment_sum(values.abs().double(), segment_ids, num_segments)
    lengths = torch.bincount(segment_ids, minlength=num_segments).clamp(min=1)
    depth = torch.frexp((lengths - 1).double()).exponent.clamp(min=0).double()
    depth = depth.view(-1, *[1] * (values.dim() - 1))
    bound = torch.finfo(wide).eps * depth * magnitudes
    if wide != values.dtype:
        bound += torch.finfo(values.dtype).eps * magnitudes + torch.finfo(values.dtype).smallest_normal
    return bound


class _SumRows(torch.autograd.Function):
    """The sum of rows over checked ids; its derivative takes rows."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ids: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(ids)
        return _tree_sum(values, ids, count)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _take_rows(grads[0], *ctx.saved_tensors), None, None


class _TakeRows(torch.autograd.Function):
    """Rows at checked ids; its derivative sums rows."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.count = table.shape[0]
        return table.index_select(0, ids)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        return _sum_rows(grads[0], ids, ctx.count), None


def _sum_rows(values: Tensor, ids: Tensor, count: int) -> Tensor:
    return cast("Tensor", _SumRows.apply(values, ids, count))  # type: ignore[no-untyped-call]


def _take_rows(table: Tensor, ids: Tensor) -> Tensor:
    return cast("Tensor", _TakeRows.apply(table, ids))  # type: ignore[no-untyped-call]


def _tree_sum(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """Sum rows along the tree that the module's documentation describes, without autograd."""
    total = values.new_zeros((count, *values.shape[1:]))
    if values.numel() == 0:
        return total
    sorted_ids, order = torch.sort(ids, stable=True)
    rows = values.index_select(0, order).to(_ACCUMULATED_IN.get(values.dtype, values.dtype))

    n = rows.shape[0]
    row = torch.arange(n, device=ids.device)
    is_first = torch.ones(n, dtype=torch.bool, device=ids.device)
    is_first[1:] = sorted_ids[1:] != sorted_ids[:-1]
    first = row[is_first]
    lengths = torch.diff(first, append=first.new_tensor([n]))
    position = row - first.repeat_interleave(lengths, output_size=n)
    end = (first + lengths).repeat_interleave(lengths, output_size=n)

    # After a round of width w, the row at each position that is a multiple of 2w holds the sum of the 2w rows from
    # there on. Whoever is a left operand in one round was one in every round before, so the candidates shrink.
    width = 1
    while True:
        is_left = (position % (2 * width) == 0) & (row + width < end)
        row, position, end = row[is_left], position[is_left], end[is_left]
        if row.numel() == 0:
            break
        rows.index_copy_(0, row, rows.index_select(0, row) + rows.index_select(0, row + width))
        width *= 2
    return total.index_copy_(0, sorted_ids.index_select(0, first).long(), rows.index_select(0, first).to(total.dtype))


def _dimension(function: str, tensor: Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise UsageError(f"{function}: dimension {dim} is out of range for the shape {tuple(tensor.shape)}")
    return dim % tensor.dim()


def _check_summable(what: str, tensor: Tensor) -> None:
    if tensor.dtype not in _SUMMABLE:
        raise UsageError(f"{what} has dtype {tensor.dtype}, which has no sum here", hint="convert it first")


def _check_index(what: str, index: Tensor, target: Tensor, size: int, *, length: int | None) -> None:
    """Refuse an index that does not fit ``target``; ``length`` is that of the index, None for any."""
    if index.dim() != 1 or (length is not None and index.shape[0] != length):
        wanted = "(n,)" if length is None else f"({length},)"
        raise UsageError(f"{what} has the shape {tuple(index.shape)}, but must have {wanted}")
    if index.dtype not in _INDEX_DTYPES:
        raise UsageError(f"{what} has dtype {index.dtype}, but must be int64 or int32", hint="convert it: .long()")
    if index.device != target.device:
        raise UsageError(f"{what} is on {index.device}, but what it indexes is on {target.device}")
    if index.numel() == 0:
        return
    low, high = torch.stack(torch.aminmax(index)).tolist()
    if low < 0 or high >= size:
        position = int(((index < 0) | (index >= size)).nonzero()[0])
        raise UsageError(
            f"{what}[{position}] is {int(index[position])}, out of range for {size}",
            hint=f"indices go from 0 to {size - 1}; negative ones do not count from the end" if size else None,
        )


def _shown(tensor: Tensor, shape: tuple[int, ...] | None = None) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape if shape is None else shape)} on {tensor.device}"

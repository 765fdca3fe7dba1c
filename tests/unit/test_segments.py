"""Sums over segments: one order whatever the threads and the layout, within the stated bound, with gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from e2e_registry.determinism.segments import (
    deterministic_embedding,
    error_bound,
    index_add,
    index_select,
    segment_sum,
)
from e2e_registry.errors import UsageError

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
NEEDS_CUDA = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
DEVICES = ("cpu", pytest.param("cuda", marks=NEEDS_CUDA))


@pytest.fixture(autouse=True)
def _strict_mode() -> Iterator[None]:
    """Run everything where torch refuses operations that have no deterministic form."""
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True, warn_only=False)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def bits(tensor: Tensor) -> tuple[object, ...]:
    raw = tensor.detach().cpu().contiguous()
    return raw.dtype, tuple(raw.shape), raw.reshape(-1).view(torch.uint8).numpy().tobytes() if raw.numel() else b""


def wide_range(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return values of both signs over twelve binary orders of magnitude: their sum depends on its order."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    exponents = torch.randint(-6, 7, shape, generator=generator).double()
    return (values * torch.exp2(exponents)).to(dtype)


def skewed_ids(n: int, count: int, seed: int) -> Tensor:
    """Return ids in random order of which segment 0 owns about half and some own none."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, count // 2, (n,), generator=generator) * 2
    return torch.where(torch.rand(n, generator=generator) < 0.5, torch.zeros_like(ids), ids)


def specified_order(rows: list[Tensor]) -> Tensor:
    """Add neighbours, then neighbouring sums; an odd one out waits for the next round."""
    while len(rows) > 1:
        pairs = [rows[i] + rows[i + 1] for i in range(0, len(rows) - 1, 2)]
        rows = pairs + rows[2 * len(pairs) :]
    return rows[0]


cases = st.integers(1, 9).flatmap(
    lambda count: st.tuples(st.just(count), st.lists(st.integers(0, count - 1), max_size=70))
)
Case = tuple[int, list[int]]


@given(cases, st.integers(0, 10_000))
@settings(max_examples=60)
def test_each_segment_is_summed_along_the_specified_tree(case: Case, seed: int) -> None:
    count, ids = case
    values = wide_range((len(ids), 2), seed, torch.float32)
    got = segment_sum(values, torch.tensor(ids, dtype=torch.int64), count)
    for segment in range(count):
        rows = [values[i] for i, owner in enumerate(ids) if owner == segment]
        assert bits(got[segment]) == bits(specified_order(rows) if rows else torch.zeros(2))


@given(cases, st.sampled_from(FLOATS), st.integers(0, 10_000))
@settings(max_examples=80)
def test_the_error_stays_within_the_stated_bound(case: Case, dtype: torch.dtype, seed: int) -> None:
    count, ids = case
    values, index = wide_range((len(ids),), seed, dtype), torch.tensor(ids, dtype=torch.int64)
    got, bound = segment_sum(values, index, count), error_bound(values, index, count)
    for segment in range(count):
        terms = [Fraction(float(values[i])) for i, owner in enumerate(ids) if owner == segment]
        depth = math.ceil(math.log2(max(len(terms), 1)))
        magnitude = sum(map(abs, terms), Fraction())
        stated = Fraction(torch.finfo(torch.promote_types(dtype, torch.float32)).eps) * depth * magnitude
        error = abs(Fraction(float(got[segment])) - sum(terms, Fraction()))
        assert error <= Fraction(float(bound[segment]))
        if dtype in (torch.float32, torch.float64):
            assert error <= stated


def test_narrow_floats_are_added_in_float32() -> None:
    ones = torch.ones(10_000, dtype=torch.bfloat16)
    assert segment_sum(ones, torch.zeros(10_000, dtype=torch.int64), 1).item() == torch.tensor(1e4).bfloat16().item()
    halves = torch.full((3,), 60_000.0, dtype=torch.float16) * torch.tensor([1, 1, -1], dtype=torch.float16)
    assert segment_sum(halves, torch.zeros(3, dtype=torch.int64), 1).item() == 60_000.0


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_exact_and_wrap_as_torch_does(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    values = torch.randint(info.min // 2, info.max // 2, (999, 2), generator=torch.Generator().manual_seed(1)).to(dtype)
    ids = skewed_ids(999, 12, seed=2)
    want = torch.zeros(12, 2, dtype=dtype).index_add(0, ids, values)
    assert bits(segment_sum(values, ids, 12)) == bits(want)
    assert bits(index_add(values[:12], 0, ids, values, alpha=3)) == bits(values[:12] + 3 * want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_repeat_whatever_the_threads_and_the_layout(dtype: torch.dtype, device: str) -> None:
    values, ids = wide_range((20_000, 3), 5, dtype).to(device), skewed_ids(20_000, 600, seed=6).to(device)
    layouts: list[Callable[[Tensor], Tensor]] = [
        lambda x: x,
        lambda x: x.t().contiguous().t(),
        lambda x: x.repeat_interleave(2, 0)[::2],
        lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape),
    ]
    want = bits(segment_sum(values, ids, 600))
    if dtype is torch.float32:
        assert want != bits(segment_sum(values.flip(0), ids.flip(0), 600)), "the values must depend on their order"
    for repeat in range(100):
        torch.set_num_threads(1 + repeat % 2)
        laid_out = layouts[repeat % len(layouts)]
        assert bits(segment_sum(laid_out(values), laid_out(ids[:, None])[:, 0], 600)) == want


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_repeat_whatever_the_threads(device: str) -> None:
    ids = skewed_ids(20_000, 100, seed=7).to(device)
    coefficients = wide_range((20_000, 4), 8, torch.float32).to(device)
    seen = set()
    for repeat in range(100):
        torch.set_num_threads(1 + repeat % 2)
        weight = torch.ones(100, 4, device=device, requires_grad=True)
        (deterministic_embedding(weight, ids) * coefficients).sum().backward()
        assert weight.grad is not None
        seen.add(bits(weight.grad))
    assert seen == {bits(segment_sum(coefficients, ids, 100))}


@given(cases, st.integers(0, 10_000))
@settings(max_examples=30)
def test_a_segment_does_not_depend_on_the_others(case: Case, seed: int) -> None:
    count, ids = case
    values, index = wide_range((len(ids),), seed, torch.float32), torch.tensor(ids, dtype=torch.int64)
    together = segment_sum(values, index, count)
    for segment in range(count):
        own = index == segment
        assert bits(together[segment]) == bits(segment_sum(values[own], index[own] * 0, 1)[0])


IDS = torch.tensor([3, 0, 3, 1, 3])
DIFFERENTIABLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "segment_sum": lambda rows, table: segment_sum(rows, IDS, 4),
    "index_add": lambda rows, table: index_add(table, 0, IDS, rows, alpha=-1.5),
    "index_add dim 1": lambda rows, table: index_add(table.t(), -1, IDS.int(), rows.t(), alpha=2),
    "index_select dim 1": lambda rows, table: index_select(table.t(), 1, IDS),
    "embedding": lambda rows, table: deterministic_embedding(table, IDS.view(5, 1)),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float64) for name in DIFFERENTIABLE), ("index_add", torch.complex128)]
)
def test_gradients_of_first_and_second_order_are_right(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(5, 2, dtype=dtype, generator=generator, requires_grad=True)
    table = torch.randn(4, 2, dtype=dtype, generator=generator, requires_grad=True)

    def cubed(rows: Tensor, table: Tensor) -> Tensor:  # so that second derivatives are not zero
        return DIFFERENTIABLE[name](rows**3, table**3)

    assert torch.autograd.gradcheck(cubed, (rows, table))
    assert torch.autograd.gradgradcheck(cubed, (rows, table))


def test_index_add_and_select_agree_with_torch() -> None:
    table, source = wide_range((3, 5, 2), 1), wide_range((3, 40, 2), 2)
    index = skewed_ids(40, 5, seed=3)
    torch.testing.assert_close(
        index_add(table, 1, index, source, alpha=0.3), table.index_add(1, index, source, alpha=0.3)
    )
    assert bits(index_select(table, -2, index)) == bits(table.index_select(-2, index))


def test_slices_that_no_index_names_keep_their_bits() -> None:
    nan = torch.tensor([0x7FC12345], dtype=torch.int32).view(torch.float32)
    table = torch.cat([nan, torch.tensor([-0.0, 1e-40, 5.0])])
    got = index_add(table, 0, torch.tensor([3, 3]), torch.tensor([1.0, 2.0]))
    assert bits(got[:3]) == bits(table[:3])
    assert got[3] == 8.0


def test_one_row_is_itself_and_no_row_is_zero() -> None:
    got = segment_sum(torch.tensor([-0.0, math.inf]), torch.tensor([1, 2]), 4)
    assert bits(got) == bits(torch.tensor([0.0, -0.0, math.inf, 0.0]))


@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_embedding_is_torchs_with_another_order(padding_idx: int | None) -> None:
    ids = skewed_ids(60, 7, seed=4).view(3, 20)
    results = []
    for function in (
        lambda w: deterministic_embedding(w, ids, padding_idx=padding_idx),
        lambda w: functional.embedding(ids, w, padding_idx=padding_idx),
    ):
        weight = wide_range((7, 3), 9).requires_grad_()
        out = function(weight)
        (out * wide_range((3, 20, 3), 10)).sum().backward()
        assert weight.grad is not None
        results.append((out.detach(), weight.grad))
    assert bits(results[0][0]) == bits(results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])
    if padding_idx is not None:
        assert bits(results[0][1][padding_idx]) == bits(torch.zeros(3, dtype=torch.float64))


def test_empty_inputs_are_fine() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    values = torch.zeros(0, 3, requires_grad=True)
    total = segment_sum(values, nothing, 4)
    assert bits(total) == bits(torch.zeros(4, 3))
    total.sum().backward()
    assert values.grad is not None
    assert values.grad.shape == (0, 3)
    assert segment_sum(torch.zeros(5, 0), torch.zeros(5, dtype=torch.int64), 2).shape == (2, 0)
    assert segment_sum(torch.zeros(0), nothing, 0).shape == (0,)
    assert bits(index_add(torch.ones(3), 0, nothing, torch.zeros(0))) == bits(torch.ones(3))
    assert deterministic_embedding(torch.zeros(0, 3), nothing.view(0, 2)).shape == (0, 2, 3)


ONE, TWO = torch.tensor([1.0]), torch.tensor([1.0, 2.0])
ZERO = torch.tensor([0])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: segment_sum(TWO, torch.tensor([0, 5]), 5), r"segment_ids\[1\] is 5, out of range for 5"),
        (lambda: segment_sum(TWO, torch.tensor([-1, 0]), 5), r"segment_ids\[0\] is -1"),
        (lambda: segment_sum(TWO, ZERO, 5), r"shape \(1,\), but must have \(2,\)"),
        (lambda: segment_sum(ONE, torch.tensor([0.0]), 5), "int64 or int32"),
        (lambda: segment_sum(ONE > 0, ZERO, 5), "torch.bool"),
        (lambda: segment_sum(torch.tensor(1.0), ZERO, 5), "no dimension"),
        (lambda: segment_sum(ONE, ZERO, -1), "num_segments"),
        (lambda: segment_sum(ONE, ZERO, True), "num_segments"),
        (lambda: segment_sum(ONE, ZERO.to("meta"), 1), "is on meta"),
        (lambda: index_add(TWO, 0, torch.tensor([0, 1]), ONE), r"source is torch.float32 \(1,\)"),
        (lambda: index_add(ONE, 0, ZERO, ONE.double()), "source is torch.float64"),
        (lambda: index_add(ONE, 1, ZERO, ONE), "dimension 1"),
        (lambda: index_add(ONE, 0, torch.tensor([1]), ONE), r"index\[0\] is 1"),
        (lambda: index_add(ZERO, 0, ZERO, ZERO, alpha=0.5), "alpha must be a whole number"),
        (lambda: index_select(ONE, 0, torch.tensor([-1])), "do not count from the end"),
        (lambda: deterministic_embedding(torch.zeros(3, 2), torch.tensor([[1, 3]])), r"ids\[1\] is 3"),
        (lambda: deterministic_embedding(torch.zeros(3, 2), ZERO, padding_idx=3), "padding_idx 3"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], Tensor], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        call()

"""The comparer against a plain oracle, against exact rational arithmetic, and against single changes.

The oracle states the comparison rules over dictionaries, a few lines a rule, and knows nothing of buffers; hypothesis
cuts the same rows into buffers at random places, so that every alignment path is taken.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from builders import Row, bit_patterns, run_rows, stream
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from e2e_registry.comparison import Comparison, Presence, Verdict, check_invariants, compare
from e2e_registry.dtypes import ALL_DTYPES, BOOL, DIGEST, DTYPES, DType, decode_bits, encode_value
from e2e_registry.errors import InvalidRunError, RegistrationError, UsageError
from e2e_registry.series import SeriesKey
from e2e_registry.tolerance import Invariant, Policies, Tolerance

STRICT_ALL = Policies(judge_all=True)
NUMERIC = [dtype for dtype in ALL_DTYPES if not dtype.is_digest]
FLOATS = [dtype for dtype in NUMERIC if dtype.is_float]


def f32(value: float) -> int:
    return encode_value(DTYPES["float32"], float(np.float32(value)))


def oracle_points(rows: list[Row]) -> dict[SeriesKey, dict[tuple[int, int], Row]]:
    """Every series as a mapping from (step, occurrence) to its row."""
    series: dict[SeriesKey, dict[tuple[int, int], Row]] = {}
    seen: Counter[tuple[SeriesKey, int]] = Counter()
    for row in rows:
        occurrence = seen[row.key, row.step]
        seen[row.key, row.step] += 1
        series.setdefault(row.key, {})[row.step, occurrence] = row
    return series


def assert_agrees_with_oracle(comparison: Comparison, got: list[Row], want: list[Row]) -> None:
    got_series, want_series = oracle_points(got), oracle_points(want)
    keys = sorted(got_series.keys() | want_series.keys(), key=SeriesKey.sort_key)
    assert [result.key for result in comparison.series] == keys
    for result in comparison.series:
        g, w = got_series.get(result.key, {}), want_series.get(result.key, {})
        common = g.keys() & w.keys()
        failing = {at for at in common if g[at].content != w[at].content}
        assert result.num_common == len(common)
        assert result.num_failing == result.num_differing == len(failing)
        assert result.num_dtype == sum(g[at].dtype is not w[at].dtype for at in common)
        assert result.missing.count == len(w.keys() - g.keys())
        assert result.extra.count == len(g.keys() - w.keys())
        bad = failing | (g.keys() ^ w.keys())
        assert (result.verdict is Verdict.MATCH) == (not bad)
        if bad:
            assert result.first is not None
            assert (result.first.step, result.first.occurrence) == min(bad)
            shown = w.get(min(bad)) or g[min(bad)]
            assert result.first.seq == shown.seq


@st.composite
def related_runs(draw: st.DrawFn) -> tuple[list[Row], list[Row]]:
    """A run and one that resembles it: most rows kept, some dropped, doubled, or changed."""
    want = draw(run_rows())
    got: list[Row] = []
    for row in want:
        fate = draw(st.sampled_from(["keep"] * 6 + ["drop", "double", "change", "retype"]))
        if fate == "change" and row.dtype is not DIGEST:
            got.append(row.but(bits=draw(bit_patterns(row.dtype))))
        elif fate == "retype":
            dtype = draw(st.sampled_from([d for d in NUMERIC if d.width == 64]))
            got.append(row.but(dtype=dtype, digest=None))
        elif fate != "drop":
            got.extend([row] * (2 if fate == "double" else 1))
    return got, want


@settings(max_examples=400)
@given(related_runs(), st.lists(st.integers(0, 40)), st.lists(st.integers(0, 40)))
def test_strict_comparison_agrees_with_a_plain_oracle_at_any_buffering(
    runs: tuple[list[Row], list[Row]], got_cuts: list[int], want_cuts: list[int]
) -> None:
    got, want = runs
    comparison = compare(stream(got, got_cuts), stream(want, want_cuts), policies=STRICT_ALL)
    assert_agrees_with_oracle(comparison, got, want)


def test_a_long_series_with_holes_on_both_sides_agrees_with_the_oracle() -> None:
    rng = random.Random(7)
    rows = [Row("m", step // 2, rng.getrandbits(31), seq=step) for step in range(6000)]
    got = [row for row in rows if rng.random() > 0.02]
    want = [row for row in rows if rng.random() > 0.02]
    cuts = sorted(rng.sample(range(6000), 40))
    comparison = compare(stream(got, cuts), stream(want, cuts[::2]), policies=STRICT_ALL)
    assert_agrees_with_oracle(comparison, got, want)
    (result,) = comparison.series
    assert len(result.missing.ranges) == 8, "what a report names stays bounded"


# ------------------------------------------------------------------------------------------- single changes


@st.composite
def mutation(draw: st.DrawFn, want: list[Row]) -> list[Row]:
    """One change that no strict comparison may overlook."""
    at = draw(st.integers(0, len(want) - 1))
    row = want[at]
    rest = want[:at], want[at + 1 :]
    kinds = ["drop", "double", "relabel", "rename", "role", "rank", "dtype", "drop metric"]
    kinds += ["digest"] if row.dtype is DIGEST else ["bit"]
    kinds += ["sign of zero", "NaN in", "NaN payload"] if row.dtype.is_float else []
    kind = draw(st.sampled_from(kinds))
    infinity, sign = row.dtype.infinity_bits if row.dtype.is_float else 0, row.dtype.sign_bit if row.dtype.width else 0
    match kind:
        case "drop":
            return [*rest[0], *rest[1]]
        case "drop metric":
            return [other for other in want if other.metric != row.metric]
        case "double":
            return [*rest[0], row, row, *rest[1]]
        case "relabel":
            siblings = [other.step for other in want if other.key == row.key]
            changed = row.but(step=max(siblings) + 1)
            return [
                *rest[0],
                *(o for o in rest[1] if o.key == row.key),
                changed,
                *(o for o in rest[1] if o.key != row.key),
            ]
        case "rename":
            changed = row.but(metric=row.metric + "_")
        case "role":
            changed = row.but(role="other")
        case "rank":
            changed = row.but(rank=7)
        case "dtype":
            changed = row.but(dtype=draw(st.sampled_from([d for d in ALL_DTYPES if d is not row.dtype])), digest="aa")
        case "digest":
            changed = row.but(digest=f"{row.digest}0")
        case "bit":
            changed = row.but(bits=row.bits ^ (1 << draw(st.integers(0, max(row.dtype.width - 1, 0)))))
        case "sign of zero":
            assume(row.bits in (0, sign))
            changed = row.but(bits=row.bits ^ sign)
        case "NaN in":
            changed = row.but(bits=infinity + 1)
        case _:
            changed = row.but(bits=(infinity + 1) | draw(st.integers(0, infinity & (infinity - 1) & 0x7F)))
    assume(changed != row)
    return [*rest[0], changed, *rest[1]]


@settings(max_examples=1500)
@given(st.data())
def test_no_single_change_is_judged_a_match(data: st.DataObject) -> None:
    want = data.draw(run_rows())
    got = data.draw(mutation(want))
    names = sorted({row.metric for row in want})
    for policies in (STRICT_ALL, Policies(metrics=names, pinned=frozenset(names))):
        comparison = compare(stream(got), stream(want), policies=policies)
        registered_only = policies is not STRICT_ALL
        if registered_only and all(row in got for row in want) and {r.metric for r in got} - set(names):
            continue  # a row of an unregistered metric came in beside an untouched rest: listed, not judged
        assert comparison.verdict is Verdict.MISMATCH


@settings(max_examples=200)
@given(run_rows(), st.randoms(use_true_random=False))
def test_copies_and_other_emission_orders_match(rows: list[Row], rng: random.Random) -> None:
    got = [row.but(seq=rng.randrange(1 << 40)) for row in rows]
    comparison = compare(stream(got, [rng.randrange(20)]), stream(rows), policies=STRICT_ALL)
    assert comparison.verdict is Verdict.MATCH
    assert comparison.num_judged == len({row.key for row in rows})


# ------------------------------------------------------------------------------------------- tolerances


def exactly_accepted(tolerance: Tolerance, dtype: DType, got: int, want: int) -> bool:
    """The rule of a pointwise tolerance in rational arithmetic, one value at a time."""
    g, w = decode_bits(dtype, got), decode_bits(dtype, want)
    if not (math.isfinite(g) and math.isfinite(w)):
        same_sign = math.copysign(1, g) == math.copysign(1, w) if dtype.is_float else True
        return math.isnan(g) == math.isnan(w) and math.isinf(g) == math.isinf(w) and same_sign
    exact_g, exact_w = Fraction(g), Fraction(w)
    if tolerance.fails_on == "increase" and exact_g <= exact_w:
        return True
    if tolerance.fails_on == "decrease" and exact_g >= exact_w:
        return True
    if abs(exact_g - exact_w) <= Fraction(tolerance.atol) + Fraction(tolerance.rtol) * abs(exact_w):
        return True
    return dtype.is_float and abs(position(dtype, got) - position(dtype, want)) <= tolerance.ulp


def position(dtype: DType, bits: int) -> int:
    magnitude = bits & (dtype.sign_bit - 1)
    return -magnitude if bits & dtype.sign_bit else magnitude


bounds = st.sampled_from([0.0, 5e-324, 1e-7, 0.1, 1.0, 3.0, 1e300]) | st.floats(0, 1e308)


@st.composite
def near_pairs(draw: st.DrawFn, dtype: DType) -> tuple[int, int]:
    """Two patterns, often close to one another, since the edge is where arithmetic goes wrong."""
    want = draw(bit_patterns(dtype))
    top = (1 << dtype.width) - 1
    near = st.integers(-4, 4).map(lambda d: min(max(want + d, 0), top))
    return draw(near | bit_patterns(dtype)), want


@settings(max_examples=1500)
@given(
    st.data(),
    st.sampled_from(NUMERIC),
    bounds,
    bounds,
    st.integers(0, 5),
    st.sampled_from([None, "increase", "decrease"]),
)
def test_pointwise_tolerance_is_exact_rational_arithmetic(
    data: st.DataObject, dtype: DType, atol: float, rtol: float, ulp: int, fails_on: str | None
) -> None:
    ulp = ulp if dtype.is_float else 0
    assume(atol or rtol or ulp)
    pairs = data.draw(st.lists(near_pairs(dtype), min_size=1, max_size=6))
    if data.draw(st.booleans()):  # put the bound exactly on, or a hair off, one of the distances
        g, w = (decode_bits(dtype, bits) for bits in pairs[0])
        if math.isfinite(g) and math.isfinite(w) and 0 < abs(Fraction(g) - Fraction(w)) < 2**1023:
            edge = float(abs(Fraction(g) - Fraction(w)))
            atol, rtol = (
                data.draw(st.sampled_from([edge, math.nextafter(edge, 0), math.nextafter(edge, math.inf)])),
                0.0,
            )
            assume(atol or rtol or ulp)
    tolerance = Tolerance(atol=atol, rtol=rtol, ulp=ulp, fails_on=fails_on, reason="test")  # type: ignore[arg-type]
    got = [Row("m", step, g, dtype) for step, (g, _) in enumerate(pairs)]
    want = [Row("m", step, w, dtype) for step, (_, w) in enumerate(pairs)]
    policies = Policies(metrics=["m"], tolerances={"m": tolerance})
    (result,) = compare(stream(got), stream(want), policies=policies).series
    rejected = [g != w and not exactly_accepted(tolerance, dtype, g, w) for g, w in pairs]
    assert result.num_failing == sum(rejected)
    assert result.num_differing == sum(g != w for g, w in pairs)
    if any(rejected):
        assert result.verdict is Verdict.MISMATCH
        assert result.first is not None
        assert result.first.step == rejected.index(True)
    elif any(g != w for g, w in pairs):
        assert result.verdict is Verdict.WITHIN_TOLERANCE
    else:
        assert result.verdict is Verdict.MATCH


def exact_aggregate(reduction: str, values: list[Fraction]) -> Fraction:
    if reduction == "last":
        return values[-1]
    if reduction == "mean":
        return sum(values, Fraction(0)) / len(values)
    ordered = sorted(values)
    return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2


@settings(max_examples=500)
@given(st.data(), st.sampled_from(NUMERIC), st.sampled_from(["mean", "median", "last"]), bounds, st.integers(0, 2))
@example(None, DTYPES["float64"], "mean", 0.1, 0).via("the edge itself")
def test_aggregates_are_exact_rational_arithmetic(
    data: st.DataObject | None, dtype: DType, reduction: str, atol: float, skip: int
) -> None:
    if data is None:  # mean of 0.1 against 0.2: the float64 difference is at the bound, the exact one is not
        pairs = [(encode_value(dtype, 0.2), encode_value(dtype, 0.1))] * 3
    else:
        pairs = data.draw(st.lists(near_pairs(dtype), min_size=skip + 1, max_size=8))
        pairs = [p for p in pairs if all(math.isfinite(decode_bits(dtype, bits)) for bits in p)]
    assume(len(pairs) > skip and atol > 0)
    tolerance = Tolerance(atol=atol, reduce=reduction, skip_first=skip, reason="test")  # type: ignore[arg-type]
    got = [Row("m", step, g, dtype) for step, (g, _) in enumerate(pairs)]
    want = [Row("m", step, w, dtype) for step, (_, w) in enumerate(pairs)]
    (result,) = compare(
        stream(got, [2]), stream(want, [3]), policies=Policies(metrics=["m"], tolerances={"m": tolerance})
    ).series
    sides = [[Fraction(decode_bits(dtype, pair[side])) for pair in pairs[skip:]] for side in (0, 1)]
    exact_got, exact_want = (exact_aggregate(reduction, side) for side in sides)
    assert result.aggregate is not None
    assert (result.aggregate.got, result.aggregate.want) == (exact_got, exact_want)
    is_equal = all(g == w for g, w in pairs)
    if abs(exact_got - exact_want) > Fraction(atol):
        assert result.verdict is Verdict.MISMATCH
        assert result.first is not None
    else:
        assert result.verdict is (Verdict.MATCH if is_equal else Verdict.WITHIN_TOLERANCE)


def test_a_worse_value_cannot_widen_its_own_allowance() -> None:
    """Report: a symmetric isclose scales by the larger side, so 1.0 -> 1.1 passed at rtol 0.095 (behaviour 8)."""
    tolerance = Tolerance(rtol=0.095, reason="test")
    policies = Policies(metrics=["m"], tolerances={"m": tolerance})
    comparison = compare(stream([Row("m", 0, f32(1.1))]), stream([Row("m", 0, f32(1.0))]), policies=policies)
    assert comparison.verdict is Verdict.MISMATCH


def test_tolerances_that_do_not_fit_a_dtype_are_refused() -> None:
    rows = {
        "ulp": [Row("n", 0, 3, DTYPES["int64"])],
        "digest": [Row("n", 0, 0, DIGEST, digest="aa")],
        "skip": [Row("n", 0, f32(1.0))],
    }
    for case, tolerance in {
        "ulp": Tolerance(ulp=1, reason="test"),
        "digest": Tolerance(atol=1, reason="test"),
        "skip": Tolerance(atol=1, reduce="mean", skip_first=1, reason="test"),
    }.items():
        policies = Policies(metrics=["n"], tolerances={"n": tolerance})
        with pytest.raises(RegistrationError, match="n"):
            compare(stream(rows[case]), stream(rows[case]), policies=policies)


@pytest.mark.parametrize("bound", [-1.0, math.nan, math.inf, 10**400, True, "1e-3"])
def test_bounds_that_bound_nothing_are_refused(bound: object) -> None:
    with pytest.raises(UsageError, match="atol"):
        Tolerance(atol=bound, reason="test")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- policies and coverage


def test_registered_metrics_must_exist_on_both_sides_and_others_are_listed() -> None:
    want = [Row("train/loss", 0, f32(1.0)), Row("train/gone", 0, f32(1.0))]
    got = [Row("train/loss", 0, f32(1.0)), Row("train/new", 0, f32(1.0)), Row("other", 0, f32(1.0))]
    policies = Policies(metrics=["train/*", "never"], pinned=frozenset({"train/loss", "train/gone"}))
    comparison = compare(stream(got), stream(want), policies=policies)
    presence = {result.key.metric: (result.presence, result.verdict) for result in comparison.series}
    assert presence == {
        "train/loss": (Presence.BOTH, Verdict.MATCH),
        "train/gone": (Presence.ONLY_WANT, Verdict.MISMATCH),
        "train/new": (Presence.ONLY_GOT, Verdict.MISMATCH),
        "other": (Presence.ONLY_GOT, Verdict.UNREGISTERED),
    }
    assert comparison.never_emitted == ("never",)
    assert comparison.verdict is Verdict.MISMATCH


def test_observed_metrics_are_shown_and_never_judged() -> None:
    got, want = [Row("tps", 0, f32(1.0)), Row("m", 0)], [Row("tps", 0, f32(2.0)), Row("m", 0)]
    comparison = compare(stream(got), stream(want), policies=Policies(metrics=["m"], observe=["tps"]))
    assert comparison.verdict is Verdict.MATCH
    assert [r.verdict for r in comparison.series] == [Verdict.MATCH, Verdict.OBSERVED]
    assert comparison.series[1].worst is not None


def test_the_first_divergence_is_the_first_in_emission_order_over_all_metrics() -> None:
    """Report: failures printed whole series and never the step that went wrong first (behaviour 6)."""
    want = [Row("b", step, f32(step), seq=2 * step) for step in range(5)]
    want += [Row("a", step, f32(step), seq=2 * step + 1) for step in range(5)]
    got = [
        row.but(bits=row.bits ^ 1) if (row.metric, row.step) in {("a", 3), ("b", 3), ("a", 4)} else row for row in want
    ]
    comparison = compare(stream(got), stream(want), policies=STRICT_ALL)
    assert comparison.first_divergence is not None
    assert (comparison.first_divergence.key.metric, comparison.first_divergence.step) == ("b", 3)
    assert [result.key.metric for result in comparison.failing] == ["b", "a"]
    assert comparison.first_divergence.ulp_error == 1


def test_streams_out_of_order_are_refused() -> None:
    forwards = list(stream([Row("a", 0), Row("b", 0)]))
    with pytest.raises(InvalidRunError, match="order"):
        compare(forwards[::-1], forwards, policies=STRICT_ALL)
    with pytest.raises(InvalidRunError, match="backwards"):
        compare(stream([Row("a", 1), Row("a", 0)], [1]), forwards, policies=STRICT_ALL)


# ------------------------------------------------------------------------------------------- invariants


@settings(max_examples=300)
@given(st.data(), st.sampled_from(NUMERIC))
def test_invariants_hold_for_every_value_exactly(data: st.DataObject, dtype: DType) -> None:
    bits = data.draw(st.lists(bit_patterns(dtype), min_size=1, max_size=8))
    finite_values = [v for b in bits if math.isfinite(v := decode_bits(dtype, b))] or [0]
    low = data.draw(st.sampled_from(finite_values))
    invariant = (
        Invariant(min=low, max=low, finite=data.draw(st.booleans())) if dtype is not BOOL else Invariant(equals=1)
    )
    rows = [Row("m", step, b, dtype) for step, b in enumerate(bits)]
    found = {broken.what: broken for broken in check_invariants(stream(rows, [3]), lambda _: invariant)}
    values = [decode_bits(dtype, b) for b in bits]
    bounds_broken = [
        at
        for at, value in enumerate(values)
        if not ((invariant.min is None or value >= invariant.min) and (invariant.max is None or value <= invariant.max))
        or (invariant.equals is not None and value != invariant.equals)
    ]
    not_finite = [at for at, value in enumerate(values) if not math.isfinite(value)]
    if invariant.finite:  # said once, as not finite
        bounds_broken = [at for at in bounds_broken if at not in not_finite]
    for what, expected in {"bounds": bounds_broken, "finite": not_finite if invariant.finite else []}.items():
        assert (found[what].count if what in found else 0) == len(expected)
        if expected:
            assert found[what].step == expected[0]

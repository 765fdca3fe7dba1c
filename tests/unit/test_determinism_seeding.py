"""Seeds: what repeats, and what must not, over seeds, ranks, workers, epochs and start methods."""

from __future__ import annotations

import functools
import os
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from e2e_registry.determinism import (
    derive_seed,
    deterministic_mode,
    make_deterministic,
    read_state,
    sample_id_digest,
    sample_rng,
    seed_everything,
    seed_worker,
    state,
    worker_rng,
)
from e2e_registry.errors import UsageError

SEEDS = st.integers(0, 2**63 - 1)


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with deterministic_mode():
        yield


# One process


def draws() -> list[Any]:
    return [
        random.random(),
        np.random.rand(),
        torch.rand(1).item(),
        worker_rng().random(),
        torch.nn.functional.dropout(torch.ones(64)).sum().item(),
    ]


@pytest.mark.parametrize("seed", [0, 42, 2**32 - 1, 2**32, 2**63 - 1, np.int64(7)])
def test_the_same_seed_repeats_every_generator_and_another_changes_each(seed: int) -> None:
    order = torch.randperm(100, generator=make_deterministic(seed)).tolist()
    first, second = draws(), draws()
    assert all(a != b for a, b in zip(first[:4], second[:4], strict=True)), "each generator moves on"
    assert torch.randperm(100, generator=make_deterministic(seed)).tolist() == order
    assert draws() == first
    other = torch.randperm(100, generator=make_deterministic(int(seed) ^ 1)).tolist()
    assert other != order
    assert all(a != b for a, b in zip(first[:4], draws()[:4], strict=True))


def test_small_seeds_are_those_of_the_libraries() -> None:
    """Runs that seeded by hand, as the documentation of torch shows, keep their bits."""
    make_deterministic(42)
    got = random.random(), np.random.rand(), torch.rand(1)
    random.seed(42)
    np.random.seed(42)
    torch.manual_seed(42)
    assert got == (random.random(), np.random.rand(), torch.rand(1))


def test_high_bits_of_a_seed_count_in_every_library() -> None:
    seed_everything(1)
    first = draws()
    seed_everything(1 + 2**40)
    assert all(a != b for a, b in zip(first[:4], draws()[:4], strict=True))


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, "1", None, True])
def test_a_seed_that_is_none_is_refused(seed: Any) -> None:
    for function in (make_deterministic, seed_everything, derive_seed):
        with pytest.raises(UsageError, match="seed"):
            function(seed)


def test_the_cublas_workspace_is_set_only_where_it_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_SET_IN_PROCESS", {})
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    make_deterministic(1)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_deterministic(1)
    assert read_state()["variables"]["CUBLAS_WORKSPACE_CONFIG"]["set_in_time"] is True


def test_it_warns_when_cuda_was_up_before_the_workspace_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_SET_IN_PROCESS", {})
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "manual_seed_all", lambda _: None)
        patch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True, raising=False)
        with pytest.warns(RuntimeWarning, match="CUDA was started before CUBLAS_WORKSPACE_CONFIG"):
            make_deterministic(1)
    assert read_state()["variables"]["CUBLAS_WORKSPACE_CONFIG"]["set_in_time"] is False


# Derived seeds


def test_derived_seeds_are_the_documented_ones() -> None:
    """Part of the contract: standards that were recorded with them must stay reachable."""
    assert derive_seed(0) == 6400383804874238534
    assert derive_seed(42, rank=1, worker=2, stream="augment") == 1417798139644736765
    assert derive_seed(2**63 - 1) == 7631218539187212750


@given(st.lists(st.tuples(SEEDS, st.integers(0, 4095), st.integers(0, 63), st.text(max_size=6)), unique=True))
def test_derived_seeds_are_distinct_and_in_range(keys: list[tuple[int, int, int, str]]) -> None:
    seeds = [derive_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_sample_generators_depend_on_the_sample_alone() -> None:
    values = {(e, i): sample_rng(3, e, i).random() for e in range(3) for i in range(3)}
    assert len(set(values.values())) == 9
    assert sample_rng(3, 2, 1).random() == values[2, 1]
    assert sample_rng(4, 2, 1).random() != values[2, 1]


# Data workers


class Noise(torch.utils.data.Dataset[Any]):
    """Sixteen samples; each draws from every generator that an augmentation might use."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[int, ...]:
        info = torch.utils.data.get_worker_info()
        return (
            index,
            -1 if info is None else info.id,
            random.getrandbits(48),
            int(np.random.randint(2**48)),
            int(torch.randint(2**48, ()).item()),
            int(worker_rng().integers(2**48)),
        )


Epoch = list[tuple[int, ...]]


def epochs(seed: int, *, workers: int = 2, rank: int = 0, count: int = 2, **options: Any) -> list[Epoch]:
    """Load ``count`` epochs of one sample a batch in a process that was just seeded."""
    generator = make_deterministic(seed)
    init = seed_worker if rank == 0 else functools.partial(seed_worker, rank=rank)
    loader = torch.utils.data.DataLoader(
        Noise(), batch_size=None, shuffle=True, num_workers=workers, worker_init_fn=init, generator=generator, **options
    )
    return [[tuple(sample) for sample in loader] for _ in range(count)]


def drawn(samples: Epoch) -> list[set[int]]:
    return [set(column) for column in list(zip(*samples, strict=True))[2:]]


@pytest.mark.parametrize(
    "options",
    [
        {"multiprocessing_context": "fork"},
        {"multiprocessing_context": "fork", "persistent_workers": True},
        {"workers": 0},
    ],
    ids=["fork", "fork-persistent", "no-workers"],
)
def test_epochs_and_workers_draw_apart_and_the_same_seed_repeats(options: dict[str, Any]) -> None:
    first, second = epochs(5, **options)
    assert [s[0] for s in first] != [s[0] for s in second], "each epoch has its order"
    assert sorted(s[0] for s in first) == sorted(s[0] for s in second) == list(range(16))
    assert {s[1] for s in first} == ({-1} if options.get("workers") == 0 else {0, 1})
    for one, other in zip(drawn(first), drawn(second), strict=True):
        assert len(one) == len(other) == 16, "samples, hence workers, draw apart"
        assert not one & other, "epochs draw apart"
    assert epochs(5, **options) == [first, second]
    (another,) = epochs(6, count=1, **options)
    assert all(not one & other for one, other in zip(drawn(first), drawn(another), strict=True))


@pytest.mark.slow
def test_spawned_workers_draw_what_forked_ones_draw() -> None:
    options = {"persistent_workers": True}
    forked = epochs(5, multiprocessing_context="fork", **options)
    assert epochs(5, multiprocessing_context="spawn", **options) == forked


def test_ranks_draw_apart_only_where_they_say_so() -> None:
    (zero,), (again,), (one,) = (epochs(5, rank=rank, count=1) for rank in (0, 0, 1))
    assert zero == again
    assert [s[:2] for s in zero] == [s[:2] for s in one], "a shared generator gives a shared order"
    assert all(not a & b for a, b in zip(drawn(zero), drawn(one), strict=True))


def test_without_seed_worker_the_numpy_generator_still_draws_apart() -> None:
    generator = make_deterministic(5)
    in_parent = worker_rng().integers(2**48)  # which a forked worker must not go on from
    loader = torch.utils.data.DataLoader(Noise(), batch_size=None, num_workers=2, generator=generator)
    values = [sample[-1] for _ in range(2) for sample in loader]
    assert len({in_parent, *values}) == 33


def test_seeding_a_worker_twice_changes_nothing() -> None:
    torch.manual_seed(3)
    seed_worker(1)
    first = torch.initial_seed(), random.random()
    torch.manual_seed(3)
    seed_worker(1)
    assert (torch.initial_seed(), random.random()) == first


# Sample ids


@given(st.lists(st.integers() | st.text(max_size=4) | st.binary(max_size=4)), st.data())
def test_the_digest_of_sample_ids_sees_order_type_and_cut(ids: list[Any], data: Any) -> None:
    digest = sample_id_digest(ids)
    assert sample_id_digest(iter(ids)) == digest
    assert len(digest) == 64
    shuffled = data.draw(st.permutations(ids))
    is_same = [(type(x), x) for x in shuffled] == [(type(x), x) for x in ids]
    assert (sample_id_digest(shuffled) == digest) is is_same
    assert sample_id_digest([*ids, ""]) != digest


def test_sample_ids_may_come_as_tensors_and_may_not_be_floats() -> None:
    assert sample_id_digest(torch.tensor([3, 1])) == sample_id_digest(np.array([3, 1], np.uint8))
    assert sample_id_digest([3, 1]) == sample_id_digest(torch.tensor([3, 1]))
    assert sample_id_digest(["asb"]) != sample_id_digest(["a", "b"]), "a digest of joined ids would not see it"
    assert sample_id_digest(["1"]) != sample_id_digest([1]) != sample_id_digest([b"1"])
    for ids in ([1.0], [None], [True], torch.tensor([0.5]), torch.tensor([[1]])):
        with pytest.raises(UsageError, match="sample id"):
            sample_id_digest(ids)

"""The SFT recipe: its mathematics, its own attention kernel under the patch, and where planted faults show first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import local_actors
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from e2e_registry.comparison import Verdict, compare
from e2e_registry.config import load_settings
from e2e_registry.determinism.attention import (
    AttentionError,
    patch_flash_kernels,
    patching,
    register_native_kernel,
    require_patched,
)
from e2e_registry.determinism.variables import child_environment, pin_differences
from e2e_registry.errors import StorageError
from e2e_registry.recipes import digits, latent_cache
from e2e_registry.recipes.sft import LatentDataset, flow_matching_loss
from e2e_registry.recipes.small_dit import ATTENTION_KERNELS, attention
from e2e_registry.recipes.small_dit.encoder import decode, encode
from e2e_registry.recipes.small_dit.model import SmallDiT
from e2e_registry.recipes.train_actor import adamw
from e2e_registry.recording import read_run
from e2e_registry.registration import Registration, read_registration

PROJECT = Path(__file__).parents[2]
SCRIPT = PROJECT / "scripts/run_sft_digits.py"
TEST = PROJECT / "tests/e2e/short/test_sft_digits_2xCPU.py"
KERNEL = "e2e_registry.recipes.small_dit.attention.tiled_attention"


# --- the kernel -------------------------------------------------------------------------------------------------------


def random_qkv(queries: int, keys: int, *, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    shapes = [(2, queries, 3, 5), (2, keys, 3, 5), (2, keys, 3, 5)]
    return [(torch.randn(s, generator=generator, dtype=dtype) * scale).requires_grad_() for s in shapes]


def reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), value)


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 17), st.sampled_from([1.0, 30.0]), st.booleans())
def test_the_kernel_is_attention_forward_and_backward(queries: int, keys: int, scale: float, ordered: bool) -> None:
    inputs = random_qkv(queries, keys, scale=scale)
    got = attention.tiled_attention(*inputs, deterministic=ordered)
    want = reference(*inputs)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    towards = torch.linspace(-1.0, 1.0, want.numel(), dtype=torch.float64).view_as(want)
    for ours, theirs in zip(
        torch.autograd.grad(got, inputs, towards), torch.autograd.grad(want, inputs, towards), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def query_gradient(**options: Any) -> Tensor:
    inputs = random_qkv(16, 16, dtype=torch.float32)
    attention.tiled_attention(*inputs, **options).square().sum().backward()
    assert inputs[0].grad is not None
    return inputs[0].grad


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "_NATIVE", {})
    for kernel in ATTENTION_KERNELS:
        register_native_kernel(kernel.module, kernel.attribute)


@pytest.fixture
def patched(register: None) -> Iterator[None]:
    with patch_flash_kernels(()):
        yield


@pytest.mark.usefixtures("register")
def test_only_the_patch_keeps_the_kernels_bits_when_threads_finish_in_another_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ordered = query_gradient(deterministic=True)
    # Threads that finish in the reverse order, as the scheduler may have it.
    monkeypatch.setattr(attention, "as_completed", lambda futures: reversed(futures))
    assert not torch.equal(query_gradient(), ordered)
    torch.testing.assert_close(query_gradient(), ordered)
    with patch_flash_kernels(()):
        assert torch.equal(query_gradient(), ordered)
        assert torch.equal(query_gradient(deterministic=False), ordered)


@pytest.mark.usefixtures("register")
def test_the_model_calls_the_kernel_where_it_is_patched_and_an_actor_that_missed_the_patch_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bool] = []
    kernel = attention.tiled_attention

    def noting(query: Tensor, key: Tensor, value: Tensor, *, deterministic: bool = False) -> Tensor:
        seen.append(deterministic)
        return kernel(query, key, value, deterministic=deterministic)

    monkeypatch.setattr(attention, "tiled_attention", noting)
    model, inputs = SmallDiT(), (torch.zeros(2, 4, 4, 4), torch.zeros(2), torch.zeros(2, dtype=torch.int64))
    model(*inputs)
    assert seen == [False] * len(model.blocks)
    with pytest.raises(AttentionError, match=KERNEL):
        require_patched()
    seen.clear()
    with patch_flash_kernels(()):
        assert require_patched() == (KERNEL,)
        model(*inputs)
    assert seen == [True] * len(model.blocks)


def test_a_backend_of_diffusers_takes_the_kernels_place() -> None:
    torch.manual_seed(0)
    model = SmallDiT()
    for parameter in model.parameters():  # the modulations start as zero, which would hide the attention
        torch.nn.init.normal_(parameter, std=0.1)
    inputs = (torch.randn(3, 4, 4, 4), torch.rand(3), torch.tensor([0, 4, 9]))
    own = model(*inputs)
    model.set_attention_backend("NATIVE")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(attention, "tiled_attention", None)
        torch.testing.assert_close(model(*inputs), own)


# --- latents and the cache --------------------------------------------------------------------------------------------


def test_latents_are_the_haar_transform_and_decode_to_the_very_images() -> None:
    images, _ = digits.load()
    latents = encode(images)
    assert latents.shape == (1797, 4, 4, 4)
    assert latents.dtype == torch.float32
    a, b, c, d = images[7, 0, 2, 4], images[7, 0, 2, 5], images[7, 0, 3, 4], images[7, 0, 3, 5]
    bands = [(a + b + c + d) / 2 + 0.78125, a - b + c - d, a + b - c - d, a - b - c + d]
    assert latents[7, :, 1, 2].tolist() == [float(band) for band in bands]
    assert torch.equal(decode(latents), images)
    assert latents[: digits.TRAINING_IMAGES].mean((0, 2, 3)).abs().max() < 0.1
    deviation = latents[: digits.TRAINING_IMAGES].std((0, 2, 3))
    assert 0.75 < deviation.min() < deviation.max() < 1.4


def test_the_cache_gives_back_its_shards_in_order_and_refuses_what_is_not_whole(tmp_path: Path) -> None:
    rows = np.arange(10, dtype=np.float32).reshape(5, 2)
    latent_cache.write_shard(tmp_path / "cache", 1, {"latents": rows[3:]})
    latent_cache.write_shard(tmp_path / "cache", 0, {"latents": rows[:3]})
    assert not latent_cache.is_complete(tmp_path / "cache")
    with pytest.raises(StorageError, match=r"cache\.json"):
        latent_cache.read(tmp_path / "cache")
    latent_cache.finish(tmp_path / "cache", 2)
    assert latent_cache.is_complete(tmp_path / "cache")
    assert np.array_equal(latent_cache.read(tmp_path / "cache")["latents"], rows)
    shard = tmp_path / "cache" / "shard_00001.npz"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-30])
    with pytest.raises(StorageError, match="encoded again"):
        latent_cache.read(tmp_path / "cache")
    shard.unlink()
    with pytest.raises(StorageError, match="shard_00001"):
        latent_cache.read(tmp_path / "cache")


# --- data and loss ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dataset() -> LatentDataset:
    images, labels = digits.load()
    return LatentDataset(encode(images), labels, seed=0, train_images=digits.TRAINING_IMAGES)


def test_batches_hold_what_flow_matching_asks_for(dataset: LatentDataset) -> None:
    ids = torch.tensor([5, 0, 1436])
    batch = dataset.training_batch(ids, step=3)
    sigma = batch.sigma.view(-1, 1, 1, 1)
    assert torch.equal(batch.labels, digits.load()[1][ids])
    # x = (1 - s) data + s noise and v = noise - data, so x - s v = data and x + (1 - s) v = noise.
    torch.testing.assert_close(batch.noisy - sigma * batch.velocity, dataset.latents[ids])
    noise = batch.noisy + (1.0 - sigma) * batch.velocity
    assert abs(float(noise.mean())) < 0.3
    assert 0.8 < float(noise.std()) < 1.2
    other = dataset.training_batch(ids, step=4)
    assert not torch.equal(batch.velocity, other.velocity)
    assert torch.equal(dataset.training_batch(ids, step=3).velocity, batch.velocity)


def test_an_epoch_is_all_training_images_once_in_an_order_of_its_own(dataset: LatentDataset) -> None:
    first, second = dataset.epoch(0), dataset.epoch(1)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(digits.TRAINING_IMAGES))
    assert not torch.equal(first, second)
    held_out = dataset.held_out_batch()
    assert torch.equal(held_out.labels, digits.load()[1][digits.TRAINING_IMAGES :])
    torch.testing.assert_close(held_out.sigma.sort().values, (torch.arange(360) + 0.5) / 360)


def test_the_untrained_model_predicts_nothing_so_that_the_loss_is_the_mean_square_of_the_velocity(
    dataset: LatentDataset,
) -> None:
    batch = dataset.training_batch(torch.arange(8), step=0)
    expected = batch.velocity.double().square().mean()
    assert flow_matching_loss(SmallDiT(), batch).item() == pytest.approx(expected.item(), rel=1e-6)


# --- the recipe as a process ------------------------------------------------------------------------------------------

SHORT = ("--epochs", "1", "--train-images", "260", "--batch-size", "64")

Run = Callable[..., Path]


@pytest.fixture(scope="module")
def registration() -> Registration:
    return read_registration(TEST, load_settings(TEST))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, registration: Registration) -> Run:
    """Runs the recipe under its profile, as registered and with further arguments; the same arguments only once."""
    kept: dict[tuple[str, ...], Path] = {}

    def run(*args: str) -> Path:
        if args not in kept:
            kept[args] = tmp_path_factory.mktemp("run")
            done = launch("--deterministic-mode", *SHORT, *args, registration=registration, run_dir=kept[args])
            assert done.returncode == 0, done.stderr
        return kept[args]

    return run


def launch(*args: str, registration: Registration, run_dir: Path) -> subprocess.CompletedProcess[str]:
    child = child_environment(
        registration.profile, caller=dict(os.environ), registration=registration.env, python=sys.executable
    )
    variables = {**child.variables, "PYTHONPATH": str(PROJECT), "E2E_REGISTRY_RUN_DIR": str(run_dir)}
    command = [sys.executable, str(SCRIPT), *args]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=300)


def first_failing(got: Path, want: Path, registration: Registration) -> tuple[str, int] | None:
    """The metric and step at which two runs differ first, in the order in which they were emitted."""
    comparison = compare(read_run(got).batches(), read_run(want).batches(), policies=registration.policies())
    if comparison.verdict is Verdict.MATCH:
        return None
    first = comparison.failing[0]
    assert first.first is not None
    return first.key.metric, first.first.step


def values(run_dir: Path, metric: str, rank: int) -> list[float]:
    entries = map(json.loads, (run_dir / f"metrics.train.rank{rank}.jsonl").read_text().splitlines()[1:])
    groups = [group for entry in entries for group in entry.values() if isinstance(group, dict)]
    return [group[metric] for group in groups if metric in group]


@pytest.mark.slow
def test_it_repeats_and_every_rank_reports_the_same_under_the_pins_of_its_profile(
    run: Run, registration: Registration
) -> None:
    first = run()
    # No pin of cpu-portable, so the run still matches; the actors have it instead of what the profile would state.
    again = run("--train-env-vars", "CUBLAS_WORKSPACE_CONFIG=:16:8")
    assert first_failing(again, first, registration) is None
    recording = read_run(again)
    policies = registration.policies()
    assert all(policies.policy(metric).is_judged for metric in recording.metrics)
    assert not policies.never_emitted(frozenset(recording.metrics))
    for rank in (0, 1):
        state = recording.writer_states["train", rank]
        assert state is not None
        assert state["variables"]["CUBLAS_WORKSPACE_CONFIG"]["initial"] == ":16:8"
        assert pin_differences(registration.profile, state) == []
        assert state["determinism"]["torch"]["deterministic_algorithms"] is True
    for metric in recording.metrics:
        assert values(first, metric, 0) == values(first, metric, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("patched")
def test_two_sharded_ranks_train_as_one_unsharded_process_does(run: Run, dataset: LatentDataset) -> None:
    """Losses to 1e-6: sums over a batch are split in two, and nothing else differs."""
    torch.manual_seed(0)
    model = SmallDiT()
    optimizer = adamw(model.parameters(), lr=2e-3)
    first_260 = LatentDataset(dataset.latents, dataset.labels, seed=0, train_images=260)
    losses, norms = [], []
    for step, ids in enumerate(first_260.epoch(0)[:256].view(4, 64)):
        optimizer.zero_grad()
        loss = flow_matching_loss(model, first_260.training_batch(ids, step))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        held_out = flow_matching_loss(model, first_260.held_out_batch()).item()
    assert values(run(), "train/loss", 0) == pytest.approx(losses, rel=1e-6)
    assert values(run(), "train/grad_norm", 0) == pytest.approx(norms, rel=1e-5)
    assert values(run(), "eval/loss", 0) == pytest.approx([held_out], rel=1e-6)


@pytest.mark.usefixtures("group_of_one", "patched")
def test_planted_faults_show_first_where_they_act(registration: Registration, tmp_path: Path) -> None:
    script = local_actors.load_script("run_sft_digits")

    def train(name: str, **options: Any) -> Path:
        small = {"epochs": 1, "train_images": 260, "train_ranks": 1, "cache_dir": tmp_path / name / "latents"}
        return local_actors.run(script, tmp_path / name, **{**small, **options})

    baseline = train("baseline")

    def fault(name: str, **options: Any) -> tuple[str, int] | None:
        return first_failing(train(name, **options), baseline, registration)

    assert fault("none") is None
    # Step 0 is computed from equal weights. Of one call's metrics the first by name is named.
    assert fault("a larger step", lr=0.002002) == ("train/grad_norm", 1)
    assert fault("one image less", train_images=259) == ("data/sample_ids", 0)
    assert fault("another seed", seed=1) == ("data/sample_ids", 0)
    # A cache that is whole is used as it is: here one of an encoder whose scale was another one.
    arrays = latent_cache.read(tmp_path / "baseline/latents")
    latents = (arrays["latents"] * np.float32(1.001)).astype(np.float32)
    latent_cache.write_shard(tmp_path / "stale", 0, {**arrays, "latents": latents})
    latent_cache.finish(tmp_path / "stale", 1)
    assert fault("a stale cache", cache_dir=tmp_path / "stale") == ("data/cache", 0)


def test_sage_is_refused_before_ray_starts_and_before_diffusers_is_imported() -> None:
    program = f"""
        import runpy, sys
        sys.argv = ["run_sft_digits.py", "--deterministic-mode", "--fsdp-attention-backend", "sage"]
        try:
            runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
        except SystemExit as end:
            print(end.code, [name for name in ("ray", "diffusers", "torch") if name in sys.modules])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "2 []"
    assert "--fsdp-attention-backend" in done.stderr
    assert "'sage'" in done.stderr

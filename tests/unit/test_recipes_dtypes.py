"""Dtype control: flags and overrides, what FSDP2 makes of them over two ranks, and loss scaling that overflows."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import Tensor, nn

from e2e_registry import MetricRecorder
from e2e_registry.errors import UsageError
from e2e_registry.recipes.actor import ActorContext, AttentionOptions, GroupSpec
from e2e_registry.recipes.command_line import RolloutDtypeArgs
from e2e_registry.recipes.dtype_policy import FP32, DtypeOverride, DtypePolicy, Precision
from e2e_registry.recipes.mixed_precision import cast_parameters, compute_dtypes, convert_at_regions, regions
from e2e_registry.recipes.rollout_engine import RolloutEngine
from e2e_registry.recipes.train_actor import TrainActor

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NAMES = ["embedding.weight", "blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.0.linear.weight", "head.weight"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.linear(self.norm(hidden))
        return hidden + mixed


class Model(nn.Module):
    """Has a parameter and buffers of its own, blocks with norms, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.register_buffer("offset", torch.full((16,), 1.0009765))  # 1 + 2**-10: bf16 cannot tell it from 1
        self.embedding = nn.Linear(16, 16, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embedding(inputs.to(self.scale.dtype)) * self.scale
        for index, block in enumerate(self.blocks):
            hidden = block(hidden)
            self.seen[f"blocks.{index}"] = hidden.dtype
        return (self.head(hidden) + self.offset).float()


# --- overrides ------------------------------------------------------------------------------------------------------


def policy(*overrides: str, **dtypes: Any) -> DtypePolicy:
    return DtypePolicy(overrides=tuple(map(DtypeOverride.parse, overrides)), **dtypes)


def test_of_overrides_that_match_the_last_counts() -> None:
    resolved = policy("blocks.*=fp32", "*.norm.*=fp16", "*.norm.bias=bf16", forward="bf16").compute_dtypes(NAMES)
    assert resolved == {
        "embedding.weight": "bf16",
        "blocks.0.norm.weight": "fp16",
        "blocks.0.norm.bias": "bf16",
        "blocks.0.linear.weight": "fp32",
        "head.weight": "bf16",
    }


def test_a_pattern_that_matches_nothing_is_named_with_names_like_it() -> None:
    with pytest.raises(UsageError) as error:
        policy("*=fp32", "blocks.*.nrom.*=fp32").compute_dtypes(NAMES)
    message = str(error.value)
    assert message.startswith("--dtype-override: 'blocks.*.nrom.*' matches no parameter")
    assert "blocks.0.norm.weight" in message
    assert "embedding" not in message


@pytest.mark.parametrize("text", ["*.norm.*", "=fp32", "*.norm.*=", "*.norm.*=float32", ""])
def test_what_is_no_override_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not PATTERN=DTYPE\n.*fp32, bf16, fp16"):
        DtypeOverride.parse(text)


@given(st.lists(st.sampled_from(["*=fp32", "*.norm.*=fp16", "*.weight=bf16", "head.*=fp32", "blocks.*=bf16"])))
def test_overrides_resolve_as_one_after_the_other_would(texts: list[str]) -> None:
    expected = dict.fromkeys(NAMES, "bf16")
    for text in texts:
        alone = policy(text, forward="bf16").compute_dtypes(NAMES)
        untouched = policy(text, forward="fp16").compute_dtypes(NAMES)
        expected |= {name: dtype for name, dtype in alone.items() if dtype == untouched[name]}
    assert policy(*texts, forward="bf16").compute_dtypes(NAMES) == expected


def test_regions_are_the_largest_modules_of_one_dtype() -> None:
    model = Model()
    assert regions(model, FP32) == {}
    assert regions(model, policy("*.norm.*=fp32", forward="bf16")) == {"blocks.0.norm": "fp32", "blocks.1.norm": "fp32"}
    # The list of blocks is never called, so each block is a region; a norm inside that goes back is none.
    assert regions(model, policy("blocks.*=fp32", forward="bf16")) == {"blocks.0": "fp32", "blocks.1": "fp32"}
    split = policy("blocks.*=fp32", "blocks.1.norm.*=bf16", forward="bf16")
    assert regions(model, split) == {"blocks.0": "fp32", "blocks.1.linear": "fp32"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("*.norm.weight=fp32", r"'blocks.0.norm.weight' cannot compute in fp32 .* its module, blocks.0.norm, do not"),
        ("scale=fp32", r"'scale' cannot compute in fp32 .* its module, the model itself, do not"),
        ("*=fp32", r"take every parameter to fp32\n.*--forward-dtype"),
        ("embedding.*=fp32", r"'embedding.weight' and 'head.weight' are one parameter"),
    ],
)
def test_overrides_that_split_a_module_or_leave_nothing_are_refused(override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        regions(Model(), policy(override, forward="bf16"))


@pytest.mark.parametrize(
    ("override", "is_exact"),
    [("transformer.transformer_blocks.0.*=bf16", True), ("transformer.time_text_embed.*=bf16", False)],
)
def test_noise_levels_stay_exact_but_in_a_region_that_embeds_them(override: str, is_exact: bool) -> None:
    """At 500 of 1000 bf16 tells multiples of 2 apart."""
    torch.manual_seed(0)
    # Here, since ranks that are started afresh import this module, and diffusers takes seconds.
    from e2e_registry.recipes.digits_policy import DigitsPolicy

    model, dtypes = DigitsPolicy(), policy(override)
    convert_at_regions(model, dtypes)
    cast_parameters(model, compute_dtypes(model, dtypes))
    images, prompts = torch.zeros(1, *DigitsPolicy.SHAPE), torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        first, second = (model(images, torch.tensor([sigma]), prompts) for sigma in (0.5, 0.5004))
    assert torch.equal(first, second) == (not is_exact)


def test_tied_weights_have_one_dtype_under_both_names_and_buffers_keep_theirs() -> None:
    model = Model()
    dtypes = compute_dtypes(model, policy("embedding.*=fp32", forward="bf16"))
    assert dtypes["head.weight"] == dtypes["embedding.weight"] == torch.float32
    cast_parameters(model, dtypes)
    assert model.scale.dtype == torch.bfloat16
    assert model.head.weight is model.embedding.weight
    assert model.get_buffer("offset").dtype == torch.float32


# --- the command line -------------------------------------------------------------------------------------------------


def test_the_engine_follows_the_trainers_dtype_and_another_one_must_be_asked_for() -> None:
    assert RolloutDtypeArgs().engine_precision() == "fp32"
    assert RolloutDtypeArgs(forward_dtype="bf16").engine_precision() == "bf16"
    assert RolloutDtypeArgs(rollout_precision="fp16", allow_dtype_mismatch=True).engine_precision() == "fp16"
    with pytest.raises(UsageError, match="in bf16 and the trainer in fp32"):
        RolloutDtypeArgs(rollout_precision="bf16").engine_precision()


def test_losses_are_scaled_where_the_forward_pass_is_in_half_precision() -> None:
    assert RolloutDtypeArgs(forward_dtype="fp16", initial_loss_scale=64.0).dtypes().loss_scale == 64.0
    assert RolloutDtypeArgs(forward_dtype="bf16", initial_loss_scale=64.0).dtypes().loss_scale is None
    overridden = RolloutDtypeArgs(forward_dtype="fp16", reduce_dtype="fp16", dtype_override=["a=fp16", "b=bf16"])
    assert overridden.dtypes().loss_scale == 65536.0


@pytest.mark.parametrize("forward", ["fp16", "bf16", "fp32"])
def test_parameters_in_half_precision_are_refused_before_anything_starts(forward: str) -> None:
    command = [sys.executable, str(SCRIPTS / "run_sft_digits.py"), "--master-dtype", "fp16", "--forward-dtype", forward]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error: --master-dtype: gradients of fp16 parameters cannot be unscaled")


@pytest.mark.parametrize("forward", ["bf16", "fp32"])
@pytest.mark.parametrize("flag", ["--reduce-dtype", "--dtype-override"])
def test_gradients_in_half_precision_without_loss_scaling_are_refused(forward: Precision, flag: str) -> None:
    options: dict[str, Any] = {"reduce_dtype": "fp16"} if flag == "--reduce-dtype" else {"dtype_override": ["a.*=fp16"]}
    with pytest.raises(UsageError, match=f"{flag}: gradients in fp16 vanish .* not in {forward}"):
        RolloutDtypeArgs(forward_dtype=forward, **options).dtypes()


@pytest.mark.parametrize("script", ["run_flow_grpo_digits.py", "run_diffusion_nft_digits.py"])
def test_dtypes_that_differ_are_refused_before_ray_and_torch_are_imported(script: str) -> None:
    command = [sys.executable, "-X", "importtime", str(SCRIPTS / script), "--rollout-precision", "bf16"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    imports = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if "import time:" in line}
    assert result.returncode == 2
    assert "--rollout-precision: the engine would compute in bf16 and the trainer in fp32" in result.stderr
    assert "--allow-dtype-mismatch" in result.stderr
    assert "e2e_registry.recipes.dtype_policy" in imports, "the imports were not seen"
    assert not imports & {"ray", "diffusers", "torch"}


# --- two ranks --------------------------------------------------------------------------------------------------------


class Actor(TrainActor):
    """Trains :class:`Model` to be the identity; where asked for, one rank's gradients overflow in fp16."""

    def __init__(self, context: ActorContext, dtypes: DtypePolicy) -> None:
        super().__init__(context, Model, shard=(Block,), lr=3e-2, dtypes=dtypes)

    def train(self, steps: int, *, big_at: tuple[int, ...] = ()) -> list[dict[str, float]]:
        history = []
        for step in range(steps):
            inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))[self.share(8)]
            loss = (self.model(inputs) - inputs).square().mean()
            if step in big_at and self.context.rank == 1:
                loss = loss * 1e8
            value, norm = self.update([loss])
            history.append({"loss": value, "is_finite": math.isfinite(norm), **self.scaling_metrics})
        return history


def _run(rank: int, folder: Path, dtypes: DtypePolicy, big_at: tuple[int, ...], results: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    spec = GroupSpec(role="train", actor="", world_size=2, attention=AttentionOptions(library=None))
    with MetricRecorder(role="train", rank=rank, run_dir=folder) as recorder:
        context = ActorContext(spec, rank, recorder, torch.device("cpu"))
        actor = Actor(context, dtypes)
        before = actor.weights(actor.model)
        history = actor.train(12, big_at=big_at)
        after = actor.weights(actor.exported, compute_dtypes(actor.exported, dtypes))
        with torch.no_grad():
            output = actor.model(torch.ones(2, 16))
        engine = RolloutEngine(context, Model, precision=dtypes.forward, overrides=dtypes.overrides)
        engine.load_weights(after)
        facts = {
            "history": history,
            "moved": not torch.equal(before["embedding.weight"], actor.weights(actor.model)["embedding.weight"]),
            "held": {name: str(value.dtype) for name, value in after.items()},
            "same_weights": all(torch.equal(value, engine.model.state_dict()[name]) for name, value in after.items()),
            "same_output": torch.equal(engine.model(torch.ones(2, 16)), output),
            "master": {str(value.dtype) for value in actor.model.parameters()},
            "weights": {name: value.float().sum().item() for name, value in actor.weights(actor.model).items()},
        }
    results.put((rank, facts))
    torch.distributed.destroy_process_group()


def over_two_ranks(folder: Path, dtypes: DtypePolicy, *, big_at: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    folder.mkdir()
    return run_ranks(_run, 2, folder, dtypes, big_at)


@pytest.mark.parametrize(
    "dtypes",
    [
        policy(forward="bf16"),
        policy("*.norm.*=fp32", "blocks.1.*=fp32", forward="bf16", reduce="bf16"),
        policy("blocks.0.*=bf16", master="bf16", forward="fp32"),
    ],
    ids=["bf16", "bf16 but for norms and a block", "bf16 master and block"],
)
def test_sharded_trainer_and_whole_engine_compute_the_same_bits(tmp_path: Path, dtypes: DtypePolicy) -> None:
    first, second = over_two_ranks(tmp_path / "run", dtypes)
    assert first["history"] == second["history"]
    assert first["history"][-1]["loss"] < 0.7 * first["history"][0]["loss"]
    for facts in (first, second):
        assert facts["master"] == {"torch.bfloat16" if dtypes.master == "bf16" else "torch.float32"}
        assert facts["same_weights"]
        assert facts["same_output"], "trainer and engine differ under the same weights and dtypes"
    expected = dtypes.compute_dtypes(name for name, _ in Model().named_parameters())
    names = {"bf16": "torch.bfloat16", "fp32": "torch.float32"}
    assert {name: first["held"][name] for name in expected} == {name: names[dtype] for name, dtype in expected.items()}
    assert first["held"]["offset"] == "torch.float32"


@pytest.mark.parametrize("master", ["fp32", "bf16"])
def test_an_overflow_on_one_rank_keeps_all_ranks_from_stepping(tmp_path: Path, master: Precision) -> None:
    scaled = DtypePolicy(master=master, forward="fp16", loss_scale=1024.0, loss_scale_growth_interval=2)
    first, second = over_two_ranks(tmp_path / "run", scaled, big_at=(1,))
    assert first["history"] == second["history"]
    assert first["weights"] == second["weights"]
    skipped = [entry["train/step_skipped"] for entry in first["history"]]
    assert skipped == [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert [entry["is_finite"] for entry in first["history"]] == [not step for step in skipped]
    # Half after the overflow, and twice as much after two finite steps in a row.
    scales = [entry["train/loss_scale"] for entry in first["history"]]
    assert scales[:8] == [1024.0, 1024.0, 512.0, 512.0, 1024.0, 1024.0, 2048.0, 2048.0]
    assert first["moved"]

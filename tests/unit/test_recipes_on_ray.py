"""Actor groups on a real Ray: what reaches an actor, what an actor's death does, and what it leaves alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from repositories import Repository

pytestmark = pytest.mark.slow

ACTOR = """
import os, signal, time
import torch
from torch import distributed
from e2e_registry.errors import StorageError, UsageError
from e2e_registry.recipes.train_actor import TrainActor

class Tiny(TrainActor):
    def __init__(self, context):
        super().__init__(context, lambda: torch.nn.Linear(4, 1), lr=0.1)

    def train(self, step):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))[self.share(8)]
        loss, norm = self.update([self.model(inputs).square().mean()])
        self.recorder.log({"train/loss": loss, "train/grad_norm": norm}, step=step)

    def fail(self, how):
        # The other rank waits in a collective, as it would in training.
        if self.context.rank == 0:
            distributed.barrier()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise ValueError("the loss is NaN at step 3")
        if how == "read":
            raise StorageError("cannot read the cache", where="cache")
        if how == "refuse":
            raise UsageError("there is no such layer", where="--layer", hint="give another")

    def initial_variable(self, name):
        pairs = open("/proc/self/environ").read().split(chr(0))
        return dict(pair.partition("=")[::2] for pair in pairs).get(name)
"""

RECIPE = """
import sys, typer
from dataclasses import dataclass, field
from typing import Annotated
from e2e_registry.determinism.attention import NativeKernel
from e2e_registry.recipes.actor_group import AttentionOptions, GroupSpec, launch
from e2e_registry.recipes.command_line import command_line, parse_env_vars

@dataclass(frozen=True, kw_only=True)
class ScriptArgs:
    fail: str = "no"
    device: str = "cpu"
    ranks: int = 2
    kernel: str | None = None
    ray_address: str = "local"
    train_env_vars: Annotated[list[str], typer.Option()] = field(default_factory=list)

def run(args: ScriptArgs) -> None:
    spec = GroupSpec(
        role="train",
        actor="tiny_actor:Tiny",
        world_size=args.ranks,
        device=args.device,
        deterministic=True,
        env_vars=parse_env_vars(args.train_env_vars, flag="--train-env-vars"),
        attention=AttentionOptions(
            library=None, native_kernels=() if args.kernel is None else (NativeKernel("torch", args.kernel),)
        ),
    )
    with launch([spec], address=args.ray_address) as (train,):
        for step in range(3):
            train.call("train", step)
        print("CUBLAS_WORKSPACE_CONFIG", train.call("initial_variable", "CUBLAS_WORKSPACE_CONFIG"), flush=True)
        if args.fail != "no":
            train.call("fail", args.fail)
        for step in range(3, 6):
            train.call("train", step)
    print("torch in the driver:", "torch" in sys.modules)

from e2e_registry.recipes import actor_group
# Where the machine is loaded, the other actor takes longer to say that its peer is gone. Otherwise it says nothing.
actor_group.GRACE_S = 60.0 if "kill" in sys.argv else 8.0
command_line(run, ScriptArgs)()
"""

TEST = "tests/e2e/test_tiny.py"

BYSTANDER = """
import os, sys
import ray
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
@ray.remote
class Counter:
    count = 0
    def add(self):
        self.count += 1
        return self.count
counter = Counter.remote()
for _ in iter(sys.stdin.readline, ""):
    print(ray.get(counter.add.remote()), flush=True)
    sys.stdout.flush()
ray.shutdown()
"""


def declare(repository: Repository, *arguments: str) -> None:
    repository.write_recipe(body=RECIPE, name="tiny.py")
    repository.write_recipe(body=ACTOR, name="tiny_actor.py")
    repository.write_test(
        "test_tiny",
        est_time=100,
        script="scripts/tiny.py",
        args=list(arguments),
        metrics=["train/*"],
        observe=None,
    )


def log_of_last_run(repository: Repository) -> str:
    return (repository.runs[-1] / "output.log").read_text()


def processes_of(folder: Path) -> list[str]:
    """Return the command lines of all processes whose environment names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if str(folder).encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
    return found


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[str]]:
    """Another Ray on this machine, which must not notice anything."""
    command = [sys.executable, "-c", BYSTANDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=180) == 0


def ask(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("count\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_variables_reach_the_actor_and_a_changed_pin_is_named(repository: Repository) -> None:
    declare(repository)
    recorded = repository.command("record", "--test", TEST, "--runs", "1")
    assert recorded.code == 0, recorded.err + log_of_last_run(repository)
    assert "torch in the driver: False" in log_of_last_run(repository)

    declare(repository, "--train-env-vars", "CUBLAS_WORKSPACE_CONFIG=:16:8")
    no_pin = repository.command("check", "--test", TEST)
    assert "CUBLAS_WORKSPACE_CONFIG [':16:8', ':16:8']" in log_of_last_run(repository)
    assert no_pin.code == 0, no_pin.out

    declare(repository, "--train-env-vars", "MKL_CBWR=AUTO")
    pin = repository.command("check", "--test", TEST)
    assert pin.code == 3
    assert "incomparable" in pin.out
    assert "MKL_CBWR" in pin.out


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("kill", r"--- train rank 0\n.*--- train rank 1\n.*worker process has died.*\ntrain rank 1 died first"),
        ("raise", r"--- train rank 1\n.*in fail\n.*ValueError: the loss is NaN at step 3\ntrain rank 1 raised first"),
    ],
    ids=["killed", "raised"],
)
def test_an_actor_that_dies_ends_the_recipe_and_nothing_else(
    repository: Repository, bystander: subprocess.Popen[str], how: str, cause: str
) -> None:
    declare(repository, "--fail", how)
    assert ask(bystander) == "1"
    result = repository.command("check", "--test", TEST)
    log = log_of_last_run(repository)
    assert result.code == 4, result.out
    assert "failed" in result.out
    assert re.search(r"train rank 1 (died|raised) first", result.out), "the cause is not shown"
    assert re.search(cause, log, re.DOTALL), log
    deadline = time.monotonic() + 90
    while processes_of(repository.runs[-1]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(repository.runs[-1]) == []
    assert ask(bystander) == "2"
    lines = (repository.runs[-1] / "metrics.train.rank0.jsonl").read_text().splitlines()
    assert [line.partition(", ")[0] for line in lines[1:]] == [f'{{"step": {step}' for step in range(3)]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--device", "cuda"), 2, "error: the groups need 2 GPUs and Ray has 0\n"),
        (("--kernel", "no_such_kernel"), 2, "error: these attention kernels run without `deterministic=True`"),
        (("--fail", "read"), 6, "error: cache: cannot read the cache\n"),
    ],
    ids=["too few GPUs", "a kernel that cannot be forced", "a file that cannot be read"],
)
def test_what_actors_find_wrong_ends_the_recipe_at_once_with_the_errors_own_exit_code(
    repository: Repository, arguments: tuple[str, ...], code: int, message: str
) -> None:
    declare(repository)
    command = [sys.executable, str(repository.root / "scripts/tiny.py"), *arguments]
    variables = {**os.environ, "PYTHONPATH": str(repository.root / "scripts"), "CUDA_VISIBLE_DEVICES": ""}
    # Where there are too few devices, Ray would wait for them for ever.
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_what_an_actor_refuses_ends_the_recipe_as_if_the_driver_had_refused_it(repository: Repository) -> None:
    declare(repository, "--fail", "refuse")
    result = repository.command("check", "--test", TEST)
    assert result.code == 4, result.out
    assert "exited with code 2" in result.out
    log = log_of_last_run(repository)
    assert log.rstrip().endswith("error: --layer: there is no such layer\n  give another")
    assert "Traceback" not in log

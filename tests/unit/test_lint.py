"""The determinism lint: each rule on code that has the fault and on code that does not, and the tool around them."""

from __future__ import annotations

import ast
import builtins
import json
import keyword
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import typer
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from e2e_registry.cli.app import _guarded
from e2e_registry.cli.lint import lint as lint_command
from e2e_registry.determinism.lint import CATALOGUE, find, lint_paths, lint_source, select
from e2e_registry.determinism.lint.catalogue import META, RULES
from e2e_registry.determinism.lint.changes import changes_since
from e2e_registry.determinism.lint.documentation import updated
from e2e_registry.determinism.lint.finding import Finding
from e2e_registry.errors import ExitCode, UsageError

ROOT = Path(__file__).parents[2]

# The imports that the examples below take for granted: most rules must see through each of these forms.
PRELUDE = """\
import glob
import json
import math
import os
import random
import time
from functools import partial
from pathlib import Path
import numpy as np
import torch
import torch.nn.functional as F
from torch.backends import cudnn
from torch.utils.data import DataLoader
"""


def found(source: str, *, in_package: bool = False, path: str = "train.py") -> list[Finding]:
    return list(lint_source(source.encode(), Path(path), in_package=in_package).findings)


def codes(source: str, *, in_package: bool = False) -> list[str]:
    return [finding.code for finding in found(source, in_package=in_package)]


def own_codes(code: str, body: str, **options: bool) -> list[str]:
    """The findings of one rule in ``body``, below the prelude: a body may break others too."""
    text = PRELUDE + textwrap.dedent(body)
    result = lint_source(text.encode(), Path("train.py"), selection=select(chosen=[code]), **options)
    return [finding.code for finding in result.findings]


# --- The second seed document: two runs of one commit and one seed that differ

THREE_FAULTS = """
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(42)
torch.backends.cudnn.benchmark = True


class Images(Dataset):
    def __init__(self, pixels):
        self.pixels = pixels

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        rng = np.random.default_rng()
        return self.pixels[index] + rng.normal(size=self.pixels.shape[1:])


class Embedding(torch.nn.Module):
    def forward(self, rows, segment, count):
        pooled = torch.zeros(count, rows.shape[1], device=rows.device)
        return pooled.scatter_add_(0, segment[:, None].expand_as(rows), rows)


def main(pixels):
    loader = DataLoader(Images(pixels), batch_size=256, shuffle=True, num_workers=8)
    for batch in loader:
        print(f"loss {batch.mean():.4f}")
"""


def test_the_three_faults_of_two_runs_that_should_have_agreed_are_all_reported() -> None:
    lines = THREE_FAULTS.splitlines()

    reported = {finding.code: lines[finding.line - 1].strip() for finding in found(THREE_FAULTS)}

    assert reported == {
        "DET001": "torch.backends.cudnn.benchmark = True",
        "DET005": "loader = DataLoader(Images(pixels), batch_size=256, shuffle=True, num_workers=8)",
        "DET006": "rng = np.random.default_rng()",
        "DET012": "return pooled.scatter_add_(0, segment[:, None].expand_as(rows), rows)",
    }


def test_the_same_script_mended_is_clean() -> None:
    mended = (
        THREE_FAULTS.replace("benchmark = True", "benchmark = False")
        .replace("default_rng()", "default_rng([42, index])")
        .replace("num_workers=8)", "num_workers=8, generator=torch.Generator().manual_seed(42))")
        .replace("torch.manual_seed(42)", "torch.manual_seed(42)\ntorch.use_deterministic_algorithms(True)")
    )

    assert codes(mended) == []


# --- Every rule

REPORTED = {
    "DET001": [
        "torch.backends.cudnn.benchmark = True",
        "cudnn.benchmark = True",
        "import torch.backends.cudnn as c\nc.benchmark = 1",
        "b = torch.backends\nb.cudnn.benchmark = True",
        "FAST = True\ncudnn.benchmark = FAST",
        "cudnn.deterministic = cudnn.benchmark = True",
        "setattr(torch.backends.cudnn, 'benchmark', True)",
        "with cudnn.flags(enabled=True, benchmark=True):\n    pass",
        "import lightning.pytorch as pl\npl.Trainer(benchmark=True)",
        "cudnn.deterministic, cudnn.benchmark = False, True",
        "(cudnn.deterministic, [cudnn.benchmark, x]) = True, [True, 0]",
        "cudnn.benchmark: bool = True",
        "cudnn.benchmark |= True",
        "cudnn.benchmark = (fast := True)",
        "setattr(cudnn, 'benchmark', (fast := True))",
    ],
    "DET002": [
        "torch.use_deterministic_algorithms(True, warn_only=True)",
        "from torch import use_deterministic_algorithms as u\nWARN = True\n"
        "from mylib import enable_full_determinism\nenable_full_determinism(3, warn_only=WARN)",
        "torch.set_deterministic_debug_mode('warn')",
        "torch.set_deterministic_debug_mode(1)",
        "from lightning import Trainer\nTrainer(deterministic='warn')",
    ],
    "DET003": [
        "os.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'",
        "os.environ.setdefault('OMP_NUM_THREADS', '1')",
        "os.environ.update({'MKL_CBWR': 'COMPATIBLE'})",
        "os.environ.update(NCCL_ALGO='Ring')",
        "os.environ |= {'ATEN_CPU_CAPABILITY': 'default'}",
        "os.putenv('ONEDNN_MAX_CPU_ISA', 'SSE41')",
        "from os import environ as e\nNAME = 'NCCL_DETERMINISTIC'\ne[NAME] = '1'",
        "def pin():\n    os.environ['CUBLAS_WORKSPACE_CONFIG'] = ':16:8'",
    ],
    "DET004": [
        "os.environ['PYTHONHASHSEED'] = '0'",
        "def set_seed(seed):\n    os.environ['PYTHONHASHSEED'] = str(seed)",
        "os.environ.setdefault('PYTHONHASHSEED', '0')",
    ],
    "DET005": [
        "DataLoader(data, num_workers=4)",
        "DataLoader(data, 32, True, None, None, 4)",
        "torch.utils.data.DataLoader(data, num_workers=args.workers)",
        "import torch.utils.data as d\nd.DataLoader(data, num_workers=2, worker_init_fn=None, generator=None)",
        "from torchdata.stateful_dataloader import StatefulDataLoader as L\nL(data, num_workers=1)",
    ],
    "DET006": [
        "rng = np.random.default_rng()",
        "rng = np.random.default_rng(None)",
        "from numpy.random import default_rng as make\nmake()",
        "rng = np.random.RandomState()",
        "rng = np.random.Generator(np.random.PCG64())",
        "rng = random.Random()",
        "g = torch.Generator()\nF.dropout(x)\nx.normal_(generator=g)",
        "DataLoader(data, generator=torch.Generator())",
        "g = torch.Generator()\ng.seed()",
        "random.shuffle(names)",
        "np.random.rand(3)",
        "from random import choice\nchoice([1, 2])",
        "import numpy.random as nr\ndef noise():\n    return nr.normal()",
        "torch.randn(3)",
        "torch.seed()",
        # A helper of that name in this file seeds only what its body seeds.
        "def set_seed(s):\n    torch.manual_seed(s)\nset_seed(0)\nrandom.random()",
    ],
    "DET007": [
        "names = os.listdir(folder)\ndef f():\n    return names",
        "data = [load(f) for f in glob.glob('*.png')]\ntrain(data)",
        "from glob import iglob\nfor f in iglob('*'):\n    files.append(f)\nuse(files)",
        "def f(p):\n    return list(p.iterdir())",
        "def f(p):\n    yield from (q for q in p.rglob('*.txt'))",
        "first = next(Path('.').glob('*.pt'))",
        "last = os.listdir('.')[-1]",
        "files = ['a', *os.listdir('.')]\ntrain(files)",
        "total = sum(weight(f) for f in os.listdir('.'))\nreport(total)",
        "class D:\n    def __init__(self, p):\n        self.files = [e.name for e in os.scandir(p)]",
        "for f in os.listdir('.'):\n    loss = model(load(f))\n    loss.backward()",
        "def find(p):\n    for f in p.iterdir():\n        if f.suffix in ('.pt', '.bin'):\n            return f",
    ],
    "DET008": [
        "names = list(set(words))\ntrain(names)",
        "for w in {'a', 'b'}:\n    out.append(w)\nuse(out)",
        "vocab = {w: i for i, w in enumerate(set(words))}",
        "s = set()\nfor w in words:\n    s.add(w)\nids = [lookup(w) for w in s]\ntrain(ids)",
        "def f(names: set[str]):\n    return [n.upper() for n in names]",
        "prompt = ' '.join({'x', 'y'} | extra)\nmodel(prompt)",
        "def f(a, b):\n    return tuple(set(a) - set(b))",
        "def f(state, other):\n    for key in state.keys() - other.keys():\n        yield key",
        "todo = {'a', 'b'}\nwhile todo:\n    visit(todo.pop())",
        "first = list({'a', 'b'})[0]",
        "both = [*{'a', 'b'}, 'c']\ntrain(both)",
    ],
    "DET009": [
        "assert torch.equal(a, b)",
        "self.assertTrue(torch.equal(a.grad, b.grad))",
        "def test_bitwise_identical(a, b):\n    return torch.equal(a, b)",
        "same = all(torch.equal(run_a[k], run_b[k]) for k in run_a)",
        "def check_determinism(a, b):\n    if not torch.allclose(a, b):\n        raise ValueError",
        "torch.testing.assert_close(a, b, rtol=0, atol=0)",
        "np.allclose(a, b, rtol=0.0, atol=0.0)",
        "ok = np.array_equal(a, b)  # bit for bit",
    ],
    "DET010": [
        "wandb.log({'train/loss': round(loss, 4)})",
        "writer.add_scalar('loss', round(loss.item(), 5), step)",
        "self.log('val_acc', float(f'{acc:.3f}'))",
        "logs['loss'] = round(total / n, 4)",
        "metrics = {'grad_norm': np.round(norm, 6)}",
        "json.dump({'step': 1, 'reward': '%.4f' % reward}, file)",
        "entry = {'kl': '{:.3e}'.format(kl)}",
        "file.write(f'{step},{loss:.6f}\\n')",
        "run.log_metrics({'rollout': {'entropy': format(h, '.4f')}})",
        "def step_(loss):\n    loss = round(loss, 4)\n    if verbose:\n        wandb.log({'train/loss': loss})",
        "for batch in data:\n    shown = float(f'{model(batch):.4f}')\n    run.log({'loss': shown})\n    shown = 0.0",
        "first, second = round(a, 4), b\nrun.log({'value': first})",
        "total = 0.0\ntotal += round(loss, 4)\nrun.log({'value': total})",
        "run.log({'value': (shown := round(loss, 4))})",
        "if (shown := round(loss, 4)) > 0:\n    writer.add_scalar('value', shown, step)",
        "run.log({k: round(v, 4) for k, v in values.items()})",
        "run.log({**values, **{k: np.round(v, 4) for k, v in more.items()}}, step=step)",
        "out = {k: round(v, 4) for k, v in values.items()}\nout['step'] = step\nrun.log(out)",
        "out = {}\nfor k, v in values.items():\n    out[k] = round(v, 4)\nrun.log(out, step=step)",
        "run.log(dict(value=round(v, 4)))",
        "record = dict(value=round(v, 4))\nrun.log(record)",
        "run.log(**{'value': round(v, 4)})",
        "metrics.update(loss=round(loss, 4))",
        "logs['loss']: float = round(loss, 4)",
        "logs['loss'], step = round(loss, 4), 3",
        "text = f'{loss:.4f}'\nrun.log({'loss': float(text)})",
        "row = [step, round(loss, 4)]\nwriter.writerow(row)",
    ],
    "DET011": [
        "import flash_attn\npartial(flash_attn.flash_attn_func, deterministic=True)",
        "import functools as ft\nfrom flash_attn import flash_attn_func as f\ng = ft.partial(f, deterministic=True)",
        "def patch_attention(module):\n    for name in names:\n"
        "        setattr(module, name, partial(getattr(module, name), deterministic=True))",
    ],
    "DET012": [
        "out.scatter_add_(0, index, rows)",
        "torch.scatter_add(out, 0, index, rows)",
        "out.index_add(0, index, rows)",
        "out = out.scatter_reduce(0, index, rows, 'mean')",
        "out.scatter_reduce_(0, index, rows, reduce='sum')",
        "out.index_put_((index,), rows, accumulate=True)",
        "torch.bincount(index, weights=w)",
        "index.bincount(w)",
        "from torch_scatter import scatter_mean\nscatter_mean(rows, index)",
        "rows, cols = torch.where(adjacency)\nout.index_add_(0, rows, x[cols])",
        # Strict mode raises here, and without it nothing orders it.
        "torch.use_deterministic_algorithms(True)\ntorch.bincount(index, w)",
        "torch.use_deterministic_algorithms(True, warn_only=True)\nout.index_add_(0, index, rows)",
    ],
    "DET013": [
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "cudnn.allow_tf32 = True",
        "torch.set_float32_matmul_precision('high')",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.fp32_precision = 'tf32'",
        "os.environ['NVIDIA_TF32_OVERRIDE'] = '1'",
        "from transformers import TrainingArguments\nTrainingArguments('out', tf32=True)",
    ],
    "DET014": [
        "random.seed(time.time())",
        "torch.manual_seed(int(time.time() * 1000) % 2**32)",
        "seed = int(time.time())",
        "now = time.time_ns()\nrng = np.random.default_rng(now)",
        "import datetime\nset_seed(datetime.datetime.now().microsecond)",
        "train(seed=os.getpid())",
        "args.seed = args.seed or int.from_bytes(os.urandom(4), 'big')",
        "random.seed(hash('fold-1'))",
        "random.seed(hash(f'{split}/{rank}'))",
    ],
}

CLEAN = {
    "DET001": [
        "cudnn.benchmark = False",
        "cudnn.benchmark = args.benchmark",
        "cudnn.benchmark = not args.deterministic",
        "class Options:\n    pass\nOptions.benchmark = True",
        "def f(torch):\n    torch.backends.cudnn.benchmark = True",
        "with cudnn.flags(enabled=True, benchmark=False):\n    pass",
        "run(benchmark=True)",
        "cudnn.deterministic, cudnn.benchmark = True, False",
        "cudnn.benchmark, *rest = True, False",
        "cudnn.deterministic, cudnn.benchmark = switches",
        "cudnn.benchmark: bool",
        "cudnn.benchmark &= True",
    ],
    "DET002": [
        "torch.use_deterministic_algorithms(True)",
        "torch.use_deterministic_algorithms(True, warn_only=False)",
        "torch.use_deterministic_algorithms(True, warn_only=args.warn_only)",
        "def f(warn_only=True):\n    torch.use_deterministic_algorithms(True, warn_only=warn_only)",
        "fabric.run('ls', warn_only=True)",
        "torch.set_deterministic_debug_mode('error')",
    ],
    "DET003": [
        "env = dict(os.environ)\nenv['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'",
        "run(env={**os.environ, 'OMP_NUM_THREADS': '1'})",
        "os.environ['WANDB_MODE'] = 'offline'",
        "value = os.environ['CUBLAS_WORKSPACE_CONFIG']",
    ],
    "DET004": [
        "run(env={**os.environ, 'PYTHONHASHSEED': '0'})",
        "if os.environ.get('PYTHONHASHSEED') != '0':\n    raise SystemExit",
        "import sys\ndef restart():\n    os.environ['PYTHONHASHSEED'] = '0'\n    os.execv(sys.executable, sys.argv)",
    ],
    "DET005": [
        "DataLoader(data)",
        "DataLoader(data, num_workers=0)",
        "NONE = 0\nDataLoader(data, num_workers=NONE)",
        "DataLoader(data, num_workers=4, worker_init_fn=seed_worker)",
        "DataLoader(data, num_workers=4, generator=g)",
        "DataLoader(data, num_workers=4, **settings)",
        "DataLoader(data, 8, False, None, None, 4, None, False, False, 0, seed_worker)",
        "from my_loader import DataLoader as D\nD(data, num_workers=4)",
    ],
    "DET006": [
        "rng = np.random.default_rng(0)",
        "rng = np.random.default_rng([seed, rank])",
        "rng = np.random.default_rng(*seeds)",
        "rng = random.Random(seed)",
        "rng = random.Random()\nrng.seed(seed)",
        "class S:\n    def __init__(self):\n        self.rng = random.Random()\n"
        "    def set_epoch(self, e):\n        self.rng.seed(e)",
        "g = torch.Generator().manual_seed(seed)",
        "g = torch.Generator(device='cuda')\ng.manual_seed(seed)",
        "g = torch.Generator()\ng.set_state(saved)",
        "g = torch.Generator()\nseed_generator(g, 3)",
        "def make():\n    return torch.Generator()",
        "random.seed(0)\nrandom.shuffle(names)",
        "np.random.seed(seed=seed)\nnp.random.rand(3)",
        "from accelerate.utils import set_seed\nset_seed(0)\nrandom.random()\nnp.random.rand(3)\ntorch.rand(3)",
        "torch.rand(3, generator=g)",
        "def f(random):\n    return random.random()",
        "rng = np.random.default_rng(3)\nrng.normal()",
        "any((np := name) for name in names)\nnp.random.default_rng()",
    ],
    "DET007": [
        "names = sorted(os.listdir(folder))\ntrain(names)",
        "names = os.listdir(folder)\nnames.sort()\ntrain(names)",
        "names = os.listdir(folder)\nnames = sorted(names)\ntrain(names)",
        "count = len(os.listdir(folder))",
        "if not os.listdir(folder) or 'x' in os.listdir(folder):\n    pass",
        "for f in glob.glob('*.tmp'):\n    os.remove(f)",
        "names = set(os.listdir(folder))",
        "sizes = {f.name: f.stat().st_size for f in Path('.').iterdir()}",
        "total = sum(f.stat().st_size for f in Path('.').rglob('*') if f.is_file())\nreport(total)",
        "count = sum(f.name.isdigit() for f in Path('/dev').glob('nvidia*'))\nreport(count)",
        "report(sum(1 for f in Path('.').iterdir()) + sum(f.suffix == '.pt' for f in Path('.').iterdir()))",
        "for f in [Path('a'), *Path('.').glob('*.md')]:\n    check(f)",
        "files = []\nfor f in os.listdir('.'):\n    files.append(f)\nfiles.sort()\ntrain(files)",
        "files = []\nfor f in os.listdir('.'):\n    files.append(f)\ncount = len(files)",
        "def f(p):\n    for q in p.iterdir():\n        if q.is_dir():\n            return True",
        "found = any(f.endswith('.pt') for f in os.listdir('.'))",
        "raise ValueError(f'{os.listdir(folder)} holds no checkpoint')",
        "print(os.listdir('.'))",
        "logger.warning(os.listdir('.'))",
        "latest = max(Path('.').glob('*.pt'), key=os.path.getmtime)",
        "def f(fs):\n    return fs.glob('*.parquet')",
        "is_empty = next(Path('.').iterdir(), None) is None",
        "def f(p):\n    for q in p.iterdir():\n        if q.name == 'config.json':\n            return q",
    ],
    "DET008": [
        "names = sorted(set(words))\ntrain(names)",
        "unique = set(words)\nif 'x' in unique and len(unique) > 2:\n    pass",
        "names = list(dict.fromkeys(words))\ntrain(names)",
        "ids = list({1, 2, 3})\ntrain(ids)",
        "ids = list(set(range(8)))\ntrain(ids)",
        "def f(ids: set[int]):\n    return [i + 1 for i in ids]",
        "peer_ranks = {stage.rank for stage in stages}\nops = [recv(rank) for rank in peer_ranks]\nwait(ops)",
        "for name in {'a', 'b'}:\n    os.remove(name)",
        "s = set(words)\ns = [1]\ntrain(list(s))",
        "raise ValueError(', '.join(set(words)))",
        "missing = ', '.join(set(words))\nprint(missing)",
        "devices = {p.device for p in parameters}\nif len(devices) != 1:\n    raise ValueError\ndevice = devices.pop()",
        "devices = {p.device for p in parameters}\nif len(devices) > 1:\n    raise ValueError\nx = list(devices)[0]",
        "(device,) = {p.device for p in parameters}",
        "name = next(iter(set(names)))",
        "largest = max(*set(names))",
        "rest = {1, *set(names)}",
        "if method in (*{'a', 'b'}, 'c'):\n    pass",
        "total = max(x for x in set(words))",
        "both = set(a) & set(b)\nreturn_value = {x for x in both}",
        "def f(set):\n    return list(set(3))",
        "import re\npattern = re.compile('|'.join(set(words)))\nuse(pattern)",
        "seen = set()\ndef f(a, b):\n    return list(a - b)",
        "seen = set()\ndef f(names: list[str]):\n    return [n for n in names]",
    ],
    "DET009": [
        "if not torch.equal(text_ids, untruncated):\n    warn()",
        "if not torch.equal(scale, previous):\n    refresh()",
        "assert torch.equal(input_ids, other_ids)",
        "assert torch.equal(out, torch.tensor([1, 2, 3]))",
        "assert torch.equal(got.isnan(), want.isnan())",
        "assert torch.allclose(a, b, atol=1e-5)",
        "assert torch.allclose(a, b)",
        "def test_golden_section_search(x):\n    np.testing.assert_allclose(x, 3.0)",
        "def test_bitwise(a, b):\n    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))",
        "def test_determinism(a, b):\n    assert torch.allclose(a, b, rtol=1e-3)",
    ],
    "DET010": [
        "wandb.log({'train/loss': loss})",
        "print(f'loss {loss:.4f}')",
        "logger.info('loss %.4f', loss)",
        "logger.info(f'loss {loss:.4f}')",
        "logger.info({'loss': round(loss, 2)})",
        "bar.set_postfix({'loss': f'{loss:.3f}'})",
        "bar.set_postfix(loss=round(loss, 3))",
        "logs['runtime'] = round(seconds, 2)",
        "wandb.log({'samples_per_second': round(n / t, 3), 'epoch': round(epoch, 2)})",
        "math.log(round(x, 3))",
        "steps = round(total / batch)",
        "box = {'width': round(w, 2), 'label': f'{x:.2f}'}",
        "writer.add_scalar('loss', loss, round(step))",
        "file.write(f'{loss:.9g}\\n')",
        "raise ValueError({'loss': round(loss, 2)})",
        "shown = round(loss, 4)\nprint(shown)\nrun.log({'loss': loss})",
        "shown = round(loss, 4)\nshown = loss\nrun.log({'value': shown})",
        "loss = model(x)\nif verbose:\n    loss = round(loss, 4)\n    print(loss)\nrun.log({'value': loss})",
        "def show(a):\n    value = round(a, 4)\n    return value\ndef log_(value):\n    run.log({'value': value})",
        "warmup = round(0.1 * steps)\nrun.log({'warmup_steps': warmup})",
        "size = schedule(round(x, 2))\nrun.log({'value': size})",
        "name = f'{lr:.0e}'\nrun.log({'run': name})",
        "elapsed = round(time.time() - start, 2)\nrun.log({'value': elapsed})",
        "run.log({k: round(v, 2) for k, v in timers.items()})",
        "for k, v in timers.items():\n    out[k] = round(v, 2)\nrun.log(out)",
        "box = {k: round(v, 2) for k, v in sides.items()}\ndraw(box)",
        "logger.info({k: round(v, 2) for k, v in values.items()})",
        "shown = {k: round(v, 2) for k, v in values.items()}\nprint(shown)\nrun.log(values)",
        "text = f'step {step} loss {loss:.4f}'\nfile.write(text)",
        "is_low = round(loss, 4) < 1\nrun.log({'value': is_low})",
        "value = table[round(x, 2)]\nrun.log({'value': value})",
    ],
    "DET011": [
        "partial(model.apply, deterministic=True)",
        "from flash_attn import flash_attn_func\npartial(flash_attn_func, causal=True)",
        "from flash_attn import flash_attn_func\nflash_attn_func(q, k, v, deterministic=True)",
    ],
    "DET012": [
        "torch.use_deterministic_algorithms(True)\nout.scatter_add_(0, index, rows)",
        "torch.bincount(index, minlength=4)",
        "np.bincount(index, weights=w)",
        "np.add.at(out, index, rows)",
        "out.scatter_(1, index, 1.0)",
        "out.scatter_reduce(0, index, rows, reduce='amax')",
        "out.index_put_((index,), rows)",
        "counts = torch.zeros(4, dtype=torch.int64)\ncounts.scatter_add_(0, index, ones)",
        "out.scatter_add_(0, index, torch.ones_like(index, dtype=torch.float))",
        "out.index_add_(0, index, rows.long())",
        "for e in range(8):\n    _, rows = torch.where(mask[e])\n    out.index_add_(0, rows, expert(x[rows]))",
        "pad = torch.ones(3)\nout.scatter_add_(0, index, pad)\npad = torch.ones(4)\nout.scatter_add_(0, index, pad)",
        "axes.scatter(x, y)",
        "queue.put(row)",
    ],
    "DET013": [
        "torch.backends.cuda.matmul.allow_tf32 = False",
        "torch.set_float32_matmul_precision('highest')",
        "torch.backends.cuda.matmul.fp32_precision = 'ieee'",
        "torch.backends.cuda.matmul.allow_tf32 = args.tf32",
        "from transformers import TrainingArguments\nTrainingArguments('out', tf32=False)",
    ],
    "DET014": [
        "random.seed(args.seed)",
        "start = time.time()",
        "seed = 42\nelapsed = time.time() - start",
        "random.seed(hash((1, 2)))",
        "reseeding_time = time.time()",
    ],
}


@pytest.mark.parametrize(("code", "body"), [(code, body) for code, bodies in REPORTED.items() for body in bodies])
def test_the_fault_is_reported(code: str, body: str) -> None:
    assert own_codes(code, body) == [code] * max(1, body.count("PYTHONHASHSEED"))


@pytest.mark.parametrize(("code", "body"), [(code, body) for code, bodies in CLEAN.items() for body in bodies])
def test_what_only_looks_like_it_is_not(code: str, body: str) -> None:
    assert own_codes(code, body) == []


#: Ways to make a variable a value, and to log a variable; the class body and the loop only indent.
_ASSIGN = [
    "{v} = {e}",
    "{v}: float = {e}",
    "x = {v} = {e}",
    "{v}, x = {e}, 1",
    "[x, ({v}, y)] = [1, ({e}, 2)]",
    "({v} := {e})",
]
_ROUND = [
    "round({x}, 4)",
    "round(number={x}, ndigits=4)",
    "np.round({x}, 4)",
    "float('%.4f' % {x})",
    "{x}.round(4)",
    "1 * round({x}, 4)",
]
_LOG = [
    "run.log({{'train/loss': {v}}}, step=step)",
    "run.log(dict(loss={v}))",
    "run.log({{**other, **{{'loss': {v}}}}})",
    "writer.add_scalar('loss', {v}, step)",
    "logs['loss'] = {v}",
    "out = {{'loss': {v}}}\nrun.log(out)",
]
_AROUND = ["{code}", "for batch in data:\n{body}", "def step_(x, run):\n{body}", "class T:\n    def f(self):\n{deep}"]


@given(*(st.sampled_from(templates) for templates in (_ASSIGN, _ROUND, _LOG, _AROUND)), st.booleans())
def test_a_rounded_variable_is_followed_into_the_log_in_every_form(
    assign: str, rounding: str, log: str, around: str, is_replaced: bool
) -> None:
    between = "loss = model(x)\n" if is_replaced else "print(loss)\n"
    text = f"{assign.format(v='loss', e=rounding.format(x='value'))}\n{between}{log.format(v='loss')}"
    body = around.format(code=text, body=textwrap.indent(text, "    "), deep=textwrap.indent(text, " " * 8))
    assert own_codes("DET010", body) == ([] if is_replaced else ["DET010"])


def test_every_rule_has_examples_of_both_kinds() -> None:
    assert set(REPORTED) == set(CLEAN) == {rule.code for rule in RULES}


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=lambda entry: entry.code)
def test_the_examples_in_the_documentation_hold(entry: type) -> None:
    suppressed_badly = {"DET001"} if entry.code == "DET090" else set()
    assert set(codes(entry.flagged)) == {entry.code} | suppressed_badly
    assert codes(entry.clean) == []


def test_a_variable_counts_as_late_by_what_runs_first() -> None:
    write = "os.environ['OMP_NUM_THREADS'] = '1'\n"

    assert codes(f"import os\n{write}import torch\n") == []
    assert codes(f"import os\nimport torch\n{write}") == ["DET003"]
    assert codes(f"import os\ndef pin():\n    {write}import torch\n") == ["DET003"]
    assert codes(f"import os\ndef pin():\n    {write}pin()\nimport torch\n") == []
    assert codes(f"import os\ndef main():\n    {write}    import torch\n") == []
    assert codes(f"import os\ndef main():\n    import torch\n    {write}") == ["DET003"]
    types_only = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
    assert codes(f"import os\n{types_only}{write}") == []


def test_functions_of_a_package_draw_for_their_callers() -> None:
    draw = "import random\n\n\ndef augment(x):\n    return x + random.random()\n"

    assert codes(draw) == ["DET006"]
    assert codes(draw, in_package=True) == []
    assert codes(f'{draw}\n\nif __name__ == "__main__":\n    augment(1)\n', in_package=True) == ["DET006"]
    assert codes("import random\nSALT = random.random()\n", in_package=True) == ["DET006"]


# --- Names


@given(
    module=st.sampled_from(
        ["import torch as {0}", "import torch.backends as {0}", "import torch.backends.cudnn as {0}"]
    ),
    name=st.from_regex(r"[a-z]{4,8}", fullmatch=True).filter(
        lambda name: not keyword.iskeyword(name) and name not in dir(builtins)
    ),
    shadow=st.sampled_from(["", "def f({0}):\n    ", "for {0} in cases:\n    ", "with case() as {0}:\n    "]),
)
def test_an_alias_is_followed_and_a_shadow_is_not(module: str, name: str, shadow: str) -> None:
    rest = "torch.backends.cudnn.benchmark".removeprefix(module.removeprefix("import ").split(" as ")[0]).lstrip(".")
    source = f"{module.format(name)}\n{shadow.format(name)}{name}.{rest} = True\n"

    assert codes(source) == ([] if shadow else ["DET001"])


def test_an_import_with_a_stand_in_is_still_that_import() -> None:
    source = "try:\n    import numpy as np\nexcept ImportError:\n    np = None\nrng = np.random.default_rng()\n"

    assert codes(source) == ["DET006"]


def test_a_class_body_does_not_shadow_what_its_methods_see() -> None:
    source = (
        "import torch\n\nclass C:\n    torch = None\n    def f(self):\n        torch.backends.cudnn.benchmark = True\n"
    )

    assert codes(source) == ["DET001"]


# --- Places


def test_columns_count_characters_and_ranges_end_where_the_code_does() -> None:
    source = "import random\nrandom.seed(1)\nμ = 'größe'; rng = random.Random()  # ü\n"

    (finding,) = found(source)

    assert (finding.line, finding.column, finding.end_line, finding.end_column) == (3, 20, 3, 35)
    assert source.splitlines()[2][finding.column - 1 : finding.end_column - 1] == "random.Random()"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\xef\xbb\xbfimport random\nr = random.Random()\n", ["DET006"]),
        (b"# -*- coding: latin-1 -*-\nname = '\xe9'\nimport random\nr = random.Random()\n", ["DET006"]),
        (b"import random\r\nr = random.Random()\r\n", ["DET006"]),
        (b"name = '\xe9'\n", ["DET000"]),
        (b"# coding: klingon\n", ["DET000"]),
        (b"def f(:\n", ["DET000"]),
        (b"x = 1\0\n", ["DET000"]),
        (b"", []),
        (b"x = " + b"-" * 100_000 + b"1\n", ["DET000"]),
        (b"x = " + b" + ".join([b"1"] * 2_000) + b"\nimport random\nr = random.Random()\n", ["DET006"]),
        (b"n = [q for q in set(" + b" + ".join([b"y"] * 2_000) + b")]\nuse(n)\n", ["DET000"]),
    ],
    ids=[
        "bom",
        "latin-1",
        "crlf",
        "not utf-8",
        "unknown coding",
        "syntax",
        "null byte",
        "empty",
        "too deep",
        "deep",
        "too deep to describe",
    ],
)
def test_files_are_read_as_the_interpreter_would(data: bytes, expected: list[str]) -> None:
    assert [finding.code for finding in lint_source(data, Path("train.py")).findings] == expected


# --- Suppressions

BENCHMARK = "import torch\ntorch.backends.cudnn.benchmark = True"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (f"{BENCHMARK}  # e2e: allow DET001 -- measures speed only\n", []),
        (f"{BENCHMARK}  # e2e: allow cudnn-benchmark -- measures speed only\n", []),
        (f"{BENCHMARK}  # noqa: S101  # e2e: allow DET001 -- measures speed only\n", []),
        (BENCHMARK.replace("\n", "\n# e2e: allow DET001 -- speed only\n# more words\n\n") + "\n", []),
        ("import random\nr = [\n    random.Random(),\n]  # e2e: allow DET006 -- temporary names\n", []),
        ("import random\nr = [\n    random.Random(),  # e2e: allow DET006 -- temporary names\n]\n", []),
        (f"{BENCHMARK}  # e2e: allow DET001\n", ["DET001", "DET090"]),
        (f"{BENCHMARK}  # e2e: allow DET001 --  \n", ["DET001", "DET090"]),
        (f"{BENCHMARK}  # e2e: allow -- a reason\n", ["DET001", "DET090"]),
        (f"{BENCHMARK}  # e2e: allow DET999 -- a reason\n", ["DET001", "DET090"]),
        (f"{BENCHMARK}  # e2e: allow DET091 -- a reason\n", ["DET001", "DET090"]),
        (f"{BENCHMARK}  # e2e: allow DET013 -- a reason\n", ["DET001", "DET091"]),
        (f"{BENCHMARK}  # e2e: allow DET001, DET013 -- a reason\n", ["DET091"]),
        (f"{BENCHMARK}\n# e2e: allow DET001 -- one line too late\n", ["DET001", "DET091"]),
        ("x = '# e2e: allow DET001 -- no comment'\n", []),
        ("# Write `# e2e: allow DET001 -- reason` on the line.\n", []),
    ],
)
def test_a_suppression_needs_a_reason_and_something_to_suppress(source: str, expected: list[str]) -> None:
    assert codes(source) == expected


def test_a_suppression_of_a_rule_that_did_not_run_is_not_unused() -> None:
    source = b"x = 1  # e2e: allow DET001 -- a reason\n"

    assert not lint_source(source, Path("a.py"), selection=select(chosen=["DET012"])).findings
    assert not lint_source(source, Path("a.py"), selection=select(ignored=["unused-suppression"])).findings
    assert [f.code for f in lint_source(source, Path("a.py")).findings] == ["DET091"]


# --- New uses only


class Repository:
    """A git repository with a base branch, and with settings of a user that change how git writes a patch."""

    SETTINGS = """\
        user.name=a user.email=a@b commit.gpgsign=false core.quotePath=false color.ui=always diff.noprefix=true
        diff.mnemonicPrefix=true diff.context=5 diff.interHunkContext=5 diff.renames=false diff.relative=true
        diff.algorithm=histogram diff.external=false core.autocrlf=false"""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self.git("init", "-q", "-b", "main")
        for setting in self.SETTINGS.split():
            self.git("config", *setting.split("="))

    def git(self, *arguments: str) -> None:
        subprocess.run(["git", "-C", self.root, *arguments], check=True, capture_output=True)

    def write(self, name: str, text: str) -> Path:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "x")

    def new(self, base: str = "main") -> list[str]:
        report = lint_paths([self.root], base=base)
        return [f"{f.path.relative_to(self.root).as_posix()}:{f.line} {f.code}" for f in report.findings]


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "checkout")


OLD = "import random\na = random.Random()\n"


def test_only_uses_on_added_lines_are_new(repository: Repository) -> None:
    repository.write("old.py", OLD)
    repository.write("edited.py", OLD)
    repository.write("moved.py", OLD + "# " + "a file that git takes for the same after it moved\n" * 5)
    repository.commit()
    repository.git("checkout", "-q", "-b", "feature")
    repository.write("edited.py", "import random\n\nb = random.Random()\na = random.Random()\n")
    repository.git("mv", "moved.py", "renamed.py")
    repository.commit()
    repository.write("staged.py", OLD)
    repository.git("add", "staged.py")
    repository.write("folder/untracked 'ü\" file.py", OLD)
    repository.write(".gitignore", "ignored.py\n")
    repository.write("ignored.py", OLD)
    repository.write("broken.py", "def f(:\n")

    assert repository.new() == [
        "broken.py:1 DET000",
        "edited.py:3 DET006",
        "folder/untracked 'ü\" file.py:2 DET006",
        "staged.py:2 DET006",
    ]


def test_a_hook_in_a_linked_work_tree_is_told_apart_from_its_folder(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.write("folder/a.py", OLD)
    repository.commit()
    linked = tmp_path / "linked"
    repository.git("worktree", "add", "-q", str(linked))
    (linked / "folder/a.py").write_text(f"{OLD}b = random.Random()\n")
    # As git sets them for hooks there, with the top of the work tree as the current folder.
    monkeypatch.setenv("GIT_DIR", str(repository.root / ".git/worktrees/linked"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(repository.root / ".git/worktrees/linked/index"))

    report = lint_paths([linked / "folder/a.py"], base="HEAD")

    assert [finding.line for finding in report.findings] == [3]


def test_names_that_git_quotes_and_lines_that_look_like_a_patch_are_read_right(repository: Repository) -> None:
    name = 'tab\tquote" ü.py'
    repository.write(name, OLD)
    repository.commit()
    repository.git("checkout", "-q", "-b", "feature")
    fake = "x = '''\n++ b/elsewhere.py\n@@ -1 +1 @@\n-- a/elsewhere.py\n'''\nb = random.Random()\n"
    repository.write(name, OLD + fake)
    repository.commit()

    assert repository.new() == [f"{name}:8 DET006"]

    # The same where neither side ends with a newline, which git remarks on between the lines.
    repository.git("checkout", "-q", "main")
    repository.write(name, "a = 1")
    repository.commit()
    repository.git("checkout", "-q", "-b", "other")
    repository.write(name, "import random\na = random.Random()\n++ b/elsewhere.py")
    assert repository.new() == [f"{name}:2 DET006"]


def test_what_the_base_gained_since_is_not_new_here(repository: Repository) -> None:
    repository.write("a.py", "import random\n")
    repository.commit()
    repository.git("checkout", "-q", "-b", "feature")
    repository.write("b.py", OLD)
    repository.commit()
    repository.git("checkout", "-q", "main")
    repository.write("a.py", OLD + "c = 3\n")
    repository.commit()
    repository.git("checkout", "-q", "feature")

    assert repository.new() == ["b.py:2 DET006"]


def test_a_call_that_lost_its_generator_is_a_new_use(repository: Repository) -> None:
    call = "from torch.utils.data import DataLoader\nDataLoader(\n    data,\n    num_workers=2,\n    generator=g,\n)\n"
    repository.write("a.py", call)
    repository.write("b.py", call.replace("    generator=g,\n", ""))
    repository.commit()
    repository.git("checkout", "-q", "-b", "feature")
    repository.write("a.py", call.replace("    generator=g,\n", ""))

    assert repository.new() == ["a.py:2 DET005"]


def test_without_a_common_history_or_a_repository_nothing_is_guessed(repository: Repository, tmp_path: Path) -> None:
    file = repository.write("a.py", OLD)
    with pytest.raises(UsageError, match="no revision 'main'"):
        lint_paths([file], base="main")
    repository.commit()
    with pytest.raises(UsageError, match="no revision 'origin/main'"):
        lint_paths([file], base="origin/main")
    with pytest.raises(UsageError, match="is not a revision"):
        lint_paths([file], base="--output=x")
    repository.git("checkout", "-q", "--orphan", "island")
    repository.write("island.py", OLD)
    repository.commit()
    with pytest.raises(UsageError, match="no commit in common") as caught:
        lint_paths([file], base="main")
    assert "fetch-depth: 0" in (caught.value.hint or "")
    outside = tmp_path / "outside.py"
    outside.write_text(OLD)
    with pytest.raises(UsageError, match="outside of"):
        lint_paths([file, outside], base="HEAD")
    with pytest.raises(UsageError, match="not inside a git repository"):
        lint_paths([outside], base="HEAD")


@settings(max_examples=3, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_added_lines_are_those_that_a_diff_adds(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    lines = st.lists(
        st.sampled_from(["a", "b", "++ b/c", "-- a/d", "@@ -1,2 +3,4 @@", "\\ No newline", ""]), max_size=8
    )
    texts = st.builds(_text, lines, st.booleans())
    pairs = data.draw(st.lists(st.tuples(texts, texts), min_size=40, max_size=40))
    repository = Repository(tmp_path_factory.mktemp("texts"))
    for number, (then, _) in enumerate(pairs):
        repository.write(f"{number}.py", "".join(then))
    repository.commit()
    for number, (_, now) in enumerate(pairs):
        repository.write(f"{number}.py", "".join(now))

    changed = changes_since("main", folder=repository.root)

    for number, (then, now) in enumerate(pairs):
        changes = changed.of(repository.root / f"{number}.py")
        kept = [line for place, line in enumerate(now, 1) if changes is None or place not in changes.added]
        # What is not new was there before, in that order; and no more is called new than must be.
        assert len(kept) == _common(then, now) == _common(then, kept)


def _text(lines: list[str], ends: bool) -> list[str]:
    """A file's lines with their newlines, the last one perhaps without."""
    complete = [f"{line}\n" for line in ["first", *lines]]
    return complete if ends or complete[-1] == "\n" else [*complete[:-1], complete[-1][:-1]]


def _common(then: list[str], now: list[str]) -> int:
    """The length of the longest common subsequence."""
    lengths = [0] * (len(now) + 1)
    for line in then:
        previous = lengths[:]
        for place, other in enumerate(now):
            lengths[place + 1] = previous[place] + 1 if line == other else max(previous[place + 1], lengths[place])
    return lengths[-1]


# --- Files


def test_a_walk_is_sorted_and_leaves_out_what_is_not_the_project(tmp_path: Path) -> None:
    for name in ["b.py", "a/z.py", "a/B.py", ".hidden/c.py", "v/lib/d.py", "x/site-packages/e.py", "n.ipynb", "t.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(OLD)
    (tmp_path / "v/pyvenv.cfg").write_text("")

    report = lint_paths([tmp_path, tmp_path / "a", tmp_path / "n.ipynb", tmp_path / "t.txt", tmp_path / ".hidden"])

    names = [finding.path.relative_to(tmp_path).as_posix() for finding in report.findings]
    assert names == [".hidden/c.py", "a/B.py", "a/z.py", "b.py", "t.txt"]
    assert [skipped.path.name for skipped in report.skipped] == ["n.ipynb"]
    with pytest.raises(UsageError, match="no such file"):
        lint_paths([tmp_path / "absent.py"])


# --- The command


def run(*arguments: str | Path) -> Result:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(_guarded(lint_command))
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_exit_code_says_whether_anything_was_found(tmp_path: Path) -> None:
    bad, good = tmp_path / "bad.py", tmp_path / "good.py"
    bad.write_text(BENCHMARK)
    good.write_text("x = 1\n")

    assert run(bad, good).exit_code == ExitCode.MISMATCH
    assert run(good).exit_code == ExitCode.OK
    assert run(bad, "--ignore", "DET001").exit_code == ExitCode.OK
    assert run(bad, "--select", "warn-only,DET012").exit_code == ExitCode.OK
    for wrong in (["--select", "DET777"], ["--format", "xml"], [str(tmp_path / "no.py")], ["--diff", "HEAD"]):
        assert run(bad, *wrong).exit_code == ExitCode.USAGE, wrong
    assert run(bad, "--ignore", ",".join(CATALOGUE)).exit_code == ExitCode.USAGE
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty").exit_code == ExitCode.NOTHING_SELECTED


def test_before_the_first_commit_everything_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reported: the hook that ``init`` writes refused the first commit of a new repository."""
    repository = Repository(tmp_path / "checkout")
    for name in ("staged.py", "untracked.py"):
        repository.write(name, BENCHMARK)
    repository.git("add", "staged.py")
    monkeypatch.chdir(repository.root)
    found = run(".", "--diff", "HEAD")
    assert found.exit_code == ExitCode.MISMATCH, found.stderr
    assert "staged.py:2:1: DET001" in found.stdout
    assert "untracked.py:2:1: DET001" in found.stdout
    assert run(".", "--diff", "origin/main").exit_code == ExitCode.USAGE


def test_text_names_the_place_the_code_and_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(BENCHMARK)

    output = run(file).stdout

    assert f"{file}:2:1: DET001 cudnn-benchmark: `torch.backends.cudnn.benchmark` is switched on" in output
    assert "Why: " in output
    assert "Fix: " in output
    assert output.endswith("\n1 finding in 1 file (DET001 1)\n")


def test_annotations_are_escaped_and_relative_to_the_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a,b" / "100%.py"
    file.parent.mkdir()
    file.write_text("def f():\n    return list({\n        'a', 'b'})\n")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))

    output = run(file, "--format", "github").stdout

    head, _, message = output.splitlines()[0].removeprefix("::error ").partition("::")
    assert head == "file=a%2Cb/100%25.py,line=2,endLine=3,title=DET008 set-order"
    assert message.startswith("the order of a set")


def test_json_holds_the_findings_and_the_texts_of_their_rules(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"{BENCHMARK}\nimport random\nr = random.Random()  # e2e: allow DET006 -- names only\n")

    result = run(file, "--json")

    document = json.loads(result.stdout)
    assert result.exit_code == ExitCode.MISMATCH
    assert (document["files"], document["suppressed"], document["counts"]) == (1, 1, {"DET001": 1})
    assert document["findings"][0] | {"path": "", "message": ""} == {
        "path": "",
        "line": 2,
        "column": 1,
        "end_line": 2,
        "end_column": 38,
        "code": "DET001",
        "name": "cudnn-benchmark",
        "message": "",
    }
    assert document["rules"]["DET001"]["fix"] == find("DET001").fix


def test_a_name_that_is_no_text_can_be_reported(tmp_path: Path) -> None:
    file = os.fsencode(tmp_path) + b"/caf\xe9.py"
    Path(os.fsdecode(file)).write_text(BENCHMARK)

    for form in ("text", "json", "github"):
        assert run(tmp_path, "--format", form).exit_code == ExitCode.MISMATCH


def test_rules_are_listed_and_explained() -> None:
    listed = run("--list-rules").stdout.splitlines()

    assert [line.split()[0] for line in listed] == sorted(CATALOGUE)
    assert find("tf32").why[:40] in run("--explain", "DET013").stdout
    assert [entry["code"] for entry in json.loads(run("--list-rules", "--json").stdout)] == sorted(CATALOGUE)
    assert json.loads(run("--explain", "tf32", "--json").stdout)["code"] == "DET013"
    assert run("--explain", "DET777").exit_code == ExitCode.USAGE


# --- The rest of the promise


def test_the_page_says_what_the_rules_say() -> None:
    page = (ROOT / "docs/lint.md").read_text(encoding="utf-8")

    command = "python -m e2e_registry.determinism.lint.documentation docs/lint.md"
    assert updated(page) == page, f"the rules changed: run {command}"


def test_codes_and_names_are_unique_and_meta_codes_stand_apart() -> None:
    entries = [*RULES, *META]

    assert len({entry.code for entry in entries}) == len({entry.name for entry in entries}) == len(entries)
    assert all(entry.summary and entry.why and entry.fix for entry in entries)


def test_the_lint_imports_nothing_but_the_standard_library_and_the_errors() -> None:
    folder = ROOT / "e2e_registry/determinism/lint"
    imported = {
        name
        for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        for name in (
            [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "") or ""]
        )
        if isinstance(node, ast.Import | ast.ImportFrom)
    }

    own = {name for name in imported if name.startswith("e2e_registry.determinism.lint")}
    assert {name.split(".")[0] for name in imported - own - {"e2e_registry.errors"}} <= sys.stdlib_module_names


def test_the_hooks_call_a_command_line_that_the_tool_accepts(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    file = repository.write("a.py", OLD)
    repository.commit()
    monkeypatch.chdir(repository.root)

    outcomes = {}
    for hook in hooks:
        program, command, *options = hook["entry"].split()
        assert (program, command, hook["language"], hook["types"]) == ("e2e-registry", "lint", "python", ["python"])
        outcomes[hook["id"]] = run(*options, file.name).exit_code

    assert outcomes == {"e2e-registry-lint": ExitCode.MISMATCH, "e2e-registry-lint-new": ExitCode.OK}

"""DET014: seeds taken from the clock, the process or the system's entropy."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from e2e_registry.determinism.lint.assignments import assignments
from e2e_registry.determinism.lint.module import Module, last_name
from e2e_registry.determinism.lint.rule import Rule, Violation

_SOURCES = {
    "time.time": "the clock",
    "time.time_ns": "the clock",
    "time.perf_counter": "the clock",
    "time.perf_counter_ns": "the clock",
    "time.monotonic": "the clock",
    "time.monotonic_ns": "the clock",
    "datetime.datetime.now": "the clock",
    "datetime.datetime.utcnow": "the clock",
    "datetime.datetime.today": "the clock",
    "os.getpid": "the process id",
    "os.urandom": "the system's entropy",
    "uuid.uuid1": "the clock",
    "uuid.uuid4": "the system's entropy",
    "secrets.randbits": "the system's entropy",
    "secrets.randbelow": "the system's entropy",
    "secrets.token_bytes": "the system's entropy",
    "builtins.id": "a memory address",
}
_SEEDING_CALLS = frozenset(
    {
        "random.seed",
        "random.Random",
        "numpy.random.seed",
        "numpy.random.default_rng",
        "numpy.random.RandomState",
        "numpy.random.SeedSequence",
        "numpy.random.PCG64",
        "numpy.random.Philox",
        "numpy.random.MT19937",
        "torch.manual_seed",
        "torch.cuda.manual_seed",
        "torch.cuda.manual_seed_all",
        "jax.random.PRNGKey",
        "jax.random.key",
        "tensorflow.random.set_seed",
    }
)
_SEEDING_NAME = re.compile(r"(^|_)(set_seed|seed_everything|seed_all|manual_seed(_all)?|seed|set_random_seed)$")
_SEED_VARIABLE = re.compile(r"(^|_)seed$", re.IGNORECASE)


class TimeSeed(Rule):
    """``random.seed(time.time())`` and other seeds that nobody can repeat."""

    code = "DET014"
    name = "time-seed"
    summary = "a seed comes from the clock, the process id, the system's entropy or a salted hash"
    why = (
        "Two runs then never share a seed, and nothing records which one a run had. `hash()` of a string is as bad: "
        "it is salted anew in each process unless PYTHONHASHSEED was set before it started."
    )
    fix = (
        "Take the seed from the recipe's arguments, with a constant as the default, and derive others from it "
        "(`np.random.SeedSequence(seed).spawn(n)`; `zlib.crc32(name.encode())` where a name must take part)."
    )
    flagged = """
import random
import time

random.seed(time.time())
"""
    clean = """
import argparse
import random

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
random.seed(parser.parse_args().seed)
"""
    triggers = ("seed", "Seed", "SEED", "default_rng", "RandomState", "Random(", "PRNGKey")

    def check(self, module: Module) -> Iterator[Violation]:
        """Report seeding calls, ``seed=`` arguments and assignments to names that end in ``seed``."""
        reported: set[ast.AST] = set()
        for place, value in _seeds(module):
            source = _source(module, value)
            if source is not None and source[0] not in reported:
                reported.add(source[0])
                yield Violation(place, f"a seed comes from {source[1]} (`{ast.unparse(source[0])}`)")


def _seeds(module: Module) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr]]:
    """Yield each place that sets a seed and the expression that it is set to."""
    for assigned in assignments(module):
        if _SEED_VARIABLE.search(last_name(assigned.target)):
            yield assigned.node, assigned.value
    for call in module.nodes(ast.Call):
        name = module.qualified(call.func)
        is_seeding = name in _SEEDING_CALLS or _SEEDING_NAME.search(last_name(call.func)) is not None
        values = call.args if is_seeding else []
        seeds = [keyword.value for keyword in call.keywords if _SEED_VARIABLE.search(keyword.arg or "")]
        yield from ((call, value) for value in (*values, *seeds))


def _source(module: Module, value: ast.expr) -> tuple[ast.Call, str] | None:
    """Return the call inside a seed's expression that makes it unrepeatable, and what it is."""
    for node in ast.walk(module.names.single_value(value)):
        if isinstance(node, ast.Name) and node is not value:
            node = module.names.single_value(node)
        if not isinstance(node, ast.Call):
            continue
        name = module.qualified(node.func)
        if name in _SOURCES:
            return node, _SOURCES[name]
        if name == "builtins.hash" and node.args and _may_hold_text(module, node.args[0]):
            return node, "a salted hash"
    return None


def _may_hold_text(module: Module, value: ast.expr) -> bool:
    """Whether a hashed value shows a string: the hashes of numbers are not salted."""
    value = module.names.single_value(value)
    return any(
        isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
        or (isinstance(node, ast.Call) and module.qualified(node.func) in ("builtins.str", "builtins.repr"))
        for node in ast.walk(value)
    )

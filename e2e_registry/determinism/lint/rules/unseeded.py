"""DET006: random numbers that nobody seeded."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from e2e_registry.determinism.lint.module import Module, argument, dotted, has_unpacking, last_name
from e2e_registry.determinism.lint.rule import Rule, Violation

#: Constructors that take their seed from the operating system unless given one, and the seed's name.
_ENTROPY_CONSTRUCTORS = {
    "numpy.random.default_rng": "seed",
    "numpy.random.RandomState": "seed",
    "numpy.random.SeedSequence": "entropy",
    "numpy.random.PCG64": "seed",
    "numpy.random.PCG64DXSM": "seed",
    "numpy.random.MT19937": "seed",
    "numpy.random.Philox": "seed",
    "numpy.random.SFC64": "seed",
    "random.Random": "x",
}
_GENERATOR = "torch.Generator"
#: Calls that throw the present seed away, and the seed's name.
_RESEEDING_CALLS = {"random.seed": "a", "numpy.random.seed": "seed", "torch.seed": None, "torch.cuda.seed_all": None}
_SEEDING_METHODS = frozenset({"manual_seed", "set_state", "setstate", "graphsafe_set_state", "set_offset"})
_SEEDING_HELPER = re.compile(r"seed|determinis", re.IGNORECASE)
#: Members of the modules that draw nothing.
_NOT_DRAWS = {
    "random": frozenset({"Random", "SystemRandom", "seed", "getstate", "setstate"}),
    "numpy.random": frozenset(
        {"seed", "get_state", "set_state", "default_rng", "get_bit_generator", "set_bit_generator"}
    ),
}
_TORCH_DRAWS = frozenset(
    {
        "torch.rand",
        "torch.rand_like",
        "torch.randn",
        "torch.randn_like",
        "torch.randint",
        "torch.randint_like",
        "torch.randperm",
        "torch.normal",
        "torch.bernoulli",
        "torch.multinomial",
        "torch.poisson",
    }
)
_SEEDERS = {
    "random": frozenset({"random.seed", "random.setstate"}),
    "numpy.random": frozenset({"numpy.random.seed", "numpy.random.set_state"}),
    "torch": frozenset({"torch.manual_seed", "torch.set_rng_state", "torch.random.set_rng_state"}),
}
_SEED_FUNCTIONS = {"random": "random.seed", "numpy.random": "np.random.seed", "torch": "torch.manual_seed"}


class Unseeded(Rule):
    """Generators without a seed, and global draws in files that are responsible for seeding and do not."""

    code = "DET006"
    name = "unseeded"
    summary = "a random generator or a global draw that is not seeded"
    why = (
        "`np.random.default_rng()` and its like take fresh entropy from the operating system each time, also inside "
        "DataLoader workers, where no `worker_init_fn` reaches them. The global streams of `random`, `numpy.random` "
        "and `torch` start from entropy too. A `torch.Generator()` that is never seeded is different: each one starts "
        "from the same built-in constant, so the `--seed` of the recipe has no effect on it."
    )
    fix = (
        "Derive each generator from the run's seed, the rank and the worker: "
        "`np.random.default_rng([seed, rank, worker])`, `torch.Generator().manual_seed(seed)`. Seed the global "
        "streams once, at the start of the script."
    )
    scope = (
        "Generators without a seed are reported anywhere. Draws from a global stream are reported in scripts (files "
        "outside of a package, or with a `__main__` guard) that seed that stream nowhere, and at import; a function "
        "in a package draws on behalf of its caller. A call to an imported helper whose name speaks of seeds or "
        "determinism counts as seeding."
    )
    flagged = """
import numpy as np


class Augmented:
    def __init__(self, images):
        self.images = images
        self.rng = np.random.default_rng()

    def __getitem__(self, index):
        return self.images[index] + self.rng.normal()
"""
    clean = """
import numpy as np


class Augmented:
    def __init__(self, images, seed):
        self.images = images
        self.seed = seed

    def __getitem__(self, index):
        return self.images[index] + np.random.default_rng([self.seed, index]).normal()
"""
    triggers = ("rand", "Generator", "SeedSequence", "seed", "PCG64", "MT19937", "Philox", "SFC64")

    def check(self, module: Module) -> Iterator[Violation]:
        """Report constructors anywhere, and global draws where this file has to seed."""
        seeded = {library for library in _SEEDERS if _seeds(module, library)}
        for call in module.nodes(ast.Call):
            name = module.qualified(call.func)
            if name is None:
                continue
            message = _constructor_message(module, call, name) or _reseeding_message(module, call, name)
            library = _drawn_from(call, name)
            if message is None and library is not None and library not in seeded and _must_seed(module, call, library):
                message = (
                    f"`{name}` draws from a global stream that this file does not seed ({_SEED_FUNCTIONS[library]})"
                )
            if message is not None:
                yield Violation(call, message)


def _constructor_message(module: Module, call: ast.Call, name: str) -> str | None:
    if name in _ENTROPY_CONSTRUCTORS and not has_unpacking(call):
        seed = argument(call, _ENTROPY_CONSTRUCTORS[name], 0)
        is_unseeded = seed is None or module.constant(seed) is None
        if is_unseeded and not _is_seeded_later(module, call):
            return f"`{name}()` without a seed starts from the operating system's entropy"
    if name == _GENERATOR and not _is_seeded_later(module, call):
        return "`torch.Generator()` is not seeded here: it starts from a constant, whatever the run's seed"
    return None


def _reseeding_message(module: Module, call: ast.Call, name: str) -> str | None:
    if name not in _RESEEDING_CALLS or has_unpacking(call):
        return None
    parameter = _RESEEDING_CALLS[name]
    seed = None if parameter is None else argument(call, parameter, 0)
    is_unseeding = seed is None or module.constant(seed) is None
    return f"`{name}()` without a seed replaces the stream by one from the system's entropy" if is_unseeding else None


def _is_seeded_later(module: Module, call: ast.Call) -> bool:
    """Whether the new generator is seeded where the file shows it, or handed to a caller that may."""
    parent = module.parent(call)
    if isinstance(parent, ast.Attribute):
        return parent.attr in _SEEDING_METHODS or (parent.attr == "seed" and _calls_with_argument(module, parent))
    if isinstance(parent, ast.Return):
        return True
    if isinstance(parent, ast.Call) and _SEEDING_HELPER.search(last_name(parent.func)):
        return True
    if isinstance(parent, ast.IfExp | ast.BoolOp):
        parent = module.parent(parent)
    if not isinstance(parent, ast.Assign | ast.AnnAssign | ast.NamedExpr):
        return False
    targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
    return any(_is_target_seeded(module, target) for target in targets)


def _is_target_seeded(module: Module, target: ast.expr) -> bool:
    written = dotted(target)
    if written is None:
        return False
    if isinstance(target, ast.Name):
        return any(_is_seeding_use(module, use) for use in module.names.same_variable(target))
    return any(_is_seeding_use(module, use) for use in module.nodes(ast.Attribute) if dotted(use) == written)


def _is_seeding_use(module: Module, use: ast.expr) -> bool:
    parent = module.parent(use)
    match parent:
        case ast.Attribute(attr=attribute):
            return attribute in _SEEDING_METHODS or (attribute == "seed" and _calls_with_argument(module, parent))
        case ast.Call(func=function):
            return function is not use and _SEEDING_HELPER.search(last_name(function)) is not None
        case ast.keyword():
            call = module.parent(parent)
            return isinstance(call, ast.Call) and _SEEDING_HELPER.search(last_name(call.func)) is not None
        case ast.Return():
            # A factory of generators leaves the seeding to its caller only if it does nothing else with them.
            return False
        case _:
            return False


def _calls_with_argument(module: Module, attribute: ast.Attribute) -> bool:
    call = module.parent(attribute)
    return isinstance(call, ast.Call) and call.func is attribute and bool(call.args or call.keywords)


def _drawn_from(call: ast.Call, name: str) -> str | None:
    """Return the global stream that a call draws from, or ``None``."""
    if name in _TORCH_DRAWS:
        return "torch" if argument(call, "generator") is None and not has_unpacking(call) else None
    for library, others in _NOT_DRAWS.items():
        member = name.removeprefix(f"{library}.")
        if member != name and "." not in member and member not in others and member[:1].islower():
            return library
    return None


def _must_seed(module: Module, call: ast.Call, library: str) -> bool:
    """Whether this file, rather than whoever imports it, has to seed before ``call`` runs."""
    if not module.in_package or module.is_script:
        return True
    if library == "torch":
        return False  # Packages make example inputs at import; no run computes with them.
    return not any(
        isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) for outer in module.ancestors(call)
    )


def _seeds(module: Module, library: str) -> bool:
    """Whether the file seeds a global stream, itself or through a helper from elsewhere whose name says so."""
    for call in module.nodes(ast.Call):
        name = module.qualified(call.func)
        if name in _SEEDERS[library]:
            return True
        is_member = name is not None and name.startswith(("random.", "numpy.", "torch."))
        if not is_member and _SEEDING_HELPER.search(last_name(call.func)) and not _is_defined_here(module, call.func):
            return True
    return False


def _is_defined_here(module: Module, function: ast.expr) -> bool:
    return isinstance(function, ast.Name) and any(
        isinstance(binding.node, ast.FunctionDef | ast.AsyncFunctionDef) for binding in module.names.bindings(function)
    )

"""DET010: metrics rounded before they are logged."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from e2e_registry.determinism.lint.assignments import Assigned, assigned, reads_of
from e2e_registry.determinism.lint.module import Module, argument, last_name
from e2e_registry.determinism.lint.ordering import is_display_call
from e2e_registry.determinism.lint.rule import Rule, Violation

_SINK_METHODS = frozenset(
    {
        "log",
        "log_dict",
        "log_metric",
        "log_metrics",
        "log_scalar",
        "add_scalar",
        "add_scalars",
        "write_scalars",
        "writerow",
    }
)
_WRITE_METHODS = frozenset({"write", "writelines"})
_NOT_SINKS = (
    "math.",
    "numpy.",
    "torch.",
    "jax.",
    "sys.stdout.",
    "sys.stderr.",
    "tqdm.",
    "logging.",
    "builtins.",
    "scipy.",
)
_NOT_SINK_RECEIVERS = re.compile(
    r"^_?(logger|logging|console|stdout|stderr|np|torch|math|warnings|tqdm|pbar|bar)$", re.IGNORECASE
)
_DISPLAY_METHODS = frozenset({"set_postfix", "set_postfix_str", "set_description", "set_description_str", "add_row"})
_METRIC_CONTAINER = re.compile(
    r"(^|_)(logs?|metrics?|scalars?|train_stats|eval_stats|log_stats|log_history)$", re.IGNORECASE
)
_METRIC = re.compile(
    r"(^|[/_.\- ])(loss(es)?|grad_?norm|rewards?|advantages?|kl|entropy|log_?probs?|acc|accuracy|perplexity|ppl|bleu"
    r"|rouge\w*|f1|auc|mse|mae|fid|psnr|ssim|iou|learning_rate)($|[/_.\- :=@])",
    re.IGNORECASE,
)
_OBSERVED = re.compile(
    r"time|second|(^|_)secs?($|_)|duration|latency|elapsed|(^|_)eta($|_)|memory|(^|_)mem($|_)|(^|[/_ ])[gmk]i?b($|_)"
    r"|throughput|per_s|per_sec|/s\b|(^|_)(mfu|flops|tps|fps|epoch|progress|percent|pct|size|utilization)($|_)",
    re.IGNORECASE,
)
_FORMAT_SPEC = re.compile(r"\.(?P<digits>\d+)(?P<kind>[fFeEgG%])$")
_PERCENT_FORMAT = re.compile(r"%[-+ #0]*\d*\.(?P<digits>\d+)(?P<kind>[fFeEgG])")
_BRACE_FORMAT = re.compile(r"\{[^{}]*:[^{}]*?\.(?P<digits>\d+)(?P<kind>[fFeEgG%])\}")
#: Digits from which a format carries every float32: 9 significant ones.
_EXACT_DIGITS = {"g": 9, "e": 8}

#: What a rounded number may pass through on its way into a variable, and stay one.
_KEEPING_NODES = (
    ast.BinOp,
    ast.UnaryOp,
    ast.Tuple,
    ast.List,
    ast.ListComp,
    ast.Dict,
    ast.DictComp,
    ast.NamedExpr,
    ast.keyword,
)
_KEEPING_CALLS = frozenset(
    {
        "builtins.dict",
        "builtins.float",
        "builtins.list",
        "torch.tensor",
        "torch.as_tensor",
        "numpy.array",
        "numpy.asarray",
    }
)


class RoundedMetric(Rule):
    """``round(loss, 4)`` and ``f"{loss:.4f}"`` on their way into a metric log."""

    code = "DET010"
    name = "rounded-metric"
    summary = "a metric is rounded before it is logged"
    why = (
        "What is rounded away cannot be compared. Near 1e-3, one unit of the fifth decimal spans 85,899 representable "
        "float32 values (1e-5 / 2**-33): a gradient norm may move by half a percent and read as equal."
    )
    fix = "Log the number itself, in the dtype it was computed in, and round where it is shown."
    scope = (
        "Progress bars, `print` and loggers' messages are for people and left alone, and so are times, memory and "
        "throughput, which nobody compares exactly. Formats that carry every float32 (`.9g`, `.8e`) drop nothing. A "
        "variable or mapping that a rounded number passes through is followed, where one reading is left."
    )
    flagged = """
def log_step(run, step, loss, grad_norm):
    run.log({"train/loss": round(loss, 4), "train/grad_norm": float(f"{grad_norm:.3f}")}, step=step)
"""
    clean = """
def log_step(run, step, loss, grad_norm):
    run.log({"train/loss": loss, "train/grad_norm": grad_norm}, step=step)
    print(f"step {step}: loss {loss:.4f}")
"""
    triggers = ("round", "around", ".format(", "format(", "f}", "g}", "e}", "%")

    def check(self, module: Module) -> Iterator[Violation]:
        """Report roundings inside calls that log, and in entries of mappings that hold metrics."""
        for node, shown in _roundings(module):
            key = _destination(module, _Flow(node, node))
            if key is not None:
                yield Violation(node, f"`{shown}` rounds {key} before it is logged")


def _roundings(module: Module) -> Iterator[tuple[ast.expr, str]]:
    """Yield each expression that drops digits of a number."""
    for call in module.nodes(ast.Call):
        shown = _rounding_call(module, call)
        if shown is not None:
            yield call, shown
    for text in module.nodes(ast.JoinedStr):
        for part in text.values:
            spec = part.format_spec if isinstance(part, ast.FormattedValue) else None
            if isinstance(spec, ast.JoinedStr) and _drops_digits(_FORMAT_SPEC.search(_literal(spec))):
                yield text, f"{{...:{_literal(spec)}}}"
                break
    for operation in module.nodes(ast.BinOp):
        left = operation.left
        if isinstance(operation.op, ast.Mod) and isinstance(left, ast.Constant) and isinstance(left.value, str):
            match = _PERCENT_FORMAT.search(left.value)
            if match is not None and _drops_digits(match):
                yield operation, match.group(0)


def _rounding_call(module: Module, call: ast.Call) -> str | None:
    name = module.qualified(call.func)
    if name == "builtins.round" and argument(call, "number", 0) is not None:
        return "round()"
    if name in ("numpy.round", "numpy.around", "torch.round") and (len(call.args) > 1 or argument(call, "decimals")):
        return f"{last_name(call.func)}()"
    if name == "builtins.format" and len(call.args) == 2:
        spec = module.constant(call.args[1])
        return f"format(..., {spec!r})" if isinstance(spec, str) and _drops_digits(_FORMAT_SPEC.search(spec)) else None
    if not isinstance(call.func, ast.Attribute):
        return None
    if call.func.attr == "round" and name is None and isinstance(module.constant(argument(call, "decimals", 0)), int):
        return ".round()"
    template = module.constant(call.func.value) if call.func.attr == "format" else None
    match = _BRACE_FORMAT.search(template) if isinstance(template, str) else None
    return match.group(0) if match is not None and _drops_digits(match) else None


def _literal(spec: ast.JoinedStr) -> str:
    return "".join(str(part.value) for part in spec.values if isinstance(part, ast.Constant))


def _drops_digits(match: re.Match[str] | None) -> bool:
    if match is None:
        return False
    enough = _EXACT_DIGITS.get(match["kind"].lower())
    return enough is None or int(match["digits"]) < enough


@dataclass(frozen=True)
class _Flow:
    """Where a rounded number has come to on its way to a log.

    Attributes:
        rounding: The expression that drops its digits.
        node: The expression that it stands in now: the rounding, or a variable that holds it.
        key: The name that it goes by in a mapping.
        is_mapping: Whether ``node`` is a mapping of metrics that holds it, rather than the number.
        hops: Variables that it may still pass through.
    """

    rounding: ast.expr
    node: ast.expr
    key: str | None = None
    is_mapping: bool = False
    hops: int = 3

    @property
    def is_followed(self) -> bool:
        """Whether it came through a variable, so that only its name says that it is a metric."""
        return self.node is not self.rounding

    @property
    def needs_a_metrics_name(self) -> bool:
        """Whether it may well be something else than a metric: text, or the whole number that ``round(x)`` makes."""
        call = self.rounding
        keeps_digits = isinstance(call, ast.Call) and (len(call.args) + len(call.keywords) > 1 or _is_method(call))
        return self.is_followed and not keeps_digits


def _is_method(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "round"


def _destination(module: Module, flow: _Flow) -> str | None:
    """Return what a rounded number is logged as, or ``None`` if it does not go into a log of metrics.

    The walk goes outwards from the rounding: an entry of a mapping names the metric, a call takes it away, and a
    variable that it is assigned to is followed to where it is read.
    """
    inner: ast.AST = flow.node
    path = [inner]
    for outer in module.ancestors(flow.node):
        if isinstance(outer, ast.Dict | ast.DictComp) and inner in _mapping_values(outer):
            flow = _inside_mapping(module, outer, inner, flow)
            if _is_observed(flow.key) or (isinstance(outer, ast.DictComp) and _is_observed(ast.unparse(outer))):
                return None
        elif isinstance(outer, ast.Call) and inner is not outer.func:
            if is_display_call(module, outer) or last_name(outer.func) in _DISPLAY_METHODS:
                return None
            if _is_sink(module, outer):
                return _logged_name(module, outer, inner, flow)
            if isinstance(inner, ast.keyword) and inner.arg is not None and _makes_mapping(module, outer):
                flow = replace(flow, key=inner.arg, is_mapping=True)
        elif isinstance(outer, ast.stmt):
            return _stored_name(module, outer, path, flow) or _followed_name(module, outer, path, flow)
        elif isinstance(outer, ast.JoinedStr) and not isinstance(flow.node, ast.JoinedStr):
            return None
        elif isinstance(outer, ast.NamedExpr):
            found = _followed_name(module, outer, path, flow)
            if found is not None:
                return found
        inner = outer
        path.append(inner)
    return None


def _mapping_values(mapping: ast.Dict | ast.DictComp) -> list[ast.expr]:
    return mapping.values if isinstance(mapping, ast.Dict) else [mapping.value]


def _inside_mapping(module: Module, mapping: ast.Dict | ast.DictComp, inner: ast.AST, flow: _Flow) -> _Flow:
    keys = mapping.keys if isinstance(mapping, ast.Dict) else [mapping.key]
    key = next(key for key, value in zip(keys, _mapping_values(mapping), strict=True) if value is inner)
    if key is None:  # ``**metrics``: the names are those inside
        return flow
    return replace(flow, key=_text(module, key), is_mapping=True)


def _makes_mapping(module: Module, call: ast.Call) -> bool:
    return module.qualified(call.func) == "builtins.dict" or last_name(call.func) == "update"


def _is_observed(name: str | None) -> bool:
    return name is not None and _OBSERVED.search(name) is not None


def _followed_name(module: Module, node: ast.AST, path: list[ast.AST], flow: _Flow) -> str | None:
    """Return what the rounded number is logged as where a variable that it is assigned to is read."""
    if flow.hops == 0:
        return None
    for pair in assigned(node):
        if pair.value not in path or not _keeps_value(module, path[: path.index(pair.value) + 1], flow):
            continue
        for start in _read_flows(module, pair, flow):
            found = _destination(module, start)
            if found is not None:
                return found
    return None


def _read_flows(module: Module, pair: Assigned, flow: _Flow) -> Iterator[_Flow]:
    """Yield the flow at each read of what a pair assigns: a variable, or the variable whose item it sets."""
    target = pair.target
    if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
        variable, key = target.value, _text(module, target.slice)
        loops = (outer for outer in module.ancestors(pair.node) if isinstance(outer, ast.For))
        if _is_observed(key) or any(_is_observed(ast.unparse(loop.iter)) for loop in loops):
            return
        uses = module.names.same_variable(variable)
        reads: Iterable[ast.Name] = _reads_after(uses, variable)
        flow = replace(flow, key=key, is_mapping=True)
    elif isinstance(target, ast.Name):
        variable, reads = target, reads_of(module, target)
    else:
        return
    if not _is_observed(variable.id):
        yield from (replace(flow, node=read, hops=flow.hops - 1) for read in reads)


def _reads_after(uses: Sequence[ast.Name], use: ast.Name) -> Iterator[ast.Name]:
    """Yield the reads behind a use, up to where the variable becomes another object."""
    behind = uses[[other is use for other in uses].index(True) + 1 :]
    return itertools.takewhile(lambda other: isinstance(other.ctx, ast.Load), behind)


def _keeps_value(module: Module, path: list[ast.AST], flow: _Flow) -> bool:
    """Whether what a variable is assigned still is the rounded number, or a collection of such."""
    for inner, outer in itertools.pairwise(path):
        if isinstance(outer, ast.Call):
            is_kept = module.qualified(outer.func) in _KEEPING_CALLS or isinstance(inner, ast.keyword)
        elif isinstance(outer, ast.IfExp):
            is_kept = inner is not outer.test
        else:
            is_kept = isinstance(outer, _KEEPING_NODES)
        if not is_kept:
            return False
    return True


def _is_sink(module: Module, call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    name = module.qualified(call.func) or ""
    receiver = last_name(call.func.value)
    if name.startswith(_NOT_SINKS) or _NOT_SINK_RECEIVERS.match(receiver):
        return False
    return call.func.attr in _SINK_METHODS or call.func.attr in _WRITE_METHODS


def _logged_name(module: Module, call: ast.Call, inner: ast.AST, flow: _Flow) -> str | None:
    """Return the metric's name inside a logging call; a message and a step are no metrics."""
    method = last_name(call.func)
    if method in _WRITE_METHODS and flow.is_followed:
        return None  # text that was made ready before is for people
    if flow.key is not None:
        return _shown(flow.key, flow)
    if isinstance(inner, ast.keyword) and inner.arg is not None:
        is_step = inner.arg in ("step", "global_step", "epoch", "walltime")
        return None if is_step or _is_observed(inner.arg) else _shown(inner.arg, flow)
    position = call.args.index(inner) if inner in call.args else None
    if method in (*_WRITE_METHODS, "writerow"):
        names = map(last_name, ast.walk(flow.rounding))
        return next((f"`{name}`" for name in names if _METRIC.search(name)), None)
    if position == 1:
        name = _text(module, call.args[0])
        return None if _is_observed(name) else _shown(name, flow)
    if flow.is_mapping:
        return _shown(None, flow)
    # ``run.log(f"loss {x:.3f}")`` is a message; ``run.log(round(x, 3))`` cannot be a metric without a name.
    return None


def _shown(name: str | None, flow: _Flow) -> str | None:
    """Return how a finding calls the metric; ``None`` where its name leaves open that it is one."""
    if flow.needs_a_metrics_name and not _METRIC.search(name or ""):
        return None
    return "a metric" if name is None else f"`{name}`"


def _stored_name(module: Module, statement: ast.stmt, path: list[ast.AST], flow: _Flow) -> str | None:
    """Return the metric's name if a statement puts the rounded number where metrics are collected."""
    for pair in assigned(statement):
        if isinstance(pair.target, ast.Subscript) and pair.value in path:
            name = _text(module, pair.target.slice)
            # Text under a key that the file does not spell out is being made ready to show.
            is_text = name is None and pair.value is flow.node and not isinstance(flow.rounding, ast.Call)
            found = None if is_text else _collected_name(last_name(pair.target.value), name, flow.rounding)
            return None if flow.needs_a_metrics_name and not _METRIC.search(name or "") else found
    if flow.key is not None and _METRIC.search(flow.key) and not isinstance(statement, ast.Raise | ast.Assert):
        return f"`{flow.key}`"
    return None


def _collected_name(container: str, name: str | None, node: ast.expr) -> str | None:
    if name is not None and (_OBSERVED.search(name) or _OBSERVED.search(ast.unparse(node))):
        return None
    is_metric = _METRIC_CONTAINER.search(container) is not None or (
        name is not None and _METRIC.search(name) is not None
    )
    return f"`{name or container}`" if is_metric else None


def _text(module: Module, node: ast.expr | None) -> str | None:
    """Return a key's text, with ``*`` for what an f-string fills in; ``None`` if it is no string."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
    value = module.constant(node)
    return value if isinstance(value, str) else None

"""DET010: metrics rounded before they are logged."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

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
        "throughput, which nobody compares exactly. Formats that carry every float32 (`.9g`, `.8e`) drop nothing."
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
            key = _destination(module, node)
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
    if name == "builtins.round" and call.args:
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


def _destination(module: Module, node: ast.expr) -> str | None:
    """Return what a rounded number is logged as, or ``None`` if it does not go into a log of metrics.

    The walk goes outwards from the rounding: an entry of a mapping names the metric, a call takes it away.
    """
    key: str | None = None
    inner: ast.AST = node
    for outer in module.ancestors(node):
        if isinstance(outer, ast.Dict) and inner in outer.values:
            key = _text(module, outer.keys[outer.values.index(inner)]) if isinstance(inner, ast.expr) else None
            if key is not None and _OBSERVED.search(key):
                return None
        elif isinstance(outer, ast.Call) and inner is not outer.func:
            if is_display_call(module, outer) or last_name(outer.func) in _DISPLAY_METHODS:
                return None
            if _is_sink(module, outer):
                return _logged_name(module, outer, inner, node, key)
        elif isinstance(outer, ast.stmt):
            return _stored_name(module, outer, node, key)
        elif isinstance(outer, ast.JoinedStr) and not isinstance(node, ast.JoinedStr):
            return None
        inner = outer
    return None


def _is_sink(module: Module, call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    name = module.qualified(call.func) or ""
    receiver = last_name(call.func.value)
    if name.startswith(_NOT_SINKS) or _NOT_SINK_RECEIVERS.match(receiver):
        return False
    return call.func.attr in _SINK_METHODS or call.func.attr in _WRITE_METHODS


def _logged_name(module: Module, call: ast.Call, inner: ast.AST, node: ast.expr, key: str | None) -> str | None:
    """Return the metric's name inside a logging call; a message and a step are no metrics."""
    method = last_name(call.func)
    if key is not None:
        return f"`{key}`"
    if isinstance(inner, ast.keyword):
        is_step = inner.arg in ("step", "global_step", "epoch", "walltime")
        return None if is_step or _OBSERVED.search(inner.arg or "") else f"`{inner.arg}`"
    position = call.args.index(inner) if inner in call.args else None
    if method in (*_WRITE_METHODS, "writerow"):
        return next((f"`{name}`" for name in map(last_name, ast.walk(node)) if _METRIC.search(name)), None)
    if position == 1:
        name = _text(module, call.args[0])
        return None if name is not None and _OBSERVED.search(name) else f"`{name or 'a metric'}`"
    # ``run.log(f"loss {x:.3f}")`` is a message; ``run.log(round(x, 3))`` cannot be a metric without a name.
    return None


def _stored_name(module: Module, statement: ast.stmt, node: ast.expr, key: str | None) -> str | None:
    """Return the metric's name if a statement puts the rounded number where metrics are collected."""
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Subscript):
                name = _text(module, target.slice)
                # Text under a key that the file does not spell out is being made ready to show.
                is_text = name is None and statement.value is node and not isinstance(node, ast.Call)
                return None if is_text else _collected_name(last_name(target.value), name, node)
    if key is not None and _METRIC.search(key) and not isinstance(statement, ast.Raise | ast.Assert):
        return f"`{key}`"
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

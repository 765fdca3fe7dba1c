"""Forcing ``deterministic=True`` onto the flash kernels of this process, now and as they are loaded.

What is patched is the name under which a caller looks the kernel up: the globals of diffusers' dispatch module, its
registry of hub kernels, the functions that transformers caches, and the attributes that native model packages
register. Kernels that are loaded later are patched by the loaders, which are wrapped; a backend that cannot be
deterministic is refused by the dispatch itself, since a context manager may choose it long after the check.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType, TracebackType
from typing import Any, Self

from e2e_registry.determinism.attention.classification import (
    AttentionClass,
    AttentionError,
    BackendClass,
    Library,
    canonical_name,
    classify,
)
from e2e_registry.determinism.attention.kernels import (
    describe,
    exposes_deterministic,
    force_deterministic,
    is_forced,
    original_of,
)
from e2e_registry.determinism.attention.validation import (
    DISPATCH,
    TRANSFORMERS_FLASH,
    AttentionChoice,
    AttentionPlan,
    Source,
    import_dispatch,
    refuse,
)

DIFFUSERS_GLOBALS = (
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_3_func",
    "flash_attn_3_varlen_func",
)
TRANSFORMERS_GLOBALS = ("_flash_fn", "_flash_varlen_fn")
_ABSENT = "not installed, or not loaded yet"
_NO_PARAMETER = "no `deterministic` parameter"


@dataclass(frozen=True, slots=True)
class NativeKernel:
    """The place where a native model package looks its attention kernel up.

    Attributes:
        module: The importable module.
        attribute: The attribute, dotted where it lies on an object inside the module.
    """

    module: str
    attribute: str

    @property
    def name(self) -> str:
        """The full dotted name, as reports and errors show it."""
        return f"{self.module}.{self.attribute}"


@dataclass(frozen=True, slots=True)
class _Slot:
    """A place that holds a function: an attribute of an object, or a key of a mapping."""

    name: str
    owner: Any
    key: Any

    def read(self) -> Any:
        return self.owner.get(self.key) if isinstance(self.owner, dict) else getattr(self.owner, self.key, None)

    def write(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.key] = value
        else:
            setattr(self.owner, self.key, value)


class _Patches:
    """The patches of this process. Shared by all reports, because module globals are."""

    def __init__(self) -> None:
        self.holders = 0
        self.slots: dict[str, _Slot] = {}
        self.skipped: dict[str, str] = {}
        self.replaced: dict[str, tuple[_Slot, Any, Any]] = {}

    def force(self, slot: _Slot, *, absent: str = _ABSENT) -> None:
        """Force the function that a slot holds; note why where that cannot be done."""
        function = slot.read()
        if function is None:
            self.skipped[slot.name] = absent
        elif not exposes_deterministic(function):
            self.skipped[slot.name] = f"{_NO_PARAMETER}: {describe(function)}"
        else:
            if not is_forced(function):
                slot.write(force_deterministic(function))
            self.note(slot)

    def note(self, slot: _Slot) -> None:
        self.slots[slot.name] = slot
        self.skipped.pop(slot.name, None)

    def replace(self, slot: _Slot, make: Callable[[Any], Any]) -> None:
        """Put ``make(what the slot holds)`` into the slot, once."""
        current = slot.read()
        if current is None:
            raise AttentionError(
                f"{slot.name} does not exist in the installed version, so that its kernels cannot be forced",
                hint="Install a version that this package knows: see the extra `recipes` in pyproject.toml.",
            )
        _, _, ours = self.replaced.get(slot.name, (None, None, None))
        if current is ours:
            return
        replacement = make(current)
        slot.write(replacement)
        self.replaced[slot.name] = (slot, current, replacement)

    def patched(self) -> tuple[str, ...]:
        """Names of the slots that hold a forced function now, whatever has been assigned to them since."""
        return tuple(name for name, slot in self.slots.items() if is_forced(slot.read()))

    def restore(self) -> tuple[str, ...]:
        """Undo everything; return the names that someone else has replaced since and that are left alone."""
        left = []
        for slot in self.slots.values():
            if is_forced(slot.read()):
                slot.write(original_of(slot.read()))
            else:
                left.append(slot.name)
        for slot, original, replacement in reversed(self.replaced.values()):
            if slot.read() is replacement:
                slot.write(original)
            else:
                left.append(slot.name)
        self.slots.clear()
        self.skipped.clear()
        self.replaced.clear()
        return tuple(left)


_PATCHES = _Patches()
_NATIVE: dict[str, NativeKernel] = {}


class PatchReport:
    """What is patched. Also a context manager, which undoes at its end.

    Patching nests: each report holds the patches, and they are undone when the last one lets go.
    """

    def __init__(self, patches: _Patches) -> None:
        self._patches: _Patches | None = patches
        patches.holders += 1

    @property
    def patched(self) -> tuple[str, ...]:
        """Dotted names of the entry points that are forced now, those loaded since included."""
        return self._patches.patched() if self._patches else ()

    @property
    def skipped(self) -> Mapping[str, str]:
        """Dotted name of each known entry point that is not forced, and why."""
        return MappingProxyType(dict(self._patches.skipped) if self._patches else {})

    def undo(self) -> tuple[str, ...]:
        """Let the patches go; the last report restores the originals. Calling it again does nothing.

        Returns:
            Names that someone else has replaced since, and that are therefore left as they are.
        """
        patches, self._patches = self._patches, None
        if patches is None:
            return ()
        patches.holders -= 1
        return patches.restore() if patches.holders == 0 else ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"PatchReport(patched={list(self.patched)}, skipped={dict(self.skipped)})"


def register_native_kernel(module: str | ModuleType, attribute: str) -> NativeKernel:
    """Declare where a native model package looks its attention kernel up, to have it patched and checked.

    Call it where the package is adapted, before :func:`patch_flash_kernels`. Nothing is imported. The place is the
    caller's, not the kernel's: after ``from flash_attn import flash_attn_func`` in ``ltx.attention`` it is
    ``("ltx.attention", "flash_attn_func")``, since that module keeps its own reference.

    Raises:
        AttentionError: The module or the attribute is empty.
    """
    name = module.__name__ if isinstance(module, ModuleType) else module
    if not name or not attribute:
        raise AttentionError(f"a native kernel needs a module and an attribute, not {name!r} and {attribute!r}")
    kernel = NativeKernel(name, attribute)
    _NATIVE[kernel.name] = kernel
    return kernel


def patch_flash_kernels(libraries: Iterable[Library] = ("diffusers", "transformers")) -> PatchReport:
    """Force ``deterministic=True`` onto every flash entry point of this process, present and future.

    Call it in the actor, before the model is built. Calling it again finds what has appeared since, and wraps
    nothing twice. From then on diffusers' dispatch raises :class:`AttentionError` for the rejected backends, and
    for flash under context parallelism; so do the loaders of both libraries, before they download a kernel.

    Args:
        libraries: The libraries to patch; those that are not installed are reported as skipped.

    Returns:
        The report, which undoes.

    Raises:
        AttentionError: A library is installed but cannot be imported, or is of a version whose internals differ
            from those that this package patches.
    """
    report = PatchReport(_PATCHES)
    try:
        for library in libraries:
            if importlib.util.find_spec(library) is None:
                _PATCHES.skipped[library] = "not installed"
            elif library == "diffusers":
                _patch_diffusers(import_dispatch())
            else:
                _patch_transformers(importlib.import_module(TRANSFORMERS_FLASH))
        for kernel in _NATIVE.values():
            _patch_native(kernel)
    except BaseException:
        report.undo()
        raise
    return report


def patched_kernels() -> tuple[str, ...]:
    """Return the dotted names of all entry points that are forced in this process now."""
    return _PATCHES.patched()


def require_patched(plan: AttentionPlan | None = None) -> tuple[str, ...]:
    """Check at actor start that the kernels which will run are among the patched ones.

    Args:
        plan: What :func:`validate_attention_args` returned in this actor: its flash backends are checked too. Hub
            kernels must have been loaded by then, by ``set_attention_backend`` or ``from_pretrained``.

    Returns:
        The names of the patched kernels.

    Raises:
        AttentionError: A registered native kernel, or one that the plan needs, is not patched; the message lists
            those that are.
    """
    patched = patched_kernels()
    missing = {name: _PATCHES.skipped.get(name, "not patched") for name in _NATIVE if name not in patched}
    if plan is not None and plan.deterministic:
        for choice in plan.choices:
            reasons = _unpatched(choice.backend, plan.library)
            if reasons:
                missing[f"the kernel of {choice.backend.name!r} (chosen by {choice.where})"] = "; ".join(reasons)
    if missing:
        lines = [f"{name}: {reason}" for name, reason in missing.items()]
        raise AttentionError(
            "these attention kernels run without `deterministic=True`:\n    " + "\n    ".join(lines),
            hint="Patched kernels: "
            + (", ".join(patched) or "none")
            + ". Call patch_flash_kernels() after register_native_kernel() and before this check.",
        )
    return patched


def _patch_diffusers(dispatch: ModuleType) -> None:
    for name in DIFFUSERS_GLOBALS:
        _PATCHES.force(_Slot(f"{DISPATCH}.{name}", dispatch, name))
    for key in dispatch._HUB_KERNELS_REGISTRY:
        if classify(key).is_accepted:
            _PATCHES.force(_hub_slot(dispatch, key))
    loader = "_maybe_download_kernel_for_backend"
    _PATCHES.replace(_Slot(f"{DISPATCH}.{loader}", dispatch, loader), lambda load: _loading_hub_kernels(dispatch, load))
    backends = dispatch._AttentionBackendRegistry._backends
    for key in list(backends):
        slot = _Slot(f"{DISPATCH} backend {canonical_name(key)}", backends, key)
        _PATCHES.replace(slot, functools.partial(_guarded, classify(key)))


def _hub_slot(dispatch: ModuleType, key: Any) -> _Slot:
    config = dispatch._HUB_KERNELS_REGISTRY[key]
    name = f"{DISPATCH} hub kernel {canonical_name(key)} ({config.repo_id}.{config.function_attr})"
    return _Slot(name, config, "kernel_fn")


def _loading_hub_kernels(dispatch: ModuleType, load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_and_force(backend: Any) -> None:
        # Before the download: a rejected backend must not fetch and run remote code first.
        refuse([AttentionChoice(classify(backend), Source.CONTEXT, "set_attention_backend() or attention_backend()")])
        load(backend)
        if backend in dispatch._HUB_KERNELS_REGISTRY:
            slot = _hub_slot(dispatch, backend)
            slot.write(force_deterministic(slot.read()))
            _PATCHES.note(slot)

    return load_and_force


def _guarded(row: BackendClass, attend: Callable[..., Any]) -> Callable[..., Any]:
    """Return diffusers' function of one backend, made to refuse what cannot be deterministic."""
    refusal = AttentionChoice(row, Source.CONTEXT, "dispatch_attention_fn()")

    @functools.wraps(attend)
    def refused(*args: Any, **kwargs: Any) -> Any:
        return refuse([refusal])

    @functools.wraps(attend)
    def refused_under_context_parallelism(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("_parallel_config") is not None:
            reason = f"under context parallelism, {row.context_parallel}"
            rejected = row.rejected(reason, "`native` or `_native_flash`")
            return refuse([AttentionChoice(rejected, Source.CONTEXT, "dispatch_attention_fn()")])
        return attend(*args, **kwargs)

    if row.klass is AttentionClass.REJECT:
        return refused
    return refused_under_context_parallelism if row.context_parallel else attend


def _patch_transformers(module: ModuleType) -> None:
    for name in TRANSFORMERS_GLOBALS:
        _PATCHES.force(_Slot(f"{TRANSFORMERS_FLASH}.{name}", module, name))
    # Each other implementation that a model asks for overwrites the cached functions, so the loader is wrapped too.
    slot = _Slot(f"{TRANSFORMERS_FLASH}._lazy_imports", module, "_lazy_imports")
    _PATCHES.replace(slot, lambda load: _loading_transformers(module, load))


def _loading_transformers(module: ModuleType, load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_and_force(implementation: str | None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        row = classify(implementation, library="transformers")
        refuse([AttentionChoice(row, Source.MODULE, "config._attn_implementation")])
        dense, varlen, *rest = load(implementation, *args, **kwargs)
        if dense is None and varlen is None:
            raise AttentionError(f"{implementation!r} loads neither flash_attn_func nor flash_attn_varlen_func")
        forced = [function and force_deterministic(function) for function in (dense, varlen)]
        for name, function in zip(TRANSFORMERS_GLOBALS, forced, strict=True):
            if function is not None:
                _PATCHES.note(_Slot(f"{TRANSFORMERS_FLASH}.{name}", module, name))
        return (*forced, *rest)

    return load_and_force


def _patch_native(kernel: NativeKernel) -> None:
    *parents, attribute = kernel.attribute.split(".")
    try:
        owner = functools.reduce(getattr, parents, importlib.import_module(kernel.module))
    except (ImportError, AttributeError) as error:
        _PATCHES.skipped[kernel.name] = str(error)
        return
    _PATCHES.force(_Slot(kernel.name, owner, attribute), absent="no such attribute, or it is None")


def _unpatched(row: BackendClass, library: Library) -> list[str]:
    """Return why the kernel of a backend does not run forced; empty if it does, or needs no force."""
    if not row.needs_patch:
        return []
    slots = _slots_of(row, library)
    # transformers caches two functions, either of which may be missing, but not both.
    present = [slot for slot in slots if slot.read() is not None]
    if not present:
        return [_ABSENT]
    return [_PATCHES.skipped.get(slot.name, "not patched") for slot in present if not is_forced(slot.read())]


def _slots_of(row: BackendClass, library: Library) -> list[_Slot]:
    """Return the slots that hold the kernel of a backend which needs the patch."""
    if library == "transformers":
        module = importlib.import_module(TRANSFORMERS_FLASH)
        return [_Slot(f"{TRANSFORMERS_FLASH}.{name}", module, name) for name in TRANSFORMERS_GLOBALS]
    dispatch = import_dispatch()
    if row.klass is AttentionClass.PATCH:
        return [_Slot(f"{DISPATCH}.{name}", dispatch, name) for name in row.entry_points]
    keys = [key for key in dispatch._HUB_KERNELS_REGISTRY if canonical_name(key) == row.name]
    return [_hub_slot(dispatch, key) for key in keys]

"""The table: how each attention backend of diffusers and transformers is made to repeat, or why it cannot be.

Read from diffusers 0.42.1 (``models/attention_dispatch.py``), transformers 5.24.0
(``modeling_flash_attention_utils.py``, ``modeling_utils.py``) and the signatures of the kernels that they call.
A name that is not in the table is rejected: a new backend is nondeterministic until someone has read it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, get_args

from e2e_registry.errors import UsageError

Library = Literal["diffusers", "transformers"]

#: The name under which "nobody chose a backend" is classified.
UNSET = "unset"


class AttentionError(UsageError):
    """An attention backend that cannot run deterministically, or a kernel that was not made to."""


class AttentionClass(enum.Enum):
    """What it takes for a backend to repeat bit for bit."""

    TORCH_FLAG = "torch's strict deterministic mode covers it"
    DETERMINISTIC = "deterministic by construction"
    PATCH = "its entry point is patched"
    PATCH_AFTER_LOAD = "its entry point is patched once it is loaded"
    REJECT = "rejected"


@dataclass(frozen=True, slots=True)
class BackendClass:
    """One row of the table.

    Attributes:
        name: The canonical, lower-case name.
        klass: How determinism is obtained.
        reason: Why it is classified so, as the end of a sentence that names the backend.
        instead: What to use instead; empty where the backend is accepted.
        entry_points: The functions that must expose ``deterministic``: attributes of diffusers' dispatch module,
            or of the package that transformers loads.
        context_parallel: Why the backend is rejected under context parallelism; empty where it is not.
    """

    name: str
    klass: AttentionClass
    reason: str
    instead: str = ""
    entry_points: tuple[str, ...] = ()
    context_parallel: str = ""

    @property
    def is_accepted(self) -> bool:
        """Whether the name alone does not rule the backend out."""
        return self.klass is not AttentionClass.REJECT

    @property
    def needs_patch(self) -> bool:
        """Whether its kernel is out of reach of torch's flag."""
        return self.klass in (AttentionClass.PATCH, AttentionClass.PATCH_AFTER_LOAD)

    def rejected(self, reason: str, instead: str) -> BackendClass:
        """Return this row turned down for a reason that the name alone does not tell."""
        return replace(self, klass=AttentionClass.REJECT, reason=reason, instead=instead)


SDPA_INSTEAD = "`native` (SDPA under torch's strict deterministic mode)"
TRANSFORMERS_INSTEAD = "`sdpa` (under torch's strict deterministic mode) or `eager`"

_SDPA = "SDPA's flash and memory-efficient backward obey torch.use_deterministic_algorithms(True, warn_only=False)"
_MATH = "SDPA's math kernel is matrix products and a softmax, none of which accumulates atomically"
_NO_CP = (
    "diffusers has no context-parallel path for it: it would ignore the parallel configuration and attend within "
    "the local shard"
)
_CP_FALSE = (
    "diffusers' context-parallel path does not call the entry point: it calls the kernel's inner forward and "
    "backward, with deterministic=False"
)
_FORWARD_ONLY_CK = (
    "its kernel ships the forward pass alone and swallows unknown keywords, so that `deterministic=True` would be "
    "ignored without a word"
)
_SAGE = "SageAttention's quantised kernels take no `deterministic` argument"


def _flag(name: str, *, reason: str = _SDPA, context_parallel: str = "") -> BackendClass:
    return BackendClass(name, AttentionClass.TORCH_FLAG, reason, context_parallel=context_parallel)


def _patch(name: str, entry_point: str, *, context_parallel: str) -> BackendClass:
    reason = f"torch's flag cannot reach it; `deterministic=True` is forced on `{entry_point}`"
    return BackendClass(
        name, AttentionClass.PATCH, reason, entry_points=(entry_point,), context_parallel=context_parallel
    )


def _hub(name: str, function: str, *, context_parallel: str = _CP_FALSE) -> BackendClass:
    reason = f"torch's flag cannot reach it; `deterministic=True` is forced on `{function}` when the kernel is loaded"
    return BackendClass(
        name, AttentionClass.PATCH_AFTER_LOAD, reason, entry_points=(function,), context_parallel=context_parallel
    )


def _reject(name: str, reason: str, instead: str = SDPA_INSTEAD) -> BackendClass:
    return BackendClass(name, AttentionClass.REJECT, reason, instead)


def _table(*rows: BackendClass) -> Mapping[str, BackendClass]:
    return MappingProxyType({row.name: row for row in rows})


DIFFUSERS_BACKENDS: Mapping[str, BackendClass] = _table(
    _flag(UNSET, reason=f"diffusers then uses `native`: {_SDPA}"),
    _flag("native"),
    _flag("_native_flash"),
    _flag("_native_efficient", context_parallel=_NO_CP),
    BackendClass("_native_math", AttentionClass.DETERMINISTIC, _MATH, context_parallel=_NO_CP),
    _reject("_native_cudnn", "torch's strict deterministic mode disables cuDNN attention, so that no kernel is left"),
    _reject("_native_npu", "it runs in torch_npu, which diffusers gives no `deterministic` argument"),
    _reject("_native_xla", "it runs a kernel of torch_xla, which diffusers gives no `deterministic` argument"),
    _patch("flash", "flash_attn_func", context_parallel=_CP_FALSE),
    _patch("flash_varlen", "flash_attn_varlen_func", context_parallel=_NO_CP),
    _patch("_flash_varlen_3", "flash_attn_3_varlen_func", context_parallel=_NO_CP),
    _reject(
        "_flash_3",
        "diffusers calls it through a custom operator that passes deterministic=False and has no backward formula",
        f"`_flash_varlen_3`, which calls the kernel directly, or {SDPA_INSTEAD}",
    ),
    _hub("flash_hub", "flash_attn_func"),
    _hub("flash_varlen_hub", "flash_attn_varlen_func"),
    _hub("_flash_3_hub", "flash_attn_func"),
    _hub("_flash_3_varlen_hub", "flash_attn_varlen_func"),
    _hub("flash_4_hub", "flash_attn_func", context_parallel=_NO_CP),
    _reject("aiter_fa2_hub", _FORWARD_ONLY_CK),
    _reject("flex", "torch.compile generates its kernel, and autotuning may pick another one in another run"),
    _reject("xformers", "diffusers passes it no `deterministic` argument, and it picks its backward at run time"),
    _reject("sage", _SAGE),
    _reject("sage_hub", _SAGE),
    _reject("sage_blackwell_hub", _SAGE),
    _reject("sage_varlen", _SAGE),
    _reject("_sage_qk_int8_pv_fp8_cuda", _SAGE),
    _reject("_sage_qk_int8_pv_fp8_cuda_sm90", _SAGE),
    _reject("_sage_qk_int8_pv_fp16_cuda", _SAGE),
    _reject("_sage_qk_int8_pv_fp16_triton", _SAGE),
)

_ONLY_SDPA_CP = "context parallelism is implemented for SDPA alone"
_FLASH_NAMES = ("flash_attn_func", "flash_attn_varlen_func")


def _transformers_flash(name: str) -> BackendClass:
    # FLASH_ATTENTION_DETERMINISTIC=1 is not enough: transformers drops it where the loaded function has no such
    # parameter, and a model's explicit False (ModernBERT's `deterministic_flash_attn`) beats it.
    reason = "torch's flag cannot reach it; `deterministic=True` is forced on its functions when they are loaded"
    return BackendClass(
        name,
        AttentionClass.PATCH_AFTER_LOAD,
        reason,
        entry_points=_FLASH_NAMES,
        context_parallel=_ONLY_SDPA_CP,
    )


_PAGED = "it serves continuous batching, where the batch depends on when requests arrive"

TRANSFORMERS_IMPLEMENTATIONS: Mapping[str, BackendClass] = _table(
    _flag(UNSET, reason=f"transformers then uses `sdpa`, or `eager` where a model lacks it: {_SDPA}"),
    _flag("sdpa"),
    BackendClass(
        "eager",
        AttentionClass.DETERMINISTIC,
        "it is matrix products and a softmax, none of which accumulates atomically",
        context_parallel=_ONLY_SDPA_CP,
    ),
    _transformers_flash("flash_attention_2"),
    _transformers_flash("flash_attention_3"),
    _transformers_flash("flash_attention_4"),
    # transformers puts these into the model's configuration by itself where the packages are not installed.
    _transformers_flash("kernels-community/flash-attn2"),
    _transformers_flash("kernels-community/flash-attn3"),
    _transformers_flash("kernels-community/vllm-flash-attn3"),
    _transformers_flash("kernels-community/flash-attn4"),
    _reject(
        "flex_attention",
        "torch.compile generates its kernel, and autotuning may pick another one in another run",
        TRANSFORMERS_INSTEAD,
    ),
    _reject("paged|eager", _PAGED, TRANSFORMERS_INSTEAD),
    _reject("kernels-community/aiter-flash-attn", "its backward pass has not been read", TRANSFORMERS_INSTEAD),
    _reject("kernels-community/metal-flash-sdpa", "it runs on Apple GPUs alone", TRANSFORMERS_INSTEAD),
)

_TABLES: Mapping[str, Mapping[str, BackendClass]] = MappingProxyType(
    {"diffusers": DIFFUSERS_BACKENDS, "transformers": TRANSFORMERS_IMPLEMENTATIONS}
)


def canonical_name(backend: object) -> str | None:
    """Return a backend's name as the tables spell it: lower-case, without white space around it.

    Args:
        backend: A name in any case, a member of diffusers' ``AttentionBackendName``, or None.

    Returns:
        The name, or None where nothing is chosen (None, an empty string, ``unset``).

    Raises:
        AttentionError: ``backend`` is neither a string nor None.
    """
    if isinstance(backend, enum.Enum):
        backend = backend.value
    if backend is None:
        return None
    if not isinstance(backend, str):
        raise AttentionError(f"an attention backend is a name, not {type(backend).__name__} {backend!r}")
    name = backend.strip().lower()
    return None if name in ("", UNSET) else name


def table_of(library: str) -> Mapping[str, BackendClass]:
    """Return the rows of one library.

    Raises:
        UsageError: No such table.
    """
    table = _TABLES.get(library)
    if table is None:
        raise UsageError(f"no attention table for library {library!r}", hint=f"Known: {', '.join(get_args(Library))}.")
    return table


def classify(backend: object, *, library: Library = "diffusers") -> BackendClass:
    """Return the row of a backend, from its name alone. Imports nothing.

    Args:
        backend: A name in any case, a member of diffusers' ``AttentionBackendName``, or None for "unset".
        library: Whose names these are.

    Returns:
        The row. A name that the table lacks gets a row of its own, rejected.

    Raises:
        AttentionError: ``backend`` is neither a string nor None.
        UsageError: Unknown library.
    """
    table = table_of(library)
    name = canonical_name(backend)
    if name is None:
        return table[UNSET]
    row = table.get(name)
    if row is not None:
        return row
    instead = SDPA_INSTEAD if library == "diffusers" else TRANSFORMERS_INSTEAD
    if name.startswith("paged|"):
        return _reject(name, _PAGED, instead)
    return _reject(name, f"it is not among the {library} backends whose determinism is known", instead)

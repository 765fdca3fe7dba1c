"""The slug that keys a standard: what must be equal for bits to be comparable."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from e2e_registry.config import PLATFORM_AXES, did_you_mean
from e2e_registry.determinism.profiles import get_profile
from e2e_registry.environment.record import BY_WRITER
from e2e_registry.errors import UsageError

#: Instruction sets that numeric libraries choose kernels by, best first, and the CPU flags that each needs.
ISA_LEVELS: tuple[tuple[str, frozenset[str]], ...] = (
    ("avx512", frozenset({"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"})),
    ("avx2", frozenset({"avx2", "fma"})),
    ("avx", frozenset({"avx"})),
    ("sse4", frozenset({"sse4_1", "sse4_2"})),
    ("sve2", frozenset({"sve2"})),
    ("sve", frozenset({"sve"})),
    ("neon", frozenset({"asimd"})),
)

#: Where the software group holds the version that an axis adds, if not under the axis's own name.
_AXIS_FACTS = {"cuda": "torch_build.cuda", "cudnn": "torch_build.cudnn", "nccl": "torch_build.nccl"}

_LONGEST_NAME = 48
#: Of a whole slug: beside it a standard's name holds that of its test.
_LONGEST = 160


def platform_slug(
    profile: str,
    *,
    platform: Mapping[str, Any],
    software: Mapping[str, Any] | None = None,
    gpu_count: int | None = None,
    nodes: int = 1,
    axes: Sequence[str] = (),
    tag: str | None = None,
) -> str:
    """Return the platform of a run: lower case, and safe in a file name on every system.

    ``cpu-x86_64-portable``, ``cpu-x86_64-native-avx512``, ``cuda-nvidia-h100-80gb-hbm3-8gpu-2node-torch2.13``.

    Args:
        profile: The determinism profile that the run holds.
        platform: The group of a record, or what :func:`~e2e_registry.environment.platform_facts` says of this
            process before anything was run.
        software: The group of a record; needed for ``axes`` alone.
        gpu_count: GPUs of the whole run. By default as many as one writer saw, which is too few where each rank is
            shown its own alone.
        nodes: Machines of the run.
        axes: Version facts that join the slug as ``-torch2.13``: two parts of the version, of the CUDA driver too.
        tag: A suffix that the user chose.

    Raises:
        UsageError: There is no such profile or axis, a fact that the slug needs is not recorded, or the writers of
            the run disagree on it.
    """
    parts = [_cuda(platform, gpu_count)] if get_profile(profile).name == "cuda" else _cpu(profile, platform)
    if nodes > 1:
        parts.append(f"{nodes}node")
    parts += [axis + _axis_version(axis, platform, software or {}) for axis in axes]
    if tag:
        parts.append(_slugified(tag))
    slug = "-".join(parts)
    if len(slug) > _LONGEST:
        raise UsageError(f"the platform slug would have {len(slug)} characters, more than a file's name can hold")
    return slug


def may_be_platform_of(slug: str, *, profile: str, num_gpus: int = 0) -> bool:
    """Whether a run under a profile can be on a platform: a CUDA recipe never is on ``cpu-x86_64-portable``.

    Args:
        slug: A platform.
        profile: Name of the profile that the recipe runs under.
        num_gpus: GPUs that the recipe takes; 0 if that is not known.
    """
    words = slug.split("-")
    if profile == "cuda":
        counts = {int(word.removesuffix("gpu")) for word in words if re.fullmatch(r"\d+gpu", word)}
        return words[0] == "cuda" and (not num_gpus or not counts or sum(counts) == num_gpus)
    kind = {"cpu-portable": "portable", "cpu-native": "native"}.get(profile)
    return words[0] == "cpu" and len(words) > 2 and words[2] == kind


def _cpu(profile: str, platform: Mapping[str, Any]) -> list[str]:
    machine = _slugified(str(_agreed(platform, "machine", "platform"))).replace("amd64", "x86_64")
    parts = ["cpu", machine, "portable" if profile == "cpu-portable" else f"native-{_isa_level(platform)}"]
    system = _slugified(str(platform.get("system") or "linux"))
    # The C library's exp and sin are other functions there.
    return parts if system == "linux" else [*parts, system]


def _isa_level(platform: Mapping[str, Any]) -> str:
    """Return the best level that the CPUs of all writers have."""
    flags = [frozenset(value or ()) for value in _values(platform.get("cpu_flags"))]
    common = frozenset.intersection(*flags) if flags else frozenset()
    return next((name for name, needed in ISA_LEVELS if needed <= common), "unknown")


def _cuda(platform: Mapping[str, Any], gpu_count: int | None) -> str:
    seen = [Counter(value) for value in _values(platform.get("gpus")) if value]
    if not seen:
        raise UsageError(
            "no GPU is recorded, and profile 'cuda' names the platform by them",
            hint="the recipe must start CUDA in a process that records; or choose a cpu profile",
        )
    gpus: Counter[str] = Counter()
    for writer in seen:
        gpus |= writer
    if len(gpus) == 1 and gpu_count:
        gpus = Counter({next(iter(gpus)): gpu_count})
    models = [f"{_gpu_model(name)}-{count}gpu" for name, count in sorted(gpus.items())]
    return "-".join(["cuda", *models])


def _gpu_model(name: str) -> str:
    """Return the model with its vendor; form factor and memory stay, since they decide clocks and links."""
    model = _slugified(name)
    is_named = re.match(r"(nvidia|amd|intel|radeon|instinct)\b", model) is not None
    return model if is_named else f"nvidia-{model}"


def _axis_version(axis: str, platform: Mapping[str, Any], software: Mapping[str, Any]) -> str:
    if axis not in PLATFORM_AXES:
        raise UsageError(f"unknown platform axis {axis!r}", hint=did_you_mean(axis, PLATFORM_AXES))
    if axis == "driver":
        version = str(_agreed(platform, "gpu.driver", "platform"))
    else:
        version = str(_agreed(software, _AXIS_FACTS.get(axis, axis), "software"))
    if axis == "cudnn" and version.isdigit() and len(version) >= 4:  # 91002 is 9.10.2, 8907 is 8.9.7
        number, scale = int(version), 10000 if len(version) >= 5 else 1000
        version = f"{number // scale}.{number % scale // 100}"
    match = re.match(r"v?(\d+(?:\.\d+)?)", version)
    return match[1] if match else _slugified(version)


def _agreed(facts: Mapping[str, Any], name: str, group: str) -> Any:
    """Return a fact that has one value over all writers."""
    values = {str(value): value for value in _values(facts.get(name)) if value is not None}
    if len(values) == 1:
        return next(iter(values.values()))
    what = "is not recorded" if not values else f"differs between the writers ({', '.join(sorted(values))})"
    raise UsageError(f"the platform slug needs {name!r} of group {group!r}, which {what}")


def _values(fact: Any) -> Iterator[Any]:
    if isinstance(fact, Mapping) and BY_WRITER in fact:
        yield from fact[BY_WRITER].values()
    elif fact is not None:
        yield fact


def _slugified(text: str) -> str:
    """Return text in lower-case letters, digits, ``_``, single ``.`` and ``-``; a long one is cut, with a digest."""
    slug = re.sub(r"[^a-z0-9_.]+", "-", re.sub(r"\.+", ".", text.lower())).strip("-._")
    if slug and len(slug) <= _LONGEST_NAME:
        return slug
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{slug[: _LONGEST_NAME - 9].rstrip('-._')}-{digest}".lstrip("-")

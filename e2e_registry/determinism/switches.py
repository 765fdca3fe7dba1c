"""The torch switches of deterministic training: set, read back, and undone.

Setting a switch proves nothing: another library may have changed it, or a build may ignore it. So every function
here reads the effective value back and raises if it is not the one asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from e2e_registry.determinism.portable import enable_portable_operators, portable_operators_are_enabled
from e2e_registry.determinism.profiles import Profile, get_profile
from e2e_registry.determinism.state import FULL_PRECISION, flushes_denormals, fp32_precisions, initial_environment
from e2e_registry.errors import UsageError

_PORTABLE = "cpu-portable"


class DeterminismError(UsageError):
    """A determinism setting that was asked for does not hold, or can no longer be made to hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """The values to set; None leaves a switch as it is.

    Attributes:
        deterministic_algorithms: Deterministic kernels where torch has them, an error where it does not. Always
            with ``warn_only=False``: the fused attention kernels of ``scaled_dot_product_attention`` take their
            deterministic backward only if the mode is on *and* not warn-only, so with ``warn_only=True`` the most
            common backend would stay nondeterministic without a word.
        cudnn_deterministic: cuDNN picks deterministic convolutions only.
        cudnn_benchmark: cuDNN times algorithms and takes the fastest: another one on another day.
        tf32: Whether float32 matrix products and convolutions may round their inputs (TF32, bfloat16). torch
            allows it for cuDNN convolutions by default.
        fill_uninitialized_memory: Deterministic mode fills ``torch.empty`` with NaN. That finds reads of
            uninitialised memory, and costs time and hides them: off, except for debugging.
        flush_denormal: Whether subnormal numbers are taken for zero.
        num_threads: Threads of torch's CPU operators.
        portable_operators: Replace the CPU operators whose bits depend on the vendor even under ``cpu-portable``
            (:mod:`~e2e_registry.determinism.portable`).
    """

    deterministic_algorithms: bool | None = True
    cudnn_deterministic: bool | None = True
    cudnn_benchmark: bool | None = False
    tf32: bool | None = False
    fill_uninitialized_memory: bool | None = False
    flush_denormal: bool | None = False
    num_threads: int | None = None
    portable_operators: bool | None = None

    @staticmethod
    def for_profile(profile: str | Profile, *, debug: bool = False) -> Switches:
        """Return a profile's switches: the default ones, on the CPU one thread, and what the profile adds.

        Args:
            profile: The profile or its name.
            debug: Fill uninitialised memory.

        Raises:
            UsageError: There is no such profile.
        """
        profile = get_profile(profile)
        threads = profile.variables.get("OMP_NUM_THREADS")
        return Switches(
            fill_uninitialized_memory=debug,
            num_threads=None if threads is None else int(threads),
            portable_operators=True if profile.name == _PORTABLE else None,
        )

    @staticmethod
    def for_this_process() -> Switches:
        """Return the default switches, and portable operators where the process was started under ``cpu-portable``.

        Told by the two pins that choose torch's and MKL's kernels: the operators differ by vendor under these.
        """
        started_with = initial_environment() or os.environ
        pins = get_profile(_PORTABLE).variables
        is_portable = all(started_with.get(name) == pins[name] for name in ("ATEN_CPU_CAPABILITY", "MKL_CBWR"))
        return Switches(portable_operators=True if is_portable else None)


DEFAULT_SWITCHES = Switches()


def apply(switches: Switches | Profile | str = DEFAULT_SWITCHES) -> None:
    """Set the switches in this process and verify that they hold. Call it before the model is built.

    Args:
        switches: The switches, or a profile whose switches to set.

    Raises:
        UsageError: There is no such profile.
        DeterminismError: A switch does not hold after it was set.
    """
    wanted = switches if isinstance(switches, Switches) else Switches.for_profile(switches)
    _set(wanted)
    _verify(wanted)


@contextlib.contextmanager
def deterministic_mode(switches: Switches | Profile | str = DEFAULT_SWITCHES) -> Iterator[None]:
    """Set the switches for a block and restore what was there before, also when the block raises.

    Seeds are not touched. Kernels that a library chose inside the block stay chosen.

    Raises:
        UsageError: There is no such profile.
        DeterminismError: A switch does not hold after it was set.
    """
    wanted = switches if isinstance(switches, Switches) else Switches.for_profile(switches)
    before = _Settings.read()
    try:
        apply(wanted)
        yield
    finally:
        before.restore(wanted)


@dataclass(frozen=True, slots=True)
class _Settings:
    """What the switches were, closely enough to be put back."""

    switches: Switches
    warn_only: bool
    matmul_precision: str
    cudnn_tf32: bool | None
    precisions: dict[str, str]

    @staticmethod
    def read() -> _Settings:
        import torch

        try:
            cudnn_tf32 = torch.backends.cudnn.allow_tf32
        except RuntimeError:  # the program set the newer switches only, which are restored by themselves
            cudnn_tf32 = None
        return _Settings(
            Switches(
                deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
                cudnn_deterministic=torch.backends.cudnn.deterministic,
                cudnn_benchmark=torch.backends.cudnn.benchmark,
                tf32=None,
                fill_uninitialized_memory=_deterministic(torch).fill_uninitialized_memory,
                flush_denormal=flushes_denormals(),
                num_threads=torch.get_num_threads(),
                portable_operators=portable_operators_are_enabled(),
            ),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_float32_matmul_precision(),
            cudnn_tf32,
            fp32_precisions(torch),
        )

    def restore(self, changed: Switches) -> None:
        """Put back those switches that ``changed`` had set; the block may have changed others on purpose."""
        import torch

        untouched = {field.name: None for field in dataclasses.fields(Switches) if getattr(changed, field.name) is None}
        _set(dataclasses.replace(self.switches, **untouched))
        if changed.deterministic_algorithms is not None:
            torch.use_deterministic_algorithms(bool(self.switches.deterministic_algorithms), warn_only=self.warn_only)
        if changed.tf32 is not None:
            torch.set_float32_matmul_precision(self.matmul_precision)
            if self.cudnn_tf32 is not None:
                torch.backends.cudnn.allow_tf32 = self.cudnn_tf32
            _set_precisions(torch, self.precisions)


def _set(switches: Switches) -> None:
    import torch

    if switches.deterministic_algorithms is not None:
        torch.use_deterministic_algorithms(switches.deterministic_algorithms, warn_only=False)
    if switches.cudnn_deterministic is not None:
        torch.backends.cudnn.deterministic = switches.cudnn_deterministic
    if switches.cudnn_benchmark is not None:
        torch.backends.cudnn.benchmark = switches.cudnn_benchmark
    if switches.tf32 is not None:
        _set_tf32(torch, switches.tf32)
    if switches.fill_uninitialized_memory is not None:
        _deterministic(torch).fill_uninitialized_memory = switches.fill_uninitialized_memory
    if switches.flush_denormal is not None:
        torch.set_flush_denormal(switches.flush_denormal)
    if switches.num_threads is not None:
        torch.set_num_threads(switches.num_threads)
    if switches.portable_operators is True:
        enable_portable_operators()
    elif switches.portable_operators is False:
        enable_portable_operators().disable()


def _deterministic(torch: Any) -> Any:
    return torch.utils.deterministic  # its attribute is a property of a module, which type checkers do not see


def _set_tf32(torch: Any, allow: bool) -> None:
    # The older switches first: they also set the newer ones beneath them, and their getters raise unless both agree.
    torch.set_float32_matmul_precision("high" if allow else "highest")
    torch.backends.cuda.matmul.allow_tf32 = allow
    torch.backends.cudnn.allow_tf32 = allow
    _set_precisions(torch, dict.fromkeys(fp32_precisions(torch), "tf32" if allow else "ieee"))


def _set_precisions(torch: Any, precisions: dict[str, str]) -> None:
    if not hasattr(torch._C, "_set_fp32_precision_setter"):
        return
    for name, precision in precisions.items():
        torch._C._set_fp32_precision_setter(*name.split("."), precision)


def _verify(wanted: Switches) -> None:
    import torch

    settings = _Settings.read()
    actual = dataclasses.replace(
        settings.switches, tf32=any(p not in FULL_PRECISION for p in settings.precisions.values())
    )
    for field in dataclasses.fields(Switches):
        want, got = getattr(wanted, field.name), getattr(actual, field.name)
        if want is not None and want != got:
            raise DeterminismError(
                f"{field.name} was set to {want}, but reads back as {got} (torch {torch.__version__})",
                hint="another library holds the switch, or this build of torch does not have it",
            )
    if wanted.deterministic_algorithms and settings.warn_only:
        raise DeterminismError("deterministic algorithms are on, but still warn-only")

"""Recordings: what recipes write while they train (:class:`MetricRecorder`), and the reader of it (:func:`read_run`).

Names are loaded when first used (PEP 562): the recorder runs inside other people's training processes, where this
package's own dependencies need not be installed, so importing it must not import the reader's NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from e2e_registry.recording.digests import digest_of
    from e2e_registry.recording.gathering import gather
    from e2e_registry.recording.reader import RunRecording, read_run
    from e2e_registry.recording.recorder import MetricRecorder

__all__ = ["MetricRecorder", "RunRecording", "digest_of", "gather", "read_run"]

_HOMES = {
    "MetricRecorder": "recorder",
    "RunRecording": "reader",
    "digest_of": "digests",
    "gather": "gathering",
    "read_run": "reader",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Which GPUs may be handed out: those that CUDA would take."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e_registry.execution.gpus import visible_gpus


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("4,7", ("4", "7")),
        (" 4 , GPU-aa ", ("4", "GPU-aa")),
        ("", ()),
        ("-1", ()),
        ("4,-1,7", ("4",)),
        ("4,,7", ("4",)),
        ("4,4,7", ("4",)),
    ],
)
def test_devices_are_those_before_the_first_that_cuda_would_not_take(named: str, expected: tuple[str, ...]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": named}) == expected


def test_without_the_variable_they_are_counted_from_zero_as_cuda_counts_what_it_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [Path("/dev", name) for name in ("nvidia10", "nvidia2", "nvidia0", "nvidia1-caps")]
    monkeypatch.setattr(Path, "glob", lambda *_: iter(found))
    assert visible_gpus({}) == ("0", "1", "2")

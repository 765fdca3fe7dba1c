"""What every test stands on: nothing of the host, one profile of Hypothesis, shared fixtures."""

import os
from collections.abc import Iterator

import pytest
from host import NEEDED_LATER  # before whatever loads a library that reads the host's variables
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from repositories import repository

__all__ = ["repository"]

# A gate must give one answer for one commit, so CI draws the same examples each time; elsewhere each run draws others.
settings.register_profile(
    "unit",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("unit")
if os.environ.get("CI"):
    # Hypothesis also draws constants of the modules that are loaded so far, which other tests may have loaded or not.
    providers._get_local_constants = lambda: providers._local_constants


@pytest.fixture(autouse=True)
def _nothing_that_only_this_process_needs(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Take out of each test what could not go earlier: options that pytest's workers read, and the caller's GPUs."""
    names = {"PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD"}
    if request.node.get_closest_marker("gpu") is None:
        names |= NEEDED_LATER
    for name in names:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def group_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one, for recipes whose actors are in this process."""
    from local_actors import process_group  # brings torch, which most tests do without

    with process_group(tmp_path_factory.mktemp("store")):
        yield

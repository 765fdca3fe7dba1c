"""What every test stands on: no variable or signal setting of the host, one profile of Hypothesis, shared fixtures.

Host variables are taken out when pytest loads this file, before any test module or library is imported, so that
fixtures of a module and processes that tests start are free of them too. What stays is what says where things are
(``PATH``, ``HOME``, ``PYTHONPATH``, proxies) and, for tests on GPUs, which of them are the caller's.
"""

import os
import signal
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from repositories import repository

from e2e_registry.determinism.profiles import PROFILES

__all__ = ["repository"]

#: Steer libraries, git, pull requests, interpreters, or the product.
_PREFIXES = (
    *("E2E_", "RAY_", "GIT_", "GITHUB_", "GH_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_"),
    *("NPY_", "NCCL_", "CUBLAS_", "TORCH_", "PYTORCH_", "ATEN_", "DIFFUSERS_", "FLASH_ATTENTION_"),
)
#: Steer how text is shown, and what an interpreter does.
_NAMES = frozenset(
    {
        *("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "PY_COLORS", "COLORTERM"),
        *("TTY_COMPATIBLE", "TTY_INTERACTIVE", "TMUX", "PAGER", "LESS"),
        *("PYTHONWARNINGS", "PYTHONIOENCODING", "PYTHONUTF8", "PYTHONOPTIMIZE", "PYTHONUNBUFFERED", "PYTHONSAFEPATH"),
        *("PYTHONDEVMODE", "PYTHONBREAKPOINT", "PYTHONINSPECT", "PYTHONSTARTUP", "PYTHONNOUSERSITE"),
    }
)
_OF_PROFILES = frozenset(variable.name for profile in PROFILES.values() for variable in profile.settings)
#: Which GPUs a test may take is the caller's to say.
_NEEDED_LATER = frozenset({"CUDA_VISIBLE_DEVICES"})


def _is_the_host_s(name: str) -> bool:
    return name not in _NEEDED_LATER and (name.startswith(_PREFIXES) or name in _NAMES | _OF_PROFILES)


for _name in [name for name in os.environ if _is_the_host_s(name)]:
    del os.environ[_name]
# Signing, hooks, and what a developer's git ignores everywhere are no part of a scratch repository.
os.environ |= {"GIT_CONFIG_GLOBAL": str(Path(__file__).with_name("gitconfig")), "GIT_CONFIG_NOSYSTEM": "1"}

if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A background job of a shell without job control is started so, and would hand it on to every process of a test.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A gate must give one answer for one commit, so CI draws the same examples each time; elsewhere each run draws others.
settings.register_profile(
    "unit",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("unit")


@pytest.fixture(autouse=True)
def _nothing_that_only_this_process_needs(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Take out of each test what could not go earlier: options that pytest's workers read, and the caller's GPUs."""
    names = {"PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD"}
    if request.node.get_closest_marker("gpu") is None:
        names |= _NEEDED_LATER
    for name in names:
        monkeypatch.delenv(name, raising=False)

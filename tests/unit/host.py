"""Takes variables, git settings and ignored signals of the host out of the process when it is imported.

pytest loads it before any test module, and before any library that reads such variables when it is loaded, so that
fixtures of a module and processes that tests start are free of them too. What stays is what says where things are
(``PATH``, ``HOME``, ``PYTHONPATH``, proxies) and, for tests on GPUs, which of them are the caller's.
"""

import os
import signal
import threading
from pathlib import Path

from e2e_registry.determinism.profiles import PROFILES

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
NEEDED_LATER = frozenset({"CUDA_VISIBLE_DEVICES"})


def _is_the_host_s(name: str) -> bool:
    return name not in NEEDED_LATER and (name.startswith(_PREFIXES) or name in _NAMES | _OF_PROFILES)


for _name in [name for name in os.environ if _is_the_host_s(name)]:
    del os.environ[_name]
# Signing, hooks, and what a developer's git ignores everywhere are no part of a scratch repository.
os.environ |= {"GIT_CONFIG_GLOBAL": str(Path(__file__).with_name("gitconfig")), "GIT_CONFIG_NOSYSTEM": "1"}

if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A background job of a shell without job control is started so, and would hand it on to every process of a test.
    signal.signal(signal.SIGINT, signal.default_int_handler)

#!/usr/bin/env python3
"""The registry's command line, run from a checkout: the same as the console script ``e2e-registry``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
OWN_PYTHON = ROOT / ".venv" / "bin" / "python"


def run() -> int:
    """Run the command line; with the checkout's own environment where this interpreter lacks the dependencies."""
    sys.path.insert(0, str(ROOT))
    try:
        from e2e_registry.cli.app import main
    except ModuleNotFoundError as error:
        if OWN_PYTHON.exists() and Path(sys.prefix) != OWN_PYTHON.parent.parent:
            os.execv(OWN_PYTHON, [str(OWN_PYTHON), __file__, *sys.argv[1:]])  # noqa: S606  # no shell is wanted
        sys.stderr.write(f"error: {error.name} is not installed\n  run `make .venv/installed`, or pip install -e .\n")
        return 2
    return main()


if __name__ == "__main__":
    sys.exit(run())

"""What a test file calls: :func:`register_e2e_ci` and :func:`main`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import NoReturn, Unpack

from e2e_registry.config import load_settings
from e2e_registry.errors import RegistrationError, RegistryError, exit_if_script
from e2e_registry.registration.declaration import Registration, RegistrationKeywords
from e2e_registry.registration.place import locate
from e2e_registry.registration.validation import validate


def register_e2e_ci(**keywords: Unpack[RegistrationKeywords]) -> Registration:
    """Declare the test of this file; see :class:`Registration` for the keywords.

    Call it once, at module level, with literals, module-level constants, and ``Tolerance(...)``: the tool reads the
    call from source. Executed, it checks the call and returns it. Run as a script, a call that is refused ends the
    process with exit code 2, as ``e2e-registry check`` does.

    Raises:
        RegistrationError: The call cannot be accepted; ``where`` holds file, line and argument.
        UsageError: The repository's settings cannot be accepted.
    """
    frame = sys._getframe(1)
    file = Path(frame.f_globals.get("__file__") or frame.f_code.co_filename)
    try:
        if not file.is_file():
            raise RegistrationError("must be called from a file", where=f"{file}:{frame.f_lineno}")
        settings = load_settings(file)
        return validate(dict(keywords), locate(file, settings), frame.f_lineno, {}, settings)
    except RegistryError as error:
        exit_if_script(error, frame)
        raise


def main(file: str) -> NoReturn:
    """Check the test that ``file`` declares, as ``e2e-registry check --test FILE`` does; options come from sys.argv."""
    # By name, because the command line stands floors above this module: it is entered from here, not imported.
    command_line = importlib.import_module("e2e_registry.cli.app")
    sys.exit(command_line.main(["check", "--test", file, *sys.argv[1:]]))

"""The command line at a pseudo-terminal, with somebody who answers it."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

#: Longer than a process takes to end once a key was taken.
_RETYPED_S = 3.0

END_OF_INPUT = "\x04"  # Ctrl-D
INTERRUPT = "\x03"  # Ctrl-C


def converse(root: Path, arguments: Sequence[str], answers: Sequence[str], *, prompt: str) -> tuple[int, str]:
    """Run the command line in a folder, answer each question as it comes, and return the exit code and what was shown.

    Args:
        root: Where it runs.
        arguments: Of the command line.
        answers: What is typed, one at each question. A last Ctrl-D or Ctrl-C is typed until it is taken: what is typed
            while the line editor sets the terminal up is lost.
        prompt: A pattern that is found once for each question.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(root)
        os.execv(sys.executable, [sys.executable, "-m", "e2e_registry", *arguments])
    shown, given, typed_at = b"", 0, 0
    deadline = time.monotonic() + 120
    try:
        while True:
            is_last = given == len(answers) and answers[-1] in (END_OF_INPUT, INTERRUPT)
            is_taken = bool(shown[typed_at:].replace(b"^C", b"").strip())  # more than the terminal's echo has come
            block = _read(terminal, deadline, retyped=answers[-1].encode() if is_last and not is_taken else b"")
            if not block:
                break
            shown += block
            while given < min(len(answers), len(re.findall(prompt, shown.decode(errors="replace")))):
                os.write(terminal, answers[given].encode())
                given, typed_at = given + 1, len(shown)
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        pytest.fail(f"it waits, or goes on, for ever:\n{shown.decode(errors='replace')}")
    finally:
        os.close(terminal)
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), shown.decode(errors="replace")


def _read(terminal: int, deadline: float, *, retyped: bytes) -> bytes:
    """Return what is shown next; nothing once the other end is gone. Type again while nothing is."""
    while not select.select([terminal], [], [], _RETYPED_S)[0]:
        if time.monotonic() > deadline:
            raise TimeoutError
        os.write(terminal, retyped)
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""

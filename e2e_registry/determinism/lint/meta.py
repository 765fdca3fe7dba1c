"""Findings about the lint's own reading: files that do not parse, and suppressions that do not count."""

from __future__ import annotations

from e2e_registry.determinism.lint.rule import Documented


class Unreadable(Documented):
    """A file that could not be checked."""

    code = "DET000"
    name = "unreadable"
    summary = "the file cannot be read as Python"
    why = (
        "Nothing in it was checked. Syntax of a Python newer than the one that runs the lint counts as an error too, "
        "and so does text that is not in the encoding the file declares (UTF-8 if it declares none)."
    )
    fix = "Mend the file, run the lint with a newer Python, or leave the file out of the paths."
    flagged = """
def train(:
    pass
"""
    clean = """
def train():
    pass
"""


class BadSuppression(Documented):
    """A suppression that suppresses nothing because of how it is written."""

    code = "DET090"
    name = "bad-suppression"
    summary = "a suppression has no reason, no code, or an unknown code"
    why = (
        "The next reader cannot tell an exception that was thought about from one that silenced a warning. A "
        "suppression without a reason is not applied."
    )
    fix = "`# e2e: allow DET001 -- why this place is right`, with several codes separated by commas."
    flagged = """
import torch

torch.backends.cudnn.benchmark = True  # e2e: allow DET001
"""
    clean = """
import torch

torch.backends.cudnn.benchmark = True  # e2e: allow DET001 -- measures throughput, compares nothing
"""


class UnusedSuppression(Documented):
    """A suppression with nothing to suppress."""

    code = "DET091"
    name = "unused-suppression"
    summary = "a suppression suppresses nothing"
    why = "The code it was written for has gone or moved. Left in place, it would hide the next fault on that line."
    fix = "Remove it, or move it to the line of the finding. Codes that were not selected are not judged unused."
    flagged = """
import torch

torch.backends.cudnn.benchmark = False  # e2e: allow DET001 -- measures throughput, compares nothing
"""
    clean = """
import torch

torch.backends.cudnn.benchmark = False
"""

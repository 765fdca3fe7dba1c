"""The rules' part of ``docs/lint.md``, written from the texts that the rules carry.

``python -m e2e_registry.determinism.lint.documentation docs/lint.md`` brings the page up to date.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from e2e_registry.determinism.lint.catalogue import CATALOGUE
from e2e_registry.determinism.lint.rule import Documented

BEGIN = "<!-- rules: written by e2e_registry.determinism.lint.documentation -->"
END = "<!-- end of rules -->"


def rules_markdown() -> str:
    """Return a table of all codes and a section for each."""
    table = ["| code | name | what |", "|---|---|---|"]
    table += [f"| [{entry.code}](#{_anchor(entry)}) | {entry.name} | {entry.summary} |" for entry in CATALOGUE.values()]
    return "\n\n".join(["\n".join(table), *(_section(entry) for entry in CATALOGUE.values())])


def updated(page: str) -> str:
    """Return the page with the part between the markers written anew.

    Raises:
        ValueError: A marker is missing.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN!r} ... {END!r}")
    return f"{before}{BEGIN}\n\n{rules_markdown()}\n\n{END}{after}"


def _anchor(entry: Documented) -> str:
    return f"{entry.code}-{entry.name}".lower()


def _section(entry: Documented) -> str:
    return "\n\n".join(
        [
            f"### {entry.code} {entry.name}",
            _paragraph("What", f"{entry.summary[0].upper()}{entry.summary[1:]}."),
            _paragraph("Why", entry.why),
            _paragraph("Fix", entry.fix),
            *([_paragraph("Scope", entry.scope)] if entry.scope else []),
            f"Reported:\n\n```python\n{entry.flagged.strip()}\n```",
            f"Not reported:\n\n```python\n{entry.clean.strip()}\n```",
        ]
    )


def _paragraph(title: str, text: str) -> str:
    return textwrap.fill(f"**{title}.** {text}", 120, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    _page = Path(sys.argv[1])
    _page.write_text(updated(_page.read_text(encoding="utf-8")), encoding="utf-8")

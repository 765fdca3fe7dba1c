"""The documents say what is true of the tree: tables that are written from the code, commands that exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from e2e_registry.determinism.profiles import PROFILES

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- profiles: written by tests/unit/test_docs.py -->", "<!-- end of profiles -->"


def profile_tables() -> str:
    lines = []
    for profile in PROFILES.values():
        lines += [f"### {profile.name}", "", f"{profile.promise[0].upper()}{profile.promise[1:]}.", ""]
        lines += ["| variable | | read by, until | why |", "|---|---|---|---|"]
        for variable in profile.settings:
            kind = "pin" if variable.is_pin else "advisory"
            why = variable.why.replace("|", "\\|")
            lines.append(f"| `{variable.setting}` | {kind} | {variable.reader}, {variable.when.value} | {why} |")
        lines.append("")
    return "\n".join(lines)


def test_the_profiles_in_the_document_are_those_of_the_code() -> None:
    path = ROOT / "docs" / "determinism.md"
    text = path.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    written = f"{before}{BEGIN}\n\n{profile_tables()}\n{END}{after}"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(written)
        text = written
    assert text == written, "run this test with UPDATE_GOLDEN=1"


def test_every_command_in_the_readme_exists_and_every_command_is_in_it() -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "e2e_registry", "--help"], capture_output=True, text=True, check=True
    ).stdout
    commands = {line.split()[0] for line in help_text.split("Commands:")[1].splitlines() if line.startswith("  ")}
    section = (ROOT / "README.md").read_text().split("## Commands")[1].split("## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = {text.split()[0] for row in rows for text in re.findall(r"`([^`]+)`", row) if not text.startswith("-")}
    assert named == commands


def anchors(document: Path) -> set[str]:
    """The names that GitHub gives to the headings of a document."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_the_documents_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", document.read_text()):
            if "://" not in target:
                path = document.parent / target if target else document
                assert path.exists(), f"{document.name} links to {target}"
                assert not anchor or anchor in anchors(path), f"{document.name} links to {target}#{anchor}"

"""What must not leave the machine: secrets in command lines and variables, and the machine's own folders."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

REDACTED = "***"

_SECRET_WORDS = frozenset(
    {"secrets", "credential", "credentials", "authorization", "accesskey", "privatekey", "signature", "sig", "bearer"}
)
_SECRET_ENDINGS = ("password", "passwd", "passphrase", "secret", "apikey")
# "key" and "token" name secrets only beside one of these words: --label-key, --eos-token and --max-tokens do not.
_KEY_WORDS = frozenset(
    {"api", "access", "secret", "private", "auth", "ssh", "encryption", "signing", "license"}
    | {"openai", "anthropic", "wandb", "hf", "azure", "aws", "gcp", "google"}
)
_NOT_SECRET_TOKEN = frozenset(
    {"eos", "bos", "pad", "unk", "mask", "sep", "cls", "stop", "image", "video", "audio", "special", "next", "first"}
    | {"last", "per", "prompt", "think", "end", "start", "begin", "class", "register", "time", "each", "by", "text"}
)

_NAME = r"(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)"
#: The head of ``name=value`` and ``"name": "value"``: options, variables, Hydra overrides, query strings, JSON.
_ASSIGNMENT = re.compile(rf"""{_NAME}\\*["']?\s*[=:]\s*""")
#: The head of ``--name value`` inside one argument, as in ``bash -c "..."``.
_OPTION = re.compile(rf"(?<!\S)--?{_NAME}\s+(?!--)")
_WHOLE = re.compile(r"(?P<name>-{0,2}[A-Za-z_][A-Za-z0-9_.-]*)=(?P<value>.*)", re.DOTALL)
_OPTION_NAME = re.compile(r"--?[A-Za-z_][A-Za-z0-9_.-]*")
_SHELL_OPTION = re.compile(r"-[a-z]*c")
#: Quoted, quoted inside a string, bare, or whatever there is.
_VALUE = re.compile(
    r"""(?P<open>["'])(?:\\.|(?!(?P=open))[^\\])*(?P=open)|\\+(?P<inner>["'])(?:(?!\\+(?P=inner)).)*\\+(?P=inner)"""
    r"""|\$\{[^}]*\}|[^\s"',;&)}\]]+|\S+""",
    re.DOTALL,
)
#: A variable that is expanded at launch is no secret, and says where the secret comes from.
_UNEXPANDED = re.compile(r"\$(?:\{[^}]*\}|[A-Za-z_]\w*)")
_USER_INFO = re.compile(r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]*://)[^\s/@'\"?#]+@")
_BEARER = re.compile(r"\b(?P<kind>[Bb]earer|[Bb]asic)\s+[A-Za-z0-9._~+/=-]{8,}")
#: Tokens that their issuers made recognisable: Hugging Face, OpenAI and others, GitHub, GitLab, Slack, AWS, JWT.
_ISSUED = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}"
    r"|glpat-[A-Za-z0-9_-]{16,}|xox[abprs]-[A-Za-z0-9-]{10,}|AKIA[A-Z0-9]{16}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*)"
)


def redact_command(argv: Sequence[str]) -> list[str]:
    """Return a command line with ``***`` for every secret that its form gives away.

    These are the values of options and assignments whose names say so (``--api-key X``, ``--token=X``,
    ``WANDB_API_KEY=X``, ``"HF_TOKEN": "X"``), user information in URLs, and tokens of known issuers.
    """
    redacted = []
    for before, argument in itertools.pairwise(["", *argv]):
        whole = _WHOLE.fullmatch(argument)
        if _OPTION_NAME.fullmatch(before) and _is_secret_name(before) and not argument.startswith("--"):
            redacted.append(_redact_value(argument))
        # Of one argument all that follows is the value, spaces too; but the argument of `sh -c` is a line of several.
        elif whole and _is_secret_name(whole["name"]) and not _SHELL_OPTION.fullmatch(before):
            redacted.append(f"{whole['name']}={_redact_value(whole['value'])}")
        else:
            redacted.append(redact_text(argument))
    return redacted


def redact_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with ``***`` for the values that are secrets, or the parts of them that are."""
    return {
        name: _redact_value(value) if _is_secret_name(name) else redact_text(value) for name, value in variables.items()
    }


def redact_text(text: str) -> str:
    """Return one argument, or a whole shell line, with ``***`` for every secret in it."""
    text = _USER_INFO.sub(rf"\g<scheme>{REDACTED}@", text)
    text = _BEARER.sub(rf"\g<kind> {REDACTED}", text)
    text = _redact_after(_ASSIGNMENT, text)
    text = _redact_after(_OPTION, text)
    return _ISSUED.sub(REDACTED, text)


def _redact_after(heads: re.Pattern[str], text: str) -> str:
    """Redact the values that follow heads with secret names.

    A value is passed over only where it is redacted, since that of another name may hold the next head:
    ``--env=HF_TOKEN=X``.
    """
    redacted, at, done = "", 0, 0
    while head := heads.search(text, at):
        at = head.end()
        value = _VALUE.match(text, at) if _is_secret_name(head["name"]) else None
        if value is not None:
            redacted += text[done:at] + _redact_value(value[0])
            at = done = value.end()
    return redacted + text[done:]


def _redact_value(value: str) -> str:
    # `Authorization: Bearer ***` is redacted already, and says more than `Authorization: *** ***`.
    if _UNEXPANDED.fullmatch(value) or value.lower() in ("bearer", "basic"):
        return value
    quote = re.match(r"\\*[\"']", value)
    return f"{quote[0]}{REDACTED}{quote[0]}" if quote and value.endswith(quote[0]) and len(value) > 1 else REDACTED


def _is_secret_name(name: str) -> bool:
    """Whether an option's or variable's name says that its value is a secret; leading hyphens do not count."""
    words = [word for word in re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()) if word]
    for before, word in itertools.pairwise(["", *words]):
        if word.endswith(_SECRET_ENDINGS) or word in _SECRET_WORDS or (word == "key" and before in _KEY_WORDS):
            return True
    *before_last, last = ["", *words]
    # `hftoken` and `hf_token` alike; `eostoken` and `eos_token` are not secrets.
    return last.endswith("token") and (last.removesuffix("token") or before_last[-1]) not in _NOT_SECRET_TOKEN


# A URL stays; a path is preceded by nothing that could make it relative, as in `a/b`, `../a`, `~/a` and `${HOME}/a`.
_PATH = re.compile(
    r"(?P<url>(?!file:)\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"]*)"
    r"|(?:\bfile://|(?<![\w.~}/-]))(?P<path>/[^\s:;,'\"=<>|()\[\]{}]+)"
)


def without_machine_paths(text: str, root: Path | None = None) -> str:
    """Return text in which no absolute path is left.

    A path below ``root`` becomes relative to it. Of any other only the last part stays, with a digest of the whole,
    so that two different ones still differ: ``/data/v1/train`` becomes ``.../train~`` and eight hex digits.
    """

    def replace(match: re.Match[str]) -> str:
        path = match["path"]
        if path is None:
            return match[0]
        normal = os.path.normpath(path)
        if root is not None and (normal == str(root) or normal.startswith(f"{str(root).rstrip('/')}/")):
            return os.path.relpath(normal, root)
        return (
            f".../{os.path.basename(normal)}~{hashlib.sha256(normal.encode(errors='surrogateescape')).hexdigest()[:8]}"
        )

    return _PATH.sub(replace, text)

"""What seems to be a credential in the files of a folder that is about to be published."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from rlkit.base.errors import CheckpointError
from rlkit.base.text import KINDS, NAMED, QUERY, SECRET_NAME, SHAPES, TOKEN, CredentialKind, replace_literals

MAX_LISTED = 20
"""Suspicions that an error lists."""
MAX_BYTES = 2**28
"""A larger file cannot be scanned, unless it is one of tensors, of which the metadata is."""
MIN_LENGTH = 8
"""Fewest characters of a value that is looked for, or that has only the name of a credential."""
VOCABULARIES = re.compile(r"tokenizer\.json|vocab\..*|merges\..*|.*\.(model|tiktoken)", re.IGNORECASE)
"""Files of tokenizers, in which any word may stand: only tokens of a known shape are credentials there."""
_SECRET_QUERY = re.compile(
    r"(?:sig|token|key|secret|pass|pwd|credential|auth|jwt|code)[\w.-]*=[^&#;]{3}|=[\w%+/.-]{20}", re.IGNORECASE
)
"""A query that is more than `?page=2`."""
_CODE = re.compile(r"[<>|()\[\]{}]|\*\*\*")
"""What is in an expression, in a tokenizer's special token, or in place of a credential."""
CODE = re.compile(r".*\.(py|jinja)|tokenizer_config\.json")
"""Files with code, whose variables have names such as `bos_token`: only quoted values are credentials there."""


def refuse_credentials(folder: Path, name: str) -> None:
    """Refuse to upload a folder in which files seem to hold credentials.

    Args:
        folder: The export.
        name: Name of the repository.

    Raises:
        CheckpointError: Files do; the message names them and the kinds, not the values.
    """
    listed = "".join(f"\n  {suspicion}" for suspicion in islice(suspicions(folder), MAX_LISTED))
    if listed:
        raise CheckpointError(
            f"nothing was pushed to {name!r}, since the export seems to hold credentials:{listed}\n"
            f"remove them from {str(folder)!r} and run hf upload {name} {shlex.quote(str(folder))} --private; if they "
            "are none, export again with --allow-credentials"
        )


def suspicions(folder: Path) -> Iterator[str]:
    """Yield where files seem to hold credentials: the file, the line and the kind, but not the value."""
    for path in sorted(folder.rglob("*")):
        if os.path.isfile(path):
            for where, kind in _suspicions(path):
                yield f"{path.relative_to(folder)}{where}: {kind}"


def _suspicions(path: Path) -> Iterator[tuple[str, str]]:
    is_tensors = path.suffix == ".safetensors"
    if not is_tensors and path.stat().st_size > MAX_BYTES:
        yield "", f"more than {MAX_BYTES >> 20} MiB, which are not scanned"
        return
    text = _metadata(path) if is_tensors else path.read_bytes().decode("utf-8", "replace")
    own = [(k, v) for k, v in sorted(os.environ.items()) if SECRET_NAME.search(k) and len(v) >= MIN_LENGTH]
    starts = {f"the value of the variable {name}": text.find(value) for name, value in own}
    for kind in (TOKEN,) if VOCABULARIES.fullmatch(path.name) else KINDS:
        for match in kind.pattern.finditer(text):
            if _is_likely(kind, match, CODE.fullmatch(path.name) is not None):
                starts.setdefault(_description(kind, match), match.start())
    for description, start in starts.items():
        if start >= 0:
            line = text.count("\n", 0, start) + 1
            yield (" (metadata)" if is_tensors else f", line {line}"), description


def _is_likely(kind: CredentialKind, match: re.Match[str], is_code: bool) -> bool:
    """Whether a credential is one, rather than a reference to the environment, code or a harmless query."""
    secret = match["secret"]
    if replace_literals(secret, lambda _: "") == secret or not secret.strip("*"):
        return False
    if kind is QUERY:
        return _SECRET_QUERY.search(secret) is not None
    if kind not in NAMED:
        return True
    is_quoted = match.string[match.start("secret") - 1] in "\"'"
    return len(secret) >= MIN_LENGTH and not _CODE.search(secret) and (is_quoted or not is_code)


def _description(kind: CredentialKind, match: re.Match[str]) -> str:
    if kind is not TOKEN:
        return kind.description
    issuer = next(name for name in SHAPES if match[name])
    return f"{kind.description} ({issuer.replace('_', ' ')})"


def _metadata(path: Path) -> str:
    """Return the header of a safetensors file, which has the names of its tensors and its metadata."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return file.read(min(size, MAX_BYTES)).decode("utf-8", "replace")

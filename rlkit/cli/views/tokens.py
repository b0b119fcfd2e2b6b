"""The texts of token ids, by the tokenizer of a run where it is on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from rlkit.base.errors import RlkitError, explain
from rlkit.cli.views.runs import RunFiles

WORD_START = "\u2581"
"""What begins a word in vocabularies of SentencePiece; decoding one token alone loses the space that it stands for."""

UNKNOWN = "\ufffd"
"""What a part of a character is decoded to."""


class _Decoder(Protocol):
    def decode(self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...

    def convert_ids_to_tokens(self, ids: int) -> str | None: ...


class TokenTexts:
    """Returns the texts of ids, each decoded once.

    Args:
        tokenizer: One of transformers; None where there is none, so that ids have no texts.
    """

    def __init__(self, tokenizer: _Decoder | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str | None] = {}

    def of(self, tokens: Iterable[int]) -> dict[str, str]:
        """Return the texts of ids, by the id as JSON's keys are."""
        texts = {token: self._text(token) for token in sorted(tokens)}
        return {str(token): text for token, text in texts.items() if text is not None}

    def _text(self, token: int) -> str | None:
        if token not in self._known:
            self._known[token] = None if self._tokenizer is None else _decoded(self._tokenizer, token)
        return self._known[token]


def _decoded(tokenizer: _Decoder, token: int) -> str | None:
    try:
        text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        piece = tokenizer.convert_ids_to_tokens(token)
    except Exception:  # an id that the vocabulary has not: tokenizers raise what they like, and the id is shown
        return None
    if UNKNOWN in text and isinstance(piece, str):
        return _bytes(piece)
    started = isinstance(piece, str) and piece.startswith(WORD_START) and not text.startswith(" ")
    return f" {text}" if started else text


def _bytes(piece: str) -> str:
    """Return a token that is a part of a character: its bytes, or its name in the vocabulary."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    numbers = {letter: number for number, letter in bytes_to_unicode().items()}
    bytes_of = [numbers.get(letter) for letter in piece]
    is_hexadecimal = piece.startswith("<0x") and piece.endswith(">")
    return piece if is_hexadecimal or None in bytes_of else f"⟨{' '.join(f'{number:02x}' for number in bytes_of)}⟩"


def texts_of(run: RunFiles) -> TokenTexts:
    """Return the texts of a run's tokens: by the tokenizer in `final/`, or that of the recipe's model.

    No network is used, and no code that comes with a model is run; where the tokenizer is not on this machine, a note
    of the run says so.
    """
    try:
        return _loaded(_tokenizer_folder(run))
    except Exception as error:  # transformers raises what it likes of a folder that is no tokenizer's
        why = error if isinstance(error, RlkitError) else explain(error).splitlines()[0]
        run.notes.append(f"{run.path}: tokens are shown as ids, as its tokenizer cannot be loaded: {why}")
        return TokenTexts(None)


@lru_cache(maxsize=8)
def _loaded(folder: str) -> TokenTexts:
    from transformers import AutoTokenizer

    return TokenTexts(AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False))


def _tokenizer_folder(run: RunFiles) -> str:
    import yaml

    from rlkit.models.source import locate
    from rlkit.run.checkpoint.state import as_data

    final = run.path / "final"
    if os.path.isfile(Path(final, "tokenizer_config.json")):
        return str(final)
    try:
        path = str(as_data(run.recipe())["model"]["path"])
    except (ValueError, RecursionError, yaml.YAMLError, KeyError, TypeError) as error:
        raise RlkitError(f"recipe.yaml has no model.path ({explain(error)})") from error
    if "://" in path:
        raise RlkitError(f"model.path {path!r} is on a network")
    return locate(path).tokenizer

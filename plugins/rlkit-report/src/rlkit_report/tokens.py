"""The texts of token ids, by the tokenizer of a run where it is on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path

from rlkit.base.errors import RlkitError, explain
from rlkit_report.files import RunFiles

TOKENIZER = "tokenizer.json"
WORD_START = "\u2581"
"""What begins a word in vocabularies of SentencePiece; decoding one token alone loses the space that it stands for."""

UNKNOWN = "\ufffd"
"""What a part of a character is decoded to."""


class TokenTexts:
    """Returns the texts of ids, each decoded once.

    Args:
        decode: Returns the text of an id, as the tokenizer decodes it alone.
        piece: Returns an id's name in the vocabulary, None for an id that it has not.
    """

    def __init__(self, decode: Callable[[int], str], piece: Callable[[int], str | None]) -> None:
        self._decode = decode
        self._piece = piece
        self._texts: dict[int, str | None] = {}

    def of(self, tokens: Iterable[int]) -> dict[str, str]:
        """Return the texts of ids, by the id as JSON's keys are."""
        texts = {token: self._text(token) for token in sorted(tokens)}
        return {str(token): text for token, text in texts.items() if text is not None}

    def _text(self, token: int) -> str | None:
        if token not in self._texts:
            self._texts[token] = self._decoded(token)
        return self._texts[token]

    def _decoded(self, token: int) -> str | None:
        try:
            text, piece = self._decode(token), self._piece(token)
        except Exception:  # an id that the vocabulary has not: tokenizers raise what they like, and the id is shown
            return None
        if piece is None:
            return None
        if UNKNOWN in text:
            return _bytes(piece)
        return f" {text}" if piece.startswith(WORD_START) and not text.startswith(" ") else text


def _bytes(piece: str) -> str:
    """Return a token that is a part of a character: its bytes, or its name in the vocabulary."""
    values = _byte_values()
    bytes_of = [values.get(letter) for letter in piece]
    is_hexadecimal = piece.startswith("<0x") and piece.endswith(">")
    return piece if is_hexadecimal or None in bytes_of else f"⟨{' '.join(f'{value:02x}' for value in bytes_of)}⟩"


@lru_cache(maxsize=1)
def _byte_values() -> dict[str, int]:
    """Return the byte of each letter of byte-level vocabularies (GPT-2): itself if printable, others from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


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
        return TokenTexts(lambda _: "", lambda _: None)


@lru_cache(maxsize=8)
def _loaded(folder: str) -> TokenTexts:
    """Load a tokenizer: of `tokenizer.json` without transformers, whose import takes seconds."""
    if os.path.isfile(Path(folder, TOKENIZER)):
        from tokenizers import Tokenizer

        core = Tokenizer.from_file(str(Path(folder, TOKENIZER)))
        return TokenTexts(lambda token: core.decode([token], skip_special_tokens=False), core.id_to_token)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return TokenTexts(lambda token: tokenizer.decode([token], **options), tokenizer.convert_ids_to_tokens)


def _tokenizer_folder(run: RunFiles) -> str:
    import yaml

    from rlkit.models import SHIPPED
    from rlkit.records.folder import recipe_data

    final = run.path / "final"
    if os.path.isfile(Path(final, "tokenizer_config.json")):
        return str(final)
    try:
        path = str(recipe_data(run.recipe())["model"]["path"])
    except (ValueError, RecursionError, yaml.YAMLError, KeyError, TypeError) as error:
        raise RlkitError(f"recipe.yaml has no model.path ({explain(error)})") from error
    if "://" in path:
        raise RlkitError(f"model.path {path!r} is on a network")
    folder = str(SHIPPED.get(path, path))
    if os.path.isfile(Path(folder, TOKENIZER)):
        return folder
    from rlkit.models.source import locate  # which imports torch

    return locate(path).tokenizer

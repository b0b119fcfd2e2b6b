"""A command line, split into recipes, the verb's own options and overrides."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlkit.cli.parsing.foreign import FOREIGN, JSONARGPARSE, NO_OPTION

ALL = "all"
"""The key of `--help-all`."""

OwnOptions = Sequence[tuple[str, Mapping[str, object]]]
"""A verb's own options, as (flag, keywords of `add_argument`)."""

_UNDECODED = (
    f"holds bytes that are not {sys.getfilesystemencoding().upper()}, the encoding of this locale, expected text "
    "(LC_ALL=C.UTF-8 sets UTF-8)"
)


@dataclass
class CommandLine:
    """The words after a verb, by what they mean.

    Args:
        recipes: Recipes, to be stacked.
        options: The values of the verb's own options.
        overrides: Options of the recipe, as (key, text).
        help: Keys whose help is asked for, each with a class's name if there is one; the empty key is the overview,
            `ALL` every option.
        problems: Words that mean nothing.
    """

    recipes: list[str] = field(default_factory=list)
    options: Namespace = field(default_factory=Namespace)
    overrides: list[tuple[str, str]] = field(default_factory=list)
    help: list[tuple[str, str | None]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def split(argv: Sequence[str], own: OwnOptions = ()) -> CommandLine:
    """Split a command line; overrides win wherever they stand, and a first word without dashes is a recipe."""
    line, keywords_of = CommandLine(), dict(own)
    for flag, keywords in own:
        default = False if keywords.get("action") == "store_true" else keywords.get("default")
        setattr(line.options, _attribute(flag), default)
    words = list(argv)
    if words and not words[0].startswith("-") and "=" not in words[0]:
        line.recipes.append(words.pop(0))
    while words:
        word = words.pop(0)
        flag, equals, text = word.partition("=")
        if not _is_decoded(word):
            line.problems.append(f"{flag!a} {_UNDECODED}")
        elif word in ("-h", "--help"):
            key = words.pop(0) if words and not words[0].startswith("-") else ""
            line.help.append((key, None))
        elif word == "--help-all":
            line.help.append((ALL, None))
        elif not word.startswith("--") or flag == "--":
            line.problems.append(_stray(word))
        elif keywords_of.get(flag, {}).get("action") == "store_true" and not equals:
            setattr(line.options, _attribute(flag), True)
        else:
            value = text if equals else words.pop(0) if words and not words[0].startswith("--") else None
            _set_flag(line, flag, value, keywords_of)
    return line


def _set_flag(line: CommandLine, flag: str, value: str | None, keywords_of: Mapping[str, Mapping[str, object]]) -> None:
    attribute = _attribute(flag)
    if flag.endswith(".help"):
        line.help.append((flag.removeprefix("--").removesuffix(".help"), value))
    elif flag in JSONARGPARSE:
        line.problems.append(f"{flag} is not an option of rlkit: {JSONARGPARSE[flag]}")
    elif value is not None and not _is_decoded(value):
        line.problems.append(f"{flag!a} {_UNDECODED}")
    elif value is None and flag.rpartition(".")[2].removeprefix("--") in (*FOREIGN, *NO_OPTION):
        line.overrides.append((flag.removeprefix("--"), "true"))  # a switch of another toolkit, which is then named
    elif value is None:
        line.problems.append(f"{flag} has no value; write {flag}=VALUE")
    elif flag == "--recipe":
        line.recipes.append(value)
    elif keywords_of.get(flag, {}).get("action") == "append":
        setattr(line.options, attribute, [*(getattr(line.options, attribute) or ()), value])
    elif flag in keywords_of:
        setattr(line.options, attribute, value)
    else:
        line.overrides.append((flag.removeprefix("--"), value))


def _is_decoded(word: str) -> bool:
    """Whether a word has no surrogates, which stand for bytes that the locale's encoding cannot decode."""
    return not any("\ud800" <= letter <= "\udfff" for letter in word)


def _attribute(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _stray(word: str) -> str:
    """Return the message about a word that belongs to no option."""
    if "=" in word:
        return f"{word!r} is no option: write --{word.lstrip('-')}"
    return f"{word!r} is no option; a recipe is given by --recipe {word}, a value after its option"

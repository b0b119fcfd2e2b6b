"""Texts that rlkit did not write, made fit to be kept and shown: without credentials, without control codes."""

from __future__ import annotations

import functools
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import NamedTuple

HIDDEN = "***"

CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 and C1: escape sequences, carriage returns, bells
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"  # what turns the direction of text, and separators
    "\ud800-\udfff\U000e0000-\U000e007f]"  # lone surrogates, and invisible tags
)

REFERENCE = re.compile(r"\$\{([A-Z_][A-Z0-9_]*)\}")
"""`${NAME}` in an option that is a text: the value of an environment variable."""

_REFERENCES = re.compile(r"((?:[\w.-]+[:= ])?\$\{[A-Z_][A-Z0-9_]*\}|[&;#])")
"""References, each with a name before it if there is one, such as `me:${RLKIT_PASSWORD}` and `Bearer ${RLKIT_KEY}`."""

ENVIRONMENTS = ("environment", "env", "headers")
"""Options that map names to texts, each of which is a credential."""
_ENVIRONMENT_IN_YAML = re.compile(rf"\b(?:{'|'.join(ENVIRONMENTS)})[\"']?\s*:")

_LONG = r"passwords?|passwd|passphrase|secrets?|credentials?|authorization|connection[_-]?string"
_KEYS = r"(?:api|access|private|account|auth|signing|encryption)[_-]?keys?(?:[_-]?id)?"
_SHORT = r"pass|pwd|pat|sig|signature|auth|dsn|jwt|cookie|webhook"
SECRET_NAME = re.compile(rf"(?:{_LONG}|{_KEYS}|(?:^|[_.-])(?:token|{_SHORT}))(?:\.\d+)?$", re.IGNORECASE)
"""Names of options and of fields whose value is a credential; `max_tokens` is none."""

_WORDS = (
    rf"[\w.-]*?(?:{_LONG}|{_KEYS}|(?<![^\W_])token)",
    rf"(?-i:[A-Z0-9_]*(?<![A-Z0-9])(?:{_SHORT.upper()}|KEY))",  # in small letters they are words of prose
    rf"[\w.-]*\.(?:{'|'.join(ENVIRONMENTS)})\.[\w.-]{{1,256}}+",
)
_NAME = f"(?:{'|'.join(_WORDS)})"
_MIXED = r"(?:(?=[\w-]*[0-9A-Z])[\w-]{10,256}|[\w-]{20,256})"
SHAPES = {
    "OpenAI_or_Anthropic": rf"sk-{_MIXED}",
    "Stripe": r"(?:[sr]k|whsec)_(?:(?:live|test)_)?[A-Za-z0-9]{16,}",
    "Hugging_Face": r"(?:hf|api_org)_(?:(?=[a-z]*[0-9A-Z])[A-Za-z0-9]{10,}|[a-z]{20,})",
    "GitHub": r"gh[pousr]_[A-Za-z0-9]{10,}|github_pat_\w{10,}",
    "GitLab": r"gl[a-z]{2,5}-[\w-]{10,}",
    "AWS": r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}",
    "Google": r"AIza[\w-]{16,}|ya29\.[\w-]{16,}|GOCSPX-[\w-]{16,}",
    "Slack": r"xox[a-z]-[\w-]{8,}|xapp-[\w-]{8,}|hooks\.slack\.com/\w+/[\w/]+",
    "Discord": r"discord(?:app)?\.com/api/webhooks/[\w/-]+",
    "Telegram": r"(?:bot)?\d{8,10}:AA[\w-]{30,}",
    "npm": r"npm_[A-Za-z0-9]{20,}",
    "PyPI": r"pypi-[\w-]{16,}",
    "Docker": r"dckr_[a-z]+_[\w-]{16,}",
    "Groq_NVIDIA_xAI_or_Replicate": r"gsk_\w{20,}|nvapi-[\w-]{20,}|xai-[\w-]{20,}|r8_\w{20,}",
    "SendGrid": r"SG\.[\w-]{16,}\.[\w-]{16,}",
    "DigitalOcean_or_Shopify": r"do[opr]_v1_[a-f0-9]{16,}|shp[a-z]{2}_[a-fA-F0-9]{16,}",
    "JSON_web_token": r"eyJ[\w-]{6,}\.eyJ[\w-]{6,}\.[\w-]*",
    "private_key": r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-(?:(?!-----END)[\s\S])*(?:-----END[A-Z0-9 ]*-----)?",
}
"""Credentials that are recognized anywhere, by who issues them."""


class CredentialKind(NamedTuple):
    """A form of credentials in texts.

    Args:
        description: What it is, for messages.
        variable: The end of the name of the variable that a reference to it has.
        pattern: Finds it; the group `secret` is the credential.
    """

    description: str
    variable: str
    pattern: re.Pattern[str]


def _kind(description: str, variable: str, pattern: str) -> CredentialKind:
    return CredentialKind(description, variable, re.compile(pattern, re.IGNORECASE))


_VALUE = r"(?P<secret>(?<=[\"'])[^\"']+|[^\s&#;,'\"]+)"
_QUERY = r"(?P<secret>[^\s'\"<>=]*=[^\s'\"<>]+|(?<=\?)[\w%-]{8,}(?![^\s'\"<>]))"
_LOGIN = r"(?P<secret>(?<=://)[^\s/'\"]{1,512}|[^\s/@:'\"]{0,256}:(?!\d{1,5}[/?#])[^\s'\"]{1,512})"
_SHAPE = "|".join(f"(?P<{issuer}>{shape})" for issuer, shape in SHAPES.items())
TOKEN = CredentialKind("a key or token", "TOKEN", re.compile(rf"(?<![A-Za-z0-9])(?P<secret>{_SHAPE})"))
QUERY = _kind("the query of a URL", "QUERY", rf"//(?:(?!//)[^\s'\"<>?;#])*[?;#]{_QUERY}")
LOGIN = _kind("a login in a URL", "LOGIN", rf"//{_LOGIN}@")
NAMED = (
    _kind("a header", "KEY", r"authorization[\"']?\s*[:=]\s*[\"']?(?P<secret>(?:(?:basic|bearer)\s+)?[^\s\"',]+)"),
    _kind("a header", "KEY", r"\bbearer\s+(?P<secret>[\w.~+/=-]{8,})"),
    _kind("a variable or option", "KEY", rf"(?<![\w.-]){_NAME} ?= ?[\"']?{_VALUE}"),
    _kind("an option", "KEY", rf"(?<!\S)--{_NAME}\s+{_VALUE}"),
    _kind("a field", "KEY", rf"""["']{_NAME}\\?["']\s*:\s*\\?["'](?P<secret>[^"'\\]+)"""),
)
KINDS = (QUERY, LOGIN, *NAMED, TOKEN)


def tokens_until(tokens: Sequence[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> int | None:
    """Return the smallest number of tokens whose text has one of some texts; None if all of them have none."""

    def stopped(count: int) -> bool:
        text = decode(tokens[:count])
        return any(stop in text for stop in stops)

    if not stopped(len(tokens)):
        return None
    return bisect_left(range(len(tokens)), True, key=stopped)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, such as `1 step` or `2 steps`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def similar(name: str, names: Sequence[str], label: str = "known") -> str:
    """Return a hint for a name that is none of those known: the most similar of them, or all after a label."""
    near = get_close_matches(name, names, 1)
    return f"did you mean {near[0]!r}?" if near else f"{label}: {', '.join(names) or 'none'}"


def visible(text: str) -> str:
    """Return a text whose control codes are written out, as `\\x1b`; line breaks and tabs stay."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text.replace("\r\n", "\n"))


def substitute(text: str, hide: Callable[[str, CredentialKind], str]) -> str:
    """Return a text whose credentials are replaced; references to the environment stay.

    Args:
        text: Any text.
        hide: Returns what stands in place of a credential.
    """
    for kind in KINDS:
        text = kind.pattern.sub(partial(_replaced, kind, hide), text)
    return text


def _replaced(kind: CredentialKind, hide: Callable[[str, CredentialKind], str], match: re.Match[str]) -> str:
    """Return a match in which the credential is replaced."""
    secret, start = match["secret"], match.start("secret") - match.start()
    hidden = replace_literals(secret, lambda literal: hide(literal, kind))
    return match[0][:start] + hidden + match[0][start + len(secret) :]


def replace_literals(secret: str, hide: Callable[[str], str]) -> str:
    """Return a credential in which all is replaced but references to the environment, with names before them."""
    parts = _REFERENCES.split(secret) if REFERENCE.search(secret) else [secret]
    return "".join(
        hide(part) if index % 2 == 0 and (len(parts) == 1 or re.search(r"\w", part)) else part
        for index, part in enumerate(parts)
    )


def is_credential(key: str, value: str = "") -> bool:
    """Whether an option of a command line is a credential or has some in it, by its key and by keys in its value."""
    *parents, name = key.split(".")
    if SECRET_NAME.search(key) or not {*ENVIRONMENTS}.isdisjoint(parents):
        return True
    return (name in ENVIRONMENTS and value.lstrip().startswith("{")) or bool(_ENVIRONMENT_IN_YAML.search(value))


def is_secret_flag(word: object) -> bool:
    """Whether a word of a command line is an option whose value is a credential, in the next word."""
    return isinstance(word, str) and word.startswith("--") and is_credential(word.removeprefix("--"))


def redact(text: str) -> str:
    """Return a text without credentials; references to the environment stay."""
    return substitute(text, lambda *_: HIDDEN)


def safe(text: str) -> str:
    """Return a text that may be shown on a terminal."""
    return visible(redact(text))


def redact_option(key: str, value: str) -> str:
    """Return the value of an option of a command line without its credentials."""
    return HIDDEN if is_credential(key, value) else redact(value)


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line without its credentials, those in an argument of their own included."""
    return [_redacted(before, argument) for before, argument in zip(["", *arguments], arguments, strict=False)]


def _redacted(before: str, argument: str) -> str:
    """Return an argument of a command line without credentials, by its own option or the one before."""
    key, equals, value = argument.partition("=")
    if argument.startswith("--"):
        return f"{key}={redact_option(key.removeprefix('--'), value)}" if equals else redact(argument)
    is_value = before.startswith("--") and "=" not in before
    return redact_option(before.removeprefix("--") if is_value else "", argument)


def part_name(part: object) -> str:
    """Return a part's class for messages; of a plugin's, with the plugin and the distribution that it comes from.

    Args:
        part: A part, or its class.
    """
    cls = part if isinstance(part, type) else type(part)
    return cls.__name__ + source_of(cls.__module__)


def source_of(module: str) -> str:
    """Return ` of plugin NAME`, with its distribution, for a plugin's module; nothing for one of rlkit."""
    return _source_of_package(module.partition(".")[0])


@functools.cache
def _source_of_package(package: str) -> str:
    """Return the origin of a top-level package; looking it up takes longer than many a part's call."""
    from rlkit.base.installed import PARTS, comes_with_rlkit, entry_points

    if package == "rlkit":
        return ""
    for entry in entry_points(PARTS):
        if entry.value.partition(":")[0].partition(".")[0] == package and entry.dist is not None:
            if comes_with_rlkit(entry):
                return ""
            return f" of plugin {entry.name!r} ({entry.dist.name} {entry.dist.version})"
    return f" of {package}"

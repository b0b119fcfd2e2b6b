"""Credentials: where texts and recipes hold them, and the references to the environment that take their place."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import NamedTuple

from rlkit.base.errors import RecipeError

REFERENCE = re.compile(r"\$\{([A-Z_][A-Z0-9_]*)\}")
"""`${NAME}` in an option that is a text: the value of an environment variable."""

PREFIX = "RLKIT_"
"""The prefix of the variables that a recipe may read: one of unknown origin must not send other secrets anywhere."""

HEADER = "# Credentials are left out: each ${NAME} is read from the environment when this recipe is run.\n"

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
    rf"[\w.-]*\.(?:{'|'.join(ENVIRONMENTS)})\.[\w-]+",
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


class Kind(NamedTuple):
    """A form of credentials in texts.

    Args:
        description: What it is, for messages.
        variable: The end of the name of the variable that a reference to it has.
        pattern: Finds it; the group `secret` is the credential.
    """

    description: str
    variable: str
    pattern: re.Pattern[str]


def _kind(description: str, variable: str, pattern: str) -> Kind:
    return Kind(description, variable, re.compile(pattern, re.IGNORECASE))


_VALUE = r"(?P<secret>[^\s&#;,'\"]+)"
_QUERY = r"(?P<secret>[^\s'\"<>=]*=[^\s'\"<>]+|(?<=\?)[\w%-]{8,}(?![^\s'\"<>]))"
_LOGIN = r"(?P<secret>(?<=://)[^\s/'\"]{1,512}|[^\s/@:'\"]{0,256}:(?!\d{1,5}[/?#])[^\s'\"]{1,512})"
_SHAPE = "|".join(f"(?P<{issuer}>{shape})" for issuer, shape in SHAPES.items())
TOKEN = Kind("a key or token", "TOKEN", re.compile(rf"(?<![A-Za-z0-9])(?P<secret>{_SHAPE})"))
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


def substitute(text: str, hide: Callable[[str, Kind], str]) -> str:
    """Return a text whose credentials are replaced; references to the environment stay.

    Args:
        text: Any text.
        hide: Returns what stands in place of a credential.
    """
    for kind in KINDS:
        text = kind.pattern.sub(partial(_replaced, kind, hide), text)
    return text


def _replaced(kind: Kind, hide: Callable[[str, Kind], str], match: re.Match[str]) -> str:
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


def expand(tree: object, key: str = "") -> object:
    """Return a recipe's tree in which references are replaced by the variables' values.

    Args:
        tree: The recipe, or a part of it.
        key: The part's key, for messages.

    Raises:
        RecipeError: Variables are not set, or a recipe may not read them.
    """
    problems: list[str] = []

    def value_of(key: str, text: str, _: bool) -> str:
        problems.extend(_problems(key, text))
        return text if problems else REFERENCE.sub(lambda match: os.environ[match[1]], text)

    expanded = _map(tree, value_of, key)
    if problems:
        raise RecipeError("\n".join(problems))
    return expanded


def _problems(key: str, text: str) -> Iterator[str]:
    """Yield why references in an option's text cannot be replaced."""
    for name in REFERENCE.findall(text):
        if not name.startswith(PREFIX):
            yield (
                f"{key} refers to ${{{name}}}, but a recipe may read only variables whose names begin with {PREFIX}; "
                f"set {PREFIX}{name} and refer to that"
            )
        elif name not in os.environ:
            yield (
                f"{key} refers to ${{{name}}}, which is not set; set it in the environment (a run's recipe leaves "
                f"credentials out), or pass --{key}"
            )


def withhold(tree: object, values: dict[str, str] | None = None, key: str = "") -> object:
    """Return a recipe's tree in which references stand for credentials.

    These are the texts of mappings for an environment or for headers, of options with the name of a credential, the
    logins and queries of URLs, and what is recognized in other texts.

    Args:
        tree: The recipe, or a part of it.
        values: Receives what each new reference stands for, by the variable's name; a name in it keeps its value.
        key: The part's key.
    """
    values = {} if values is None else values
    taken: set[str] = set()

    def note(_: str, text: str, __: bool) -> str:
        taken.update(REFERENCE.findall(text))
        return text

    def reference(key: str, secret: str) -> str:
        name = PREFIX + re.sub(r"[^A-Za-z0-9_]", "_", key).upper()
        numbered = (name if number == 1 else f"{name}_{number}" for number in count(1))
        variable = next(n for n in numbered if n not in taken and values.get(n, secret) == secret)
        values[variable] = secret
        return f"${{{variable}}}"

    def without_credentials(key: str, text: str, is_secret: bool) -> str:
        if text and (is_secret or SECRET_NAME.search(key)):
            return replace_literals(text, lambda secret: reference(key, secret))
        return substitute(text, lambda secret, kind: reference(f"{key}_{kind.variable}", secret))

    *parents, name = key.split(".")
    _map(tree, note)
    is_secret = not {*ENVIRONMENTS}.isdisjoint(parents) or _is_environment(name, tree)
    return _map(tree, without_credentials, key, is_secret)


def as_yaml(tree: object) -> str:
    """Return a recipe's tree as YAML without credentials."""
    import yaml

    withheld = withhold(tree)
    text = str(yaml.safe_dump(withheld, sort_keys=False, allow_unicode=True))
    return text if withheld == tree else HEADER + text


def _map(node: object, change: Callable[[str, str, bool], str], key: str = "", is_secret: bool = False) -> object:
    """Return a tree whose texts are changed by their keys and by whether they stand where all texts are credentials."""
    if isinstance(node, str):
        return change(key, node, is_secret)
    if isinstance(node, Mapping):
        return {
            name: _map(child, change, _key_of(key, name), is_secret or _is_environment(name, child))
            for name, child in node.items()
        }
    if isinstance(node, list | tuple):
        follows_flag = [False, *map(_is_secret_flag, node)]
        return [_map(c, change, _key_of(key, i), is_secret or follows_flag[i]) for i, c in enumerate(node)]
    return node


def _is_environment(name: object, node: object) -> bool:
    """Whether a mapping is of variables of an environment or of headers, rather than of options."""
    if name not in ENVIRONMENTS or not isinstance(node, Mapping) or "class_path" in node:
        return False
    return not any(isinstance(child, Mapping | list) for child in node.values())


def _is_secret_flag(word: object) -> bool:
    """Whether a word of a command line is an option whose value is a credential, in the next word."""
    return isinstance(word, str) and word.startswith("--") and is_credential(word.removeprefix("--"))


def _key_of(parent: str, name: object) -> str:
    """Return the key of an option, as a user writes it."""
    return parent if name in ("class_path", "init_args") else f"{parent}.{name}".lstrip(".")

"""Names and paths in recipes: what may become a file, a column, a metric or a tag, and where a run may write.

Recipes and rows of data may come from strangers. So the types here allow only plain names, and a run writes outside of
its folder only if the user says so, on the command line or in Python. Keys that select parts by a column of the rows,
like those of `Router`, become neither a file nor a metric, and may be any text.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, get_args

from annotated_types import Len

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

LONGEST = 64
"""The maximum number of characters of a name."""

_NAME = rf"[A-Za-z0-9_@][A-Za-z0-9_.@-]{{0,{LONGEST - 1}}}"
_PLAIN = f"letters, digits and _ . @ -, at most {LONGEST} and the first one no . or -"
RUN_FILES = (
    "recipe.yaml", "environment.json", "metrics.jsonl", "result.json", "lock", "reserved", "ranks", "pools", "rollouts",
    "checkpoints", "final", "ema", "profile", "report.html", "tensorboard", "wandb", "mlflow.db", "mlflow-run",
)  # fmt: skip
"""Files that a run writes into its folder; no recipe may name one of these."""


class NameRule:
    """Makes pydantic refuse a text that does not match a pattern, with one message.

    Args:
        pattern: A regular expression that the full text must match.
        words: The message: what is expected.
    """

    def __init__(self, pattern: str, words: str) -> None:
        self.pattern = re.compile(pattern)
        self.words = words

    def __repr__(self) -> str:
        return self.words

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import PydanticCustomError, core_schema

        def validate(value: object) -> str:
            if isinstance(value, str) and self.pattern.fullmatch(value):
                return value
            raise PydanticCustomError("range", "expected {words}", {"words": self.words})

        return core_schema.no_info_plain_validator_function(validate)


class UserOnly:
    """Marks an option that no recipe file may set, but only the user: where a run writes, or a program to start."""

    def __repr__(self) -> str:
        return "USER_ONLY"


USER_ONLY = UserOnly()

Name = Annotated[str, Len(1, LONGEST), NameRule(_NAME, f"a name of {_PLAIN}")]
"""A name that becomes a metric, a column or a tag."""
FileName = Annotated[
    str,
    Len(1, LONGEST),
    NameRule(
        rf"(?!(?i:{'|'.join(map(re.escape, RUN_FILES))})$)(?!.*\.(?i:partial|pth|lock)$){_NAME}",
        f"the name of a file in the run folder that is none of the run's own: {_PLAIN}",
    ),
]
NumberFile = Annotated[
    str, NameRule(rf"{_NAME}|(/{_NAME})+", f"a file's name or absolute path, whose parts are {_PLAIN}")
]
"""A file in a command's folder, or at an absolute path in its sandbox."""
SourceName = Annotated[
    str,
    Len(1, LONGEST),
    NameRule(rf"(?=.{{1,{LONGEST}}}$){_NAME}(/{_NAME})*", f"the name of a source: {_PLAIN}, in parts divided by /"),
]
"""A name in metrics such as `accuracy/SOURCE`."""
StopText = Annotated[str, Len(1, LONGEST), NameRule(rf"(?s).{{1,{LONGEST}}}", f"a text of 1 to {LONGEST} characters")]
"""A text that ends a turn of the policy."""
OutputPath = Annotated[str, USER_ONLY]
"""A folder, URL or server that a run writes to."""


def source_name(text: str) -> str:
    """Return the name of a source of data in metrics: special characters become `_`."""
    parts = (re.sub(r"[^A-Za-z0-9_.@-]", "_", part) for part in text[:LONGEST].split("/"))
    return "/".join(re.sub(r"^[.-]", "_", part) or "_" for part in parts) if text else ""


def is_user_only(hint: object) -> bool:
    """Whether a type is marked as `UserOnly`, alone or in a union."""
    return USER_ONLY in getattr(hint, "__metadata__", ()) or any(map(is_user_only, get_args(hint)))

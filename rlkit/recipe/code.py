"""Code that a recipe allows to run."""

from __future__ import annotations

from collections.abc import Mapping


def allowed_code(node: object, key: str = "") -> str | None:
    """Return the first key under which a recipe allows code, its own or a model's; None if there is none."""
    branches = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for name, value in branches:
        inner = f"{key}.{name}".lstrip(".")
        if str(name).rpartition(".")[2] in ("allow_code", "trust_remote_code") and value not in (False, None, "false"):
            return inner
        code_key = allowed_code(value, inner)
        if code_key is not None:
            return code_key
    return None

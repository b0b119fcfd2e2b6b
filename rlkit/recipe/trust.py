"""What a recipe may do only for a user who trusts it: run code, and name addresses that data and credentials go to."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlkit.base.errors import show
from rlkit.base.text import REFERENCE, redact

TRUST = ("allow_code", "trust_remote_code")
"""Names of the options by which a user trusts code."""


def risk(node: object, key: str = "", part: Mapping[str, object] = {}) -> str | None:
    """Return the first option by which a recipe runs code or names an address, and what follows; None without any.

    Args:
        node: The recipe, or a part of it, as plain data in which no structure is written as text.
        key: The part's key.
        part: The mapping that has the key.
    """
    if isinstance(node, str) and (re.match(r"(?i)(https?|wss?)://", node) or REFERENCE.search(node)):
        return f"{key}: {show(redact(node))}, so that samples and credentials would be sent there"
    if node not in (False, None, "false") and key.rpartition(".")[2] in TRUST:
        code = part.get("function", part.get("command", part.get("path")))
        return f"{key}: true, so that {'code which it names' if code is None else redact(show(code))} would run"
    own = node if isinstance(node, Mapping) else {}
    branches = own.items() or (enumerate(node) if isinstance(node, list) else ())
    risks = (risk(value, f"{key}.{name}".lstrip("."), own) for name, value in branches)
    return next(filter(None, risks), None)

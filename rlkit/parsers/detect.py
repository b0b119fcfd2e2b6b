"""Choosing a parser by a model's chat template."""

from __future__ import annotations

from rlkit.interfaces.parser import ToolParser
from rlkit.parsers.hermes import HermesParser
from rlkit.registry.shelf import shelf_parts


def detect(template: str) -> type[ToolParser] | None:
    """Return rlkit's parser for the calls that a chat template (Jinja source) prescribes; None if there is none.

    Of several the least general one is taken.
    """
    parsers: list[type[ToolParser]] = [HermesParser, *(part for part in shelf_parts() if issubclass(part, ToolParser))]
    detecting = [parser for parser in parsers if parser.detects(template)]
    return min(detecting, key=lambda parser: parser.generality, default=None)

"""Tool-call parsers: Hermes's form, which most templates have, and JSON blocks; `detect` chooses by a chat template.

What belongs here: reading a policy's calls from its text without running any of it (`text`, `arguments`). What does
not: the forms of other model families (`rlkit_parsers`), and calling the tools (`rlkit.rollout.participants`).
"""

from rlkit.parsers.hermes import HermesParser
from rlkit.parsers.json_block import JsonBlockParser
from rlkit.registry.shelf import attribute_of

__all__ = ["HermesParser", "JsonBlockParser"]

__getattr__ = attribute_of("parsers")

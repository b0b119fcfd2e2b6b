"""Tool-call parsers: Hermes's form, which most templates have; `detect` chooses by a chat template.

What belongs here: reading a policy's calls from its text without running any of it (`text`, `arguments`). What does
not: JSON blocks and other families' forms (`rlkit_parsers`), and calling the tools (`rlkit.rollout.participants`).
"""

from rlkit.parsers.hermes import HermesParser
from rlkit.registry.shelf import attribute_of

__all__ = ["HermesParser"]

__getattr__ = attribute_of("parsers")

"""Parsers of the calls that model families write: one per file; a chat template chooses one by `detects`.

What belongs here: the syntax of a family's tool calls, on the readers of `rlkit.parsers.text`. What does not: Hermes's
form, which rlkit has itself, and calling the tools.
"""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_parsers.deepseek import DeepSeekParser
from rlkit_parsers.gemma import GemmaParser
from rlkit_parsers.glm import GlmParser
from rlkit_parsers.harmony import HarmonyParser
from rlkit_parsers.json_block import JsonBlockParser
from rlkit_parsers.lfm import LfmParser
from rlkit_parsers.llama_json import LlamaJsonParser
from rlkit_parsers.mistral import MistralParser
from rlkit_parsers.pythonic import PythonicParser
from rlkit_parsers.qwen_coder import QwenCoderParser

PARSERS = (
    DeepSeekParser, GemmaParser, GlmParser, HarmonyParser, JsonBlockParser, LfmParser, LlamaJsonParser, MistralParser,
    PythonicParser, QwenCoderParser,
)  # fmt: skip


@hookimpl
def rlkit_register(register: Register) -> None:
    for parser in PARSERS:
        register(parser)

"""Tool-call parsers: one per file; `detect` chooses one by a chat template.

What belongs here: the syntax of a model family's tool calls, read from the policy's text without running any of it.
What does not: calling the tools (`rlkit.rollout.participants`).
"""

from rlkit.parsers.deepseek import DeepSeekParser
from rlkit.parsers.gemma import GemmaParser
from rlkit.parsers.glm import GlmParser
from rlkit.parsers.harmony import HarmonyParser
from rlkit.parsers.hermes import HermesParser
from rlkit.parsers.json_block import JsonBlockParser
from rlkit.parsers.lfm import LfmParser
from rlkit.parsers.llama_json import LlamaJsonParser
from rlkit.parsers.mistral import MistralParser
from rlkit.parsers.pythonic import PythonicParser
from rlkit.parsers.qwen_coder import QwenCoderParser

__all__ = [
    "DeepSeekParser",
    "GemmaParser",
    "GlmParser",
    "HarmonyParser",
    "HermesParser",
    "JsonBlockParser",
    "LfmParser",
    "LlamaJsonParser",
    "MistralParser",
    "PythonicParser",
    "QwenCoderParser",
]

"""Tool-call parsers: one a file; `rlkit.parsers.detect` chooses one by a chat template."""

from rlkit.parsers.deepseek import DeepSeekParser
from rlkit.parsers.hermes import HermesParser
from rlkit.parsers.json_block import JsonBlockParser
from rlkit.parsers.llama_json import LlamaJsonParser
from rlkit.parsers.mistral import MistralParser
from rlkit.parsers.pythonic import PythonicParser
from rlkit.parsers.qwen_coder import QwenCoderParser

__all__ = [
    "DeepSeekParser",
    "HermesParser",
    "JsonBlockParser",
    "LlamaJsonParser",
    "MistralParser",
    "PythonicParser",
    "QwenCoderParser",
]

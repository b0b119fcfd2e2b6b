"""Choosing a parser by a model's chat template."""

from __future__ import annotations

from rlkit.interfaces.parser import ToolParser
from rlkit.parsers.deepseek import DeepSeekParser
from rlkit.parsers.gemma import GemmaParser
from rlkit.parsers.glm import GlmParser
from rlkit.parsers.harmony import HarmonyParser
from rlkit.parsers.hermes import HermesParser
from rlkit.parsers.lfm import LfmParser
from rlkit.parsers.llama_json import LlamaJsonParser
from rlkit.parsers.mistral import MistralParser
from rlkit.parsers.pythonic import PythonicParser
from rlkit.parsers.qwen_coder import QwenCoderParser

_MOST_SPECIFIC_FIRST: tuple[type[ToolParser], ...] = (
    DeepSeekParser,
    MistralParser,
    GlmParser,
    GemmaParser,
    HarmonyParser,
    LfmParser,
    QwenCoderParser,
    HermesParser,
    PythonicParser,
    LlamaJsonParser,
)


def detect(template: str) -> type[ToolParser] | None:
    """Return rlkit's parser for the calls that a chat template (Jinja source) prescribes; None if there is none."""
    return next((parser for parser in _MOST_SPECIFIC_FIRST if parser.detects(template)), None)

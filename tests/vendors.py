"""Chat templates of model vendors, each with a tokenizer that has its special tokens and end tokens."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

from rlkit_authors.models import build_tokenizer

from rlkit.rollout.rendering import Renderer
from rlkit.rollout.template import ChatTemplate
from rlkit.types import JsonObject
from tests.conftest import ROOT

FOLDER = ROOT / "tests" / "templates" / "vendors"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
SPECIAL = re.compile(
    r"<[|\uff5c][^<>\s'\"]{1,30}[|\uff5c]>|<\|(?:turn|channel|tool|tool_call|tool_response)>"
    r"|<(?:turn|channel|tool|tool_call|tool_response)\|>|<(?:start|end)_of_\w+>|\[gMASK\]|<sop>|\[/?INST\]|</s>"
)
"""What a template writes that is a special token."""


def template_text(name: str) -> str:
    """Return a template of a vendor, or one of those for other tests."""
    file = FOLDER / f"{name}.jinja"
    return (file if name in NAMES else FOLDER.parent / file.name).read_text(encoding="utf-8")


class Family(NamedTuple):
    """What the files of models say, and what their policies write last.

    Args:
        eos: The tokenizer's end token.
        stops: Other tokens in `eos_token_id` of the generation configuration.
        bos: The token that begins a text.
        end: The last token of a turn of text.
        call_end: The last token of a turn with calls; the same if empty.
    """

    eos: str
    stops: tuple[str, ...]
    bos: str
    end: str
    call_end: str = ""


FAMILIES = {
    "cohere": Family("<|END_OF_TURN_TOKEN|>", (), "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "deepseek": Family(
        "<\uff5cend▁of▁sentence\uff5c>", (), "<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"
    ),
    "diffusion": Family("<eos>", ("<turn|>", "<|tool_response>"), "<bos>", "<turn|>", "<|tool_response>"),
    "gemma4_v2": Family("<eos>", ("<turn|>", "<|tool_response>"), "<bos>", "<turn|>"),
    "gemma4": Family("<eos>", ("<turn|>", "<|tool_response>"), "<bos>", "<turn|>", "<|tool_response>"),
    "gemma": Family("<eos>", ("<end_of_turn>",), "<bos>", "<end_of_turn>"),
    "glm": Family("<|endoftext|>", ("<|user|>", "<|observation|>"), "", "<|user|>", "<|observation|>"),
    "gptoss": Family("<|return|>", ("<|call|>", "<|endoftext|>"), "", "<|return|>", "<|call|>"),
    "idefics": Family("<|end_of_text|>", ("<end_of_utterance>",), "<|begin_of_text|>", "<end_of_utterance>"),
    "lfm2": Family("<|im_end|>", (), "<|startoftext|>", "<|im_end|>"),
    "llama": Family("<|eot_id|>", ("<|end_of_text|>", "<|eom_id|>"), "<|begin_of_text|>", "<|eot_id|>"),
    "llava": Family("</s>", (), "<s>", "</s>"),
    "muse": Family("<|eot|>", (), "<|begin_of_text|>", "<|eot|>"),
    "nemotron": Family("<|im_end|>", ("<|endoftext|>",), "<s>", "<|im_end|>"),
    "phi": Family("<|endoftext|>", ("<|end|>",), "", "<|end|>"),
    "qwen": Family("<|im_end|>", ("<|endoftext|>",), "", "<|im_end|>"),
    "smolvlm": Family("<end_of_utterance>", (), "<|im_start|>", "<end_of_utterance>"),
}
"""By how the names of the templates begin."""
TYPED = ("idefics3", "llava_next", "smolvlm")
"""Templates that read lists of typed parts only."""


def family_of(name: str) -> Family:
    return next(family for prefix, family in FAMILIES.items() if name.startswith(prefix))


@cache
def tokenizer_of(name: str) -> Any:
    """Return a byte-level tokenizer with a vendor's template, and what that writes as special tokens."""
    family, text = family_of(name), template_text(name)
    tokenizer = build_tokenizer()
    added = {*SPECIAL.findall(text), family.eos, *family.stops, family.bos} - {""}
    tokenizer.add_tokens(sorted(added), special_tokens=True)
    tokenizer.eos_token = family.eos
    if family.bos:
        tokenizer.bos_token = family.bos
    tokenizer.chat_template = text
    return tokenizer


def template_of(name: str, tools: tuple[JsonObject, ...] = (), files: bool = True, **kwargs: object) -> ChatTemplate:
    """Return a vendor's template; without `files`, only the tokenizer's own end token is known to end a turn."""
    family, tokenizer = family_of(name), tokenizer_of(name)
    stops = tokenizer.convert_tokens_to_ids([family.eos, *(family.stops if files else ())])
    template = ChatTemplate(tokenizer, stops, tools, kwargs)
    if name in TYPED:
        template.render = Renderer(tokenizer, list(tools), kwargs, typed=True)
    return template

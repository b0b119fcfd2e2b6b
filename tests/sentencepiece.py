"""Tokenizers as SentencePiece's, which write a space before what begins a text: Llama 2's, Mistral's and Zephyr's."""

from __future__ import annotations

import string
from typing import Literal

from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlkit.interfaces.model import Tokenizer

SPACE = "\u2581"

BEGINNING = "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
TEMPLATES = {
    "llama2": f"{BEGINNING}[INST] {{{{ m.content }}}} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
    "mistral": f"{BEGINNING}[INST] {{{{ m.content }}}} [/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    "vicuna": f"{BEGINNING}USER: {{{{ m.content }}}} {{% else %}}ASSISTANT: {{{{ m.content }}}}{{{{ eos_token }}}}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}",
    "zephyr": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
}
"""Chat templates in the forms of these families, whose turns follow a bracket, a colon or a newline."""

Spaces = Literal["segments", "first"]
"""Where the space is written: before each text between special tokens (Llama's legacy form), or before the first."""


def sentencepiece_tokenizer(spaces: Spaces, template: str | None = None) -> Tokenizer:
    """Return a tokenizer of characters, of `\u2581` with a letter, and of single bytes such as `<0x0A>`."""
    letters = [*string.ascii_letters, "["]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE]
    tokens += [*string.ascii_letters, *string.digits, *"[]/<|>.,?!:'"]
    tokens += [SPACE + letter for letter in letters]
    merges = [(SPACE, letter) for letter in letters]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    core = Core(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if spaces == "segments":
        core.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    fused = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(fused)
    tokenizer: Tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = template
    return tokenizer

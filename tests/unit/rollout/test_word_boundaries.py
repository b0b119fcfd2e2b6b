"""Tokenizers that write a space before what begins a text: a turn does not begin one."""

from __future__ import annotations

from itertools import compress, product
from typing import Any

import pytest
from tokenizers import AddedToken, processors

from rlkit.data.measure import measure_answers
from rlkit.models import load
from rlkit.rollout.recorded import recorded_group
from rlkit.rollout.rendering import TokenCodec
from rlkit.rollout.template import ChatTemplate
from rlkit.types import Message, Prompt, RecordedAnswer
from tests.other_tokenizer import other_tokenizer
from tests.sentencepiece import SPACE, TEMPLATES, Spaces, sentencepiece_tokenizer

TURNS: list[Message] = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Bye bye"},
]
FORMS = [(spaces, name) for spaces, name in product(("segments", "first"), TEMPLATES)]


def template_of(spaces: Spaces, name: str) -> ChatTemplate:
    tokenizer = sentencepiece_tokenizer(spaces, TEMPLATES[name])
    return ChatTemplate(tokenizer, {tokenizer.eos_token_id})


def recorded(turns: list[Message]) -> Prompt:
    return Prompt("0", turns[:1], recorded=[RecordedAnswer(turns[1:])])


@pytest.mark.parametrize(("spaces", "name"), FORMS)
@pytest.mark.parametrize("count", [2, 4])
def test_recorded_turns_are_the_templates_rendering(spaces: Spaces, name: str, count: int) -> None:
    template, turns = template_of(spaces, name), TURNS[:count]
    prompt = recorded(turns)
    [trajectory] = recorded_group(template, prompt, 0, 1000)
    rendered = template.codec.encode(template.render(turns, generate=False))
    assert trajectory.tokens == rendered[: len(trajectory.tokens)]
    assert trajectory.tokens[-1] == template.tokenizer.eos_token_id
    [[length]] = measure_answers(template, [prompt])
    assert len(template.start(turns[:1])) + length == len(trajectory.tokens)


@pytest.mark.parametrize("spaces", ["segments", "first"])
def test_special_tokens_that_take_the_newline_after_them(spaces: Spaces) -> None:
    """Phi-3's: in the text of a conversation, a turn follows `<|assistant|>` itself, not the newline."""
    roles = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    asked = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    tokenizer: Any = sentencepiece_tokenizer(spaces, roles + asked)
    names = ("<|user|>", "<|assistant|>", "<|end|>")
    tokenizer.add_tokens([AddedToken(name, rstrip=True, normalized=False, special=True) for name in names])
    template = ChatTemplate(tokenizer, {tokenizer.convert_tokens_to_ids("<|end|>")})
    [trajectory] = recorded_group(template, recorded(TURNS), 0, 1000)
    assert trajectory.tokens == template.codec.encode(template.render(TURNS, generate=False))


def test_what_is_trained_after_a_newline_begins_without_a_space() -> None:
    """Zephyr's prompt ends `<|assistant|>` and a newline, after which the template writes `Hello`."""
    template = template_of("first", "zephyr")
    [trajectory] = recorded_group(template, recorded(TURNS[:2]), 0, 1000)
    vocabulary = {token_id: token for token, token_id in template.tokenizer.get_vocab().items()}
    trained = [vocabulary[token] for token in compress(trajectory.tokens, trajectory.mask)]
    assert trained == ["H", "e", "l", "l", "o", "</s>"]


@pytest.mark.parametrize("spaces", ["segments", "first"])
def test_a_delta_after_a_turn_without_an_end_begins_without_a_space(spaces: Spaces) -> None:
    plain = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    tokenizer = sentencepiece_tokenizer(spaces, plain)
    template = ChatTemplate(tokenizer, {tokenizer.eos_token_id})
    vocabulary = tokenizer.get_vocab()
    assert template.delta(TURNS[2:3])[:3] == [vocabulary["<0x0A>"], vocabulary["A"], vocabulary["n"]]


@pytest.mark.parametrize(
    ("spaces", "before", "tokens"),
    [
        ("segments", "", [f"{SPACE}a", f"{SPACE}b"]),
        ("segments", "x", ["a", f"{SPACE}b"]),
        ("segments", "x</s>", [f"{SPACE}a", f"{SPACE}b"]),  # as the tokenizer goes on after a special token
        ("segments", "x</s>\n", ["a", f"{SPACE}b"]),
        ("first", "", [f"{SPACE}a", f"{SPACE}b"]),
        ("first", "x", ["a", f"{SPACE}b"]),
        ("first", "x</s>", ["a", f"{SPACE}b"]),
    ],
)
def test_a_continuation_is_encoded_as_in_its_text(spaces: Spaces, before: str, tokens: list[str]) -> None:
    tokenizer = sentencepiece_tokenizer(spaces)
    codec = TokenCodec(tokenizer, {tokenizer.eos_token_id})
    expected = [tokenizer.get_vocab()[token] for token in tokens]
    assert codec.encode("a b", before) == expected
    assert codec.lengths(["a b"], [before]) == [len(expected)]


def test_a_byte_level_tokenizer_encodes_a_continuation_alone() -> None:
    """What precedes it could join with its first characters: here a newline does."""
    tokenizer = other_tokenizer("Ċ a")
    codec, vocabulary = TokenCodec(tokenizer, {tokenizer.eos_token_id}), tokenizer.get_vocab()
    assert codec.encode("ab", "x\n") == codec.encode("ab") == [vocabulary["a"], vocabulary["b"]]


@pytest.mark.parametrize("spaces", ["segments", "first"])
def test_plain_prompts_begin_as_the_tokenizer_begins_a_text(spaces: Spaces) -> None:
    """After a special token in a text, the one form writes a space and the other none; both do after their own."""
    tokenizer: Any = sentencepiece_tokenizer(spaces)
    special = ("<s>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[special])
    tokenizer.chat_template = load._read_template("plain", tokenizer)
    template = ChatTemplate(tokenizer, {tokenizer.eos_token_id})
    assert template.start([{"role": "user", "content": "Hello"}])[:-1] == tokenizer.encode("Hello")
    assert tokenizer.encode("Hello")[:2] == [special[1], tokenizer.get_vocab()[f"{SPACE}H"]]

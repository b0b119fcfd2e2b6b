"""How a chat template ends the policy's turns, and what a rollout appends after the id that really ended one."""

from __future__ import annotations

import re

import pytest

from rlkit.base.errors import RecipeError
from rlkit.rollout.recorded import recorded_group
from rlkit.rollout.rendering import find_end
from rlkit.rollout.template import ChatTemplate
from rlkit.rollout.template_check import check_template
from rlkit.types import Message, Prompt, RecordedAnswer
from tests.vendors import template_of

SPECIAL = re.compile(r"<[a-z/]+>")
USER = {"role": "user", "content": "Q2"}
RESULT = {"role": "tool", "name": "count", "tool_call_id": "call00001", "content": "7"}


@pytest.mark.parametrize(
    ("alone", "followed", "stop", "token", "turn"),
    [
        ("<end>\n", "<end>\n<user>Q", "<end>", "<end>", "<end>"),  # ChatML
        ("<end>\n", "<end>\n<user>Q", "<eos>", "<end>", "<end>"),  # a base model's files do not know it
        ("<end>\n<eos>", "<end>\n<user>Q", "<eos>|<end>", "<end>", "<end>"),  # Phi-3 closes all with its own end
        ("<return>", "<end><user>Q", "<return>", "<return>", "<return>"),  # harmony
        ("", "<user>Q", "<user>|<eos>", "<user>", "<user>"),  # GLM
        ("", "<user>Q", "<eos>", "<user>", "<user>"),
        ("}</call>", "}</call><tool>7", "<tool>", "<tool>", "}</call><tool>"),
        ("}</call><end>", "}</call><end><tool>7", "<eos>", "<end>", "}</call><end>"),
        ("<answer><end>", "<answer><end><user>Q", "<end>", "<end>", "<answer><end>"),
        ("<end><eos>\n", "<end><eos>\n<user>Q", "<end>", "<end>", "<end>"),
        ("<end> ", "<end> <end>Q", "<end>", "<end>", "<end>"),
        ("\n", "\n\n<user>Q", "<user>", "<user>", "\n\n<user>"),
        ("\n", "\n<user>Q", "<eos>", "", ""),  # a marker that ends no turn, after a line break
        ("\n", "\nUser: Q", "<eos>", "", ""),
        ("", "", "<eos>", "", ""),
    ],
)
def test_the_end_of_a_turn_is_read_off_two_renderings(
    alone: str, followed: str, stop: str, token: str, turn: str
) -> None:
    found = find_end(alone, followed, SPECIAL, re.compile(stop))
    assert (found.token, found.text_of(f"text{alone}")) == (token, f"text{turn}")
    assert found.opens_next == (bool(token) and token not in alone)
    assert (found.text_of("text<other>") is None) == bool(found.tail)


def follow(name: str, end: str, messages: list[Message]) -> str:
    """Return what a rollout has after a turn `A1` that ended with a token."""
    template = template_of(name)
    [after] = template.codec.encode(end)
    return f"A1{end}{template.codec.decode(template.delta(messages, after))}"


HARMONY_USER = "<|start|>user<|message|>Q2<|end|><|start|>assistant"
HARMONY_TOOL = '<|start|>functions.count to=assistant<|channel|>commentary<|message|>"7"<|end|><|start|>assistant'
GLM_USER, GLM_TOOL = "\nQ2<|assistant|>", "\n<tool_response>\n7\n</tool_response><|assistant|>"
PHI_USER = "\n<|user|>\nQ2<|end|>\n<|assistant|>\n"
COHERE_USER = (
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Q2<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    "<|START_RESPONSE|>"
)


@pytest.mark.parametrize(
    ("name", "end", "messages", "expected"),
    [
        ("glm4moe", "<|user|>", [USER], f"A1<|user|>{GLM_USER}"),
        ("glm4moe", "<|endoftext|>", [USER], f"A1<|endoftext|><|user|>{GLM_USER}"),
        ("glm4moe", "<|observation|>", [USER], f"A1<|observation|><|user|>{GLM_USER}"),
        ("glm4moe", "<|observation|>", [RESULT], f"A1<|observation|>{GLM_TOOL}"),
        ("gptoss", "<|return|>", [USER], f"A1<|return|>{HARMONY_USER}"),
        ("gptoss", "<|endoftext|>", [USER], f"A1<|endoftext|><|end|>{HARMONY_USER}"),
        ("gptoss", "<|call|>", [RESULT], f"A1<|call|>{HARMONY_TOOL}"),
        ("phi3_5", "<|end|>", [USER], f"A1<|end|>{PHI_USER}"),
        ("phi3_5", "<|endoftext|>", [USER], f"A1<|endoftext|><|end|>{PHI_USER}"),
        ("qwen2_5", "<|im_end|>", [USER], "A1<|im_end|>\n<|im_start|>user\nQ2<|im_end|>\n<|im_start|>assistant\n"),
        ("cohere2", "<|END_OF_TURN_TOKEN|>", [USER], f"A1<|END_OF_TURN_TOKEN|>{COHERE_USER}"),
    ],
)
def test_a_delta_leaves_out_the_id_that_ended_the_turn(
    name: str, end: str, messages: list[Message], expected: str
) -> None:
    assert follow(name, end, messages) == expected


def test_a_turn_that_was_cut_is_closed_by_the_template() -> None:
    template = template_of("qwen2_5")
    [letter] = template.codec.encode("x")
    assert template.codec.decode(template.delta([USER], letter)).startswith("<|im_end|>\n<|im_start|>user\nQ2")


def trained(template: ChatTemplate, *messages: Message) -> str:
    """Return the policy's text of the last of some messages."""
    prompt = Prompt("row", list(messages[:-1]), recorded=[RecordedAnswer(list(messages[-1:]))])
    [found] = recorded_group(template, prompt, 0, 1 << 20)
    return template.codec.decode(found.tokens[found.mask.index(True) :])


def test_the_tokenizers_end_is_used_without_one_in_the_temp() -> None:
    template = template_of("qwen2_5")
    template.tokenizer = tokenizer = template.tokenizer.__class__(
        tokenizer_object=template.tokenizer.backend_tokenizer, eos_token="<|im_end|>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'Q: ' if m.role == 'user' else 'A: ' }}{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}A: {% endif %}"
    )
    plain = ChatTemplate(tokenizer, {tokenizer.eos_token_id})
    question = {"role": "user", "content": "2 + 3?"}
    assert trained(plain, question, {"role": "assistant", "content": "5"}) == "5<|im_end|>"
    assert plain.codec.decode(plain.delta([USER], tokenizer.eos_token_id)) == "\nQ: Q2\nA: "
    talk = [{"role": "assistant", "content": "5"}, USER, {"role": "assistant", "content": "6"}]
    [found] = recorded_group(plain, Prompt("p", [question], recorded=[RecordedAnswer(talk)]), 0, 4096)
    assert plain.codec.decode(found.tokens) == "Q: 2 + 3?\nA: 5<|im_end|>\nQ: Q2\nA: 6<|im_end|>"
    assert "trained to end it with '<|im_end|>'" in "\n".join(check_template(plain).warnings)


def test_an_end_inside_a_turn_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"holds '<\|im_end\|>', which ends a turn, before its end; remove that"):
        trained(template_of("qwen2_5"), USER, {"role": "assistant", "content": "High.<|im_end|>"})


@pytest.mark.parametrize(
    ("name", "kwargs", "content", "remedies"),
    [
        ("nemotron_3_nano", {}, "High.", ("{enable_thinking: false}", "record the reasoning")),
        ("qwen3_5_think", {"enable_thinking": False}, "<think>\nHm.\n</think>\n\nHigh.", ("{enable_thinking: true}",)),
        ("deepseek_r1_distill", {}, "High.", ("set model.chat_template to a template",)),
    ],
)
def test_a_turn_that_does_not_continue_its_prompt(
    name: str, kwargs: dict[str, object], content: str, remedies: tuple[str, ...]
) -> None:
    with pytest.raises(RecipeError) as raised:
        trained(template_of(name, **kwargs), USER, {"role": "assistant", "content": content})
    message = str(raised.value)
    assert message.startswith("prompt 'row': the chat template does not render a recorded turn after its own")
    assert "the policy reads" in message
    assert "but the rendering of the turn has" in message
    assert all(remedy in message for remedy in remedies)
    assert message.count("; set") + message.count(", or") == len(remedies) + (name != "deepseek_r1_distill")


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
def test_a_thought_that_the_prompt_opens_is_continued(kwargs: dict[str, object]) -> None:
    closed = "" if kwargs else "\n</think>\n\n"
    answer = {"role": "assistant", "content": "High."}
    assert trained(template_of("qwen3_5_think", **kwargs), USER, answer) == f"{closed}High.<|im_end|>"

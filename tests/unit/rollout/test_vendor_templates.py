"""Recorded turns and rollouts under the chat templates of model vendors: what is trained is what they render."""

from __future__ import annotations

from typing import Any

import pytest
from rlkit_tasks.chat import ChatRow
from rlkit_tasks.recorded import recording

from rlkit.base.errors import RecipeError
from rlkit.data.measure import measure_answers
from rlkit.rollout.recorded import recorded_group, samples_of
from rlkit.rollout.template import ChatTemplate
from rlkit.rollout.template_check import check_template
from rlkit.types import Message, Prompt, RecordedAnswer, Trajectory
from tests.vendors import NAMES, TYPED, family_of, template_of, tokenizer_of

TIDE = {"name": "tide", "description": "High tide.", "parameters": {"type": "object", "properties": {}}}
TOOLS = ({"type": "function", "function": TIDE},)
RESULT = {"role": "tool", "name": "tide", "tool_call_id": "call00001", "content": "06:10"}
CALLS = [{"id": "call00001", "type": "function", "function": {"name": "tide", "arguments": {"port": "Bergen"}}}]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str, **fields: object) -> Message:
    return {"role": "assistant", "content": text, **fields}


QUESTION, ANSWER = user("Tide at Bergen?"), said("High at 06:10.")
AGAIN = [user("And at Tromso?"), said("High at 07:40.")]
THOUGHT = "<think>\nLook it up.\n</think>\n\n"
FIELDS = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "Look it up.")
CALLING = [QUESTION, said("", tool_calls=CALLS), RESULT, ANSWER]
ROWS: dict[str, list[Message]] = {
    "plain": [QUESTION, ANSWER],
    "system": [{"role": "system", "content": "Be brief."}, QUESTION, ANSWER],
    "two turns": [QUESTION, ANSWER, *AGAIN],
    "ends with a user": [QUESTION, ANSWER, user("Thanks.")],
    "tool": CALLING,
    "ends with a call": CALLING[:2],
    "tool, then a user": [*CALLING, *AGAIN],
    "thought": [QUESTION, said(f"{THOUGHT}High at 06:10.")],
    "reasoning": [QUESTION, said("High at 06:10.", **FIELDS)],
    "thought twice": [QUESTION, said(f"{THOUGHT}High at 06:10."), AGAIN[0], said(f"{THOUGHT}High at 07:40.")],
    "reasoning and a tool": [QUESTION, said("", tool_calls=CALLS, **FIELDS), RESULT, ANSWER],
}
"""Rows as they are recorded."""

PLAIN_TEXT = "1 1 1 1 c c c 1 1 1 c"
EQUAL = "1 1 1 1 1 1 1 1 1 1 1"
STRIPS = "1 1 1 1 1 1 1 1 1 2 1"
OUTCOMES = dict.fromkeys(NAMES, EQUAL) | {
    **dict.fromkeys(("cohere", "cohere2", "gemma3", "idefics3", "lfm2", "llama3", "llava_next"), PLAIN_TEXT),
    **dict.fromkeys(("phi3", "phi3_5", "qwen2_5_vl", "smolvlm"), PLAIN_TEXT),
    "gemma": "1 r 1 1 c c c 1 1 1 c",
    **dict.fromkeys(("glm4moe", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "qwen3"), STRIPS),
    "gptoss": "1 1 2 1 1 1 2 1 1 2 1",
    **dict.fromkeys(("qwen3_5_think", "qwen3_6"), "1 1 2 1 1 1 2 1 1 2 1"),
    "qwen3_5_nothink": "1 1 2 1 1 1 2 p p p p",
    "deepseek_r1_distill": "p p p p p p p p p p p",
    "deepseekv3": "p p p p p p p p p p p",
    **dict.fromkeys((n for n in NAMES if n.startswith("nemotron")), "p p p p p p p 1 1 2 p"),
}  # fmt: skip
"""What becomes of each row: its number of samples, or why it is refused.

c: the template writes no calls; p: it does not write the turn after its generation prompt; r: it refuses the messages.
"""
FAST = (
    "cohere2", "deepseekv3", "gemma", "gemma4_v5", "glm4moe", "gptoss", "lfm2_v2", "llama3_1", "llava_next",
    "nemotron_3_nano", "phi3_5", "qwen2_5", "qwen3", "qwen3_5_think",
)  # fmt: skip
every_template = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in NAMES]
)
REASONS = {
    "c": "does not write an assistant's calls of tools",
    "p": "does not render a recorded turn after its own generation prompt",
    "r": "cannot render the roles",
}
INFERENCE_ONLY = [("gptoss", "reasoning and a tool")]
"""Rows whose thoughts a template leaves out of its rendering of the whole, but not of the next turn's prompt."""
AFTER_THE_END = {"", "\n", " ", "\n<|endoftext|>"}
"""What a template may write after the end of the last turn."""


def recorded(row: str) -> Prompt:
    found = recording(ChatRow({"messages": ROWS[row]}), None)
    assert found.prompt is not None
    return Prompt("row", found.prompt, recorded=found.answers, tools=None if "tool" in row else [])


def rendered(name: str, messages: list[Message], tools: tuple[Any, ...] = (), **options: Any) -> list[int]:
    """Return the ids of the template's own rendering, by transformers alone."""
    if name in TYPED:
        messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    text = tokenizer_of(name).apply_chat_template(messages, tools=list(tools) or None, tokenize=False, **options)
    ids: list[int] = tokenizer_of(name).encode(text, add_special_tokens=False)
    return ids


def check_sample(name: str, row: str, sample: Trajectory) -> list[int]:
    """Compare a sample with the template's rendering; return the indices of the messages that it trains."""
    tools = TOOLS if "tool" in row else ()
    decode, family, messages = tokenizer_of(name).decode, family_of(name), sample.messages
    spans = [turn for turn in sample.turns if turn.role == "assistant"]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"][-len(spans) :]
    for index, span in zip(turns, spans, strict=True):
        context = rendered(name, messages[:index], tools, add_generation_prompt=True)
        assert decode(sample.tokens[: span.start]) == decode(context)
        assert sample.tokens[: span.start] == context
        end = family.call_end if messages[index].get("tool_calls") and family.call_end else family.end
        text = decode(sample.tokens[span.start : span.end])
        assert text.endswith(end)
        assert text.count(end) == 1
        assert messages[index]["content"].removeprefix(THOUGHT) in text
    trained = [i for span in spans for i in range(span.start, span.end)]
    assert [i for i, chosen in enumerate(sample.mask) if chosen] == trained
    whole = rendered(name, messages, tools)
    if (name, row) not in INFERENCE_ONLY and whole != sample.tokens[:-1]:  # the end belongs to what would follow
        assert whole[: len(sample.tokens)] == sample.tokens
        assert decode(whole[len(sample.tokens) :]) in AFTER_THE_END
    return turns


@every_template
def test_recorded_rows_are_what_the_template_renders(name: str) -> None:
    """Id for id, with the context of inference, or refused; what is trained begins and ends as the policy would."""
    template = template_of(name, TOOLS)
    outcomes = []
    for row in ROWS:
        prompt = recorded(row)
        try:
            [trajectory] = recorded_group(template, prompt, 0, 1 << 20)
        except RecipeError as error:
            reason = next((key for key, text in REASONS.items() if text in str(error)), str(error))
            outcomes.append(reason)
            continue
        samples = [*trajectory.span.branches, trajectory]
        trained = sorted(index for sample in samples for index in check_sample(name, row, sample))
        answers = [i for i, m in enumerate(trajectory.messages) if m["role"] == "assistant"]
        assert trained == answers
        longest = max(len(sample.tokens) for sample in samples) - len(template.start(prompt.messages, prompt.tools))
        assert measure_answers(template, [prompt]) == [[longest]]
        outcomes.append(str(len(samples)))
    assert dict(zip(ROWS, outcomes, strict=True)) == dict(zip(ROWS, OUTCOMES[name].split(), strict=True))


@every_template
def test_ends_are_found_without_the_models_files(name: str) -> None:
    """A base model's files may know only the tokenizer's own end token."""
    family, template = family_of(name), template_of(name, files=False)
    assert template.codec.decode(template.end_ids()) == family.end
    try:
        template.end(calls=True)
    except RecipeError:
        return
    assert template.codec.decode(template.end_ids(calls=True)) == (family.call_end or family.end)


def written(template: ChatTemplate, messages: list[Message]) -> list[int]:
    """Return what the policy writes for the last of some messages, after the opening that the template renders."""
    [sample] = samples_of(template, Prompt("p", messages[:-1]), RecordedAnswer(messages[-1:]))
    return template.codec.encode(sample.spans[-1].text)


@every_template
def test_rollouts_of_three_turns_are_what_the_template_renders(name: str) -> None:
    """A call, its result, an answer and a further question; or a warning says what the template renders otherwise."""
    template, warnings = template_of(name), "\n".join(check_template(template_of(name)).warnings)
    talk = ROWS["tool, then a user"] if "c" not in OUTCOMES[name] else [*ROWS["two turns"], *AGAIN]
    flat = template.start(talk[:1])
    try:
        for index in (i for i, message in enumerate(talk) if message["role"] == "assistant"):
            between = talk[index - 1 : index]
            if index > 1:
                flat += template.delta(between, flat[-1])
            flat += written(template, talk[: index + 1])
    except RecipeError:
        assert "recorded turns like that are refused" in warnings
        return
    whole = rendered(name, talk)
    if flat[:-1] == whole:
        return
    same = whole[: len(flat)] == flat and template.codec.decode(whole[len(flat) :]) in AFTER_THE_END
    assert same or "the template strips thinking from earlier turns" in warnings or "in the place of" in warnings

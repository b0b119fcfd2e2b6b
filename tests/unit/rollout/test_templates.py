"""Chat templates in the styles of real models: what a conversation is made of is what the template would render."""

from __future__ import annotations

import json
import resource
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlkit_authors.models import build_tokenizer

from rlkit.base.errors import RecipeError
from rlkit.rollout.rendering import Renderer
from rlkit.rollout.template import CALL_ID, ChatTemplate
from rlkit.rollout.template_check import check_template
from rlkit.types import Message

TEMPLATES = Path(__file__).parents[2] / "templates"
SPECIAL = {
    "chatml": (),
    "qwen3": (),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"),
    "mistral": ("<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
                "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
    "gemma": ("<bos>", "<start_of_turn>", "<end_of_turn>"),
    "numbered": (),
}  # fmt: skip
"""The special tokens that each style adds: the first begins a text, the last ends a turn."""
STYLES = ("chatml", "qwen3", "llama3", "mistral", "gemma")
WITH_TOOLS = ("chatml", "qwen3", "llama3", "mistral")
TOOLS = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}]
NEXT_ID = "call00002"


@cache
def tokenizer_of(style: str, eos: str = "") -> Any:
    tokenizer = build_tokenizer()
    if SPECIAL[style]:
        tokenizer.add_tokens(list(SPECIAL[style]), special_tokens=True)
        tokenizer.bos_token = SPECIAL[style][0]
        tokenizer.eos_token = SPECIAL[style][-1]
    tokenizer.eos_token = eos or tokenizer.eos_token
    tokenizer.chat_template = (TEMPLATES / f"{style}.jinja").read_text()
    return tokenizer


def template_of(style: str, tools: Sequence[dict[str, Any]] = ()) -> ChatTemplate:
    tokenizer = tokenizer_of(style)
    return ChatTemplate(tokenizer, {tokenizer.eos_token_id}, tools)


def altered(style: str, old: str, new: str) -> ChatTemplate:
    """Return a style with one thing changed in its source."""
    tokenizer = tokenizer_of.__wrapped__(style)
    assert old in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    return ChatTemplate(tokenizer, {tokenizer.eos_token_id})


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def calling(*ids: str) -> Message:
    function = {"name": "count", "arguments": {"what": "figs"}}
    return {**assistant(""), "tool_calls": [{"id": i, "type": "function", "function": function} for i in ids]}


def result(content: str, id: str = CALL_ID) -> Message:
    return {"role": "tool", "content": content, "name": "count", "tool_call_id": id}


def written(style: str, turn: Message) -> str:
    """Return what a policy of this style writes for a turn, but for its end token."""
    calls = [
        (c["function"]["name"], json.dumps(c["function"]["arguments"]), c["id"]) for c in turn.get("tool_calls", ())
    ]
    if not calls:
        return str(turn["content"])
    if style == "llama3":
        return "".join(f'{{"name": "{name}", "parameters": {what}}}' for name, what, _ in calls)
    if style == "mistral":
        each = (f'{{"name": "{name}", "arguments": {what}, "id": "{i}"}}' for name, what, i in calls)
        return f"[TOOL_CALLS][{', '.join(each)}]"
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {w}}}\n</tool_call>' for n, w, _ in calls)


def ids(template: ChatTemplate, text: str) -> list[int]:
    found: list[int] = template.tokenizer.encode(text, add_special_tokens=False)
    return found


def split(messages: Sequence[Message]) -> list[list[Message]]:
    """Cut a conversation after each of the policy's turns."""
    parts: list[list[Message]] = [[]]
    for message in messages:
        parts[-1].append(message)
        if message["role"] == "assistant":
            parts.append([])
    return parts if parts[-1] else parts[:-1]


def play(style: str, messages: Sequence[Message], template: ChatTemplate) -> list[int]:
    """Return the flat run of a conversation, compared with the template's own rendering at each turn of the policy."""
    flat: list[int] = []
    told: list[Message] = []
    for part in split(messages):
        *new, turn = part
        flat += template.delta(new) if told else template.start(new)
        assert flat == template.start([*told, *new])
        flat += [*ids(template, written(style, turn)), template.tokenizer.eos_token_id]
        told += part
    return flat


def turns(count: int, *first: Message) -> list[Message]:
    conversation = [m for i in range(count) for m in (user(f"Question {i}?"), assistant(f"Answer\n{i}."))]
    return [*first, *conversation]


def conversations(style: str) -> dict[str, list[Message]]:
    known = {f"{count} turns": turns(count) for count in range(1, 5)}
    if style != "gemma":
        known["system"] = turns(3, system("Be brief."))
    if style in WITH_TOOLS:
        asked = (CALL_ID,) if style == "llama3" else (CALL_ID, NEXT_ID)  # Llama calls once, but may get two results
        known["one result"] = [user("How many?"), calling(CALL_ID), result("7"), assistant("Seven.")]
        known["two results"] = [user("Both?"), calling(*asked), result("7"), result("{8}", NEXT_ID), assistant("15.")]
        known["two rounds"] = [*known["two results"][:-1], *known["one result"][1:]]
        known["user after tools"] = [*known["one result"], *turns(1)]
    return known


CASES = [(style, name) for style in STYLES for name in conversations(style)]


@pytest.mark.parametrize(("style", "name"), CASES)
def test_the_flat_run_is_what_the_template_renders(style: str, name: str) -> None:
    messages = conversations(style)[name]
    template = template_of(style)
    flat = play(style, messages, template)
    if style != "qwen3":  # which opens an empty thought in the last turn only
        full = template.tokenizer.encode(template.rendered(messages), add_special_tokens=False)
        assert full[: len(flat)] == flat
        assert template.tokenizer.decode(full[len(flat) :]) in ("", "\n")


def test_a_template_reads_its_kwargs_everywhere() -> None:
    tokenizer = tokenizer_of.__wrapped__("chatml")
    switch = "{% if thinking is defined and not thinking %}<think></think>{% endif %}"
    tokenizer.chat_template = tokenizer.chat_template + "{% if add_generation_prompt %}" + switch + "{% endif %}"
    ends = {tokenizer.eos_token_id}
    plain, without = (ChatTemplate(tokenizer, ends, (), kwargs) for kwargs in (None, {"thinking": False}))
    messages: list[Message] = [{"role": "user", "content": "2 + 2?"}]
    assert without.opening(messages) == plain.opening(messages) + "<think></think>"
    added = len(tokenizer.encode("<think></think>", add_special_tokens=False))
    assert len(without.start(messages)) == len(plain.start(messages)) + added
    assert len(without.delta(messages)) == len(plain.delta(messages)) + added


@pytest.mark.parametrize("style", WITH_TOOLS)
def test_a_conversation_is_shown_the_tools_that_it_has(style: str) -> None:
    add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    both, one, none = (template_of(style, tools) for tools in ([*TOOLS, add], [add], []))
    messages: list[Message] = [{"role": "user", "content": "2 + 2?"}]
    assert both.start(messages, ["add"]) == one.start(messages)
    assert both.start(messages, []) == none.start(messages)
    assert both.start(messages, ["count", "add"]) == both.start(messages) == both.start(messages, None)
    reply: Message = {"role": "assistant", "content": "4"}
    assert both.rendered([*messages, reply], ["add"]) == one.rendered([*messages, reply])
    openings = [both.opening(messages, names) for names in (None, ["add"], [])]
    assert both.codec.lengths(openings) == [len(template.start(messages)) for template in (both, one, none)]


@pytest.mark.parametrize("style", WITH_TOOLS)
@pytest.mark.parametrize("name", ["one result", "two results", "two rounds"])
def test_tools_are_shown_at_the_start_only(style: str, name: str) -> None:
    """Mistral's template moves them to the last user's message: there a second one is not what the template renders."""
    messages = conversations(style)[name]
    template = template_of(style, TOOLS)
    flat = play(style, messages, template)
    assert '"name": "count"' in template.tokenizer.decode(template.start(messages[:1]))
    delta = template.delta([user("And?")])
    assert '"name": "count"' not in template.tokenizer.decode(delta)
    assert (flat + delta == template.start([*messages, user("And?")])) == (style != "mistral")


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<["), max_size=20)
"""Without what special tokens begin with: those have tests of their own below."""


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=40)
@given(pairs=st.lists(st.tuples(TEXT, TEXT.map(str.strip)), min_size=1, max_size=4))
def test_any_text_is_appended(style: str, pairs: list[tuple[str, str]]) -> None:
    """A template may trim the user's text, for the delta is its own rendering; the policy's is trimmed here."""
    play(style, [m for asked, said in pairs for m in (user(asked), assistant(said))], template_of(style))


@pytest.mark.parametrize("style", WITH_TOOLS)
@settings(max_examples=40)
@given(replies=st.lists(TEXT, min_size=1, max_size=3))
def test_any_results_are_appended(style: str, replies: list[str]) -> None:
    made = [f"call{i:05}" for i in range(len(replies))]
    results = [result(reply, i) for reply, i in zip(replies, made, strict=True)]
    asked = made[:1] if style == "llama3" else made
    play(style, [user("?"), calling(*asked), *results, assistant("!")], template_of(style))


@pytest.mark.parametrize("style", ["llama3", "gemma"])
def test_spaces_around_a_turn_stay_despite_trimming(style: str) -> None:
    """The flat run holds what the policy wrote, so it differs from the template's rendering by these spaces alone."""
    template = template_of(style)
    end = [template.tokenizer.eos_token_id]
    start, delta = template.start([user("One?")]), template.delta([user("Two?")])
    trimmed = template.start([user("One?"), assistant(" Yes.\n"), user("Two?")])
    assert trimmed == start + ids(template, "Yes.") + end + delta
    assert trimmed != start + ids(template, " Yes.\n") + end + delta


def test_a_delta_renders_what_is_new_and_the_turn_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one also renders what precedes a turn, which stays the same."""
    template = template_of("chatml")
    rendered, render = list[str](), Renderer._render
    monkeypatch.setattr(Renderer, "_render", lambda *arguments: rendered.append("") or render(*arguments))
    counts = []
    for text in ("a", "b", "c"):
        before = len(rendered)
        template.delta([user(text)])
        counts.append(len(rendered) - before)
    assert counts[1:] == [2, 2]


def test_a_delta_follows_the_date_of_its_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run goes on after midnight; Llama 3.1's template, for one, begins with the day's date."""
    template, day, render = template_of("chatml"), ["Monday"], Renderer._render
    monkeypatch.setattr(Renderer, "_render", lambda *arguments: f"<{day[0]}>{render(*arguments)}")
    before = template.delta([user("a")])
    day[0] = "Tuesday"
    assert template.delta([user("a")]) == before


def test_results_of_one_turn_are_merged_by_one_delta() -> None:
    template = template_of("chatml")
    apart = template.delta([result("7")]) + template.delta([result("8")])
    both = template.tokenizer.decode(template.delta([result("7"), result("8")]))
    assert both != template.tokenizer.decode(apart)
    assert both == (
        "\n<|im_start|>user\n<tool_response>\n7\n</tool_response>\n<tool_response>\n8\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_qwen3_strips_thinking_from_renderings_only() -> None:
    template = template_of("qwen3")
    end = [template.tokenizer.eos_token_id]
    thought = "<think>\nHm.\n</think>\n\nYes."
    start, delta = template.start([user("One?")]), template.delta([user("Two?")])
    assert template.tokenizer.decode(delta) == "\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
    rendered = template.start([user("One?"), assistant(thought), user("Two?")])
    assert rendered == start + ids(template, "Yes.") + end + delta
    assert rendered != start + ids(template, thought) + end + delta
    kept = template.start([user("One?"), {**calling(CALL_ID), "content": thought}, result("7")])  # no user since
    call = ids(template, f"{thought}\n{written('qwen3', calling(CALL_ID))}")
    assert kept == start + call + end + template.delta([result("7")])
    proof = check_template(template)
    assert any("strips thinking from earlier turns" in warning for warning in proof.warnings)
    assert "a user turn is appended to what came before" in proof.facts
    assert "a tool turn is appended to what came before" in proof.facts


@pytest.mark.parametrize("style", ["chatml", "llama3", "mistral"])
def test_nothing_hurts_in_a_template_that_appends(style: str) -> None:
    assert check_template(template_of(style)).warnings == []


@pytest.mark.parametrize("messages", [[user("And?")], [result("7")]])
def test_a_template_that_renders_history_anew_gives_no_delta(messages: list[Message]) -> None:
    template = template_of("numbered")
    for hostile in (template, altered("chatml", "messages %}", "messages[-2:] %}")):
        with pytest.raises(RecipeError, match="renders earlier turns anew"):
            hostile.delta(messages)
    assert any("renders earlier turns anew" in warning for warning in check_template(template).warnings)


def test_a_template_that_marks_the_last_turn_gives_no_delta() -> None:
    marked = "turn.content + ('.' if loop.last and turn.role == 'assistant' else '') + '<|im_end|>"
    template = altered("chatml", "turn.content + '<|im_end|>", marked)
    with pytest.raises(RecipeError, match="renders earlier turns anew"):
        template.delta([user("And?")])


def test_an_error_says_what_the_template_said() -> None:
    gemma = template_of("gemma")
    with pytest.raises(RecipeError, match="the roles system, user: System role not supported"):
        gemma.start([system("Be brief."), user("Hello")])
    with pytest.raises(RecipeError, match="the roles user, assistant, tool: Conversation roles must alternate"):
        gemma.delta([result("7")])
    with pytest.raises(RecipeError, match="Conversation roles must alternate"):
        gemma.delta([user("One?"), user("Two?")])
    mistral = template_of("mistral")
    with pytest.raises(RecipeError, match="must alternate"):
        mistral.start([user("One?"), user("Two?")])
    with pytest.raises(RecipeError, match="must have 9 characters"):
        mistral.delta([result("7", "short")])


def test_a_generation_prompt_may_open_a_thought() -> None:
    template = altered("chatml", "assistant\\n' }}", "assistant\\n<think>\\n' }}")
    tokenizer = template.tokenizer
    delta = template.delta([user("Two?")])
    assert tokenizer.decode(delta) == "\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    own = [*ids(template, "Hm.\n</think>\n\nYes."), tokenizer.eos_token_id]
    history = [user("One?"), assistant("<think>\nHm.\n</think>\n\nYes."), user("Two?")]
    assert template.start(history[:1]) + own + delta == template.start(history)
    assert "rollouts are trained on the former" in check_template(template).warnings[0]


@pytest.mark.parametrize("style", STYLES)
def test_no_message_of_a_delta_holds_a_special_token(style: str) -> None:
    """The text of one is left out, and so is one that leaving out another would make."""
    template = template_of(style)
    special = template.tokenizer.all_special_tokens
    end = template.tokenizer.eos_token
    hostile = f"7{end}8{end[:2]}{''.join(special)}{end[2:]}9"
    assert template.delta([user(hostile)]) == template.delta([user("789")])
    parts = {"role": "user", "content": [{"type": "text", "text": hostile}]}
    assert template.codec.plain(parts) == {"role": "user", "content": [{"type": "text", "text": "789"}]}
    if style in WITH_TOOLS:
        assert template.delta([result(hostile)]) == template.delta([result("789")])


@settings(max_examples=100)
@given(pieces=st.lists(st.sampled_from(["<|im_", "start|>", "end|>", "<|im_end|>", "<|im_start|>", "a", "<", "|>"])))
def test_special_tokens_cannot_be_put_together(pieces: list[str]) -> None:
    template = template_of("chatml")
    inside = ids(template, template.codec.plain("".join(pieces)))
    assert not set(inside) & set(template.tokenizer.all_special_ids)


def test_words_that_are_no_special_tokens_stay() -> None:
    """Prompts speak of <think>; an end token that is an ordinary one, such as a newline, may be written by anybody."""
    template = template_of("chatml")
    newline = ChatTemplate(template.tokenizer, {*template.stop_ids, *ids(template, "\n")})
    text = "Think in <think>\n</think>; I see <tool_call>, [INST] and </s>.\n"
    assert template.codec.plain(text) == newline.codec.plain(text) == text


@pytest.mark.parametrize("messages", [[user("And?")], [result("7")], [result("7"), result("8", NEXT_ID)]])
def test_a_turn_that_ends_differently_is_closed_by_the_template(messages: list[Message]) -> None:
    """Where the model's own end is not the template's, the delta begins with the latter; the proof says so."""
    tokenizer = tokenizer_of("chatml", eos="<|endoftext|>")
    other = ChatTemplate(tokenizer, {tokenizer.eos_token_id})
    usual, [end] = template_of("chatml"), ids(template_of("chatml"), "<|im_end|>")
    assert other.delta(messages, tokenizer.eos_token_id) == [end, *usual.delta(messages)]
    assert other.delta(messages, end) == other.delta(messages) == usual.delta(messages)
    assert other.stop_ids == {tokenizer.eos_token_id, end}
    assert "rollouts stop at it, and so does the saved model" in "\n".join(check_template(other).facts)


@pytest.mark.parametrize("after", ["", "\\n", "\\n\\n", "<|endoftext|>\\n"])
def test_text_after_the_end_token_belongs_to_the_delta(after: str) -> None:
    template = altered("chatml", "turn.content + '<|im_end|>\\n'", f"turn.content + '<|im_end|>{after}'")
    play("chatml", turns(3), template)
    begun = template.tokenizer.decode(template.delta([user("And?")]))
    assert begun.startswith(after.replace("\\n", "\n") + "<|im_start|>user")


def test_results_answer_calls_with_their_ids() -> None:
    """A template may look up the call of a result."""
    looked_up = (
        "{%- set made = (turns | selectattr('tool_calls') | list)[-1].tool_calls %}"
        "{%- if turn.tool_call_id not in made | map(attribute='id') | list %}{{ raise_exception('?') }}{% endif %}"
    )
    template = altered("chatml", "{%- if turn.role == 'tool' %}", "{%- if turn.role == 'tool' %}" + looked_up)
    results = [result("7"), result("8", NEXT_ID)]
    assert template.delta(results) == template_of("chatml").delta(results)
    with pytest.raises(RecipeError, match="has no attribute 'content'"):  # rather than that there is no call
        template.delta([{"role": "tool", "tool_call_id": CALL_ID}])


def test_arguments_may_be_text() -> None:
    """Some templates join the arguments to other text, which an object cannot be."""
    joined = altered("chatml", "call.function.arguments | tojson + '}", "call.function.arguments + '}")
    assert joined.delta([result("7")]) == template_of("chatml").delta([result("7")])


@pytest.mark.parametrize(
    "program",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}loops and writes{% endfor %}{% endfor %}",
        "{{ 'a' * 10 ** 11 }}",
        "{{ ('a' * 10 ** 9) ~ ('b' * 10 ** 9) }}",
        "{% macro again(n) %}{{ again(n) }}{% endmacro %}{{ again(1) }}",
    ],
)
def test_a_template_that_does_not_end_is_refused(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit.rollout.rendering.RENDER_SECONDS", 0.2)
    memory = resource.getrlimit(resource.RLIMIT_AS)
    tokenizer = tokenizer_of.__wrapped__("chatml")
    tokenizer.chat_template = program
    with pytest.raises(RecipeError, match="does not end|cannot render"):
        ChatTemplate(tokenizer, {tokenizer.eos_token_id}).start([{"role": "user", "content": "a"}])
    tokenizer.chat_template = "{{ messages[0].content }}"  # and the process goes on without limits
    assert len(ChatTemplate(tokenizer, {tokenizer.eos_token_id}).start([{"role": "user", "content": "a"}])) == 1
    assert resource.getrlimit(resource.RLIMIT_AS) == memory


def test_a_template_that_renders_nothing_is_refused() -> None:
    tokenizer = tokenizer_of.__wrapped__("chatml")
    tokenizer.chat_template = "{% for message in messages %}{% endfor %}"
    with pytest.raises(RecipeError, match="renders nothing"):
        ChatTemplate(tokenizer, {tokenizer.eos_token_id}).start([{"role": "user", "content": "a"}])

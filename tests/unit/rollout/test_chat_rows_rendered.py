"""Chat rows as the policy reads them: arguments in the template's form, a row's own schemas, turns without loss."""

from __future__ import annotations

import asyncio
import json
from itertools import compress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlkit_authors.models import build_tokenizer

from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.data.lengths import PromptLengths
from rlkit.recipe.method import Method, ReinforcementLearning, Supervised
from rlkit.rollout.conversation import Conversation
from rlkit.rollout.participants import Participants, ParticipantSession
from rlkit.rollout.recorded import recorded_group
from rlkit.rollout.template import ChatTemplate
from rlkit.tools import Calculator
from rlkit.types import JsonObject, Message, Prompt, RecordedAnswer, SampleKey
from tests.unit.rollout.test_templates import TOOLS, WITH_TOOLS, template_of
from tests.vendors import template_text

ASKED: Message = {"role": "user", "content": "Tide at Bergen?"}
SCHEMA: JsonObject = {
    "type": "function",
    "function": {"name": "tide", "description": "Next high tide", "parameters": {"type": "object", "properties": {}}},
}


def calling(arguments: object) -> Message:
    function = {"name": "tide", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c00000001", "type": "function", "function": function}],
    }


def said(content: str) -> Message:
    return {"role": "assistant", "content": content}


def deepseek() -> ChatTemplate:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template_text("deepseekv3")
    return ChatTemplate(tokenizer, {tokenizer.eos_token_id})


@pytest.mark.parametrize("style", [*WITH_TOOLS, "deepseekv3"])
def test_arguments_have_the_form_that_a_template_takes(style: str) -> None:
    """Objects for those that write JSON of them; JSON text for DeepSeek's, which writes a text as it is."""
    renders = deepseek() if style == "deepseekv3" else template_of(style)
    arguments = {"port": "Bergen", "days": 2, "exact": True, "at": None, "name": "Ørsta"}
    text = renders.render([ASKED, calling(arguments)], generate=False)
    assert json.dumps(arguments, ensure_ascii=False) in text
    assert renders.render([ASKED, calling({})], generate=False).count("{}") == 1


def test_a_template_that_writes_no_calls_gets_objects() -> None:
    renders = template_of("gemma")
    assert not renders.render._takes_text


@pytest.mark.parametrize("style", WITH_TOOLS)
def test_the_schemas_of_a_row_are_shown(style: str) -> None:
    """Instead of the recipe's tools, and of the one that has their name."""
    renders = template_of(style, TOOLS)
    own = {"type": "function", "function": {**TOOLS[0]["function"], "description": "Counts fruit"}}

    def shown(tools: Any) -> str:
        return renders.opening([ASKED], tools)

    assert "Next high tide" in shown([SCHEMA])
    assert '"count"' not in shown([SCHEMA])
    assert "Next high tide" in shown(["count", SCHEMA])
    assert '"count"' in shown(["count", SCHEMA])
    assert "Counts fruit" in shown([own])
    assert shown([own]).count('"count"') == 1
    assert shown(["count"]) == shown(None) != shown([])
    assert renders.start([ASKED], [SCHEMA]) != renders.start([ASKED], [own])


def test_the_schemas_of_a_row_stand_before_its_recorded_turns() -> None:
    renders = template_of("chatml")
    prompt = Prompt("tide", [ASKED], tools=[SCHEMA], recorded=[RecordedAnswer([calling({"port": "Bergen"})])])
    [found] = recorded_group(renders, prompt, 0, 1 << 20)
    text = renders.codec.decode(found.tokens)
    assert text.startswith(renders.opening([ASKED], [SCHEMA]))
    assert renders.codec.decode(list(compress(found.tokens, found.mask))).startswith("<tool_call>")


def test_turns_that_are_not_trained_are_context() -> None:
    """The first of two turns is in the tokens, as without its mark, but not under the mask."""
    renders = template_of("chatml")
    again: Message = {"role": "user", "content": "And in Oslo?"}

    def answered(first: Message) -> Any:
        prompt = Prompt("tide", [ASKED], recorded=[RecordedAnswer([first, again, said("07:40")], 0.5)])
        return recorded_group(renders, prompt, 0, 1 << 20)[0]

    found, whole = answered({**said("06:10"), "trained": False}), answered(said("06:10"))
    assert found.tokens == whole.tokens
    assert renders.codec.decode(list(compress(found.tokens, found.mask))) == "07:40<|im_end|>"
    assert [turn.role for turn in found.turns] == ["user", "assistant", "user", "assistant"]
    assert (found.reward, len(found.turn_rewards)) == (0.5, 2)


def test_an_answer_cut_before_its_trained_turn_is_left_out() -> None:
    renders = template_of("chatml")
    first: Message = {**said("06:10 or so, at the pier"), "trained": False}
    prompt = Prompt("tide", [ASKED], recorded=[RecordedAnswer([first, ASKED, said("06:10")])])
    [found] = recorded_group(renders, prompt, 0, len(renders.start([ASKED])) + 5)
    assert found.error == "prompt 'tide': the context ends before the first turn that is trained"


def lengths(method: Method, **changes: object) -> PromptLengths:
    recipe = SimpleNamespace(
        tools={"count": Calculator()}, agent=None, method=method, rollout=SimpleNamespace(max_prompt_tokens=None)
    )
    vars(recipe).update(changes)
    return PromptLengths(SimpleNamespace(recipe=recipe, template=template_of("chatml", TOOLS), context=4096))  # type: ignore[arg-type]


def test_a_schema_that_no_tool_runs_is_refused_in_rollouts() -> None:
    own = {"type": "function", "function": TOOLS[0]["function"]}
    prompt = Prompt("row 3", [ASKED], tools=[own, SCHEMA])
    message = r"prompt 'row 3' has a schema of the tool 'tide' in its column `tools`, but the recipe's tools are: count"
    with pytest.raises(RecipeError, match=message):
        lengths(ReinforcementLearning()).measure([prompt])
    [shown] = lengths(ReinforcementLearning()).measure([Prompt("a", [ASKED], tools=[own])])
    assert shown == len(template_of("chatml", TOOLS).start([ASKED], ["count"]))
    for measured in (lengths(Supervised()), lengths(ReinforcementLearning(), agent=object())):
        assert measured.measure([prompt])[0] > shown
        with pytest.raises(RecipeError, match="prompt 'b' names the tool 'tide', but the recipe's tools are: count"):
            measured.measure([Prompt("b", [ASKED], tools=["tide"])])


@pytest.mark.parametrize("column", [["calculator"], [SCHEMA | {"function": {"name": "calculator"}}], '["calculator"]'])
def test_names_and_schemas_choose_the_tools_that_run(column: object) -> None:
    """The column is in `meta` too, where it holds no arguments for the tools' methods."""
    tools: Any = json.loads(column) if isinstance(column, str) else column
    prompt = Prompt("sum", [ASKED], tools=tools, meta={"tools": column})
    participants = Participants({"calculator": Calculator(), "other": Calculator()})

    async def opened() -> list[str]:
        async with ParticipantSession(participants, Conversation(prompt, 0), SampleKey(0, 0, "p", 0)) as session:
            assert await session.open() == []
            return list(session.tools)

    assert asyncio.run(opened()) == ["calculator"]


def test_a_run_refuses_such_a_row_before_its_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "Tide?", "answer": "1", "tools": json.dumps([SCHEMA])}) + "\n")
    options = ("--recipe=quickstart", "--task=Jsonl", f"--task.path={path}", "--validation=null")
    assert main(["fit", *options, f"--out={tmp_path / 'run'}"]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "prompt '0' has a schema of the tool 'tide' in its column `tools`, but the recipe's tools are: none" in shown
    assert "add one that runs the calls (tools: {tide: ...}), or remove the schema" in shown

"""Long replies of tools, users and environments: what is left of them, what the policy reads, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlkit_authors.models import build_tokenizer

from rlkit import commands, hookimpl
from rlkit.cli.main import main
from rlkit.interfaces.environment import Environment, Observation
from rlkit.interfaces.tool import State, Tool
from rlkit.recipe import ConversationLimits
from rlkit.registry import load_plugins
from rlkit.rollout.conversation import Limits
from rlkit.rollout.participants import Participants
from rlkit.rollout.replies import WIDEST, note, reply_limit, without_middle
from rlkit.rollout.template import ChatTemplate
from rlkit.tools import Calculator
from rlkit.types import Message, StopReason
from tests.conftest import read_jsonl
from tests.unit.rollout.test_conversation import call, hold, replies, tools

TOKENIZER = build_tokenizer()  # a token is a byte
TEMPLATE = ChatTemplate(TOKENIZER, {TOKENIZER.eos_token_id})


def tool_message(content: Any) -> Message:
    return {"role": "tool", "content": content}


def cut(content: Any, limit: int) -> Any:
    """The content of a message after the cut; None if it fits."""
    message = tool_message(content)
    before = json.dumps(message)
    found = without_middle(message, limit, TEMPLATE.codec.count)
    assert json.dumps(message) == before  # the tool may use it again
    return None if found is None else found["content"]


def test_the_middle_is_left_out_and_counted() -> None:
    """Ten letters, limit 4: two of each end stay, six are left out."""
    assert cut("abcdefghij", 4) == "ab\n[... 6 characters left out ...]\nij"
    assert cut("abcdefghij", 5) == "abc\n[... 5 characters left out ...]\nij"
    assert cut("abcdefghij", 1) == "a\n[... 9 characters left out ...]\n"
    assert cut("abcdefghij", 10) is None
    assert cut("x" * 5000, 2)[2:-2] == "[... 4,998 characters left out ...]"


def test_no_character_is_divided() -> None:
    """`é` has two bytes, so two tokens here, and the emoji four: a third token, or a fifth, would be half of one."""
    assert cut("é" * 10, 6) == "é" + note(8) + "é"
    assert cut("🙂🙂🙂", 9) == "🙂" + note(1) + "🙂"


def test_typed_parts_are_cut_as_one_text_and_others_stay() -> None:
    image = {"type": "image", "image": "x.png"}
    parts = [{"type": "text", "text": "abcde"}, image, {"type": "text", "text": "fg"}, {"type": "text", "text": "hij"}]
    assert cut(parts, 4) == [
        {"type": "text", "text": "ab" + note(6)}, image, {"type": "text", "text": ""}, {"type": "text", "text": "ij"}
    ]  # fmt: skip
    assert cut(parts, 10) is None
    assert [cut(content, 1) for content in ([], None, [image, 7, None])] == [None] * 3


@given(st.text(max_size=300), st.integers(1, 40))
def test_any_text_keeps_its_ends_and_no_more_than_the_limit(text: str, limit: int) -> None:
    found = cut(text, limit)
    if found is None:
        assert TEMPLATE.codec.count(text) <= limit
        return
    left = next(n for n in range(len(text) + 1) if note(n) in found and len(text) == len(found) - len(note(n)) + n)
    head, _, tail = found.partition(note(left))
    assert text.startswith(head)
    assert text.endswith(tail)
    assert TEMPLATE.codec.count(head) <= limit - limit // 2
    assert TEMPLATE.codec.count(tail) <= limit // 2


@given(st.text(st.characters(codec="utf-8"), min_size=200, max_size=300), st.integers(20, 40))
def test_what_is_kept_is_nearly_what_may_be_kept(text: str, limit: int) -> None:
    """A character has at most four tokens here; texts whose ends differ are measured at each end."""
    found = cut(text, limit)
    assert found is not None
    kept = TEMPLATE.codec.count(found) - TEMPLATE.codec.count(note(len(text)))
    assert kept > limit // 2


@given(st.lists(st.text(max_size=60), max_size=6), st.integers(1, 30))
def test_typed_parts_keep_what_one_text_keeps(texts: list[str], limit: int) -> None:
    parts = cut([{"type": "text", "text": text} for text in texts], limit)
    whole = cut("".join(texts), limit)
    assert (None if parts is None else "".join(part["text"] for part in parts)) == whole


def test_a_huge_text_is_measured_at_its_ends_only() -> None:
    measured: list[int] = []

    def count(text: str) -> int:
        measured.append(len(text))
        return len(text) // 4  # a token has four characters

    found = without_middle(tool_message("Z" * 10**7), 2048, count)
    assert found is not None
    assert 8192 <= found["content"].count("Z") <= 8198  # three characters at either end are no token
    assert max(measured) <= WIDEST * 1024
    assert len(measured) <= 10


def test_the_default_limit_is_a_quarter_up_to_2048() -> None:
    given = {context: reply_limit(ConversationLimits(), context) for context in (2, 4096, 32768)}
    assert given == {2: 1, 4096: 1024, 32768: 2048}
    assert reply_limit(ConversationLimits(max_reply_tokens=5000), 4096) == 5000
    assert reply_limit(ConversationLimits(max_reply_tokens=None), 4096) is None


class Talkative(Tool):
    """Replies with as many letters as asked."""

    name, description = "repeat", "Repeats."
    parameters = {  # noqa: RUF012
        "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
    }  # fmt: skip

    async def call(self, arguments: dict[str, Any], state: State, **kwargs: Any) -> str:
        return "<" + "a" * arguments["n"] + ">"


def test_each_reply_is_limited_by_itself() -> None:
    """Of three calls two replies are too long; the check of the rendering, which is strict, sees no difference."""
    turns = ["".join(call("repeat", n=n) for n in (8, 30, 98)), "done"]
    [done] = hold(
        lambda request, turn: turns[turn], tools(repeat=Talkative()), limits=Limits(turns=6, reply=10), check="strict"
    )
    assert (done.error, done.stop) == (None, StopReason.STOP)
    assert done.counts == {"tool_calls": 3, "replies_cut": 2}
    contents = [message["content"] for message in done.messages if message["role"] == "tool"]
    assert contents == ["<aaaaaaaa>", f"<aaaa{note(22)}aaaa>", f"<aaaa{note(90)}aaaa>"]
    assert all(content in replies(done) for content in contents)
    [whole] = hold(lambda request, turn: turns[turn], tools(repeat=Talkative()), check="strict")
    assert whole.counts == {"tool_calls": 3}


class Wordy(Environment):
    """A game whose every observation is long, and names special tokens."""

    async def reset(self, prompt: Any, seed: int, state: State) -> str:
        return "<|im_end|>begin " + "x" * 90 + " seen"

    async def step(self, action: str, state: State) -> Observation:
        return Observation("\ud800" + "y" * 90, 1.0, action == "end")


def test_a_games_observations_are_limited_from_the_first() -> None:
    """A special token in it ends no turn, and half a surrogate pair, which no tokenizer reads, ends no run."""
    limits = Limits(turns=6, reply=40)
    [done] = hold(lambda request, turn: ["go", "end"][turn], Participants(environment=Wordy()), limits=limits)
    assert (done.error, done.counts) == (None, {"replies_cut": 2})
    texts = [message["content"] for message in done.messages[1:]]
    assert texts == [
        "begin " + "x" * 14 + note(61) + "x" * 15 + " seen",
        "go",
        "?" + "y" * 19 + note(51) + "y" * 20,
        "end",
    ]


class Archive(Calculator):
    """Looks everything up, and replies with all of it."""

    async def call(self, arguments: dict[str, Any], state: State, **kwargs: Any) -> str:
        return "Z" * 10_000_000


def test_ten_megabytes_of_a_reply_cost_a_turn_and_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through `rlkit fit`, with the default: the policy goes on after such replies, and is trained on what it reads."""
    made = SimpleNamespace(__name__="tests", rlkit_register=hookimpl(lambda register: register(Archive)))
    monkeypatch.setattr(commands, "load_plugins", lambda: load_plugins([("archive", made)], entry_points=False))
    options = (
        "--recipe=quick_tool", "--tools.calculator=Archive", "--validation=null", "--train.steps=1",
        "--train.prompts_per_step=4", "--rollout.group_size=2", "--conversation.check=strict",
        "--rollout.sampling.max_tokens=64", "--conversation.turns=2", "--train.seed=1",
    )  # fmt: skip
    assert main(["fit", *options, f"--out={tmp_path / 'out'}"]) == 0
    [row] = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert (
        0 < row["conversation/replies_cut"] == row["conversation/tool_calls"] - row.get("conversation/tool_errors", 0)
    )
    assert row.get("conversation/template_differs", 0) == row["rollout/failed"] == 0
    rows = read_jsonl(tmp_path / "out" / "rollouts" / "step-00001.jsonl.gz")
    lengths = [end - start for row in rows for role, start, end in row["turns"] if role == "tool"]
    assert 1024 < max(lengths) < 1024 + 100
    read = [message["content"] for row in rows for message in row["conversation"] if message["role"] == "tool"]
    assert any(reply.startswith("ZZ") and "9,998,976 characters left out" in reply for reply in read)
    capsys.readouterr()
    assert main(["reward", "try", f"--rollouts={tmp_path / 'out'}", "--json"]) == 0  # by the recipe of the run itself
    again = json.loads(capsys.readouterr().out)
    assert (again["compared"], again["changed"]) == (8, 0)

"""Lengths of many prompts: measured once, kept under what they depend on, and shortened to a limit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.data import measure as measures
from rlkit.data.measure import measure, shorten
from rlkit.models.load import load_tokenizer
from rlkit.recipe import Model
from rlkit.rollout.rendering import TokenCodec
from rlkit.rollout.template import ChatTemplate
from rlkit.testing import save_random_model
from rlkit.types import Message, Prompt
from tests.conftest import read_jsonl
from tests.unit.rollout.test_templates import TOOLS, template_of

SIDES = ("left", "right", "middle")


def prompts(count: int) -> list[Prompt]:
    return [Prompt(str(i), [{"role": "user", "content": f"{'x' * (i % 7)} {i}?"}]) for i in range(count)]


@pytest.fixture
def template() -> ChatTemplate:
    tokenizer: Any = load_tokenizer(Model("tiny"))
    return ChatTemplate(tokenizer, {tokenizer.eos_token_id})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measures, "FEW", 50)
    return tmp_path / "rlkit" / "lengths"


class CountingCodec(TokenCodec):
    """Counts the texts that it measures."""

    measured = 0

    def lengths(self, texts: Sequence[str]) -> list[int]:
        assert os.environ["TOKENIZERS_PARALLELISM"] == "true"  # commands set it to false
        self.measured += len(texts)
        return super().lengths(texts)


def counted(template: ChatTemplate) -> Any:
    counting = ChatTemplate(template.tokenizer, template.stop_ids, template.tools)
    counting.codec = CountingCodec(template.tokenizer, template.stop_ids)
    return counting


def test_many_prompts_are_measured_once(template: ChatTemplate, cache: Path) -> None:
    many = prompts(measures.FEW + 1)
    first = counted(template)
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    found = measure(first, many)
    assert os.environ.get("TOKENIZERS_PARALLELISM") == before
    assert found == [len(template.start(p.messages)) for p in many]
    assert first.codec.measured == len(many)
    second = counted(template)
    assert measure(second, many) == found
    assert second.codec.measured == 0
    assert measure(counted(template), many[:3]) == found[:3]
    assert len(list(cache.iterdir())) == 1


def test_lengths_are_kept_under_what_they_depend_on(cache: Path) -> None:
    many = prompts(measures.FEW + 1)
    plain = measure(template_of("chatml"), many)
    with_tools = template_of("chatml", TOOLS)
    assert measure(with_tools, many) != plain
    without = [Prompt(p.id, p.messages, tools=[]) for p in many]
    assert measure(with_tools, without) == plain
    assert measure(template_of("qwen3"), many) == [len(template_of("qwen3").start(p.messages)) for p in many]
    changed = [*many[:-1], Prompt("0", [{"role": "user", "content": "another, longer one"}])]
    assert measure(template_of("chatml"), changed)[-1] != plain[-1]
    assert len(list(cache.iterdir())) == 5


def test_lengths_of_other_releases_are_measured_again(
    template: ChatTemplate, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release that encodes answers otherwise has another `ENCODING`."""
    many = prompts(measures.FEW + 1)
    measure(template, many)
    monkeypatch.setattr(measures, "ENCODING", measures.ENCODING + 1)
    other = counted(template)
    measure(other, many)
    assert other.codec.measured == len(many)


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"no array", None])
def test_a_damaged_file_of_lengths_is_measured_again(
    template: ChatTemplate, cache: Path, content: bytes | None
) -> None:
    many = prompts(measures.FEW + 1)
    found = measure(template, many)
    [path] = cache.iterdir()
    if content is None:  # another number of them, and a pickle
        np.save(path, np.asarray([found[:-1]], dtype=object), allow_pickle=True)
    else:
        path.write_bytes(content)
    again = counted(template)
    assert measure(again, many) == found
    assert again.codec.measured == len(many)
    assert measure(counted(template), many) == found


def test_without_a_place_to_keep_lengths_they_are_measured(
    template: ChatTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rlkit").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    many = prompts(measures.FEW + 1)
    assert measure(template, many) == [len(template.start(p.messages)) for p in many]


def test_old_files_of_lengths_are_removed(template: ChatTemplate, cache: Path) -> None:
    cache.mkdir(parents=True)
    for number in range(measures.KEPT + 5):
        (cache / f"{number}.npy").touch()
        os.utime(cache / f"{number}.npy", (number, number))
    measure(template, prompts(measures.FEW + 1))
    names = {path.name for path in cache.iterdir()}
    assert len(names) == measures.KEPT
    assert "0.npy" not in names
    assert f"{measures.KEPT + 4}.npy" in names


def test_a_prompt_that_the_template_refuses_is_named_among_many(template: ChatTemplate, cache: Path) -> None:
    tokenizer: Any = load_tokenizer(Model("tiny"))
    tokenizer.chat_template = "{% if '7' in messages[0]['content'] %}{{ raise_exception('no') }}{% endif %}read"
    with pytest.raises(RecipeError, match=r"prompt '7': the chat template cannot render the roles user"):
        measure(ChatTemplate(tokenizer, {1}), prompts(measures.FEW + 1))


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<[|"), max_size=40)


@given(
    texts=st.lists(TEXT, min_size=1, max_size=4),
    limit=st.integers(1, 120),
    side=st.sampled_from(SIDES),
    style=st.sampled_from(("chatml", "llama3")),
)
@settings(max_examples=30, deadline=None)
def test_a_shortened_prompt_fits(texts: list[str], limit: int, side: Any, style: str) -> None:
    template = template_of(style)
    roles = ["user", "assistant"] * 2
    messages: list[Message] = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    before = len(template.start(messages))
    least = len(template.start([{**message, "content": ""} for message in messages]))
    prompt = Prompt("p", messages, "answer", {"kept": 1})
    if limit < least:
        with pytest.raises(RecipeError, match=rf"'p' cannot be shortened to {limit} tokens: .* alone have \d+"):
            shorten(template, prompt, limit, side)
        return
    found = shorten(template, prompt, limit, side)
    after = len(template.start(found.messages))
    assert after <= limit
    assert (found.id, found.answer, found.meta) == ("p", "answer", {"kept": 1})
    if before <= limit:
        assert found.messages == messages
    for old, new in zip(messages, found.messages, strict=True):
        assert new["role"] == old["role"]
        if side == "left":
            assert old["content"].endswith(new["content"])
        if side == "right":
            assert old["content"].startswith(new["content"])


def test_kwargs_of_the_template_count_in_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_random_model(tmp_path / "model")
    path = tmp_path / "model" / "chat_template.jinja"
    path.write_text(path.read_text() + "{% if hint is defined %}{{ hint }}{% endif %}")
    common = ("--recipe=quickstart", f"--model.path={tmp_path / 'model'}", "--validation=null", "--train.steps=1")
    few = ("--train.prompts_per_step=2", "--train.schedule=Constant", "--rollout.group_size=2")
    longest = []
    for name, kwargs in (("plain", ()), ("hinted", ("--model.chat_template_kwargs.hint=xyz",))):
        assert main(["fit", *common, *few, *kwargs, f"--out={tmp_path / name}"]) == 0
        row = read_jsonl(tmp_path / name / "rollouts" / "step-00001.jsonl.gz")[0]
        longest.append(row["mask"].index(1))
    assert longest[1] == longest[0] + 3  # a letter is a token
    capsys.readouterr()
    assert main(["recipe", "check", "quickstart", "--model.chat_template_kwargs.tools=1"]) == 2
    assert "sets 'tools', which rlkit sets itself" in capsys.readouterr().err


def test_only_texts_are_cut(template: ChatTemplate) -> None:
    template.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | string }}{% endfor %}"
    parts: list[Message] = [{"role": "user", "content": [{"type": "text", "text": "x" * 50}]}]
    with pytest.raises(RecipeError, match="cannot be shortened"):
        shorten(template, Prompt("p", parts), 20, "left")


def test_overlong_prompts_through_the_command_line(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of many prompts of two lengths: those that are too long are left out, and counted."""
    rows = "".join(f'{{"prompt": "{"x" * (40 if i % 5 == 0 else 4)} {i}", "answer": "1"}}\n' for i in range(2500))
    (tmp_path / "t.jsonl").write_text(rows)
    options = ("--task=HFDataset", f"--task.path={tmp_path / 't.jsonl'}", "--validation=null", "--reward=ExactReward")
    limits = ("--rollout.max_prompt_tokens=50", "--train.steps=1")
    for _ in range(2):  # the second time from the cache
        assert main(["recipe", "check", "quickstart", *options, *limits, "--rollout.overlong=drop"]) == 0
        printed = capsys.readouterr().out
        assert "500 prompts of more than 50 tokens are dropped (rollout.overlong)" in printed
        assert "passes over 2,000 rows" in printed
    assert len(list(cache.iterdir())) == 1
    assert main(["recipe", "check", "quickstart", *options, *limits, "--train.steps=200"]) == 2
    assert "or set rollout.overlong to drop, left, right or middle" in capsys.readouterr().err

"""Answers that a data set has: their columns, their tokens, and runs that train on them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, compress
from pathlib import Path
from typing import Any

import pytest
import torch
from rlkit_tasks.chat import ChatRow
from rlkit_tasks.recorded import recording
from rlkit_tasks.rows import Rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlkit.base.errors import RecipeError
from rlkit.commands import parse
from rlkit.data.data import load_data
from rlkit.data.measure import AnswerSizes, measure_answers
from rlkit.engines import Recorded, TorchEngine
from rlkit.interfaces.engine import Capability
from rlkit.rollout.collate import add_rewards, collate
from rlkit.rollout.recorded import recorded_group
from rlkit.rollout.template import ChatTemplate
from rlkit.tasks import Arithmetic
from rlkit.types import Message, Prompt, RecordedAnswer, StopReason
from tests.conftest import ROOT, read_jsonl, rlkit_in_process
from tests.unit.rollout.test_templates import CASES, calling, conversations, play, template_of

TINY = ROOT / "rlkit" / "models" / "tiny"
USER = {"role": "user", "content": "2 + 3 = ?"}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def template() -> ChatTemplate:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    return ChatTemplate(tokenizer, {tokenizer.eos_token_id})


@pytest.mark.parametrize(
    ("row", "answers"),
    [
        ({"completion": "5"}, [("5", 0.0)]),
        ({"completion": "5", "reward": 0.25}, [("5", 0.25)]),
        ({"completion": "5", "label": True}, [("5", 1.0)]),
        ({"completion": "6", "label": False}, [("6", 0.0)]),
        ({"completion": "5", "label": 1}, [("5", 1.0)]),
        ({"completion": "5", "label": 1.0}, [("5", 1.0)]),  # pandas, where a label is missing
        ({"completion": "6", "label": 0.0, "reward": 0.5}, [("6", 0.0)]),
        ({"completion": "5", "label": "True"}, [("5", 1.0)]),  # CSV
        ({"completion": "5", "label": "1.0"}, [("5", 1.0)]),
        ({"completion": "6", "label": "false", "reward": 0.5}, [("6", 0.0)]),
        ({"completion": "6", "label": float("nan"), "reward": 0.5}, [("6", 0.5)]),
        ({"completion": "5", "label": "sums", "reward": 0.25}, [("5", 0.25)]),
        ({"completion": "5", "reward": "high"}, []),
        ({"completions": ["6", "5"], "rewards": None}, [("6", 0.0), ("5", 0.0)]),
        ({"completions": ["6", "5"], "rewards": 1}, []),
        ({"completions": ["6", "5"], "rewards": {"6": 1}}, []),
        ({"chosen": "5", "rejected": "6", "score_chosen": "8", "score_rejected": 3.5}, []),
        (
            {"chosen": "5", "rejected": "6", "score_chosen": float("nan"), "score_rejected": None},
            [("5", 1.0), ("6", 0.0)],
        ),
        ({"completion": [said("5")]}, [("5", 0.0)]),
        ({"completions": ["6", "5"], "rewards": [0, 1]}, [("5", 1.0), ("6", 0.0)]),
        ({"completions": ["6", "5"], "rewards": [0]}, []),
        ({"completions": ["2 and 3", "is 6"], "labels": [True, False]}, []),
        ({"completions": ["6", ""], "rewards": [0, 1]}, []),
        ({"completions": ["6", "5"], "rewards": [0, float("nan")]}, []),
        ({"chosen": "5", "rejected": "6"}, [("5", 1.0), ("6", 0.0)]),
        ({"chosen": "5", "rejected": "6", "score_chosen": 8, "score_rejected": 3.5}, [("5", 8.0), ("6", 3.5)]),
        ({"chosen": [USER, said("5")], "rejected": [USER, said("6")]}, [("5", 1.0), ("6", 0.0)]),
        ({"chosen": "5", "rejected": None}, []),
        ({"completion": 5}, []),
        ({"messages": [USER, said("5")]}, []),
        ({}, []),
    ],
)
def test_columns_of_a_row_with_a_prompt(row: dict[str, Any], answers: list[tuple[str, float]]) -> None:
    found = recording(ChatRow(row), [USER])
    assert found.prompt is None
    assert [(answer.messages[0]["content"], answer.reward) for answer in found.answers] == answers


def test_a_pair_keeps_the_turns_that_its_answers_share() -> None:
    """Only the prompt's own messages are left out, if the answers repeat them: as they are, or in other words."""
    system, more = {"role": "system", "content": "Add."}, {"role": "user", "content": "And 1?"}
    talks = [[said("5"), more, said(last)] for last in ("6", "7")]
    expected = [RecordedAnswer(talks[0], 1.0), RecordedAnswer(talks[1], 0.0)]
    other_words = {"role": "user", "content": "What is 2 + 3?"}
    for repeated in ([], [USER], [system, USER], [other_words]):
        row = {"chosen": [*repeated, *talks[0]], "rejected": [*repeated, *talks[1]]}
        assert recording(ChatRow(row), [system, USER]) == (None, expected)
    answers = [RecordedAnswer([said("6")], 1.0), RecordedAnswer([said("7")], 0.0)]
    for repeated in ([USER], [system, USER], [other_words]):
        row = {"chosen": [*repeated, *talks[0]], "rejected": [*repeated, *talks[1]]}
        assert recording(ChatRow(row), [*repeated[:-1], USER, *talks[0][:2]]) == (None, answers)
    assert recording(ChatRow({"chosen": [USER], "rejected": [USER, said("5")]}), [USER]) == (None, [])


def test_the_chosen_answer_is_the_better_one_whatever_its_score() -> None:
    """Equal scores are a preference without a margin, also where they are equal in float32 only."""
    pair = {"chosen": "5", "rejected": "6"}
    for scores in ((7.0, 7.0), (0.0, 0.0), (-8e6, -8e6), (0.1 + 0.2, 0.3)):
        row = pair | dict(zip(("score_chosen", "score_rejected"), scores, strict=True))
        rewards = torch.tensor([answer.reward for answer in recording(ChatRow(row), [USER]).answers])
        assert rewards[0] > rewards[1]
        torch.testing.assert_close(rewards[1], rewards[0])
    row = pair | {"score_chosen": 2, "score_rejected": 8}
    with pytest.raises(RecipeError, match=r"^row: score_chosen is 2 and score_rejected 8, but .* is the better one"):
        recording(ChatRow(row), [USER])


@pytest.mark.parametrize("number", [1e308, -1e31, float("inf"), 10**400], ids=["1e308", "-1e31", "inf", "integer"])
@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"completion": "5", "reward": 0}, "reward"),
        ({"completions": ["6", "5"], "rewards": [0, 1]}, "rewards"),
        ({"chosen": "5", "rejected": "6", "score_chosen": 8, "score_rejected": 3.5}, "score_rejected"),
    ],
)
def test_a_reward_beyond_float32_is_refused_with_its_place(row: dict[str, Any], column: str, number: float) -> None:
    row = {"prompt": "2 + 3 = ?", **row, column: [1, number] if column == "rewards" else number}
    with pytest.raises(RecipeError, match=rf"^task, row 7: '{column}' is .*, expected a finite number up to 1e\+30$"):
        Rows([row]).prompt(row, 7)


def test_columns_of_a_row_without_a_prompt() -> None:
    system = {"role": "system", "content": "Add."}
    talk = [system, USER, said("5"), {"role": "user", "content": "Sure?"}, said("Yes."), USER]
    assert recording(ChatRow({"messages": talk}), None) == (talk[:2], [RecordedAnswer(talk[2:5])])
    assert recording(ChatRow({"messages": [USER, USER]}), None) == (None, [])
    assert recording(ChatRow({"messages": [said("5")]}), None) == (None, [])
    assert recording(ChatRow({"text": "Once."}), None) == ([], [RecordedAnswer([said("Once.")])])
    pair = {"chosen": [system, USER, said("5")], "rejected": [system, USER, said("6")]}
    expected = ([system, USER], [RecordedAnswer([said("5")], 1.0), RecordedAnswer([said("6")], 0.0)])
    assert recording(ChatRow(pair), None) == expected
    assert recording(ChatRow({**pair, "rejected": pair["chosen"]}), None) == (None, [])


@pytest.mark.parametrize(("style", "name"), CASES)
def test_tokens_are_those_of_a_policy_that_writes_the_same(style: str, name: str) -> None:
    """All its turns count, each with its end, and nothing else; calls of tools are as the template writes them."""
    renders, messages = template_of(style), conversations(style)[name]
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    prompt = Prompt("sum", messages[:first], recorded=[RecordedAnswer(messages[first:], 0.5)])
    [found] = recorded_group(renders, prompt, 3, 1 << 20)
    if style == "qwen3":  # which opens an empty thought in the last turn only
        assert renders.codec.decode(found.tokens) + "\n" == renders.render(messages, generate=False)
    else:
        assert found.tokens == play(style, messages, renders)
    assert measure_answers(renders, [prompt]) == [[len(found.tokens) - len(renders.start(prompt.messages))]]
    turns = [found.tokens[start:stop] for role, start, stop in found.turns if role == "assistant"]
    assert all(turn[-1] in renders.stop_ids and renders.stop_ids.isdisjoint(turn[:-1]) for turn in turns)
    assert list(compress(found.tokens, found.mask)) == list(chain.from_iterable(turns))
    assert (found.group, found.reward, found.stop) == (3, 0.5, StopReason.STOP)
    assert set(found.versions) == {-1}
    assert set(found.logps) == {0.0}


def test_a_turn_of_calls_alone_needs_no_content() -> None:
    turn = calling("call00001")
    alone = {key: value for key, value in turn.items() if key != "content"}
    first, second = (
        recorded_group(template_of("chatml"), Prompt("p", [USER], recorded=[RecordedAnswer([one])]), 0, 4096)[0].tokens
        for one in (alone, turn)
    )
    assert first == second


THOUGHT = "<think>\nHm.\n</think>\n\n"
TALK = [said(f"{THOUGHT}5"), USER, said(f"{THOUGHT}Still 5.")]


def test_a_turn_that_is_rendered_anew_is_a_sample() -> None:
    """Qwen3 drops the thought of the first turn once the second follows, which reads the conversation without it."""
    renders = template_of("qwen3")
    prompt = Prompt("sum", [USER], recorded=[RecordedAnswer(TALK, 0.5, [0.25, 0.75])])
    [main] = recorded_group(renders, prompt, 0, 4096)
    [first] = main.span.branches
    asked = "<|im_start|>user\n2 + 3 = ?<|im_end|>\n<|im_start|>assistant\n"
    assert renders.codec.decode(first.tokens) == f"{asked}{THOUGHT}5<|im_end|>"
    assert renders.codec.decode(main.tokens) == f"{asked}5<|im_end|>\n{asked}{THOUGHT}Still 5.<|im_end|>"
    assert renders.codec.decode(list(compress(main.tokens, main.mask))) == f"{THOUGHT}Still 5.<|im_end|>"
    assert [t.score and t.score.turn_rewards for t in (first, main)] == [[0.25], [0.75]]
    assert (main.messages, first.messages) == ([USER, *TALK], [USER, TALK[0]])
    longest = len(main.tokens) - len(renders.start([USER]))
    assert measure_answers(renders, [prompt]) == [[longest]]
    with pytest.raises(
        RecipeError, match=r"^prompt 'sum': .* anew once others follow: .*'<think>.* which loss DPO does"
    ):
        measure_answers(renders, [prompt], answer_loss="DPO")


def test_a_turn_that_is_not_trained_is_context() -> None:
    untrained = [{**TALK[0], "trained": False}, *TALK[1:]]
    [main] = recorded_group(template_of("qwen3"), Prompt("p", [USER], recorded=[RecordedAnswer(untrained)]), 0, 4096)
    assert not main.span.branches
    assert template().codec.decode(list(compress(main.tokens, main.mask))) == f"{THOUGHT}Still 5.<|im_end|>"
    plain = [{**said("5"), "trained": False}, USER, said("It is 5.")]
    [whole] = recorded_group(template(), Prompt("p", [USER], recorded=[RecordedAnswer(plain)]), 0, 4096)
    assert template().codec.decode(list(compress(whole.tokens, whole.mask))) == "It is 5.<|im_end|>"


def test_a_run_trains_all_samples_of_an_answer(tmp_path: Path) -> None:
    strips = tmp_path / "strips.jinja"
    content = "{{ m.content if loop.last else m.content.split('</think>')[-1].lstrip() }}"
    strips.write_text((TINY / "chat_template.jinja").read_text().replace("{{ m['content'] }}", content))
    words = rows_in(tmp_path, [{"messages": [USER, *TALK]}] * 8)
    done = rlkit_in_process("fit", *RUN, *words, f"--model.chat_template={strips}", "--out=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [row, *_] = read_jsonl(tmp_path / "run" / "rollouts" / "step-00001.jsonl.gz")
    [branch] = row["branches"]
    trained = [template().codec.decode(list(compress(one["tokens"], one["mask"]))) for one in (branch, row)]
    assert trained == [f"{THOUGHT}5<|im_end|>", f"{THOUGHT}Still 5.<|im_end|>"]
    losses = [line["policy/loss"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert losses[-1] < losses[0]
    pair = rows_in(tmp_path, [{"prompt": [USER], "chosen": TALK, "rejected": [*TALK[:2], said("6")]}] * 8)
    words = (*pair, "--loss=DPO", f"--model.chat_template={strips}", "--out=dpo")
    done = rlkit_in_process("fit", *RUN, *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "Each turn of the answer is then a sample of its own, which loss DPO does not take" in done.stderr


def test_an_answer_ends_where_the_context_does() -> None:
    renders = template()
    prompt = Prompt("sum", [USER], recorded=[RecordedAnswer([said("It is 5 and not 6.")])])
    [whole] = recorded_group(renders, prompt, 0, 4096)
    [cut] = recorded_group(renders, prompt, 0, len(whole.tokens) - 2)
    assert cut.tokens == whole.tokens[:-2]
    assert (whole.stop, cut.stop) == (StopReason.STOP, StopReason.CONTEXT)


def test_rewards_beyond_the_context_count_nowhere() -> None:
    renders = template()
    answer = RecordedAnswer([said("5"), USER, said("It is 5.")], 1.0, [0.25, 0.5])
    [whole] = recorded_group(renders, Prompt("sum", [USER], recorded=[answer]), 0, 4096)
    first = whole.turns[1].end
    [cut] = recorded_group(renders, Prompt("sum", [USER], recorded=[answer]), 0, first + 1)
    assert [add_rewards(collate([one]), [one]).rewards.item() for one in (whole, cut)] == [1.75, 1.25]


@pytest.mark.parametrize("few", [0, 2000])
def test_lengths_of_answers_are_those_of_trajectories(
    few: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where many are measured at once and kept for the next run; one with no prompt is a plain text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("rlkit.data.measure.FEW", few)
    talk = RecordedAnswer([said("5"), USER, said("It is 5.")])
    prompts = [
        Prompt("sum", [USER], recorded=[RecordedAnswer([said("5")]), talk, RecordedAnswer([said("It is 5. " * 99)])]),
        Prompt("text", [], recorded=[RecordedAnswer([said("Once upon")])]),
    ]
    renders = template()
    groups = [recorded_group(renders, prompt, 0, 1 << 20) for prompt in prompts]
    for _ in range(2):
        found = measure_answers(renders, prompts)
        for prompt, group, sizes in zip(prompts, groups, found, strict=True):
            assert [len(renders.start(prompt.messages)) + size for size in sizes] == [len(t.tokens) for t in group]
    assert len(list(tmp_path.glob("rlkit/lengths/*.npy"))) == (few == 0)
    with pytest.raises(RecipeError, match="^prompt 'odd': a recorded answer has the roles user, assistant, expected"):
        measure_answers(renders, [Prompt("odd", [USER], recorded=[RecordedAnswer([USER, said("5")])])])


def test_an_answer_may_fill_the_context_to_its_last_token() -> None:
    """A digit is a token."""
    empty = Prompt("sum", [USER], recorded=[RecordedAnswer([said("")])])
    alone = len(recorded_group(template(), empty, 0, 4096)[0].tokens)
    for extra in (0, 1):
        rows = [{"prompt": USER["content"], "completion": "5" * (4096 - alone + extra)}]
        recipe = parse("fit", list(RUN)).recipe
        with pytest.raises(RecipeError, match="has 4097 tokens") if extra else nullcontext():
            data = load_data(replace(recipe, task=Rows(rows)))
            assert (data.longest_row, data.answers) == (4096, AnswerSizes(4096, 1, 4096 - data.longest, 1.0))


def test_a_plain_text_is_trained_on_from_its_first_token() -> None:
    renders = template()
    [found] = recorded_group(renders, Prompt("text", [], recorded=[RecordedAnswer([said("Once upon")])]), 0, 4096)
    end = renders.tokenizer.eos_token
    assert renders.codec.decode(found.tokens) == f"{renders.tokenizer.bos_token or end}Once upon{end}"
    assert found.mask == [False] + [True] * (len(found.tokens) - 1)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([USER, said("5")], "has the roles user, assistant, expected it to begin and end with a turn of the assistant"),
        ([said("5"), USER], "has the roles assistant, user, expected"),
        ([said("5"), said("6")], "never two of them in a row"),
        ([], "has the roles of no message"),
    ],
)
def test_an_answer_that_no_policy_could_have_written_is_refused(messages: list[Message], message: str) -> None:
    prompt = Prompt("sum", [USER], recorded=[RecordedAnswer(messages)])
    with pytest.raises(RecipeError, match=message) as raised:
        recorded_group(template(), prompt, 0, 4096)
    assert str(raised.value).startswith("prompt 'sum': ")


def test_mistakes_of_arithmetic_are_near_and_always_the_same() -> None:
    task = Arithmetic(mistakes=4)
    for row in (*task.rows("train")[:50], {"question": "0 + 0 = ?", "answer": "0"}):
        right, *wrong = task.prompt(row, 0).recorded
        assert (right.messages[0]["content"], right.reward) == (f"#### {row['answer']}", 1.0)
        texts = [answer.messages[0]["content"].removeprefix("#### ") for answer in wrong]
        assert all(abs(int(text) - int(row["answer"])) in (1, 2, 10, 20) for text in texts)
        assert len(set(texts)) == 4
        assert {answer.reward for answer in wrong} == {0.0}
        assert task.prompt(row, 0) == task.prompt(row, 0)


RUN = ("--recipe=quick_sft", "--train.steps=3", "--train.prompts_per_step=4", "--validation=null", "--reward=null")


def rows_in(folder: Path, rows: list[dict[str, Any]]) -> tuple[str, ...]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ("--task=Jsonl", "--task.path=rows.jsonl", "--task.answer_field=null")


def reference_losses(steps: list[list[dict[str, Any]]], rate: float) -> list[float]:
    """Train as `transformers` alone does: labels of -100 outside the answers, AdamW, one batch a step."""
    model = AutoModelForCausalLM.from_pretrained(TINY).train()
    decayed = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.0)
    losses = []
    for rows in steps:
        width = max(len(row["tokens"]) for row in rows)
        tokens = torch.tensor([row["tokens"] + [0] * (width - len(row["tokens"])) for row in rows])
        mask = torch.tensor([row["mask"] + [0] * (width - len(row["mask"])) for row in rows]).bool()
        attention = torch.tensor([[1] * len(row["tokens"]) + [0] * (width - len(row["tokens"])) for row in rows])
        loss = model(tokens, attention_mask=attention, labels=tokens.masked_fill(~mask, -100)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        decayed.step()
        decayed.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_losses_of_20_steps_are_those_of_transformers(tmp_path: Path) -> None:
    words = (
        "--train.schedule=Constant",
        "--train.warmup_steps=0",
        "--train.lr=1e-4",
        "--log.rollouts.limit=null",
        "--out=run",
    )
    done = rlkit_in_process("fit", *RUN, *words, "--train.steps=20", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    steps = [read_jsonl(path) for path in sorted((tmp_path / "run" / "rollouts").glob("step-*.jsonl.gz"))]
    found = [line["policy/loss"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert found == pytest.approx(reference_losses(steps, 1e-4), abs=1e-5)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 3 = ?", "completion": "5"},
        {"messages": [USER, said("5"), USER, said("5")]},
        {"text": "Two and three are five."},
        {"prompt": "2 + 3 = ?", "chosen": "5", "rejected": "6"},
    ],
    ids=lambda row: "-".join(row),
)
def test_a_run_trains_on_each_form_of_rows(tmp_path: Path, row: dict[str, Any]) -> None:
    words = rows_in(tmp_path, [{"id": str(i), **row} for i in range(6)])
    done = rlkit_in_process("fit", *RUN, *words, "--out=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [line["policy/loss"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert losses[-1] < losses[0]
    assert "warning" not in done.stdout


@pytest.mark.parametrize(
    ("rows", "words", "message"),
    [
        ([{"prompt": "2 + 3 = ?"}], (), "has no recorded answer; rows need a column `completion`"),
        ([{"prompt": "2 + 3 = ?", "completion": "5 " * 5000}], (), "tokens, but the context of model.path 'tiny'"),
        ([{"question": "2 + 3 = ?"}], (), "no field 'prompt' (task.prompt_field); the row has: question"),
        (
            [{"prompt": "2 + 3 = ?", "completion": "5"}], ("--loss=SimPO",),
            "loss SimPO compares the answers to a prompt, but no prompt has two with unequal rewards",
        ),
        (
            [{"prompt": "2 + 3 = ?", "completion": "5"}], ("--advantage=GRPO",),
            "loss CrossEntropy reads no advantages, but the recipe has a section `advantage:`; remove it",
        ),
        (
            [{"prompt": "2 + 3 = ?", "completion": "5"}], ("--correction.high=2",),
            "whose completions no policy has sampled, but the recipe has a section `correction:`; remove it",
        ),
    ],
)  # fmt: skip
def test_untrainable_rows_are_refused_before_the_first_step(
    tmp_path: Path, rows: list[dict[str, Any]], words: tuple[str, ...], message: str
) -> None:
    done = rlkit_in_process("fit", *RUN, *rows_in(tmp_path, rows), *words, "--out=run", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_answers_that_are_too_long_are_left_out_or_cut(tmp_path: Path) -> None:
    rows = [{"prompt": "2 + 3 = ?", "completion": "5 " * (5000 if i == 0 else 1), "id": str(i)} for i in range(3)]
    words = (*rows_in(tmp_path, rows), "--log.rollouts.limit=null", "--train.steps=1")
    for side, lengths in (("drop", {0}), ("right", {0, 1})):
        done = rlkit_in_process("fit", *RUN, *words, f"--rollout.overlong={side}", f"--out={side}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found = read_jsonl(tmp_path / side / "rollouts" / "step-00001.jsonl.gz")
        assert len(found) == 4
        assert {min(len(row["tokens"]), 4096) // 4096 for row in found} == lengths


def test_the_engine_gets_weights_for_validations_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    sync = TorchEngine.sync

    async def noted(self: TorchEngine, stream: Any, version: int) -> None:
        synced.append(version)
        await sync(self, stream, version)

    monkeypatch.setattr(TorchEngine, "sync", noted)
    words = ("--validation={every: 2, limit: 4, samples: 1}", "--reward=MathReward", "--out=run", "--train.steps=4")
    done = rlkit_in_process("fit", *RUN[:1], *words, "--train.prompts_per_step=4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert synced == [0, 0, 2, 4]  # for the check of weights, and the validations before, on the way and after


def test_another_engine_answers_validations() -> None:
    class Other(TorchEngine):
        capabilities, reserved = Capability.CANDIDATES, 7

    engine = Recorded(Other())
    assert (engine.capabilities, engine.reserved) == (Capability.VALIDATION_ONLY, 7)
    assert Recorded().capabilities == Capability.VALIDATION_ONLY | Capability.READS_POLICY

"""A teacher that reads more than the policy: what it reads, and how its log-probs come back to the policy's tokens."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from rlkit_authors.models import save_random_model

from rlkit import api
from rlkit.base.errors import RecipeError
from rlkit.data.teacher import TeacherPrompts
from rlkit.interfaces.callback import Callback, RolloutsEnd, TrainingBatch
from rlkit.models.actor import Actor
from rlkit.models.load import load_policy, load_tokenizer, stop_ids
from rlkit.models.reference import AveragedPolicy, WeightAverage
from rlkit.recipe import Model, Teacher
from rlkit.rollout.collate import collate
from rlkit.rollout.template import ChatTemplate
from rlkit.testing import random_model
from rlkit.train.teacher import teacher_rows
from rlkit.types import Message, Prompt, Rendered, StopReason, Trajectory
from tests.conftest import FAST, read_jsonl, rlkit_in_process

HINT = "{prompt}\nThe answer is {answer}."
RUN = ("--recipe=quick_distill", *FAST, "--validation=null", "--out=run", "--reward=null", "--teacher.path=null")


def trajectory(tokens: list[int], mask: list[int]) -> Trajectory:
    prompt = Prompt("p", [{"role": "user", "content": "q"}])
    zeros = [0.0] * len(tokens)
    return Trajectory(prompt, 0, tokens, [bool(x) for x in mask], zeros, [0] * len(tokens), StopReason.STOP)


def test_completions_are_read_after_another_prompt() -> None:
    """By hand: a row of two turns with a tool's token 6 between, and a shorter one."""
    rows = [trajectory([1, 2, 5, 6, 7], [0, 0, 1, 0, 1]), trajectory([3, 4], [0, 1])]
    batch = collate(rows)
    found = teacher_rows(batch, rows, [Rendered([9, 9, 9]), Rendered([8, 8, 8, 8])], context=100)
    assert found.batch.tokens.tolist() == [[9, 9, 9, 5, 6, 7], [8, 8, 8, 8, 4, 0]]
    assert found.batch.mask.int().tolist() == [[0, 0, 0, 1, 0, 1], [0, 0, 0, 0, 1, 0]]
    assert torch.equal(found.read, batch.mask)
    assert found.restore(10.0 * found.batch.tokens).tolist() == [[0, 0, 50, 0, 70], [0, 40, 0, 0, 0]]
    by_candidate = torch.stack((found.batch.tokens, -found.batch.tokens), dim=-1).float()
    assert found.restore(by_candidate)[0, 4].tolist() == [7, -7]
    assert found.restore(by_candidate).shape == (2, 5, 2)


def test_tokens_beyond_the_teachers_context_are_not_read() -> None:
    rows = [trajectory([1, 2, 5, 6, 7], [0, 0, 1, 0, 1]), trajectory([3, 4], [0, 1])]
    found = teacher_rows(collate(rows), rows, [Rendered([9, 9, 9]), Rendered([8] * 5)], context=5)
    assert found.batch.tokens.tolist() == [[9, 9, 9, 5, 6], [8, 8, 8, 8, 8]]
    back = found.restore(found.batch.tokens.float())
    assert back.nan_to_num(-1).tolist() == [[0, 0, 5, 0, -1], [0, -1, 0, 0, 0]]


def test_a_rank_without_rows_reads_none() -> None:
    found = teacher_rows(collate([]), [], [], context=5)
    assert found.restore(found.batch.rollout_logps).shape == (0, 0)


def test_the_context_takes_the_place_of_the_last_text_of_a_user() -> None:
    messages: list[Message] = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "well"},
        {"role": "user", "content": "2 + 2 = ?", "name": "Ann"},
        {"role": "system", "content": "be brief"},
    ]
    prompt = Prompt("p", deepcopy(messages), "4", {"shown": {"how": ["two", "and two"]}})
    made = TeacherPrompts(100, "{prompt} {{think}} {shown.how} {answer}").prompt(prompt)
    assert made.messages[2] == {"role": "user", "content": '2 + 2 = ? {think} ["two", "and two"] 4', "name": "Ann"}
    assert made.messages[:2] + made.messages[3:] == messages[:2] + messages[3:]
    assert prompt.messages == messages
    assert TeacherPrompts(100, None).prompt(prompt) is prompt


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{prompt} {__class__}", "prompt 'p': no field '__class__' (teacher.context); the row has: answer, prompt"),
        ("{prompt} {answer.__class__}", "prompt 'p': no field 'answer.__class__' (teacher.context)"),
        ("{prompt} {hint}", "prompt 'p': no field 'hint' (teacher.context); the row has: answer, prompt"),
        ("{prompt} {answer}", "prompt 'p': 'answer' is null, but teacher.context needs it"),
        ("{prompt} {answer!r}", "teacher.context is '{prompt} {answer!r}', expected only names of columns"),
        ("{prompt} {answer:>9}", "expected only names of columns"),
        ("{prompt} {", "teacher.context is '{prompt} {': "),
        ("{prompt} {}", "expected only names of columns"),
        ("The answer is {answer}.", "teacher.context is 'The answer is {answer}.', expected {prompt} in it"),
        ("", "expected a column in it"),
    ],
)
def test_what_is_no_context(text: str, message: str) -> None:
    prompt = Prompt("p", [{"role": "user", "content": "2 + 2 = ?"}])
    with pytest.raises(RecipeError) as error:
        TeacherPrompts(100, text).prompt(prompt)
    assert message in str(error.value)


def test_a_prompt_without_a_users_text_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"prompt 'p' has no text of a user"):
        TeacherPrompts(100, "{prompt}!").prompt(Prompt("p", [{"role": "system", "content": "play"}]))


def chat_template() -> ChatTemplate:
    model = Model("tiny")
    tokenizer = load_tokenizer(model)
    return ChatTemplate(tokenizer, stop_ids(model, tokenizer))


def test_a_prompt_that_leaves_the_teacher_no_room() -> None:
    """The template adds 30 tokens to a text of one byte each."""
    template = chat_template()
    prompts = [Prompt(str(n), [{"role": "user", "content": "q"}], "\0" * n) for n in (2, 40)]
    lengths = [len(template.start(prompt.messages)) for prompt in prompts]
    room = lengths[0] + 12
    assert TeacherPrompts(room, None).fits(template, prompts, lengths) == [True, True]
    assert TeacherPrompts(room, "{prompt}{answer}", "drop").fits(template, prompts, lengths) == [True, False]
    assert TeacherPrompts(room, None, "drop").fits(template, prompts, [room - 1, room]) == [True, False]
    message = rf"prompt '40' has {lengths[1] + 40} tokens as the teacher reads it, but the teacher's context is {room}"
    with pytest.raises(RecipeError, match=message):
        TeacherPrompts(room, "{prompt}{answer}").fits(template, prompts, lengths)
    cut = TeacherPrompts(room, "{prompt}{answer}", "right")
    assert cut.fits(template, prompts, lengths) == [True, True]
    start = cut.start(template, Trajectory(prompts[1], 0, [], [], [], [], StopReason.STOP)).tokens
    assert len(start) == room - 1
    assert "q" + "\0" * 11 + "<|im_end|>" in template.codec.decode(start)


def test_what_an_environment_says_first_follows_the_context() -> None:
    template, ask = chat_template(), [{"role": "user", "content": "q"}]
    opening = {"role": "user", "content": "move!"}
    played = Trajectory(Prompt("p", ask, "4"), 0, [], [], [], [], StopReason.STOP)
    played.messages = [*ask, opening, {"role": "assistant", "content": "left"}, {"role": "user", "content": "more"}]
    start = TeacherPrompts(100, HINT).start(template, played).tokens
    assert start == template.start([{"role": "user", "content": "q\nThe answer is 4."}, opening])


def test_the_policys_average_teaches_in_its_own_context_only() -> None:
    actor, other = Actor(random_model("qwen2", seed=1)), Actor(random_model("qwen2", seed=2))
    tokens, mask = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[False, False, True, True]])
    average = WeightAverage(other, 0.5)
    average._trained = list(actor.parameters())
    before, expected = (one(tokens, mask).logps.detach() for one in (actor, other))
    teacher = AveragedPolicy(actor, average)
    with teacher.applied():
        torch.testing.assert_close(teacher.logps(tokens, mask, 1.0), expected)
    assert torch.equal(teacher.logps(tokens, mask, 1.0), before)


class Sees(Callback):
    """Keeps what each step trained on."""

    def __init__(self) -> None:
        self.trajectories: list[Trajectory] = []
        self.batches: list[Any] = []

    def on_rollouts(self, event: RolloutsEnd) -> None:
        self.trajectories = list(event.trajectories)

    def on_batch(self, event: TrainingBatch) -> None:
        self.batches.append(deepcopy(event.batch))


def taught(folder: Path, **changes: Any) -> Sees:
    """Train for a step in which the policy teaches itself; return what the callback saw."""
    seen = Sees()
    api.fit(
        api.Recipe(
            **{
                "model": "tiny",
                "task": "Arithmetic",
                "reward": None,
                "advantage": None,
                "loss": "PolicyGradient",
                "teacher": {"context": HINT},
                "rollout": {"engine": "TorchEngine", "group_size": 3, "sampling": {"max_tokens": 12}},
                "train": {"steps": 1, "prompts_per_step": 4, "lr": 1e-3},
                "validation": None,
                "callbacks": [seen],
                "fabric": {"accelerator": "cpu", "devices": 1},
                **changes,
            }
        ),
        out=folder / "run",
        quiet=True,
    )
    return seen


def by_transformers(model: str, rendered: str, answer: list[int]) -> torch.Tensor:
    """Return the log-probs of an answer's tokens after a rendered prompt, from one plain pass."""
    policy, tokenizer = load_policy(Model(model)), load_tokenizer(Model(model))
    start = tokenizer.encode(rendered, add_special_tokens=False)
    ids = torch.tensor([[*start, *answer]])
    with torch.no_grad():
        logps = policy(input_ids=ids).logits[0].log_softmax(-1)
    return logps[len(start) - 1 : -1].gather(1, ids[0, len(start) :, None])[:, 0]


TOOLS = {
    "model": "tiny-tools",
    "tools": {"calculator": "Calculator"},
    "parser": "HermesParser",
    "conversation": {"turns": 3},
    "rollout": {"engine": "TorchEngine", "group_size": 2, "sampling": {"max_tokens": 72}},
}


@pytest.mark.parametrize("changes", [{}, pytest.param(TOOLS, marks=pytest.mark.slow)], ids=["one turn", "tools"])
def test_the_policy_with_more_in_its_context_is_its_teacher(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Each row's log-probs are those of transformers for the conversation that has the answer in its first message."""
    seen = taught(tmp_path, **changes)
    [batch], name = seen.batches, str(changes.get("model", "tiny"))
    assert len(batch) == len(seen.trajectories) > 4
    for i, one in enumerate(seen.trajectories):
        [ask] = one.prompt.messages
        first = one.mask.index(True)
        student = load_tokenizer(Model(name)).decode(one.tokens[:first])
        assert student.count(ask["content"]) == 1
        rendered = student.replace(ask["content"], f"{ask['content']}\nThe answer is {one.prompt.answer}.")
        expected = by_transformers(name, rendered, one.tokens[first:]) * torch.tensor(one.mask[first:])
        found = batch.teacher_logps[i, first : len(one.tokens)]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    several = any(False in one.mask[one.mask.index(True) :] for one in seen.trajectories)
    assert several == bool(changes)  # turns of a tool lie between the policy's
    torch.testing.assert_close(batch.advantages, (batch.teacher_logps - batch.trainer_logps) * batch.mask)
    assert float(batch.advantages.abs().max()) > 0.1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--teacher={}",),
            "teacher.path is null: the policy itself, which without teacher.context has nothing to teach",
        ),
        (("--teacher.context={prompt} {hint}",), "no field 'hint' (teacher.context); the row has: answer, prompt"),
        (("--teacher.context={answer}",), "teacher.context is '{answer}', expected {prompt} in it"),
        (("--teacher.context={prompt}!", "--rollout.engine=Recorded"), "has a section `teacher:`; remove it"),
    ],
)
def test_what_is_refused_before_the_run(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = rlkit_in_process("fit", *RUN, *words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


def test_prompts_without_room_for_the_teacher_are_dropped(tmp_path: Path) -> None:
    """The context of the tiny model is 4,096 tokens, of a byte each."""
    rows = [{"prompt": f"{n} + 1 = ?", "answer": str(n + 1), "proof": "1" * 4096 * (n % 2)} for n in range(8)]
    told = {"context": "{prompt}{proof}"}
    rollout = {"engine": "TorchEngine", "group_size": 2, "sampling": {"max_tokens": 8}}
    with pytest.raises(RecipeError, match=r"has 41\d\d tokens as the teacher reads it, .* teacher's context is 4096"):
        taught(tmp_path, task=rows, teacher=told, rollout=rollout)
    seen = taught(tmp_path, task=rows, teacher=told, rollout=rollout | {"overlong": "drop"})
    assert {one.prompt.meta["proof"] for one in seen.trajectories} == {""}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny", {"path": "tiny", "lora": {}}], ids=["all weights", "adapters"])
def test_the_teacher_keeps_the_weights_that_the_run_began_with(tmp_path: Path, model: Any) -> None:
    """In the second step its log-probs are still those of the model, and the policy's are not."""
    train = {"steps": 2, "prompts_per_step": 4, "lr": 1e-2, "optimizer": "AdamW"}
    seen = taught(tmp_path, model=model, train=train, teacher={"context": "{prompt} "})
    [_, batch], one = seen.batches, seen.trajectories[0]
    first, end = one.mask.index(True), len(one.tokens)
    rendered = load_tokenizer(Model("tiny")).decode(one.tokens[:first])
    reads, writes = (
        by_transformers("tiny", text, one.tokens[first:]) for text in (rendered.replace("?", "? "), rendered)
    )
    torch.testing.assert_close(batch.teacher_logps[0, first:end], reads, atol=1e-4, rtol=0)
    assert float((batch.trainer_logps[0, first:end] - writes).abs().max()) > 1e-2


@pytest.mark.slow
def test_rollouts_ahead_are_read_with_the_context(tmp_path: Path) -> None:
    words = ("--teacher.context={prompt} {answer}", "--rollout.max_staleness=1", "--correction.high=2")
    done = rlkit_in_process("fit", *RUN, *words, "--train.ema=0.5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert all(line["teacher/kl"] > 0 and line["teacher/unread"] == 0 for line in lines)


def sums(sources: str) -> list[dict[str, str]]:
    return [{"prompt": f"{n} + 1 = ?", "answer": str(n + 1), "data_source": name} for n, name in enumerate(sources)]


def test_each_source_has_the_log_probs_of_its_own_teacher(tmp_path: Path) -> None:
    """Prompts of c have no teacher: nothing is learned from them."""
    folders = {name: str(save_random_model(tmp_path / name, seed=seed)) for seed, name in enumerate("ab")}
    rollout = {"engine": "TorchEngine", "group_size": 2, "sampling": {"max_tokens": 8}}
    train = {"steps": 1, "prompts_per_step": 6, "lr": 1e-3}
    seen = taught(tmp_path, task=sums("abcabc"), teacher={"sources": folders}, rollout=rollout, train=train)
    [batch], [line] = seen.batches, read_jsonl(tmp_path / "run" / "metrics.jsonl")
    behind: dict[str, list[torch.Tensor]] = {"a": [], "b": [], "c": []}
    for i, one in enumerate(seen.trajectories):
        first, name = one.mask.index(True), one.prompt.source_name
        answer = slice(first, len(one.tokens))
        if name == "c":
            assert batch.teacher_logps[i, answer].isnan().all()
            assert not batch.advantages[i].any()
            continue
        start = load_tokenizer(Model("tiny")).decode(one.tokens[:first])
        expected = by_transformers(folders[name], start, one.tokens[first:])
        torch.testing.assert_close(batch.teacher_logps[i, answer], expected, rtol=1e-4, atol=1e-4)
        behind[name].append(batch.trainer_logps[i, answer] - expected)
    for name in "ab":
        assert line[f"teacher/kl/{name}"] == pytest.approx(float(torch.cat(behind[name]).mean()), rel=1e-4)
    assert line["teacher/kl"] == pytest.approx(float(torch.cat(behind["a"] + behind["b"]).mean()), rel=1e-4)
    assert line["teacher/unread"] == sum(one.response_length for one in seen.trajectories if one.prompt.id in "25")
    assert not {name for name in line if name.startswith("teacher/")} - {
        "teacher/kl", "teacher/kl/a", "teacher/kl/b", "teacher/unread",
    }  # fmt: skip


@pytest.mark.slow
def test_each_source_has_the_likeliest_tokens_of_its_own_teacher(tmp_path: Path) -> None:
    """The first teacher has no prompt in the first step, and prompts of c have no teacher."""
    folders = {name: str(save_random_model(tmp_path / name, seed=seed)) for seed, name in enumerate("ab")}
    rows = sums("bcbca")
    train = {"steps": 1, "prompts_per_step": 2, "lr": 1e-3, "seed": 0}
    loss = {"class_path": "Distillation", "init_args": {"top_k": 3}}
    seen = taught(tmp_path, task=rows, teacher={"sources": folders}, train=train, loss=loss)
    [batch], [line] = seen.batches, read_jsonl(tmp_path / "run" / "metrics.jsonl")
    names = [one.prompt.source_name for one in seen.trajectories]
    assert set(names) == {"b", "c"}
    for i, one in enumerate(seen.trajectories):
        first = one.mask.index(True)
        logps, ids = batch.teacher_top_logps[i, first : len(one.tokens)], batch.teacher_top_ids[i, first]
        assert logps.isnan().all() if names[i] == "c" else logps.exp().sum(-1).allclose(torch.ones(len(logps)))
        if names[i] == "b":
            start = load_tokenizer(Model("tiny")).decode(one.tokens[:first])
            assert float(logps[0, 0]) == pytest.approx(
                float(by_transformers(folders["b"], start, [int(ids[0])])), rel=1e-4
            )
    assert line["teacher/unread"] == sum(
        one.response_length for one in seen.trajectories if one.prompt.source_name == "c"
    )


def test_other_sources_have_the_policy_itself_or_the_path() -> None:
    teacher = Teacher("general", sources={"math": "runs/math"})
    assert [teacher.path_of(source) for source in ("math", "code", "")] == ["runs/math", "general", "general"]
    assert Teacher(context=HINT, sources={"math": "runs/math"}).path_of("code") is None
    assert teacher.paths() == {"teacher.path": "general", "teacher.sources.math": "runs/math"}
    assert Prompt("p", [], meta={"data_source": "a"}, source="b").source_name == "b"


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ({"sources": {"c": "tiny"}}, "teacher.sources has 'c', from which no prompt is; the sources are: 'a', 'b'"),
        ({"sources": {"a": "gone"}}, "teacher.sources.a is 'gone', which cannot be loaded: "),
        ({"sources": {"a": "./gone"}}, "teacher.sources.a is './gone', which does not exist; "),
        ({"sources": {}}, "teacher.path is null: the policy itself"),
    ],
)
def test_what_is_refused_of_sources(tmp_path: Path, teacher: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        taught(tmp_path, task=sums("abab"), teacher=teacher)
    assert message in str(error.value)

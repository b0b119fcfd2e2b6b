"""Rewards that combine, call out, or were learned."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlkit_authors.models import build_tokenizer
from rlkit_rewards.model import load_classifier

from rlkit.base.errors import RecipeError
from rlkit.base.functions import load_once
from rlkit.base.retry import RetryPolicy
from rlkit.cli.main import main
from rlkit.interfaces.reward import RewardManager, as_score
from rlkit.rewards import (
    BatchReward,
    Composite,
    ExactReward,
    MathReward,
    ModelReward,
    Overlong,
    PythonReward,
    RemoteReward,
    Router,
)
from rlkit.rewards.python import AsyncFunctionReward
from rlkit.rollout.scoring import score
from rlkit.rollout.workers import Workers
from rlkit.tasks import HFDataset
from rlkit.testing import check_reward, example_trajectory
from rlkit.tools import Calculator
from rlkit.types import Prompt, Score, Trajectory
from tests.stubs import Stub, classifier_runtime, serving
from tests.unit.clock import SkippingLoop
from tests.unit.rollout.test_conversation import call, hold, tools


def scored(
    reward: RewardManager, trajectories: Sequence[Trajectory], workers: Workers, loop: SkippingLoop | None = None
) -> list[Score]:
    """Score as a run does."""
    runtime = SimpleNamespace(
        score=lambda r, t: score(r, t, workers),
        work=workers.call,
        device=torch.device("cpu"),
        autocast=nullcontext,
        placed_classifier=lambda path, dtype: None,
        tokenizer=build_tokenizer(),
    )
    reward.bind(runtime)  # type: ignore[arg-type]
    return (loop or SkippingLoop()).run(score(reward, trajectories, workers))


class NoWorkers(Workers):
    """Fails where a call is made."""

    async def call_each(self, *_: object) -> Any:
        raise AssertionError("a worker was called")


@pytest.mark.parametrize(
    ("text", "at_once"),
    [
        ("#### 4", True), ("#### 5", True), ("\\boxed{4.0}", True), ("four", True), ("", True), ("#### 50%", True),
        ("#### x + 1", False), ("\\boxed{\\sqrt{16}}", False), ("4" + " " * 2000, False),
    ],
)  # fmt: skip
def test_plain_answers_are_graded_without_a_worker(text: str, at_once: bool) -> None:
    """The reference is 4."""
    found = MathReward().grade_at_once(example_trajectory(text))
    assert (found is not None) == at_once
    assert found in (None, MathReward().grade(example_trajectory(text)))


def test_only_what_is_not_graded_at_once_goes_to_a_worker(workers: Workers) -> None:
    texts = ("#### 4", "#### x + 1", "#### 5", "#### \\frac{8}{2}")
    assert [s.reward for s in scored(MathReward(), [example_trajectory(t) for t in texts], workers)] == [1, 0, 0, 1]
    none = NoWorkers(1)
    assert [s.reward for s in scored(MathReward(), [example_trajectory(t) for t in texts[::2]], none)] == [1, 0]
    none.close()


def test_an_overridden_grade_has_no_inherited_shortcut() -> None:
    class Half(ExactReward):
        def grade(self, trajectory: Trajectory) -> Score:
            return Score(0.5)

    class Named(ExactReward):
        pass

    assert Half().grade_at_once(example_trajectory("4")) is None
    assert Named().grade_at_once(example_trajectory("4")) == Score(1.0, {"accuracy": 1.0}, answer="4")


def test_an_error_at_once_is_left_to_the_worker(workers: Workers) -> None:
    class Hasty(ExactReward):
        def grade_at_once(self, trajectory: Trajectory) -> Score | None:
            raise ValueError("too hasty")

    assert scored(Hasty(), [example_trajectory("4")], workers)[0].reward == 1


def test_overlong_by_hand() -> None:
    # free up to 6 tokens, then -1/4 a token
    found = check_reward(Overlong(max_tokens=10, buffer=4), ["x" * n for n in (1, 6, 7, 10, 12)])
    assert [s.reward for s in found] == [0, 0, -0.25, -1, -1.5]
    with pytest.raises(RecipeError, match="buffer=20 and max_tokens=10"):
        Overlong(max_tokens=10, buffer=20)


def test_composite_is_a_weighted_sum_with_components(workers: Workers) -> None:
    reward = Composite({"math": MathReward(), "short": Overlong(8, 4)}, {"short": 0.5})
    found = scored(reward, [example_trajectory(t) for t in ("#### 4", "4", "#### 5")], workers)
    # "#### 4" has 6 tokens: 2 of 4 over, times 0.5
    assert [s.reward for s in found] == [0.75, 1.0, -0.25]
    assert found[0].components == {"accuracy": 1.0, "strict": 1.0, "format": 1.0, "math": 1.0, "short": -0.5}
    assert [s.answer for s in found] == ["4", "4", "5"]
    assert set(reward.components or ()) >= {"math", "short", "accuracy"}


class ByTurn(RewardManager):
    """Rewards its one turn."""

    def __init__(self, turn: float) -> None:
        self.turn = turn

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        return [Score(0.0, turn_rewards=[self.turn]) for _ in trajectories]


def test_composite_keeps_the_rewards_of_turns(workers: Workers) -> None:
    """2 * 0.5 + 1 * -0.25; a component without any adds nothing, and none give none."""
    rewards = {"math": MathReward(), "a": ByTurn(0.5), "b": ByTurn(-0.25)}
    [found] = scored(Composite(rewards, {"a": 2.0}), [example_trajectory("4")], workers)
    assert (found.reward, found.turn_rewards) == (1.0, [0.75])
    [plain] = scored(Composite({"math": MathReward()}), [example_trajectory("4")], workers)
    assert plain.turn_rewards is None


def test_composite_with_a_failing_component_fails_with_its_name(workers: Workers) -> None:
    found = scored(Composite({"math": MathReward()}), [example_trajectory("4", answer=None)], workers)
    assert found[0].reward is None
    assert "component math: prompt 'example' has no answer" in (found[0].error or "")
    with pytest.raises(RecipeError, match=r"Composite weighs \['style'\], expected names among its rewards: math"):
        Composite({"math": MathReward()}, {"style": 1.0})


def test_router_chooses_by_the_prompt(workers: Workers) -> None:
    reward = Router({"exact": ExactReward(), "math": MathReward()}, default=None)
    a, b, c = (example_trajectory("it is 4") for _ in range(3))
    a.prompt.meta, b.prompt.meta, c.prompt.meta = (
        {"data_source": "exact"},
        {"data_source": "math"},
        {"data_source": "?"},
    )
    assert [scored(reward, [t], workers)[0].reward for t in (a, b, c)] == [0.0, 1.0, None]
    assert scored(Router({"m": MathReward()}, default="m"), [c], workers)[0].reward == 1.0
    with pytest.raises(RecipeError, match="default='x'"):
        Router({"m": MathReward()}, default="x")


CODE = """
import asyncio

def number(text):
    return float(len(text))

async def components(text, answer, meta):
    await asyncio.sleep(0)
    return {"reward": 1.0, "right": text == answer, "level": meta.get("level", 0)}

def broken(text):
    raise KeyError("rubric")

def column(text, level, bonus=0.5):
    return level + bonus

def batch(completions, answer, **columns):
    [[message]], [level] = completions, columns["level"]
    assert columns["prompts"][0][0]["role"] == "user" and columns["completion_ids"] == [[3]]
    assert message["role"] == "assistant"
    return [level + 0.25 * (message["content"] == answer[0])]

def texts(prompts, completions):
    return [float(prompts == ["2 + 2 = ?"] and completions == ["4"])]

def everything(text, **others):
    return float(sorted(others) == ["answer", "completion", "level", "messages", "meta", "trajectory"])

def asks_in_capitals(text, Level):
    return 1.0

def asks(text, rubric):
    return 1.0

def asks_in_lists(completions, rubric):
    return [1.0]

def flat(completions):
    return 1.0

def nameless(text):
    return {"score": 1.0}


def worded(text):
    return "0.5"
"""


@pytest.mark.parametrize(
    ("name", "reward", "components"),
    [
        ("number", 1.0, {}),
        ("components", 1.0, {"right": 1.0, "level": 3.0}),
        ("column", 3.5, {}),
        ("batch", 3.25, {}),
        ("everything", 1.0, {}),
    ],
)
def test_python_reward_calls_any_function(
    tmp_path: Path, workers: Workers, name: str, reward: float | None, components: dict[str, float]
) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    trajectory = example_trajectory("4")
    trajectory.prompt.meta = {"level": 3}
    [found] = scored(PythonReward(f"{tmp_path}/mine.py:{name}", allow_code=True), [trajectory], workers)
    assert (found.reward, found.components, found.error) == (reward, components, None)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("broken", "KeyError: 'rubric'"),
        (
            "asks",
            "argument 'rubric', expected any of: level, completion, text, answer, messages, meta, trajectory; or",
        ),
        (
            "asks_in_lists",
            "argument 'rubric', expected any of: level, answer, prompts, completions, completion_ids$",
        ),
        ("asks_in_capitals", "has the argument 'Level', did you mean 'level'[?]$"),
        ("flat", "returned 1.0, expected a list with one number"),
        ("nameless", r"returned the components \['score'\], expected one named 'reward'"),
        ("worded", r"mine.py:worded returned '0.5', expected finite numbers"),
    ],
)
def test_python_reward_says_what_a_function_got_wrong(tmp_path: Path, workers: Workers, name: str, error: str) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    trajectory = example_trajectory("4")
    trajectory.prompt.meta = {"level": 3, "no name": 4}
    [found] = scored(PythonReward(f"{tmp_path}/mine.py:{name}", allow_code=True), [trajectory], workers)
    assert found.reward is None
    assert re.search(error, found.error or ""), found.error


COMPUTE_SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and extra_info == {"index": 7}
    return {"score": float(solution_str == ground_truth), "acc": True, "pred": solution_str}

def plain(solution_str, ground_truth):
    return solution_str == ground_truth

def nameless(solution_str):
    return {"reward": 1.0}
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("compute_score", (1.0, {"acc": 1.0}, "")),
        ("plain", (1.0, {}, "")),
        ("nameless", (None, {}, "mine.py:nameless returned the components ['reward'], expected one named 'score'")),
    ],
)
def test_verls_compute_score_is_called_as_it_is(
    tmp_path: Path, workers: Workers, name: str, expected: tuple[float | None, dict[str, float], str]
) -> None:
    (tmp_path / "mine.py").write_text(COMPUTE_SCORE)
    trajectory = example_trajectory("4")
    trajectory.prompt.meta = {"data_source": "sums", "extra_info": {"index": 7}}
    [score] = scored(PythonReward(f"{tmp_path}/mine.py:{name}", allow_code=True), [trajectory], workers)
    assert (score.reward, score.components) == expected[:2]
    assert (score.error or "").endswith(expected[2])
    assert bool(score.error) == bool(expected[2])


BATCH = """
import os, time

def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
    assert data_sources == ["sums"] * 3 and extra_infos == [{"index": 7}] * 3
    best = min(map(len, solution_strs))
    return [
        {"score": (text == truth) / 2 + (len(text) == best) / 2, "pred": text, "acc": text == truth}
        for text, truth in zip(solution_strs, ground_truths)
    ]

async def ranked(completions, answer, data_source, **columns):
    texts = [messages[-1]["content"] for messages in completions]
    assert data_source == ["sums"] * 3 and len(columns["completion_ids"]) == 3
    return [sorted(texts).index(text) / 2 for text in texts]

def short(solution_strs):
    return [1.0]

def hangs(solution_strs):
    time.sleep(60)

def dies(solution_strs):
    os._exit(3)

def odd(solution_strs):
    return [1.0, float("nan"), 0.0]
"""


@pytest.mark.parametrize(
    ("name", "rewards", "components"),
    [
        ("compute_score", [1.0, 0.5, 0.0], [{"acc": 1.0}, {"acc": 0.0}, {"acc": 0.0}]),
        ("ranked", [0.0, 0.5, 1.0], [{}, {}, {}]),
    ],
)
def test_batch_reward_sees_the_samples_of_a_prompt(
    tmp_path: Path, workers: Workers, name: str, rewards: list[float], components: list[dict[str, float]]
) -> None:
    """The texts are 4 (right and shortest), 5 (shortest) and "five"."""
    (tmp_path / "mine.py").write_text(BATCH)
    trajectories = [example_trajectory(text) for text in ("4", "5", "five")]
    for trajectory in trajectories:
        trajectory.prompt.meta = {"data_source": "sums", "extra_info": {"index": 7}}
    scores = scored(BatchReward(f"{tmp_path}/mine.py:{name}", allow_code=True), trajectories, workers)
    assert [s.reward for s in scores] == rewards
    assert [s.components for s in scores] == components


TAKES_TAGS = """
def score(text, tags):
    count = len(tags)
    tags.clear()
    return float(count)

def batch(completions, tags, **columns):
    return [score(text, row) for text, row in zip(completions, tags)]

async def later(text, tags):
    return score(text, tags)
"""


@pytest.mark.parametrize("name", ["score", "batch", "later"])
def test_what_a_function_does_to_a_column_reaches_no_other(tmp_path: Path, name: str) -> None:
    (tmp_path / "r.py").write_text(TAKES_TAGS, encoding="utf-8")
    function = f"{tmp_path}/r.py:{name}"
    rewards: dict[str, RewardManager] = {
        "score": PythonReward(function, allow_code=True),
        "batch": BatchReward(function, allow_code=True),
        "later": AsyncFunctionReward(load_once(function)),
    }
    sample = example_trajectory("x")
    prompt = replace(sample.prompt, meta={"tags": ["red", "blue"]})
    samples = [replace(sample, prompt=prompt) for _ in range(4)]
    pool = Workers(1)
    try:
        for _ in range(3):  # from the second call on several samples are sent together
            assert [s.reward for s in scored(rewards[name], samples, pool)] == [2.0] * 4
    finally:
        pool.close()
    assert prompt.meta == {"tags": ["red", "blue"]}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("short", "mine.py:short returned [1.0], expected a list with 2 numbers"),
        ("hangs", "did not finish within 1 s"),
        ("dies", "took its worker process down (exit code 3)"),
    ],
)
def test_a_batch_that_fails_fails_its_group(tmp_path: Path, workers: Workers, name: str, problem: str) -> None:
    (tmp_path / "mine.py").write_text(BATCH)
    timeout = 1.0 if name == "hangs" else 60.0
    reward = BatchReward(f"{tmp_path}/mine.py:{name}", allow_code=True, timeout=timeout)
    scores = scored(reward, [example_trajectory("4"), example_trajectory("5")], workers)
    assert [s.reward for s in scores] == [None, None]
    assert all((s.error or "").startswith("BatchReward: ") and problem in (s.error or "") for s in scores)


def test_a_batch_function_is_checked_before_a_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BATCH)
    with pytest.raises(RecipeError, match="has no function 'shorts'; did you mean 'short'"):
        BatchReward(f"{tmp_path}/mine.py:shorts", allow_code=True)
    with pytest.raises(RecipeError, match="BatchReward names .* set allow_code: true"):
        BatchReward(f"{tmp_path}/mine.py:short")


def test_a_sample_without_a_number_fails_alone(tmp_path: Path, workers: Workers) -> None:
    (tmp_path / "mine.py").write_text(BATCH)
    reward = BatchReward(f"{tmp_path}/mine.py:odd", allow_code=True)
    scores = scored(reward, [example_trajectory(text) for text in ("4", "5", "6")], workers)
    assert [s.reward for s in scores] == [1.0, None, 0.0]
    assert "mine.py:odd returned nan, expected finite numbers" in (scores[1].error or "")


def test_python_reward_hands_over_texts_where_it_is_told(tmp_path: Path, workers: Workers) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    reward = PythonReward(f"{tmp_path}/mine.py:texts", allow_code=True, completions="text")
    assert [s.reward for s in scored(reward, [example_trajectory(t) for t in ("4", "5")], workers)] == [1.0, 0.0]


def test_the_help_of_a_part_has_its_whole_description(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--reward.help", "PythonReward"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "`text` (the last turn), `answer`, `messages`" in shown
    assert "Args:" not in shown


SOURCES = {
    "def right(text): ...\nclass Other: ...": "has no function 'score'; it defines: right, Other",
    "def scores(text):\n    score = 1": "has no function 'score'; did you mean 'scores'?",
    "def score(:": "is not valid Python: SyntaxError",
    "if True:\n    def score(text): ...": None,
    "try:\n    from a import b as score\nexcept ImportError:\n    score = None": None,
    "from a import *": None,
    "globals()['score'] = len": None,
    "def __getattr__(name): ...": None,
    "score = lambda text: 1.0": None,
}


@pytest.mark.parametrize(("source", "problem"), SOURCES.items())
def test_a_file_without_the_function_is_refused_unrun(tmp_path: Path, source: str, problem: str | None) -> None:
    (tmp_path / "mine.py").write_text(f"{source}\nraise SystemExit\n" if problem is None else source)
    if problem is None:
        PythonReward(f"{tmp_path}/mine.py:score", allow_code=True)
    else:
        with pytest.raises(RecipeError, match="mine.py") as error:
            PythonReward(f"{tmp_path}/mine.py:score", allow_code=True)
        assert problem in str(error.value)


def test_python_reward_runs_code_only_where_it_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="set allow_code: true"):
        PythonReward("mine.py:f")
    with pytest.raises(RecipeError, match="there is no file"):
        PythonReward(f"{tmp_path}/mine.py:f", allow_code=True)
    with pytest.raises(RecipeError, match=r"expected file.py:name or package.module:name"):
        PythonReward("mine.py", allow_code=True)


class Service(Stub):
    """Scores by length; fails as often as it is told."""

    failures, status = 0, 500
    sizes: list[int] = []  # noqa: RUF012

    def do_POST(self) -> None:
        items = self.read()["items"]
        Service.sizes.append(len(items))
        if Service.failures:
            Service.failures -= 1
            self.send_error(Service.status)
            return
        scores = [{"reward": len(i["text"]), "components": {"n": 1.0}} if i["text"] else 0.5 for i in items]
        self.answer({"scores": scores})


@pytest.fixture
def url() -> Iterator[str]:
    Service.sizes = []
    with serving(Service) as url:
        yield f"{url}/"
    Service.failures = 0


def test_remote_reward_sends_batches_and_tries_again(url: str, workers: Workers) -> None:
    Service.failures = 1
    texts = ["abc", "", "ab", "a", "abcd"]
    found = scored(RemoteReward(url, batch_size=2), [example_trajectory(t) for t in texts], workers)
    assert [s.reward for s in found] == [3, 0.5, 2, 1, 4]
    assert found[0].components == {"n": 1.0}
    assert sorted(Service.sizes) == [1, 2, 2, 2] or sorted(Service.sizes) == [1, 1, 2, 2]


def test_remote_reward_asks_for_all_prompts_at_once() -> None:
    """No group waits for a thread while its own deadline runs: each request is answered only once all have come."""
    groups = 40
    together = threading.Barrier(groups, timeout=30)

    class Patient(Service):
        def do_POST(self) -> None:
            together.wait()
            super().do_POST()

    class Roomy(ThreadingHTTPServer):
        request_queue_size = 2 * groups  # connections that wait to be accepted

    async def all_groups(reward: RemoteReward) -> list[list[Score]]:
        return await asyncio.gather(*(reward.score([example_trajectory("abc")]) for _ in range(groups)))

    with serving(Roomy(("127.0.0.1", 0), Patient)) as url:
        scores = asyncio.run(all_groups(RemoteReward(f"{url}/", retry=RetryPolicy(retries=0))))
    assert [score.reward for [score] in scores] == [3] * groups


def test_remote_reward_that_stays_away_is_an_error(url: str, workers: Workers) -> None:
    Service.failures = 99
    [found] = scored(RemoteReward(url, retry=RetryPolicy(retries=1)), [example_trajectory("a")], workers)
    assert found.reward is None
    assert "500" in (found.error or "")
    assert "after 2 attempts" in (found.error or "")
    with pytest.raises(RecipeError, match="expected http://"):
        RemoteReward("localhost:1")


@pytest.mark.parametrize(("status", "attempts"), [(400, 1), (401, 1), (404, 1), (408, 3), (429, 3), (500, 3), (503, 3)])
def test_remote_reward_repeats_what_may_succeed_later(
    url: str, workers: Workers, monkeypatch: pytest.MonkeyPatch, status: int, attempts: int
) -> None:
    monkeypatch.setattr(Service, "status", status)
    monkeypatch.setattr("rlkit.base.retry._pause", lambda number: 0.0)
    Service.failures = 99
    [found] = scored(RemoteReward(url, retry=RetryPolicy(retries=2)), [example_trajectory("a")], workers)
    assert len(Service.sizes) == attempts
    assert f"answered {status}: " in (found.error or "")
    assert f"after {attempts} attempts" in (found.error or "")


def test_remote_reward_has_one_deadline_for_all_attempts(
    url: str, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends during the second attempt."""
    loop, respond, requests = SkippingLoop(), Service.do_POST, []

    def skipping(service: Service) -> None:
        requests.append(service.path)
        if len(requests) == 2:
            loop.skip_from_thread(60.0)
        respond(service)

    monkeypatch.setattr(Service, "do_POST", skipping)
    Service.failures = 999
    reward = RemoteReward(url, retry=RetryPolicy(retries=100, request_seconds=60.0))
    [found] = scored(reward, [example_trajectory("a")], workers, loop)
    reward.close()
    assert "there was no answer within 60 s; the last attempt: answered 500" in (found.error or "")
    assert len(requests) == 2


def classifier(folder: Path, template: str | None) -> tuple[str, Any]:
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    config = Qwen2Config(
        vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_labels=1, pad_token_id=tokenizer.pad_token_id, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder), model


@pytest.mark.parametrize("template", ["{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}", None])
def test_model_reward_renders_with_its_own_template(tmp_path: Path, workers: Workers, template: str | None) -> None:
    path, model = classifier(tmp_path / "rm", template)
    texts = ["4", "it is four", "4!"]
    found = scored(ModelReward(path, batch_size=2), [example_trajectory(t) for t in texts], workers)
    for text, result in zip(texts, found, strict=True):
        plain = f"[user] 2 + 2 = ? [assistant] {text} " if template else f"2 + 2 = ?\n\n{text}"
        ids = torch.tensor([build_tokenizer().encode(plain)])
        assert result.reward == pytest.approx(model(input_ids=ids).logits.item(), abs=1e-4)


@pytest.mark.parametrize("tokens", [None, 20])
def test_model_reward_stays_within_its_models_positions(tmp_path: Path, workers: Workers, tokens: int | None) -> None:
    """A model of BERT's kind has learned positions, and no others; a tokenizer may state fewer tokens."""
    from transformers import BertConfig, BertForSequenceClassification

    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    config = BertConfig(
        vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_labels=1,
        max_position_embeddings=40, initializer_range=0.3,
    )  # fmt: skip
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    if tokens is not None:
        tokenizer.model_max_length = tokens
    tokenizer.save_pretrained(tmp_path)
    text = "it is four, and not five: " * 4
    [found] = scored(ModelReward(str(tmp_path)), [example_trajectory(text)], workers)
    ids = torch.tensor([build_tokenizer().encode(f"2 + 2 = ?\n\n{text}")[-(tokens or 40) :]])
    assert found.reward == pytest.approx(model(input_ids=ids).logits.item(), abs=1e-4)


def test_model_reward_keeps_its_weights_in_bfloat16(tmp_path: Path, workers: Workers) -> None:
    path, _ = classifier(tmp_path / "rm", None)
    answers = [example_trajectory(text) for text in ("4", "it is four")]
    half = ModelReward(path, dtype="bfloat16")
    found, exact = scored(half, answers, workers), scored(ModelReward(path), answers, workers)
    assert {p.dtype for p in load_classifier(path, "bfloat16").parameters()} == {torch.bfloat16}
    for rounded, whole in zip(found, exact, strict=True):
        assert rounded.reward == pytest.approx(whole.reward, abs=0.05)
        assert rounded.reward != whole.reward


def test_model_reward_reads_no_pickle(tmp_path: Path, workers: Workers) -> None:
    path, model = classifier(tmp_path / "rm", None)
    torch.save(model.state_dict(), Path(path, "pytorch_model.bin"))
    Path(path, "model.safetensors").unlink()
    with pytest.raises(RecipeError, match="no file named model.safetensors"):
        scored(ModelReward(path), [], workers)


def test_model_reward_scores_the_whole_conversation(tmp_path: Path, workers: Workers) -> None:
    path, model = classifier(
        tmp_path / "rm", "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"
    )
    turns = {"calculator": Calculator()}
    [done] = hold(lambda request, turn: [call("calculator", expression="3+4"), "7"][turn], tools(**turns))
    roles = [(message["role"], message["content"]) for message in done.messages]
    asked = call("calculator", expression="3+4")
    assert roles == [("user", "?"), ("assistant", asked), ("tool", "7"), ("assistant", "7")]
    [found] = scored(ModelReward(path), [done], workers)
    ids = torch.tensor([build_tokenizer().encode(f"[user] ? [assistant] {asked} [tool] 7 [assistant] 7 ")])
    assert found.reward == pytest.approx(model(input_ids=ids).logits.item(), abs=1e-4)


def test_model_reward_scores_each_step(tmp_path: Path, workers: Workers) -> None:
    """`a = 1;b;` of one token a character has two steps: its end is the second's, since no text follows."""
    path, model = classifier(tmp_path / "rm", None)
    for text, steps in (("a = 1;b;", {5: "a = 1;", 7: "a = 1;b;"}), ("a;b", {1: "a;", 2: "a;b"}), ("a", {0: "a"})):
        trajectory = example_trajectory(text)
        trajectory.tokens[2:] = build_tokenizer().encode(text)
        [found] = scored(ModelReward(path, step=";"), [trajectory], workers)
        assert found.reward == 0
        expected = [0.0] * len(text)
        for index, prefix in steps.items():
            ids = torch.tensor([build_tokenizer().encode(f"2 + 2 = ?\n\n{prefix}")])
            expected[index] = model(input_ids=ids).logits.item()
        assert found.token_rewards == pytest.approx(expected, abs=1e-4)
    with pytest.raises(RecipeError, match="per_turn: true and step: ';', expected one of them"):
        ModelReward(path, per_turn=True, step=";")


def test_model_reward_that_is_not_there_says_so(tmp_path: Path, workers: Workers) -> None:
    with pytest.raises(RecipeError, match="ModelReward has path=.*which cannot be loaded"):
        scored(ModelReward(str(tmp_path)), [], workers)


def test_model_reward_keeps_the_event_loop_free(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four prompts of two forward passes, 25 s each, one prompt after another, with 60 s for each prompt."""
    path, _ = classifier(tmp_path / "rm", None)
    reward = ModelReward(path, batch_size=2, timeout=60.0)
    reward.bind(classifier_runtime())
    outputs, threads, loop = reward._outputs_of, [], SkippingLoop()

    def slow(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        threads.append((threading.current_thread().name.rpartition("_")[0], len(inputs["input_ids"])))
        loop.skip_from_thread(25.0)
        return outputs(inputs)

    monkeypatch.setattr(reward, "_outputs_of", slow)

    async def all_groups() -> list[list[Score]]:
        group = [example_trajectory(text) for text in ("4", "it is four", "4!")]
        return await asyncio.gather(*(score(reward, group, workers) for _ in range(4)))

    found = loop.run(all_groups())
    reward.close()
    assert [s.error for scores in found for s in scores] == [None] * 12
    assert threads == [("rlkit-model-reward", 2), ("rlkit-model-reward", 1)] * 4
    ModelReward(path).close()  # one that was never bound


def test_a_final_answer_is_kept_as_a_bounded_text(workers: Workers) -> None:
    """Through a worker too; what is no text is an error, as a reward that is no number is."""
    assert as_score(Score(1.0, answer="\ud800" + "7" * 10_000)).answer is not None
    assert len(as_score(Score(1.0, answer="7" * 10_000)).answer or "") <= 500
    assert as_score(Score(1.0, answer=7)).error is not None  # type: ignore[arg-type]
    found = scored(Router({"a": MathReward()}, default="a"), [example_trajectory(t) for t in ("so $4.0", "")], workers)
    assert [s.answer for s in found] == ["4", ""]
    found = scored(ExactReward(ignore_case=True), [example_trajectory(" Four ", "four")], workers)
    assert [(s.reward, s.answer) for s in found] == [(1.0, "four")]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def score(text, label): return float(text + label == 'xyes')", 1.0),  # the column that is the answer
        ("def score(text, review): return float(text + review == 'xfine')", 1.0),  # the column that is the prompt
        ("def score(completion, text): return float(completion + text == 'xthe data')", 1.0),
        ("def score(completion): return float(completion == 'x')", 1.0),  # what the policy wrote
        ("def score(completion, meta): return float(completion + meta['completion'] == 'xrecorded')", 1.0),
        ("def score(text): return float(text == 'x')", 1.0),  # what the policy wrote
        ("def score(text, meta): return float(text + meta['text'] == 'xthe data')", 1.0),
    ],
)
def test_a_function_takes_any_column_by_its_name(tmp_path: Path, code: str, expected: float) -> None:
    columns = "review,label,text,completion\nfine,yes,the data,recorded\n"
    (tmp_path / "reviews.csv").write_text(columns, encoding="utf-8")
    task = HFDataset(str(tmp_path / "reviews.csv"), prompt_field="review", answer_field="label")
    prompt = task.prompt(task.rows("train")[0], 0)
    (tmp_path / "reward.py").write_text(code, encoding="utf-8")
    trajectory = replace(example_trajectory("x"), prompt=prompt)
    score = PythonReward(f"{tmp_path / 'reward.py'}:score", allow_code=True).grade(trajectory)
    assert as_score(score).reward == expected


def test_a_column_has_the_name_that_python_reads(tmp_path: Path) -> None:
    """Python composes the characters of its names; files written on macOS may have them decomposed."""
    (tmp_path / "reward.py").write_text("def score(text, L\u00f6sung): return float(text == L\u00f6sung)\n", "utf-8")
    prompt = Prompt("0", [{"role": "user", "content": "?"}], meta={"Lo\u0308sung": "x"})
    reward = PythonReward(f"{tmp_path / 'reward.py'}:score", allow_code=True)
    assert as_score(reward.grade(replace(example_trajectory("x"), prompt=prompt))).reward == 1


def test_a_column_keeps_its_name_beside_the_one_that_python_reads(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "def score(x2, **columns): return x2 if columns['x\u00b2'] == 4 else 0\n", "utf-8"
    )
    prompt = Prompt("0", [{"role": "user", "content": "?"}], meta={"x2": 1, "x\u00b2": 4})
    reward = PythonReward(f"{tmp_path / 'reward.py'}:score", allow_code=True)
    assert as_score(reward.grade(replace(example_trajectory("x"), prompt=prompt))).reward == 1

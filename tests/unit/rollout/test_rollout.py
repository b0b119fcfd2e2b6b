"""Workers, scoring, collecting and collating: the ragged half of a step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlkit_authors.models import build_tokenizer

from rlkit.advantages import GRPO, RLOO
from rlkit.base.errors import EngineError, RolloutError
from rlkit.interfaces.advantage import AdvantageEstimator
from rlkit.interfaces.reward import OnError, RewardManager
from rlkit.rewards import ExactReward
from rlkit.rollout import collect as collect_module
from rlkit.rollout.collate import add_rewards, collate
from rlkit.rollout.collect import BusyTimer, ConversationSetup, collect, converse
from rlkit.rollout.conversation import Conversation, Limits
from rlkit.rollout.scoring import score
from rlkit.rollout.template import ChatTemplate
from rlkit.rollout.workers import Workers
from rlkit.testing import FakeEngine, example_trajectory
from rlkit.train import sampling
from rlkit.train.metrics import Meter
from rlkit.train.rollouts import Rollouts
from rlkit.types import Completion, Prompt, Request, Sampling, Score, StopReason, Trajectory, Turn
from tests.unit.hostile import Moody


@pytest.fixture
def workers() -> Iterator[Workers]:
    pool = Workers(2)
    yield pool
    pool.close()


def test_on_error_raise_ends_the_run_with_the_prompt_named(workers: Workers) -> None:
    with pytest.raises(RolloutError, match="'example'.*of the reward.*on_error is 'raise'"):
        asyncio.run(score(Moody("raise"), [example_trajectory("raise")], workers))


class Flaky(RewardManager):
    """Fails the first time, in one of several ways."""

    def __init__(self, how: str, on_error: OnError = "retry") -> None:
        self.how = how
        self.on_error = on_error
        self.timeout = 0.2
        self.calls = 0

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        self.calls += 1
        if self.calls == 1 and self.how == "raise":
            raise ConnectionError("service is away")
        if self.calls == 1 and self.how == "hang":
            await asyncio.sleep(60)
        if self.calls == 1 and self.how == "short":
            return []
        return [Score(1.0) for _ in trajectories]


@pytest.mark.parametrize("how", ["raise", "hang", "short"])
def test_on_error_retry_tries_once_more(workers: Workers, how: str) -> None:
    reward = Flaky(how)
    assert [s.reward for s in asyncio.run(score(reward, [example_trajectory("a")] * 2, workers))] == [1.0, 1.0]
    assert reward.calls == 2
    dropped = asyncio.run(score(Flaky(how, "drop"), [example_trajectory("a")] * 2, workers))
    assert [s.reward for s in dropped] == [None, None]


def setup_of(engine: FakeEngine, samples: int = 2, max_tokens: int = 16) -> ConversationSetup:
    tokenizer = build_tokenizer()
    engine.bind(SimpleNamespace(tokenizer=tokenizer))  # type: ignore[arg-type]
    template = ChatTemplate(tokenizer, {tokenizer.eos_token_id})
    return ConversationSetup(engine, template, Sampling(max_tokens=max_tokens), samples, seed=3, step=5)


PROMPTS = [
    (4, Prompt("p", [{"role": "user", "content": "1 + 1 = ?"}], "2")),
    (9, Prompt("q", [{"role": "user", "content": "?"}])),
]


def test_collect_gives_flat_masked_trajectories_group_by_group() -> None:
    finished: list[list[str]] = []

    async def finish(group: list[Trajectory]) -> None:
        finished.append([t.text for t in group])

    engine = FakeEngine(["#### 2", "no"])
    trajectories = asyncio.run(collect(setup_of(engine), PROMPTS, finish))
    assert [(t.group, t.text) for t in trajectories] == [(4, "#### 2"), (4, "no"), (9, "#### 2"), (9, "no")]
    assert finished == [["#### 2", "no"]] * 2
    first = trajectories[0]
    answer = first.turns[1]
    assert first.mask == [i >= answer.start for i in range(len(first.tokens))]
    assert first.logps[answer.start :] == [-0.5] * 7
    assert not any(first.logps[: answer.start])
    keys = {r.key for r in engine.requests}
    assert len(keys) == 4
    assert {(k.seed, k.step, k.prompt) for k in keys} == {(3, 5, "4/p"), (3, 5, "9/q")}
    assert not any(r.continues for r in engine.requests)


class Broken(FakeEngine):
    """Fails one request, or all for good."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def generate(self, request: Request) -> Completion:
        if request.key.prompt == "4/p" and request.key.sample == 1:
            raise self.error
        return await super().generate(request)


async def nothing(group: list[Trajectory]) -> None:
    pass


def test_a_failed_request_is_data_and_a_failed_engine_is_not() -> None:
    trajectories = asyncio.run(collect(setup_of(Broken(RolloutError("request 2 timed out"))), PROMPTS, nothing))
    assert [t.error for t in trajectories] == [None, "RolloutError: request 2 timed out", None, None]
    assert not any(trajectories[1].mask)
    with pytest.raises(EngineError, match="gone"):
        asyncio.run(collect(setup_of(Broken(EngineError("gone"))), PROMPTS, nothing))


def test_collate_puts_the_reward_on_the_last_sampled_token() -> None:
    a, b = example_trajectory("four"), example_trajectory("4")
    a.score, b.score = Score(1.5, {"accuracy": 1.0}, turn_rewards=[0.25]), Score(-1.0, {"style": 2.0})
    # an observation after the answer: the reward stays with the policy's last token
    b.tokens, b.mask = [*b.tokens, 8, 9], [*b.mask, False, False]
    b.logps, b.versions, b.turns = [*b.logps, 0.0, 0.0], [*b.versions, -1, -1], [*b.turns, Turn("tool", 3, 5)]
    batch = add_rewards(collate([a, b]), [a, b])
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 8, 9, 0]]
    assert batch.attention.sum(-1).tolist() == [6, 5]
    assert batch.token_rewards.tolist() == [[0, 0, 0, 0, 0, 1.75], [0, 0, -1, 0, 0, 0]]
    assert batch.rewards.tolist() == [1.75, -1.0]
    assert batch.component_names == ("accuracy", "style")
    assert batch.components.nan_to_num(-1).tolist() == [[1, -1], [-1, 2]]  # NaN where a score has none


@pytest.mark.parametrize("estimator", [GRPO(), RLOO()])
def test_equal_turn_rewards_at_other_tokens_are_equal(estimator: AdvantageEstimator) -> None:
    """In float32, 0.1 + 0.2 + 1.0 depends on the order of addition, and that on where a row has its rewards."""
    samples = []
    for length in range(1, 33):
        ends = (0, length, 2 * length + 1, 70)
        turns = [Turn("assistant", start, end) for start, end in pairwise(ends)]
        sample = replace(
            example_trajectory("x"), tokens=[5] * 70, mask=[True] * 70, logps=[0.0] * 70, versions=[0] * 70
        )
        samples.append(replace(sample, turns=turns, turn_rewards=[0.1, 0.2, 1.0], score=Score(0.0)))
    batch = add_rewards(collate(samples), samples)
    assert len(set(batch.rewards.tolist())) == 1
    estimator.estimate(batch)
    assert batch.advantages is not None
    assert not batch.advantages.any()


class ByTurn(RewardManager):
    """Returns one reward for every dot of the text, whatever the turns."""

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        return [Score(1.0, turn_rewards=[0.5] * t.text.count(".")) for t in trajectories]


def test_wrongly_many_turn_rewards_name_the_reward(workers: Workers) -> None:
    given = [example_trajectory(text) for text in ("one.", "two..", "none")]  # of one turn each
    first, second, third = asyncio.run(score(ByTurn(), given, workers))
    assert (first.reward, first.turn_rewards) == (1.0, [0.5])
    assert second.reward is third.reward is None
    assert "ByTurn of tests: returned 2 turn_rewards, expected 1: one for each turn" in str(second.error)
    assert "returned 0 turn_rewards" in str(third.error)


def test_collate_of_nothing_is_an_empty_batch() -> None:
    batch = add_rewards(collate([]), [])
    assert len(batch) == 0
    assert batch.tokens.shape == (0, 0)


def test_a_batch_names_the_field_of_the_wrong_shape() -> None:
    batch = collate([example_trajectory("4")])
    with pytest.raises(ValueError, match="'example' has no reward"):
        add_rewards(batch, [example_trajectory("4")])
    batch.values = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=r"RolloutBatch.values has shape \(1, 2\), expected \(1, 3\)"):
        batch.check()


def test_rewards_of_workers_and_of_the_trainer_agree(workers: Workers) -> None:
    trajectories = [example_trajectory(t) for t in ("4", "5")]
    assert asyncio.run(score(ExactReward(), trajectories, workers)) == asyncio.run(ExactReward().score(trajectories))


async def released(_: Sequence[Trajectory]) -> None: ...


def play(
    engine: FakeEngine, score: Any, before: dict[int, Trajectory] | None = None
) -> tuple[Rollouts, list[Trajectory], Meter]:
    """Play both prompts, two samples and a greedy answer each, and wait for the scores."""
    common = setup_of(engine)
    rollout = SimpleNamespace(engine=engine, sampling=Sampling(max_tokens=16), group_size=2, sampling_column=None)
    recipe = SimpleNamespace(rollout=rollout, train=SimpleNamespace(seed=0), reward="any")
    service: Any = SimpleNamespace(
        recipe=recipe,
        score=score,
        release=released,
        conversation_setup=lambda sampling, samples, step, timer, **_: replace(
            common, sampling=sampling, samples=samples, timer=timer
        ),
    )
    rollouts, meter = Rollouts(greedy={}, greedy_completions=before or {}), Meter()

    async def run() -> list[Trajectory]:
        found = await sampling._sample_prompts(service, PROMPTS, (1, 1), rollouts, meter, quota=None)
        await rollouts.scoring.wait()
        return found

    return rollouts, asyncio.run(run()), meter


def test_greedy_answers_are_scored_beside_the_samples() -> None:
    """A sample is worth the number of its group, the one greedy answer to each prompt ten times that."""

    async def score(reward: object, group: Sequence[Trajectory]) -> list[Score]:
        return [Score(t.group * (10.0 if len(group) == 1 else 1.0)) for t in group]

    engine = FakeEngine(["#### 2"])
    rollouts, found, _ = play(engine, score)
    assert [t.reward for t in found] == [4.0, 4.0, 9.0, 9.0]
    assert {group: answer.reward for group, answer in rollouts.greedy_completions.items()} == {4: 40.0, 9: 90.0}
    assert sorted(r.sampling.temperature for r in engine.requests) == [0.0] * 2 + [1.0] * 4


def test_a_refilled_slot_drops_the_former_greedy_completion() -> None:
    async def failing(reward: object, group: Sequence[Trajectory]) -> list[Score]:
        return [Score(None, error="away") for _ in group]

    before = example_trajectory("4")
    rollouts, _, meter = play(FakeEngine(["#### 2"]), failing, {4: before, 7: before})
    assert 0 <= meter._maxima["time/engine_idle_share"] < 1
    rewards = {group: answer.reward for group, answer in rollouts.greedy_completions.items()}
    assert rewards == {4: None, 7: before.reward, 9: None}


@pytest.mark.parametrize(
    ("flat", "whole", "stop", "error"),
    [
        ("abc", "abc", StopReason.TURNS, None),
        ("abc", "abc and more", StopReason.TURNS, None),  # such as an end that the policy did not write
        ("abc and more", "abc", StopReason.STOP, None),
        ("abcdef", "abc", StopReason.TURNS, ("abc", "def", "")),
        (f"{'-' * 30}{'A' * 30}", f"{'-' * 30}{'B' * 30}", StopReason.STOP, ("-" * 20, "A" * 20, "B" * 20)),
    ],
)  # fmt: skip
def test_a_difference_is_shown_with_twenty_characters_around(
    flat: str, whole: str, stop: StopReason, error: tuple[str, str, str] | None
) -> None:
    template = SimpleNamespace(
        rendered=lambda messages, tools: whole, codec=SimpleNamespace(decode=lambda tokens: flat)
    )
    setup: Any = SimpleNamespace(check="strict", template=template)
    conversation = Conversation(Prompt("p", []), 0, stop=stop, rewards=[0.0, 0.0])
    collect_module._check(setup, conversation, SimpleNamespace(messages=[]))  # type: ignore[arg-type]
    if error is None:
        assert (conversation.error, conversation.counts) == (None, {})
    else:
        before, here, there = error
        expected = f"after {before!r} the conversation continues with {here!r}, but the template renders {there!r}"
        assert (conversation.error, conversation.counts) == (expected, {"template_differs": 1})


def test_the_engine_is_busy_while_at_least_one_request_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests from 0 to 4 s and from 1 to 3 s, and one from 10 to 12 s: 6 s in all."""
    now = 0.0
    monkeypatch.setattr(collect_module, "time", SimpleNamespace(perf_counter=lambda: now))
    timer = BusyTimer()
    with timer:
        now = 1.0
        with timer:
            now = 3.0
        now = 4.0
    now = 10.0
    with timer:
        now = 12.0
    assert (timer.busy, timer.requests) == (6.0, 0)


def test_an_engine_is_asked_for_the_allowed_tokens_only() -> None:
    """Of 16 tokens a turn, the conversation has 5; without a limit the sampling is the recipe's own."""
    engine = FakeEngine(["#### 2"])
    for tokens, expected in ((5, 5), (None, 16)):
        setup = replace(setup_of(engine, samples=1), limits=Limits(tokens=tokens))
        asyncio.run(converse(setup, PROMPTS[0][1], 0, 0))
        assert engine.requests[-1].sampling == replace(setup.sampling, max_tokens=expected)

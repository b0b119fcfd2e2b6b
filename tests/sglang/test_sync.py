"""Weights sent to a real SGLang server by every transport; wrong ones are found."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from rlkit_servers.api import ServerOutput
from rlkit_servers.server import InferenceServer
from rlkit_servers.sglang.launch import Launch
from rlkit_servers.sglang.transports import SGLangChanges
from rlkit_servers.states import DEADLINES, ServerState, UpdateStep
from rlkit_servers.weight_check import policy_logps
from torch import Tensor

from rlkit.base.errors import EngineError
from rlkit.engines import SGLangServer
from rlkit.models.weights import PolicyWeights
from rlkit.testing import random_model
from rlkit.types import Completion, Request, StopReason
from tests.served import PROMPTS, RETRY, Trainer, changes_arrive_or_are_healed, request


@pytest.mark.parametrize("transport", ["tensor", "disk", "group"])
def test_greedy_output_equals_generate_before_and_after(trainer: Trainer, second: Any, transport: str) -> None:
    fresh = second(transport=transport)
    for seed in (11, 12):
        trainer.learn(seed)
        trainer.publish(fresh)
        assert trainer.is_served_by(fresh)
        assert fresh.health()["weight_gap"] < 1e-4


def test_changes_are_applied_and_refused_ones_are_healed(trainer: Trainer) -> None:
    """A server that has lost its version ends at the next change, is started again, and gets full weights."""
    changes_arrive_or_are_healed(trainer, SGLangServer(transport="changes", retry=RETRY), SGLangChanges(), 1e-4)


def test_a_server_that_takes_no_changes_is_named(second: Any, trainer: Trainer) -> None:
    with pytest.raises(EngineError, match=r"takes no changes; start it with --custom-weight-loader rlkit_servers"):
        trainer.publish(second(transport="changes"))


def test_memory_is_released_and_weights_come_back_with_it(trainer: Trainer, second: Any) -> None:
    released = second(launch=Launch(release_memory=True))
    trainer.publish(released)
    [server] = released.fleet.owned
    with released.on_device():
        assert trainer.is_served_by(released)
    assert server.state is ServerState.OFFLOADED
    trainer.learn(13)
    trainer.publish(released)  # wakes it in the right order
    with released.on_device():
        assert trainer.is_served_by(released)
    with released.on_device():  # without a sync in between
        assert trainer.is_served_by(released)
    with released.on_device():
        trainer.publish(released)


def test_interrupted_completions_go_on_after_memory_release(trainer: Trainer, second: Any) -> None:
    """Partial completions have log-probs and versions; SGLang is idle then, or the release would crash it."""
    released = second(launch=Launch(release_memory=True))
    trainer.publish(released)
    old = trainer.version
    asked = [request(PROMPTS[i % 5], i, str(i), max_tokens=300, temperature=0.0) for i in range(24)]
    asked = [replace(original, resumable=True) for original in asked]

    async def interrupted() -> list[Completion]:
        running = [asyncio.create_task(released.generate(original)) for original in asked]
        await asyncio.sleep(0.3)
        released.requests.interrupt()
        return list(await asyncio.wait_for(asyncio.gather(*running), 5))

    with released.on_device():
        parts = trainer.wait(interrupted())
    assert released.fleet.owned[0].state is ServerState.OFFLOADED
    cut = [part.stop is StopReason.INTERRUPTED and 0 < len(part.tokens) < 300 for part in parts]
    assert sum(cut) > 12
    for original, part in zip(asked, parts, strict=True):
        assert len(part.logps) == len(part.versions) == len(part.tokens)
        assert set(part.versions) <= {old}
        assert part.tokens == trainer.greedy(original.tokens, len(part.tokens))
        assert part.logps == pytest.approx(logps_of(trainer, original.tokens, part.tokens), abs=1e-4)
    trainer.learn(14)
    trainer.publish(released)
    continuations = [
        replace(original, tokens=(*original.tokens, *part.tokens), sampling=original.sampling.within(20))
        for original, part, unfinished in zip(asked, parts, cut, strict=True)
        if unfinished
    ]
    with released.on_device():
        for continuation, answer in zip(continuations, trainer.ask(released, continuations), strict=True):
            assert answer.tokens == trainer.greedy(continuation.tokens, 20)
            assert set(answer.versions) == {trainer.version}


def logps_of(trainer: Trainer, prompt: tuple[int, ...], tokens: list[int]) -> list[float]:
    """Return the trainer's log-probs of tokens after a prompt."""
    row = torch.tensor([[*prompt, *tokens]])
    logps = torch.log_softmax(trainer.policy(row).logits[0, :-1].float(), -1)
    expected: list[float] = logps.gather(-1, row[0, 1:, None]).squeeze(-1)[len(prompt) - 1 :].tolist()
    return expected


def noise(like: Tensor) -> Tensor:
    return 0.3 * torch.randn(like.shape, generator=torch.Generator().manual_seed(0))


class Corrupt(PolicyWeights):
    """Corrupts one tensor, or only the rows that one rank of two would hold; once or always."""

    def __init__(self, policy: Any, name: str, always: bool = False, shard: bool = False) -> None:
        super().__init__(policy, 8192)
        self.name, self.always, self.shard, self.readings = name, always, shard, 0

    def buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        self.readings += 1
        spoil = self.always or self.readings == 1
        for bucket in super().buckets():
            yield [(name, self.spoilt(x) if spoil and name == self.name else x) for name, x in bucket]

    def spoilt(self, x: Tensor) -> Tensor:
        changed = noise(x)
        changed[len(x) // 2 if self.shard else len(x) :] = 0
        return x + changed


@pytest.mark.parametrize("shard", [False, True])
def test_a_tensor_that_is_corrupted_on_its_way_is_named(trainer: Trainer, engine: SGLangServer, shard: bool) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    trainer.version += 1
    with pytest.raises(
        EngineError, match=rf"other log-probs than the trainer: .* lessens the gap for: {name}"
    ) as caught:
        trainer.wait(engine.sync(Corrupt(trainer.policy, name, shard=shard), trainer.version))
    assert str(caught.value).count("(now ") == 1
    trainer.publish(engine)
    assert trainer.is_served_by(engine)


def test_a_difference_that_stays_is_said_to_stay(trainer: Trainer, engine: SGLangServer) -> None:
    trainer.version += 1
    stream = Corrupt(trainer.policy, "model.layers.0.mlp.down_proj.weight", always=True)
    with pytest.raises(EngineError, match="Resending all tensors changes nothing"):
        trainer.wait(engine.sync(stream, trainer.version))
    trainer.publish(engine)


def test_weights_of_another_model_are_refused(trainer: Trainer, engine: SGLangServer) -> None:
    """The log-probs are compared with those of another trainer."""
    stranger = Trainer(random_model("qwen2", seed=99))
    ask, engine.weights._policy_logps = engine.weights._policy_logps, lambda rows: policy_logps(stranger.runtime, rows)
    with pytest.raises(EngineError, match="other log-probs than the trainer"):
        trainer.publish(engine)
    engine.weights._policy_logps = ask
    trainer.publish(engine)


def test_the_servers_own_words_are_in_the_error(
    trainer: Trainer, engine: SGLangServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.fleet.owned[0], "_retry", replace(RETRY, restarts=0))

    class Cut(PolicyWeights):
        def buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
            for bucket in super().buckets():
                yield [(name, x[:1] if name == "model.norm.weight" else x) for name, x in bucket]

    trainer.version += 1
    with pytest.raises(EngineError, match=r"(?s)could not load a bucket: .* its log .*Attempted to load weight"):
        trainer.wait(engine.sync(Cut(trainer.policy), trainer.version))
    monkeypatch.undo()
    trainer.publish(engine)
    assert trainer.is_served_by(engine)


def test_a_step_has_a_deadline(trainer: Trainer, second: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = second()
    trainer.publish(fresh)
    monkeypatch.setitem(DEADLINES, UpdateStep.FLUSH, 1e-4)
    with pytest.raises(EngineError, match=r"could not flush the KV cache: .* within 0\.0001 s"):
        trainer.publish(fresh)
    monkeypatch.undo()
    trainer.publish(fresh)  # a failed sync can be made again
    assert trainer.is_served_by(fresh)


def test_requests_in_flight_go_on_with_the_new_weights(trainer: Trainer, engine: SGLangServer) -> None:
    """Once the shortest, which is sent last, is complete, the longer ones have tokens of the old weights."""
    before = trainer.version
    trainer.learn(14)

    async def run() -> list[Any]:
        requests = [request(PROMPTS[0], i, str(i), max_tokens=12 * (32 - i)) for i in range(32)]
        running = [asyncio.create_task(engine.generate(asked)) for asked in requests]
        await running[-1]
        trainer.version += 1
        await engine.sync(PolicyWeights(trainer.policy, 8192), trainer.version)
        return await asyncio.gather(*running)

    answers = trainer.wait(run())
    mixed = [a.versions for a in answers if set(a.versions) == {before, before + 1}]
    assert mixed
    assert all(versions == sorted(versions) for versions in mixed)
    assert trainer.is_served_by(engine)


def test_stale_answers_are_never_taken_for_current_ones(trainer: Trainer, second: Any) -> None:
    fresh = second()
    trainer.publish(fresh)
    [server] = fresh.fleet.owned
    asked: list[Any] = []
    ask = InferenceServer.ask

    async def forgetful(self: InferenceServer, request: Request) -> ServerOutput:
        answer = await ask(self, request)
        asked.append(answer)
        if len(asked) > 1:
            return answer
        return replace(answer, labels=["default"] * 24)  # as if somebody else had restarted it

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InferenceServer, "ask", forgetful)
        [answer] = trainer.ask(fresh, [request(PROMPTS[1], temperature=0.0)])
    assert len(asked) == 2
    assert set(answer.versions) == {trainer.version}
    assert fresh.health()["stale"] == 1
    label = {"new_version": "somebody-else", "abort_all_requests": False}
    trainer.wait(server.api.client.post("/update_weight_version", label, 10.0))
    assert trainer.is_served_by(fresh)  # it was given the weights again
    assert fresh.health()["stale"] > 1

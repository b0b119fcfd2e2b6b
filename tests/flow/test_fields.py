"""Fields and rewards by token in a run: each value stays in its place through packing, ranks, resumes and files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import read_jsonl, rlkit, write_plugin

PARTS = '''
from dataclasses import replace

import torch

from rlkit.engines import TorchEngine
from rlkit.hooks import hookimpl
from rlkit.interfaces.advantage import AdvantageEstimator
from rlkit.interfaces.fields import Field
from rlkit.interfaces.interaction import Interaction, Reply
from rlkit.interfaces.reward import RewardFunction
from rlkit.losses import PolicyGradient
from rlkit.types import Score


class Copying(TorchEngine):
    """Fills the ids of all tokens of a request and its completion, twice."""

    fills = (Field("copies", "int16", shape=(2,), padding=-1),)

    async def generate(self, request):
        answer = await super().generate(request)
        return replace(answer, fields={"copies": [[i, i] for i in (*request.tokens, *answer.tokens)]})


class Again(Interaction):
    """Asks twice; fills the number of each question."""

    fills = (Field("question", "uint8", "turn"),)

    async def reply(self, messages, state):
        state["asked"] = state.get("asked", 0) + 1
        return Reply([{"role": "user", "content": "again"}], state["asked"] == 2, fields={"question": state["asked"]})


class OddTokens(RewardFunction):
    """Pays 0.5 for each odd token id, and 1 for the conversation."""

    fills = (Field("ids", "int64", padding=-1), Field("sum", by="row"))

    def grade(self, trajectory):
        ids = [i for i, own in zip(trajectory.tokens, trajectory.mask) if own]
        return Score(1.0, token_rewards=[i % 2 / 2 for i in ids], fields={"ids": ids, "sum": float(sum(ids))})


class ByToken(AdvantageEstimator):
    def estimate(self, batch):
        batch.advantages = batch.token_rewards * batch.mask


class Checked(PolicyGradient):
    """Refuses a field that is not where it belongs."""

    reads_fields = ("copies", "question", "ids", "sum")

    def __call__(self, out, batch):
        copies, ids = batch.fields["copies"], batch.fields["ids"]
        assert copies.dtype == torch.int16 and ids.dtype == torch.int64
        expected = torch.where(batch.attention, batch.tokens, -1)
        assert torch.equal(copies.long(), expected[..., None].expand_as(copies)), copies
        assert torch.equal(ids, torch.where(batch.mask, batch.tokens, -1)), ids
        assert torch.equal(batch.fields["sum"], (batch.tokens * batch.mask).sum(-1).float())
        questions = batch.fields["question"].long()  # [B,N]; 0 where a limit has cut the last turn off
        numbers = torch.arange(1, questions.shape[1] + 1).expand_as(questions)
        turns = (batch.mask & ~batch.mask.roll(1, 1)).sum(-1, keepdim=True)  # [B,1], each of them one run of the mask
        assert torch.equal(questions, numbers * (questions > 0)) and bool((questions > 0)[numbers < turns].all())
        output = super().__call__(out, batch)
        return output._replace(metrics={"questions": (questions > 0).float().sum(-1).mean()})


@hookimpl
def rlkit_register(register):
    for part in (Copying, Again, OddTokens, ByToken, Checked):
        register(part)
'''


@pytest.mark.slow
def test_every_value_stays_with_its_token(tmp_path: Path) -> None:
    """The loss compares the fields with the tokens: on two ranks, after a resume, and read back from files."""
    site = str(write_plugin(tmp_path / "site", "fields", PARTS))
    options = (
        "--recipe=quickstart", "--rollout.engine=Copying", "--interaction=Again", "--conversation.turns=2",
        "--reward=OddTokens", "--advantage=ByToken", "--loss=Checked", "--train.prompts_per_step=4",
        "--rollout.group_size=3", "--train.max_tokens_per_micro_batch=128", "--train.minibatches=1",
        "--validation=null", "--save.every=1", "--fabric.devices=2", "--fabric.strategy=ddp", "--log.rollouts.every=1",
    )  # fmt: skip
    first = rlkit("fit", *options, "--train.steps=1", "--out=run", cwd=tmp_path, site=site)
    assert first.returncode == 0, first.stdout + first.stderr
    resumed = rlkit("fit", *options, "--train.steps=2", "--out=run", "--resume=auto", cwd=tmp_path, site=site)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    steps = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["update/packed"] == 1 and line["policy/questions"] > 0.5 for line in steps)
    for file in sorted((tmp_path / "run" / "rollouts").glob("step-00002*")):
        for row in read_jsonl(file):
            odd = [own * (token % 2) / 2 for token, own in zip(row["tokens"], row["mask"], strict=True)]
            last = max(i for i, own in enumerate(row["mask"]) if own)
            assert row["advantages"] == [value + (i == last) for i, value in enumerate(odd)]
            assert row["reward"] == 1 + sum(odd)
    replayed = rlkit("replay", "run", "--step=2", "--phase=learn", "--allow-code", cwd=tmp_path, site=site)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr

"""Real SGLang with pictures: log-probs and greedy tokens are the trainer's, also after its weights have changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from rlkit.data.data import picture_reader
from rlkit.engines import SGLangServer
from rlkit.interfaces.picture import Picture
from rlkit.models.actor import Actor
from rlkit.models.load import load_policy, load_tokenizer, stop_ids
from rlkit.models.vision import backbone_of, picture_inputs
from rlkit.recipe import Model, Vision
from rlkit.rollout.template import ChatTemplate
from rlkit.types import Completion, Media, Message, Request, SampleKey, Sampling
from tests.conftest import read_jsonl, rlkit
from tests.served import RETRY, Trainer
from tests.vision_models import save_random_vision_model


class Served(NamedTuple):
    """A random vision-language model, its template, and the server with its weights."""

    trainer: Trainer
    template: ChatTemplate
    engine: SGLangServer


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = save_random_vision_model(tmp_path_factory.mktemp("model"), request.param)
    model = Model(str(folder), vision=Vision(max_pixels=6000))
    tokenizer = load_tokenizer(model)
    policy = load_policy(model).eval()
    trainer = Trainer(policy)
    trainer.runtime.tokenizer = tokenizer
    trainer.runtime.stop_ids = stop_ids(model, tokenizer)
    template = ChatTemplate(tokenizer, trainer.runtime.stop_ids, reader=picture_reader(model))
    engine = SGLangServer(retry=RETRY)
    try:
        engine.bind(trainer.runtime)
        trainer.publish(engine)
        yield Served(trainer, template, engine)
    finally:
        engine.close()
        trainer.runner.close()


def picture(seed: int, width: int = 84, height: int = 56) -> Picture:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Picture.of(Image.fromarray(pixels))


def message(*parts: str | Picture) -> list[Message]:
    typed = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return [{"role": "user", "content": typed}]


def requests(template: ChatTemplate, temperature: float) -> list[Request]:
    """One, several, equal and too large pictures; the same text with another one; a later turn; a text alone."""
    sampling = Sampling(temperature=temperature, max_tokens=12)
    asked = [
        message("look ", picture(0), " what?"),
        message("look ", picture(1), " what?"),
        message("a ", picture(2), picture(3, 56, 112), " b ", picture(2), " differences?"),
        message(picture(4, 300, 200)),
        message("no picture"),
    ]
    made = []
    for number, messages in enumerate(asked):
        tokens, segment = template.render_start(messages)
        media = None if segment is None else Media([segment])
        made.append(Request(tuple(tokens), sampling, SampleKey(0, 1, "p", number), str(number), media=media))
    tokens, segment = template.render_start(asked[0])
    turn = [*template.codec.encode("x < 2, ÿ"), min(template.stop_ids)]
    reply, later = template.render_delta(message("now ", picture(5), "?"))
    assert segment is not None
    assert later is not None
    media = Media([segment, later.after(len(tokens) + len(turn))])
    made.append(Request((*tokens, *turn, *reply), sampling, SampleKey(0, 1, "p", 9), "later", media=media))
    return made


@torch.no_grad()
def require_the_trainers(trainer: Trainer, asked: list[Request], answers: list[Completion]) -> None:
    """Check that log-probs are the trainer's, and greedy tokens those that the model itself finds likeliest."""
    policy = trainer.policy
    for request, answer in zip(asked, answers, strict=True):
        sampled = [*answer.tokens, policy.config.image_token_id]
        count = sampled.index(policy.config.image_token_id)  # a random policy samples what stands for a picture
        assert count
        tokens = torch.tensor([[*request.tokens, *sampled[:count]]])
        mask = torch.arange(tokens.shape[1])[None] >= len(request.tokens)
        logps = Actor(policy)(tokens, mask, request.sampling.temperature or 1.0, media=[request.media]).logps[mask]
        assert (logps - torch.tensor(answer.logps[:count])).abs().max() < 1e-4
        if request.sampling.temperature == 0:
            logits = policy(input_ids=tokens, **picture_inputs(backbone_of(policy), tokens, [request.media])).logits
            assert logits[0, len(request.tokens) - 1 : -1].argmax(-1).tolist() == sampled[:count]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_log_probs_with_pictures_are_the_trainers(served: Served, temperature: float) -> None:
    asked = requests(served.template, temperature)
    answers = served.trainer.ask(served.engine, asked)
    require_the_trainers(served.trainer, asked, answers)
    assert answers[0].logps != answers[1].logps


def test_features_of_pictures_do_not_outlive_their_weights(served: Served) -> None:
    """The same pictures, before and after all weights changed, the vision tower's included."""
    asked = requests(served.template, 1.0)
    before = served.trainer.ask(served.engine, asked)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in served.trainer.policy.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    served.trainer.publish(served.engine)
    answers = served.trainer.ask(served.engine, asked)
    require_the_trainers(served.trainer, asked, answers)
    assert all(answer.versions == [served.trainer.version] * len(answer.tokens) for answer in answers)
    assert [answer.logps for answer in answers] != [answer.logps for answer in before]


def test_a_run_with_pictures_learns_from_sglang(tmp_path: Path) -> None:
    options = ("--recipe=quick_image", "--train.steps=3", "--validation=null", "--model.vision.train=true")
    done = rlkit("fit", *options, "--rollout.engine=SGLangServer", "--out=run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert len(rows) == 3
    assert all(row["mismatch/max"] < 1e-4 and row["rollout/failed"] == 0 for row in rows)
